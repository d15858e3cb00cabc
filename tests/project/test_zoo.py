# SPDX-License-Identifier: Apache-2.0
"""The full zoo: ``pytest -m zoo``; minutes, so an ordinary run leaves it out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.models import NETWORKS

ROOT = Path(__file__).parents[2]
# Multiply-adds of convolutions, linears and LSTMs in int8, where it is not all of them.
INT8_SHARE = {"bert_base": 0.9999}  # its pooler has no part in the result

pytestmark = pytest.mark.zoo


@pytest.fixture(scope="module", params=NETWORKS)
def row(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the row that one run writes about a network."""
    name: str = request.param
    if not NETWORKS[name].available:
        pytest.skip(f"{name} needs {NETWORKS[name].requires}")
    file = tmp_path_factory.mktemp("zoo") / "row.json"
    command = [sys.executable, "-m", "benchmarks", "models", "--model", name, "--json", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    print(result.stdout)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_it_runs_in_int8(row: dict[str, Any]) -> None:
    assert "torchq" not in row["failures"] and "torchq_script" not in row["failures"]
    assert row["int8_mac_share"] >= INT8_SHARE.get(row["model"], 1.0)
    assert all(layer["reason"] for layer in row["float_layers"])


def test_it_is_as_precise_as_torch_ao(row: dict[str, Any]) -> None:
    sqnr = row["sqnr_db"]
    if "torch_ao" not in sqnr:
        pytest.skip(row["failures"].get("torch_ao", "torch.ao is not installed"))
    assert sqnr["torchq"] >= sqnr["torch_ao"]


def test_it_is_faster_than_float(row: dict[str, Any]) -> None:
    """By the frozen TorchScript; how it compares with the peers is in docs/models.md."""
    assert row["torchq_script_ms"] < row["float_ms"]


def test_it_is_smaller(row: dict[str, Any]) -> None:
    assert row["torchq_bytes"] < row["float_bytes"]
