# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks accuracy --imagenet`` on a small made folder."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from benchmarks.accuracy import command, imagenet

COLORS = {"n01": (200, 60, 60), "n02": (60, 200, 60), "n10": (60, 60, 200)}
NAME = "torchvision/resnet18"

ROOT = Path(__file__).parents[2]
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eight noisy images of one color in each of three classes."""
    generator = np.random.default_rng(0)
    for name, color in COLORS.items():
        (tmp_path / "val" / name).mkdir(parents=True)
        for i in range(8):
            pixels = np.array(color) + generator.normal(0, 20, (64, 64, 3))
            picture = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            picture.save(tmp_path / "val" / name / f"{i}.JPEG")
    (tmp_path / "val" / "n01" / "notes.txt").write_text("no image")
    return tmp_path


class Colors(nn.Module):
    """Tells images apart by their largest mean, after a convolution that passes colors on."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.conv.weight.data = torch.eye(3).view(3, 3, 1, 1)
        self.conv.bias.data.zero_()

    def forward(self, images: Tensor) -> Tensor:
        return self.conv(images).mean((2, 3))


def _tensor(picture: Any) -> Tensor:
    return torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1).float() / 255


@pytest.fixture
def colors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imagenet, "network", lambda *_: (Colors(), _tensor))
    monkeypatch.setattr(imagenet, "_BATCH", 5)


@pytest.mark.usefixtures("colors")
def test_right_answers_are_counted(benchmarks: Command, folder: Path) -> None:
    page = folder / "page.md"
    options = ("--imagenet", str(folder), "--weights", str(folder), "--only", "torchq, fast")
    result = benchmarks("accuracy", NAME, *options, "--rounds", "2", "--markdown", str(page))
    assert result.returncode == 0, result.stderr
    assert "12 images calibrate, 12 others measure" in result.stdout
    assert "| float | 100.00 / 100.00 |" in result.stdout
    assert "| torchq, fast | 100.00 / 100.00 |" in result.stdout
    assert page.read_text().startswith(f"# Accuracy on ImageNet\n\n## {NAME}\n")


@pytest.mark.usefixtures("colors")
def test_the_commands_of_the_page(
    benchmarks: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run, on the made folder: the page has three commands, and the last writes a page."""
    text = (ROOT / "docs/accuracy.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\.venv/bin/python -m (.*)$", text, re.MULTILINE)
    install, one, every = [shlex.split(line) for line in lines]
    assert install[:2] == ["pip", "install"]
    monkeypatch.setattr(imagenet, "MODELS", (NAME,))
    monkeypatch.chdir(folder)
    for words in (one, every):
        assert words[:2] == ["benchmarks", "accuracy"]
        options = [str(folder) if word == "PATH" else word for word in words[1:]]
        result = benchmarks(*options, "--weights", str(folder), "--rounds", "1")
        assert result.returncode == 0, result.stderr
        assert "| torchq, best | 100.00 / 100.00 |" in result.stdout
    assert (folder / "imagenet.md").read_text().startswith("# Accuracy on ImageNet\n")


def test_the_page_says_what_the_command_writes() -> None:
    written = command._page(argparse.Namespace(imagenet=None, rounds=15), [])
    words = written[written.index("- *torch.ao*") :].strip()
    assert words and words in (ROOT / "docs/accuracy.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("colors")
def test_no_image_calibrates_and_measures(folder: Path) -> None:
    task = imagenet.loaders(folder, folder)[NAME]()
    assert [len(batch) for batch in task.test] == [5, 5, 2] == [len(batch) for batch in task.test]
    images = torch.cat([*task.calibration, *task.test])
    assert len(images) == len(images.flatten(1).unique(dim=0)) == 24
    logits = task.run(task.model, task.test)
    assert task.score(logits, logits) == "100.00 / 100.00"
    assert task.score(logits, logits.roll(1, 1)) == "0.00 / 100.00"  # of three classes, the top 5


def test_folders_are_one_for_each_class(benchmarks: Command, folder: Path) -> None:
    result = benchmarks("accuracy", "--imagenet", str(folder))
    assert result.returncode == 1
    assert "must have 1000 folders, one for each class" in result.stderr
    assert f"got 3 in {folder}. Sorted names are classes 0 to 999." in result.stderr


def test_a_folder_without_images_is_refused(benchmarks: Command, tmp_path: Path) -> None:
    result = benchmarks("accuracy", "--imagenet", str(tmp_path / "missing"))
    assert result.returncode == 1
    assert f"got 0 images in {tmp_path}/missing. Move them to" in result.stderr


def test_weights_of_other_classes_are_refused(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 5).state_dict(), tmp_path / "net.pth")
    with pytest.raises(RuntimeError, match=r"(?s)must fit 3 classes, .*size mismatch"):
        imagenet._load_weights(nn.Linear(2, 3), tmp_path / "net.pth", 3)


def test_an_unknown_network_is_named(benchmarks: Command, folder: Path) -> None:
    options = ("--imagenet", str(folder), "--weights", str(folder))
    result = benchmarks("accuracy", "resnet19", *options)
    assert result.returncode == 1
    assert "no task ['resnet19']; there are ['torchvision/resnet18'," in result.stderr
