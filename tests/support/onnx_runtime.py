# SPDX-License-Identifier: Apache-2.0
"""Sessions of ONNX Runtime that compute exact int8 sums on every CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import torchq


def session(path: Path, optimized: bool = True) -> Any:
    """Return a session on one thread.

    Without VNNI, the products of uint8 and int8 that ONNX Runtime makes of its float ones saturate.
    """
    runtime = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    if not (optimized and any("vnni" in isa or isa == "amx" for isa in torchq.supported_isas())):
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
