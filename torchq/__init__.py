# SPDX-License-Identifier: Apache-2.0
"""torchq: exact, fast int8 inference on CPUs for PyTorch."""

from torchq import eager, functional, nn, observers, packing, saturation
from torchq.analysis import (
    compare,
    load_calibration,
    milliseconds,
    profile,
    save_calibration,
    sensitivity,
    sqnr,
    write_report,
)
from torchq.attr import Attr
from torchq.compose import compose
from torchq.config import QConfig
from torchq.convert.api import calibrate, convert, prepare, quantize
from torchq.convert.explain import explain
from torchq.fake_quantize import FakeQuantize
from torchq.isa import (
    cpu_info,
    isa,
    last_kernel,
    memory_info,
    release_memory,
    supported_isas,
    use_isa,
)
from torchq.post_ops import PostOps
from torchq.qparams import QParams
from torchq.serialization import load, save

__version__ = "0.1.0"

__all__ = [
    "Attr",
    "FakeQuantize",
    "PostOps",
    "QConfig",
    "QParams",
    "calibrate",
    "compare",
    "compose",
    "convert",
    "cpu_info",
    "eager",
    "explain",
    "functional",
    "isa",
    "last_kernel",
    "load",
    "load_calibration",
    "memory_info",
    "milliseconds",
    "nn",
    "observers",
    "packing",
    "prepare",
    "profile",
    "quantize",
    "release_memory",
    "saturation",
    "save",
    "save_calibration",
    "sensitivity",
    "sqnr",
    "supported_isas",
    "use_isa",
    "write_report",
]
