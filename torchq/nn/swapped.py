# SPDX-License-Identifier: Apache-2.0
"""A quantized layer among code that is not known: float32 in, float32 out."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.nn.conv_transpose import QConvTranspose
from torchq.nn.module import QModule
from torchq.nn.standing import Described, Fixed, FloatModule, NoAnswer, Stands, changed, put


def constants_of(module: nn.Module) -> dict[str, Any]:
    """What a float layer was made of, by name: ``in_features`` and the like, and a class's own.

    Of a layer that stands for a module (``eager.leaves.stand_in``), what that was made of: the same
    name may mean something else there.
    """
    found: dict[str, Any] = {}
    if "_stands_for" in vars(module):
        return dict(vars(module)["_stands_for"])
    for cls in reversed(type(module).__mro__):
        names = getattr(cls, "__constants__", ())
        if cls.__module__.startswith(("torch.", "torchq.")) or cls is object:
            found.update((name, getattr(module, name, None)) for name in names)
        else:
            found.update(vars(cls))
    found.update(vars(module))
    ours = {"training", "weight", "bias"}
    return {k: v for k, v in found.items() if k[0] != "_" and k not in ours and _is_plain(v)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return type(value) in (int, float, bool, str, type(None))


class Standing(Stands):
    """In the place of a float layer, whose constants it has: the model's code may ask for them.

    Setting them to something else raises, since it would have no effect.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises AttributeError for what the float layer had, and what it does not replace."""
        fixed = vars(self).get("_fixed", {})
        if name in fixed.keys() | {"weight", "bias"} and fixed.get(name, self) != value:
            raise AttributeError(changed(f"{name} of a layer"))
        super().__setattr__(name, value)

    def _fix(self, constants: dict[str, Any]) -> None:
        """To be called last: what it has itself is not replaced."""
        own = vars(self).keys() | self._modules.keys()
        fixed = {name: value for name, value in constants.items() if name not in own}
        vars(self).update(fixed)
        vars(self)["_fixed"] = fixed


class Part(Stands):
    """In the place of what is inside a module that became something else: it cannot be called."""

    def __init__(self) -> None:
        """Hooks would never run."""
        super().__init__()
        self._forward_hooks, self._forward_pre_hooks = Fixed(), Fixed()

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises AttributeError for a ``forward``, too, which would never run."""
        if name == "forward":
            raise AttributeError(changed("forward of a part of a layer"))
        super().__setattr__(name, value)

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Raises NoAnswer."""
        raise NoAnswer(
            "torchq.nn: code of a model whose modules are swapped must not call parts of what "
            "became a whole in int8. Keep that float: name it in overrides with None."
        )


def described(module: nn.Module, memo: dict[int, Any]) -> FloatModule:
    """What a float module is; ``memo``: what stands for its tensors and modules, each once."""

    def tensor(value: Tensor | None) -> Described | None:
        if value is None:
            return None
        new = Described(tuple(value.shape), value.dtype)
        return memo.setdefault(id(value), new)  # type: ignore[no-any-return]

    def part(value: nn.Module | None) -> nn.Module | None:
        if value is None:
            return None
        if id(value) not in memo:
            memo[id(value)] = Part().eval()
            put(memo[id(value)], described(value, memo))
        return memo[id(value)]  # type: ignore[no-any-return]

    return FloatModule(
        type(module),
        {name: tensor(value) for name, value in module._parameters.items()},
        {name: tensor(value) for name, value in module._buffers.items()},
        {name: part(value) for name, value in module._modules.items()},
        constants_of(module),
        frozenset(dir(module)).difference(dir(nn.Module)),
    )


class Swapped(Standing, QModule):
    """Stands where a model's own code calls a float layer, and takes and gives what that did.

    Whatever the code does with the result is right, then: it is of real values. The layer's packed
    weight is no attribute here, so that code which computes with ``layer.weight`` fails instead of
    taking the integers; what the layer was made of (``in_features`` and the like) is, and
    ``weight`` and ``bias`` tell dtype and shape.
    """

    __jit_unused_properties__ = ("weight", "bias")
    _pad: list[int]
    _pad_mode: str

    def __init__(
        self, layer: nn.Module, constants: dict[str, Any], pad: Sequence[int] = (), mode: str = ""
    ) -> None:
        """``layer`` is quantized, and has a float32 destination; ``constants`` are attributes.

        ``pad`` and ``mode``: how :func:`torch.nn.functional.pad` pads in front of it.
        """
        super().__init__()
        self.layer, self._pad, self._pad_mode = layer, list(pad), mode
        self._set_spec(constants=constants, pad=list(pad), mode=mode)
        self._fix({k: _hashable(value) for k, value in constants.items()})

    @classmethod
    def of(cls, module: Any, layer: QModule) -> "Swapped":
        """In the place of ``module``; ``layer`` is made of what :func:`without_padding` gives."""
        shape, has_bias = tuple(module.weight.shape), module.bias is not None
        constants = constants_of(module) | {"weight_shape": shape, "has_bias": has_bias}
        mode = getattr(module, "padding_mode", "zeros")
        if mode == "zeros":
            return cls(layer, constants)
        return cls(layer, constants, module._reversed_padding_repeated_twice, mode)

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> "Swapped":
        """The layer is put in by its own spec."""
        return cls(nn.Identity(), spec["constants"], spec["pad"], spec["mode"])

    @property
    def weight(self) -> Described:
        """What the float weight was."""
        if "_stood" in vars(self):
            return self._of_float("weight")  # type: ignore[no-any-return]
        shape: Any = self.weight_shape
        return Described(shape)

    @property
    def bias(self) -> Described | None:
        """What the float bias was."""
        if "_stood" in vars(self):
            return self._of_float("bias")  # type: ignore[no-any-return]
        if not self.has_bias:
            return None
        shape, transposed = self.weight.shape, isinstance(self.layer, QConvTranspose)
        return Described((shape[1] * self.groups if transposed else shape[0],))

    def _of_float(self, name: str) -> Any:
        stood: FloatModule = vars(self)["_stood"]
        if name not in stood.parameters:
            raise AttributeError(name)
        return stood.parameters[name]

    def forward(self, input: Tensor) -> Tensor:
        """Runs the layer; the argument is called as those of ``torch.nn``."""
        if input.dtype != torch.float32:
            raise TypeError(
                "torchq.nn: a layer that a model's own code calls takes torch.float32, as the "
                f"float layer does, got {input.dtype}. Give it input.float(), say, and call it "
                "outside of autocast."
            )
        if len(self._pad) > 0:
            input = F.pad(input, self._pad, self._pad_mode)
        dst: Tensor = self.layer(input)
        return dst


def without_padding(module: nn.Module) -> nn.Module:
    """The float layer without a padding of other values than zeros, which :class:`Swapped` does."""
    if getattr(module, "padding_mode", "zeros") == "zeros":
        return module
    result: Any = copy.copy(module)
    result.padding, result.padding_mode = (0,) * len(result.kernel_size), "zeros"
    return result  # type: ignore[no-any-return]


def _hashable(value: Any) -> Any:
    """Tuples, which JSON writes as lists."""
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


def by_float_name(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """``named_modules`` with the layers themselves in place of those that hold them."""
    held = {id(m.layer): name for name, m in model.named_modules() if isinstance(m, Swapped)}
    parts = [part for part in model.named_modules() if not isinstance(part[1], Swapped)]
    return [(held.get(id(module), name), module) for name, module in parts]
