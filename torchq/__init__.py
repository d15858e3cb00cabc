# SPDX-License-Identifier: Apache-2.0
"""torchq: exact, fast int8 inference on CPUs for PyTorch."""

from torchq.attr import Attr
from torchq.config import QConfig
from torchq.isa import cpu_info, isa, last_kernel, supported_isas, use_isa
from torchq.post_ops import PostOps
from torchq.qparams import QParams

__version__ = "0.1.0"

__all__ = [
    "Attr",
    "PostOps",
    "QConfig",
    "QParams",
    "cpu_info",
    "isa",
    "last_kernel",
    "supported_isas",
    "use_isa",
]
