# SPDX-License-Identifier: Apache-2.0
"""Modules as one call of a captured graph.

torch.export would unroll recurrent modules; the code of fake quantizers looks into buffers.
Activations and batch norms keep the size of their source. Calls that say so spare torch.export
symbolic arithmetic: it captures MobileNet-V2 in 1.3 s instead of 4.1.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from torchq.capture.module_kinds import is_foreign
from torchq.models.trees import Args
from torchq.nn.fake_scales import is_fake, is_watcher, keep_fixed

RECURRENT = (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell)

_library = torch.library.Library("torchq_capture", "DEF")
_library.define(
    "recurrent(Tensor[] srcs, str name, str kind, int hidden, int projected, int layers, "
    "int directions, bool batch_first) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl(_library, "recurrent", "Meta")
def _fake(
    srcs: list[Tensor], name: str, kind: str, hidden: int, projected: int, layers: int,
    directions: int, batch_first: bool,
) -> list[Tensor]:  # fmt: skip
    """Return results without values: the output, and the last states."""
    src = srcs[0]
    if kind.endswith("Cell"):
        shape = [*src.shape[:-1], hidden]
        return [src.new_empty(shape) for _ in range(2 if kind == "LSTMCell" else 1)]
    batch = [] if src.dim() == 2 else [src.shape[0 if batch_first else 1]]
    output = src.new_empty([*src.shape[:-1], projected * directions])
    state = src.new_empty([layers * directions, *batch, projected])
    if kind != "LSTM":
        return [output, state]
    return [output, state, src.new_empty([layers * directions, *batch, hidden])]


def _is_recurrent(module: nn.Module) -> bool:
    return isinstance(module, RECURRENT) and not is_foreign(module)


def is_one_call(module: nn.Module) -> bool:
    """Return whether a graph may call a float module: a recurrent one, or a fake quantizer."""
    return _is_recurrent(module) or is_fake(module)


def as_one_call(model: nn.Module) -> nn.Module:
    """Make modules of a copy of a model call ops of ``torchq_capture``."""
    for name, module in model.named_modules():
        if _is_recurrent(module):
            vars(module)["_torchq_name"] = name
            vars(module)["forward"] = types.MethodType(_forward, module)
        elif (call := _as_same_size_call(module)) is not None:
            vars(module)["forward"] = call
    return model


def _forward(
    module: nn.Module, input: Tensor | PackedSequence, hx: Tensor | Sequence[Tensor] | None = None
) -> object:
    """Call the op; give the results as the module does."""
    if isinstance(input, PackedSequence):
        raise TypeError(f"'{module._torchq_name}' reads a packed sequence")
    if module._forward_hooks or module._forward_pre_hooks:
        raise TypeError(f"'{module._torchq_name}' has hooks, which its quantized form keeps")
    kind = next(cls.__name__ for cls in type(module).__mro__ if cls in RECURRENT)
    states = [] if hx is None else [hx] if isinstance(hx, Tensor) else list(hx)
    cell = kind.endswith("Cell")
    hidden = module.hidden_size
    projected = hidden if cell else module.proj_size or hidden
    found = torch.ops.torchq_capture.recurrent(
        [input, *states], module._torchq_name, kind, hidden, projected,
        1 if cell else module.num_layers, 2 if not cell and module.bidirectional else 1,
        False if cell else module.batch_first,
    )  # fmt: skip
    if cell:
        return tuple(found) if kind == "LSTMCell" else found[0]
    return found[0], tuple(found[1:]) if kind == "LSTM" else found[1]


FLAGS = ("observer_enabled", "static_enabled")
"""Tensors of torch.ao's fake quantizers that let them observe."""

_NAMES = ("fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine")
_FUNCTIONS = [(getattr(torch, name), getattr(torch.ops.aten, name)) for name in _NAMES]


def _empty(src: Tensor, *args: object) -> Tensor:
    """Return a result without values."""
    return torch.empty_like(src)


def _define(name: str, schema: str) -> None:
    _library.define(f"{name}({schema}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, _empty, "Meta")


def _define_twin(overload: OpOverload) -> None:
    """Define an op like one of ATen, which computes it on constants of the model's code."""
    schema = overload._schema
    name = f"{schema.name.partition('::')[2]}.{schema.overload_name}".rstrip(".")
    _define(name, str(schema).partition("(")[2].rpartition(")")[0])
    _library.impl(name, overload, "CPU")


_define("fake_quantize", "Tensor src, str name")
for _, _packet in _FUNCTIONS:  # these have no kernel for sizes that vary
    for _overload in _packet.overloads():
        _define_twin(getattr(_packet, _overload))


_SAME_SIZE: dict[type[nn.Module], tuple[OpOverloadPacket, Callable[[nn.Module], Args]]] = {
    nn.ReLU: (torch.ops.aten.relu, lambda m: ()),
    nn.SiLU: (torch.ops.aten.silu, lambda m: ()),
    nn.Hardswish: (torch.ops.aten.hardswish, lambda m: ()),
    nn.Hardsigmoid: (torch.ops.aten.hardsigmoid, lambda m: ()),
    **dict.fromkeys(
        (nn.Hardtanh, nn.ReLU6), (torch.ops.aten.hardtanh, lambda m: (m.min_val, m.max_val))
    ),
    **dict.fromkeys(
        (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
        (torch.ops.aten.batch_norm, lambda m: (
            m.weight, m.bias, m.running_mean, m.running_var, False, m.momentum or 0.0, m.eps,
            torch.backends.cudnn.enabled,
        )),
    ),
}  # fmt: skip
"""Modules that keep sizes -> their ATen call, and its arguments behind the source."""

for _packet, _ in dict.fromkeys(_SAME_SIZE.values()):
    _define_twin(_packet.default)


def _as_same_size_call(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return a forward that is one call of ``torchq_capture``; None where torch's own stays."""
    if type(module) not in _SAME_SIZE or "forward" in vars(module):
        return None
    if getattr(module, "inplace", False):
        return None
    batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    if batch_norm and (module.training or module.running_mean is None):
        return None
    packet, rest = _SAME_SIZE[type(module)]
    check = getattr(module, "_check_input_dim", None)
    function = getattr(torch.ops.torchq_capture, packet.__name__)

    def forward(input: Tensor) -> Tensor:
        if check is not None:
            check(input)
        result: Tensor = function(input, *rest(module))
        return result

    return forward


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
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
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
            vars(module)["forward"] = types.MethodType(_fake_forward, module)
    return model


def _fake_forward(module: nn.Module, src: Tensor) -> Tensor:
    result: Tensor = torch.ops.torchq_capture.fake_quantize(src, module._torchq_name)
    return result


def without_observers(model: nn.Module) -> nn.Module:
    """Freeze the scales of fake quantizers of a copy; what only observes passes values on."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        parent = model.get_submodule(name.rpartition(".")[0])
        if name and is_watcher(module) and not is_fake(parent):
            model.set_submodule(name, nn.Identity())
        keep_fixed(module)
        for flag in FLAGS:
            enabled = getattr(module, flag, None)
            if isinstance(enabled, Tensor):
                enabled.zero_()
    return model
