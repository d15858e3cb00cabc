# SPDX-License-Identifier: Apache-2.0
"""Gives every op its fake kernel.

The ops themselves are ``torch.ops.torchq.*`` (schemas: ``csrc/library.cpp``). A fake kernel states
shape, strides and dtype without data, which ``torch.compile`` and ``torch.export`` trace with. The
fake kernels are in ``torchq/runtime``. They are registered here, because the library names this
module as the one that does so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from torchq.runtime.library import LIBRARY_PATH, refuse_onnx_export
from torchq.runtime.matmul_fakes import FAKES
from torchq.runtime.stand_ins import check_as_op

__all__ = ["LIBRARY_PATH"]


def _register(name: str, kernel: Callable[..., object]) -> None:
    """Register the fake kernel of ``torchq::<name>``."""
    arguments = getattr(torch.ops.torchq, name).default._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    needed = inspect.signature(kernel).parameters

    def checked(*args: object, **kwargs: object) -> object:
        refuse_onnx_export()
        given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        _check_devices(name, given)
        given = defaults | given
        check_as_op(name, {a.name: given[a.name] for a in arguments})
        return kernel(**{key: given[key] for key in needed})

    torch.library.register_fake(f"torchq::{name}", checked)


def _check_devices(name: str, given: Mapping[str, object]) -> None:
    """Refuse CPU sources with meta tensors: dst would be on the CPU, and nothing written to it."""
    devices: dict[bool, list[str]] = {False: [], True: []}
    on_meta: list[bool] = []
    for argument, value in given.items():
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if isinstance(tensor, Tensor):
                on_meta.append(tensor.device.type == "meta")
                devices[on_meta[-1]].append(argument)
    if devices[True] and devices[False] and not on_meta[0]:
        raise ValueError(
            f"torchq.{name}: all tensors must be on one device, got {', '.join(devices[True])} on "
            f"meta and {', '.join(devices[False])} on the CPU. Load values into what was made on "
            "the meta device."
        )


for _name, _kernel in FAKES.items():
    _register(_name, _kernel)
