# SPDX-License-Identifier: Apache-2.0
"""Fake quantizers of training as one call of a graph: their code looks into buffers."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchq.convert.fake import is_fake, is_watcher

_FLAGS = ("observer_enabled", "static_enabled")

_NAMES = ("fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine")
_FUNCTIONS = [(getattr(torch, name), getattr(torch.ops.aten, name)) for name in _NAMES]


def _empty(src: Tensor, *args: Any) -> Tensor:
    """Return a result without values."""
    return torch.empty_like(src)


_library = torch.library.Library("torchq_capture", "FRAGMENT")  # type: ignore[no-untyped-call]


def _define(name: str, schema: str) -> None:
    _library.define(f"{name}({schema}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _library.impl(name, _empty, "Meta")  # type: ignore[no-untyped-call]


_define("fake_quantize", "Tensor src, str name")
for _, _packet in _FUNCTIONS:  # these have no kernel for sizes that vary
    for _overload in _packet.overloads():
        _schema = getattr(_packet, _overload)._schema
        _define(_schema.name.partition("::")[2] + f".{_schema.overload_name}".rstrip("."),
                str(_schema).partition("(")[2].rpartition(")")[0])  # fmt: skip


class FakeFunctions(TorchFunctionMode):
    """Makes ``torch.fake_quantize_*`` calls of ``torchq_capture``, while a module is exported.

    Attributes:
        seen: whether there were any.
    """

    def __init__(self, replace: bool = True) -> None:
        """``replace=False`` only looks; exporting takes twice as long with this mode."""
        super().__init__()
        self.replace, self.seen = replace, False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the function or its twin."""
        for function, packet in _FUNCTIONS:
            if func is function or func is packet or getattr(func, "overloadpacket", 0) is packet:
                self.seen = True
                if self.replace:
                    func = getattr(torch.ops.torchq_capture, packet.__name__)
        return func(*args, **(kwargs or {}))


def as_fake_calls(model: nn.Module) -> nn.Module:
    """Make each fake quantizer of a copy of a model call ``torchq_capture::fake_quantize``."""
    for name, module in model.named_modules():
        if is_fake(module):
            vars(module)["_torchq_name"] = name
            vars(module)["forward"] = types.MethodType(_forward, module)
    return model


def _forward(module: Any, src: Tensor) -> Tensor:
    result: Tensor = torch.ops.torchq_capture.fake_quantize(src, module._torchq_name)
    return result


def without_observers(model: nn.Module) -> nn.Module:
    """Freezes the scales of fake quantizers of a copy; what only observes passes values on."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        parent = model.get_submodule(name.rpartition(".")[0])
        if name and is_watcher(module) and not is_fake(parent):
            model.set_submodule(name, nn.Identity())
        for flag in _FLAGS:
            enabled = getattr(module, flag, None)
            if isinstance(enabled, Tensor):
                enabled.zero_()
    return model
