# SPDX-License-Identifier: Apache-2.0
"""torchq: exact, fast int8 inference on CPUs for PyTorch."""

from torchq import eager, functional, nn, ops
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
from torchq.attributes.attr import Attr
from torchq.attributes.post_ops import PostOps
from torchq.convert.api import calibrate, convert, prepare, quantize
from torchq.convert.explain import explain
from torchq.export import to_onnx
from torchq.functional import packing
from torchq.nn.fake_quantize import FakeQuantize
from torchq.onednn import saturation
from torchq.onednn.composition import compose
from torchq.quantization import observers
from torchq.quantization.config import QConfig
from torchq.quantization.qparams import QParams
from torchq.runtime.isa import (
    cpu_info,
    isa,
    last_kernel,
    memory_info,
    release_memory,
    supported_isas,
    use_isa,
)
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
    "ops",
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
    "to_onnx",
    "use_isa",
    "write_report",
]
