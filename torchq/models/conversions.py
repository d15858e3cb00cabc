# SPDX-License-Identifier: Apache-2.0
"""Refuse ``half()``, ``to(dtype)`` and the like of a quantized model before anything is changed.

``nn.Module._apply`` converts depth first: float layers in front of a quantized one would be
converted when that refuses. So modules that hold quantized ones ask all of them first, by a
function of their own in the place of ``_apply``. A float module around a quantized model has none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from torchq.models.attached import attachment_of
from torchq.models.inputs import Model
from torchq.nn.module import QModule


def refusing_conversions(model: Model) -> Model:
    """Return the model; it and its parts refuse conversions before they change anything."""
    for module in model.modules():
        if not isinstance(module, QModule) and next(_quantized(module), None) is not None:
            vars(module)["_apply"] = functools.partial(_apply, module)
    return model


def check_conversions(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Ask all quantized modules in a module.

    Raises:
        TypeError: one has to keep its dtypes, or to stay on the CPU.
    """
    for name, quantized in _quantized(module):
        quantized.check_conversion(fn, name)


def _apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Convert a module as its class does, if all quantized modules in it agree."""
    if recurse:
        check_conversions(module, fn)
    result: nn.Module = type(module)._apply(module, fn, recurse)
    return result


def _quantized(module: nn.Module) -> Iterator[tuple[str, QModule]]:
    """Yield the quantized modules in a module and in its graphs, and their names."""
    for name, part in module.named_modules():
        if isinstance(part, QModule):
            yield name, part
        attached = attachment_of(part)
        if attached is not None:
            yield from _quantized(attached.graph)
