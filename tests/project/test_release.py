# SPDX-License-Identifier: Apache-2.0
"""The checks of `make release-check`, and the versions that the documentation names."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "wheel"))
import release


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout that is a release."""
    (tmp_path / "torchq").mkdir()
    (tmp_path / "torchq/__init__.py").write_text('__version__ = "1.2.3"\n')
    changes = "# Changelog\n\n## [Unreleased]\n\n## [1.2.3] - 2030-01-31\n\n- All.\n"
    (tmp_path / "CHANGELOG.md").write_text(changes)
    about = '[project.urls]\nSource = "https://torchq.example/"\n[tool.torchq]\npublished = true\n'
    (tmp_path / "pyproject.toml").write_text(about)
    commit(tmp_path)
    return tmp_path


def commit(tree: Path) -> None:
    for command in ("init -q", "add -A", "commit -q -m one"):
        names = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *names, *command.split()], cwd=tree, check=True)


def edit(name: str, old: str, new: str) -> Callable[[Path], object]:
    def change(tree: Path) -> None:
        path = tree / name
        path.write_text(path.read_text().replace(old, new))
        commit(tree)

    return change


def released(tree: Path) -> None:
    release.git(tree, "tag", "v1.2.3")
    edit("CHANGELOG.md", "All", "Some")(tree)


def test_a_release_lacks_nothing(tree: Path) -> None:
    assert release.what_the_tree_lacks(tree) == []
    release.git(tree, "tag", "v1.2.3")
    assert release.what_the_tree_lacks(tree) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda tree: (tree / "new").touch(), "the tree has changes"),
        (released, "version 1.2.3 was released before"),
        (lambda tree: release.git(tree, "tag", "v1.3.0"), "the tag of this commit is not v1.2.3"),
        (edit("torchq/__init__.py", "1.2.3", "1.2.4"), "CHANGELOG.md has no section [1.2.4]"),
        (edit("CHANGELOG.md", " - 2030-01-31", ""), "CHANGELOG.md has no section [1.2.3]"),
        (edit("CHANGELOG.md", "[Unreleased]\n", "[Unreleased]\n\n- More.\n"), "still has changes"),
        (edit("pyproject.toml", "true", "false"), "published is false"),
        (edit("pyproject.toml", ".example", ".invalid"), "Source is a placeholder"),
    ],
    ids=[
        "dirty",
        "released",
        "tag",
        "no-section",
        "no-date",
        "unreleased",
        "published",
        "placeholder",
    ],
)
def test_what_a_release_lacks(tree: Path, change: Callable[[Path], object], problem: str) -> None:
    change(tree)
    found = release.what_the_tree_lacks(tree)
    assert len(found) == 1 and problem in found[0], found


def test_wheels_that_differ(tmp_path: Path) -> None:
    for name, text in {"one": "1", "same": "1", "two": "2"}.items():
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            wheel.writestr(zipfile.ZipInfo("torchq/__init__.py"), text)
    assert release.what_differs(tmp_path / "one", tmp_path / "same") == []
    assert release.what_differs(tmp_path / "one", tmp_path / "two") == ["torchq/__init__.py"]


def test_workflows_call_only_targets_of_the_makefile() -> None:
    targets = re.findall(
        r"^([a-z][a-z0-9-]*):", release.read(release.ROOT, "Makefile"), re.MULTILINE
    )
    called = set()
    for path in release.ROOT.glob(".github/workflows/*.yml"):
        for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values():
            commands = [step["run"] for step in job["steps"] if "run" in step]
            assert all(command.startswith("make ") for command in commands), path
            rows = job.get("strategy", {"matrix": {"include": []}})["matrix"]["include"]
            words = [*commands, *(row.get("target", "") for row in rows)]
            called |= set(re.findall(r"(?<!\S)[a-z][a-z-]*(?!\S)", " ".join(words))) - {"make"}
    assert called - {*targets} == set()
    assert called >= {"lint", "docs", "test", "test-slow", "wheel", "wheel-test", "release-check"}


def test_the_matrix_has_the_releases_that_the_wheel_is_tried_with() -> None:
    text = (release.ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d\.\d+) \| 3\.(\d+) to 3\.(\d+) \|", text, re.MULTILINE)
    run = runpy.run_path(str(release.ROOT / "tests/wheel/run.py"))
    tried = {name.rpartition(".")[0]: oldest for name, oldest in run["RELEASES"].items()}
    assert {torch: int(oldest) for torch, oldest, _ in rows} == tried
    assert {int(newest) for _, _, newest in rows} == {run["PYTHONS"][-1]}


@pytest.mark.parametrize(
    ("target", "extras"),
    [
        ("build", set()),
        ("demo", {"examples"}),
        ("test", {"test"}),
        ("wheel", {"wheel"}),
        ("docs", {"test", "docs"}),
    ],
)
def test_a_target_installs_what_it_needs(target: str, extras: set[str]) -> None:
    """In a fresh checkout; no command runs."""
    command = ["make", "--dry-run", "--always-make", target]
    done = subprocess.run(command, cwd=release.ROOT, capture_output=True, text=True, check=True)
    installs = [
        line for line in done.stdout.splitlines() if " install " in line and "-m pip" in line
    ]
    assert set(re.findall(r"\[([\w,]+)\]", " ".join(installs))) == extras
    assert len(installs) == len(extras) + 3  # torch, what builds need, and torchq itself
