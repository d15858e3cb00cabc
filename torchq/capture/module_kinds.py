# SPDX-License-Identifier: Apache-2.0
"""Float modules that both flows know, by what becomes of them; why one may have to stay float."""

from __future__ import annotations

import torch
from torch import nn

from torchq.attributes.arguments import FLOATS
from torchq.nn.batch_norm import TRANSPOSED, reduction
from torchq.quantization.config import QConfig
from torchq.report import reasons

_LIBRARY = ("torch.nn.", "torchq.")
_HARMLESS = {
    *("__init__", "__module__", "__doc__", "__annotations__", "__constants__", "__dict__"),
    *("__weakref__", "__repr__", "__orig_bases__", "__parameters__", "__static_attributes__"),
    *("__firstlineno__", "extra_repr", "reset_parameters"),
}
MATMUL = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)
RECURRENT = (nn.RNNBase, nn.RNNCellBase)
BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
AVERAGES = (
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
)
MAX_REDUCTION = 65793  # products of 255 * 127 that an int32 surely holds


def is_patched(module: nn.Module) -> bool:
    """Return whether an object has a forward of its own, which its class does not know."""
    return not vars(module).keys().isdisjoint(("forward", "_conv_forward"))


def inherits(cls: type) -> bool:
    """Return True where nothing that matters to a call is a class's own, and not the library's."""
    base = next(c for c in cls.__mro__ if c.__module__.startswith(_LIBRARY))
    known = {*dir(base), *(n for c in base.__mro__ for n in vars(c).get("__annotations__", ()))}
    own = {name for c in cls.__mro__[: cls.__mro__.index(base)] for name in vars(c)}
    return base is not nn.Module and not own & known - _HARMLESS


def is_foreign(module: nn.Module) -> bool:
    """Return True for recurrent modules with a forward of their own, which may compute anything."""
    known = inherits(type(module)) and not is_patched(module)
    return isinstance(module, RECURRENT) and not known


def why_dtypes(dtypes: set[torch.dtype]) -> str:
    """Return why what reads tensors of these dtypes must stay float; "" where it need not."""
    other = dtypes - {*FLOATS}
    return reasons.SOURCE_DTYPE.format(dtype=other.pop()) if other else ""


def why_sums(module: nn.Module) -> str:
    """Return why an int32 may not hold the sums of a layer or recurrent module, or ""."""
    if isinstance(module, RECURRENT):
        sums = max(weight.size(-1) for weight in module.parameters() if weight.dim() > 1)
    else:
        sums = reduction(module)
    return reasons.TOO_LONG.format(products=MAX_REDUCTION) if sums > MAX_REDUCTION else ""


def why_float(module: nn.Module, config: QConfig | None, dtypes: set[torch.dtype]) -> str:
    """Return why such a module must stay float; "" where it need not.

    Args:
        module: recurrent.
        config: of the module; None keeps it float.
        dtypes: of the tensors that it was called with.
    """
    if config is None:
        return reasons.OVERRIDE
    if is_foreign(module):
        return reasons.OWN_RECURRENT
    if why := why_dtypes(dtypes):
        return why
    return why_sums(module)
