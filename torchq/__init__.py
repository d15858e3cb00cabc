# SPDX-License-Identifier: Apache-2.0
"""torchq: exact, fast int8 inference on CPUs for PyTorch."""

from typing import TYPE_CHECKING

from torchq import eager, functional, nn, observers, ops, packing, saturation
from torchq.analysis import (
    compare,
    explain,
    load_calibration,
    milliseconds,
    profile,
    save_calibration,
    sensitivity,
    sqnr,
    tune,
    write_report,
)
from torchq.attributes.attr import Attr
from torchq.attributes.post_ops import PostOps
from torchq.convert.api import calibrate, convert, prepare, quantize
from torchq.export import to_onnx
from torchq.integrations import registration
from torchq.integrations.compressed_tensors import from_compressed_tensors
from torchq.integrations.compressed_writer import to_compressed_tensors
from torchq.migrate import from_pt2e, from_torch_ao, from_torchao, quantize_dynamic
from torchq.nn.fake_quantize import FakeQuantize
from torchq.onednn.composition import compose
from torchq.qat.place import prepare_qat
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

if TYPE_CHECKING:
    from torchq.integrations.transformers import TorchqConfig as TorchqConfig
else:

    def __getattr__(name: str) -> object:
        """Import what needs an optional package when it is first asked for."""
        if name != "TorchqConfig":
            raise AttributeError(f"module 'torchq' has no attribute {name!r}")
        from torchq.integrations.transformers import TorchqConfig

        return TorchqConfig


registration.register()

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
    "from_compressed_tensors",
    "from_pt2e",
    "from_torch_ao",
    "from_torchao",
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
    "prepare_qat",
    "profile",
    "quantize",
    "quantize_dynamic",
    "release_memory",
    "saturation",
    "save",
    "save_calibration",
    "sensitivity",
    "sqnr",
    "supported_isas",
    "to_compressed_tensors",
    "to_onnx",
    "tune",
    "use_isa",
    "write_report",
]
