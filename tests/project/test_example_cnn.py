# SPDX-License-Identifier: Apache-2.0
"""examples/cnn_inference_int8.py runs as its docstring says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_example_runs_and_is_accurate() -> None:
    script = ROOT / "examples" / "cnn_inference_int8.py"
    command = [sys.executable, str(script), "--batch", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    sqnr = re.search(r"SQNR +([\d.]+) dB", done.stdout)
    assert sqnr is not None and float(sqnr[1]) > 30, done.stdout
    for name in ("attributes", "max error", "float", "int8"):
        assert re.search(rf"^{name} ", done.stdout, re.MULTILINE), done.stdout
