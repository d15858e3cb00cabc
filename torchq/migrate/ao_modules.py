# SPDX-License-Identifier: Apache-2.0
"""The one table of torch.ao's int8 modules: what each is in float, or as a dynamic module here.

A static module becomes a ``Sequential``: the float layer, its relu, and the fake quantizer of its
result. The layer's weight is the dequantized one, behind a fake quantizer of the same scales.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from torchq.attributes.options import EmbeddingBits
from torchq.functional.embeddings import pack_embedding
from torchq.migrate.leaves import dynamic_leaf, float_layer
from torchq.nn import (
    QGRU,
    QLSTM,
    QEmbedding,
    QEmbeddingBag,
    QGRUCell,
    QLSTMCell,
    QModule,
    QRecurrentLayer,
    QRNNCell,
    RecurrentWeight,
)
from torchq.nn.fake_quantize import FakeQuantize

LEVELS = {"torch.quint8": (0, 255), "torch.qint8": (-128, 127)}
"""The integers of an activation by the name of its dtype."""
_SIZES = (
    *("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups"),
    "padding_mode",
)


def kind(module: nn.Module) -> str:
    """Return the name of a module of torch.ao that computes in int8, or "".

    It has the folder in front: ``quantized.Linear``, ``intrinsic.quantized.ConvReLU2d``.
    """
    cls = type(module)
    found = re.match(r"torch\.ao\.nn\.((?:[a-z]+\.)*quantized\.(?:dynamic\.|reference\.)?)", (
        f"{cls.__module__}."
    ))  # fmt: skip
    if found is None or cls.__name__.endswith("FloatFunctional"):
        return ""
    return f"{found[1]}{cls.__name__}"


def fake_quantizer(scale: float | Tensor, zero_point: int | Tensor, dtype: object) -> FakeQuantize:
    """Return the float meaning of quantizing a tensor with one scale.

    Raises:
        ValueError: ``dtype`` is no 8-bit one.
    """
    if str(dtype) not in LEVELS:
        raise ValueError(f"activations of {dtype} have no form here")
    low, high = LEVELS[str(dtype)]
    return FakeQuantize.from_affine(float(scale), int(zero_point), low, high)


def weight_scales(weight: Tensor) -> Tensor:
    """Return the scales of an int8 weight of torch.ao, one or one per channel.

    Raises:
        ValueError: it has zero points, or is not int8.
    """
    if not weight.is_quantized or weight.int_repr().dtype != torch.int8:
        raise ValueError(f"its weight is {weight.dtype}, and weights here are int8")
    if "per_channel" in str(weight.qscheme()):
        zero_points, scales = weight.q_per_channel_zero_points(), weight.q_per_channel_scales()
    else:
        zero_points = torch.tensor([weight.q_zero_point()], device="cpu")
        scales = torch.tensor([weight.q_scale()], dtype=torch.float32, device="cpu")
    if bool(zero_points.any()):
        raise ValueError("its weight has zero points other than 0, which weights here have not")
    return scales.float()


# Layers with a weight


def unquantized(module: Any) -> nn.Module:
    """Return the linear layer or convolution of torch.nn with the dequantized weight."""
    name = type(module).__name__.replace("ReLU", "")
    if name == "Linear":
        layer: nn.Module = nn.Linear(module.in_features, module.out_features, device="meta")
    else:
        keys = (*_SIZES, "output_padding") if "Transpose" in name else _SIZES
        layer = getattr(nn, name)(**{key: getattr(module, key) for key in keys}, device="meta")
    return float_layer(layer, module.weight().dequantize(), module.bias())


def fake_weight(layer: nn.Module, weight: Tensor) -> nn.Module:
    """Return a copy of a layer whose weight is fake-quantized with the scales it has."""
    scales = weight_scales(weight)
    axis = weight.q_per_channel_axis() if scales.numel() > 1 else None
    fake = FakeQuantize.from_affine(scales, torch.zeros_like(scales), -128, 127, axis)
    layer = copy.copy(layer)
    layer._parameters = dict(layer._parameters)
    parametrize.register_parametrization(layer, "weight", fake, unsafe=True)
    return layer


# Everything else with a scale


class Functional(nn.Module):
    """The float meaning of a ``QFunctional``."""

    round: Callable[[Tensor], Tensor]

    def __init__(self, module: Any, dtype: object) -> None:
        """Take its scale."""
        super().__init__()
        self.round = fake_quantizer(module.scale, module.zero_point, dtype)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Add and rounds."""
        return self.round(x + y)

    def add_relu(self, x: Tensor, y: Tensor) -> Tensor:
        """Add, clips at zero and rounds."""
        return self.round(F.relu(x + y))

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        """Multiply and rounds."""
        return self.round(x * y)

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        """Multiply matrices and rounds."""
        return self.round(torch.matmul(x, y))

    def cat(self, x: list[Tensor], dim: int = 0) -> Tensor:
        """Concatenate and rounds."""
        return self.round(torch.cat(x, dim))

    def add_scalar(self, x: Tensor, y: float) -> Tensor:
        """Add a number: the levels move with the values."""
        return x + y

    def mul_scalar(self, x: Tensor, y: float) -> Tensor:
        """Multiply by a number: the levels move with the values."""
        return x * y


def _plain(module: nn.Module) -> nn.Module:
    """Return the module of torch.nn with the name of one of torch.ao, on the same state."""
    base = getattr(nn, type(module).__name__.replace("BNReLU", "BatchNorm"))
    plain: nn.Module = base.__new__(base)
    plain.__setstate__({key: copy.copy(value) for key, value in vars(module).items()})
    for name in ("scale", "zero_point", "output_scale", "output_zero_point"):
        plain._buffers.pop(name, None)
        vars(plain).pop(name, None)
    return plain


def _prelu(module: Any) -> nn.Module:
    plain = nn.PReLU(module.num_parameters, device="meta")
    plain.weight = nn.Parameter(module.weight.dequantize(), False)
    return plain


def _embedding(module: Any) -> nn.Module:
    """Return the embedding with the same codes, scales and offsets."""
    weight = module.weight()
    scale = weight.q_per_channel_scales().float()
    offset = -weight.q_per_channel_zero_points().float() * scale
    bits: EmbeddingBits = 8
    codes = weight.int_repr()
    if "quint4x2" in str(weight.dtype):  # packed with float16, two codes to a byte
        scale, offset, bits = scale.half(), offset.half(), 4
        codes = codes.view(len(weight), -1)
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1)[:, : weight.shape[1]]
    packed = pack_embedding(codes, scale, offset, bits)
    if type(module).__name__ == "Embedding":
        return QEmbedding(packed)
    # torch.ao sums, whatever its mode
    return QEmbeddingBag(packed, "sum", module.include_last_offset)


# Dynamic modules


def _dynamic_layer(module: Any) -> nn.Module:
    """Return the leaf of a dynamic linear layer or convolution, with the same int8 weight."""
    weight = module.weight()
    scales = weight_scales(weight)
    leaf = dynamic_leaf(unquantized(module), weight.int_repr(), scales)
    return nn.Sequential(leaf, nn.ReLU()) if "ReLU" in type(module).__name__ else leaf


def _recurrent(module: Any) -> QModule:
    """Return the dynamic network or cell with the same int8 weights."""
    weights, biases = module.get_weight(), module.get_bias()
    name = type(module).__name__
    if not name.endswith("Cell"):
        cell = {"LSTM": "lstm", "GRU": "gru"}[name]
        layers = [
            _recurrent_layer(cell, weights, biases, [f"_l{i}", f"_l{i}_reverse"])
            for i in range(module.num_layers)
        ]
        network = QLSTM if name == "LSTM" else QGRU
        return network(layers, module.batch_first)
    cells: dict[str, type[QLSTMCell | QGRUCell | QRNNCell]] = {
        "LSTMCell": QLSTMCell,
        "GRUCell": QGRUCell,
        "RNNCell": QRNNCell,
    }
    cell = {"LSTMCell": "lstm", "GRUCell": "gru"}.get(name) or f"rnn_{module.nonlinearity}"
    return cells[name](_recurrent_layer(cell, weights, biases, [""]))


def _recurrent_layer(
    cell: Any, weights: dict[str, Tensor], biases: dict[str, Tensor | None], suffixes: list[str]
) -> QRecurrentLayer:
    """Return one layer, of the directions that have weights with these suffixes."""
    suffixes = [suffix for suffix in suffixes if f"weight_ih{suffix}" in weights]
    gates = {"lstm": 4, "gru": 3}.get(cell, 1)

    def weight(part: str) -> RecurrentWeight:
        own = [weights[f"weight_{part}{suffix}"] for suffix in suffixes]
        scales = [weight_scales(w).expand(w.size(0)).reshape(gates, -1) for w in own]
        rows = [w.int_repr().reshape(gates, -1, w.size(1)) for w in own]
        return RecurrentWeight(torch.stack(rows), torch.stack(scales))

    def bias(part: str) -> Tensor | None:
        own = [b for suffix in suffixes if (b := biases.get(f"bias_{part}{suffix}")) is not None]
        if not own:
            return None
        return torch.stack([b.detach().float() for b in own]).reshape(len(own), gates, -1)

    return QRecurrentLayer(cell, weight("ih"), weight("hh"), bias("ih"), bias("hh"))


# The table

_LAYERS = [
    *(f"quantized.{name}" for name in ("Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d",
                                       "ConvTranspose2d", "ConvTranspose3d")),
    *(f"intrinsic.quantized.{name}" for name in ("LinearReLU", "ConvReLU1d", "ConvReLU2d",
                                                 "ConvReLU3d")),
]  # fmt: skip
_ROUNDED = [
    *(f"quantized.{name}" for name in ("BatchNorm2d", "BatchNorm3d", "LayerNorm", "GroupNorm",
                                       "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d",
                                       "Hardswish", "ELU", "LeakyReLU", "Sigmoid", "Softmax")),
    *(f"intrinsic.quantized.{name}" for name in ("BNReLU2d", "BNReLU3d")),
]  # fmt: skip
STATIC = frozenset({*_LAYERS, *_ROUNDED, "quantized.PReLU", "quantized.Quantize"})
"""Modules that round what they give to a scale of their own."""
LAYERS = frozenset(_LAYERS)
"""Those of them that multiply by a weight."""
DYNAMIC: dict[str, Callable[[object], nn.Module]] = {
    **{f"quantized.dynamic.{name}": _dynamic_layer for name in ("Linear", "Conv1d", "Conv2d",
                                                                "Conv3d")},
    "intrinsic.quantized.dynamic.LinearReLU": _dynamic_layer,
    **{f"quantized.dynamic.{name}": _recurrent for name in ("LSTM", "GRU", "LSTMCell", "GRUCell",
                                                            "RNNCell")},
    "quantized.Embedding": _embedding,
    "quantized.EmbeddingBag": _embedding,
    "quantized.DeQuantize": lambda module: nn.Identity(),
    "quantized.Dropout": lambda module: nn.Identity(),
    "quantized.ReLU6": lambda module: nn.ReLU6(),
}  # fmt: skip
"""Modules without a scale of their own, to what they are here."""


def output_params(module: nn.Module) -> tuple[float, int]:
    """Return scale and zero point of what a static module gives."""
    prefix = "" if hasattr(module, "scale") else "output_"
    return float(getattr(module, f"{prefix}scale")), int(getattr(module, f"{prefix}zero_point"))


def float_meaning(module: Any, dtype: object) -> nn.Module:
    """Return what a static module means in float.

    Args:
        module: its :func:`kind` is in ``STATIC``, or it is a ``QFunctional``.
        dtype: of the activations.

    Raises:
        ValueError: its weight or its dtype has no form here.
    """
    name = kind(module)
    if name == "quantized.QFunctional":
        return Functional(module, dtype)
    if name == "quantized.Quantize":
        return fake_quantizer(module.scale, module.zero_point, module.dtype)
    if name in LAYERS:
        first = fake_weight(unquantized(module), module.weight())
    else:
        first = _prelu(module) if name == "quantized.PReLU" else _plain(module)
    relu = [nn.ReLU()] if name.startswith("intrinsic.") else []
    return nn.Sequential(first, *relu, fake_quantizer(*output_params(module), dtype)).eval()
