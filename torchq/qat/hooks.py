# SPDX-License-Identifier: Apache-2.0
"""The hooks that round in training, and the names of what they call."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

SRC, DST = "src_quantizer", "dst_quantizer"
"""Names of the quantizers in a module: of what it reads, and of what it gives."""
_FREEZE_AT = "torchq_freeze_at"


def round_src(
    module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Round the source of a layer."""
    quantizer = getattr(module, SRC)
    if args:
        return (quantizer(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "input": quantizer(kwargs["input"])}


def round_dst(module: nn.Module, args: object, result: Tensor) -> object:
    """Round the result of a module."""
    return getattr(module, DST)(result)


def freeze_statistics(module: _BatchNorm, args: object) -> None:
    """Put a batch norm that has seen enough batches in eval mode, before its call."""
    seen = module.num_batches_tracked
    if module.training and seen is not None and seen >= getattr(module, _FREEZE_AT):
        module.eval()


def freeze_after(module: _BatchNorm, batches: int) -> None:
    """Freeze the statistics of a batch norm after this many batches."""
    if module.num_batches_tracked is not None:  # else it takes those of each batch
        module.register_buffer(_FREEZE_AT, module.num_batches_tracked + batches)
        module.register_forward_pre_hook(freeze_statistics)


def without_quantizers(module: nn.Module) -> nn.Module:
    """Take the hooks, and what they call, off a module; return it."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if getattr(hook, "__module__", "") == __name__:
                del hooks[key]
    for name in (SRC, DST):
        module._modules.pop(name, None)
    module._buffers.pop(_FREEZE_AT, None)
    return module
