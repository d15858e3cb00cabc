# SPDX-License-Identifier: Apache-2.0
"""Proves which channels of a weight cannot saturate, whatever the input: known when packing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.functional.packing import PackedWeight
from torchq.models.attached import computing_modules
from torchq.nn.conv import QConv
from torchq.nn.conv_transpose import QConvTranspose
from torchq.nn.dynamic import DynamicQLinear
from torchq.nn.dynamic_conv import DynamicQConv
from torchq.nn.layer import QLayer
from torchq.nn.linear import QLinear
from torchq.nn.rnn_layer import QRecurrentLayer
from torchq.onednn.saturation.pairs import HIGHEST, LOWEST, SHIFT, U8_MAX, as_conv_weight, halve
from torchq.onednn.saturation.recurrent import recurrent_layers
from torchq.runtime.library import DTYPES

EMULATED = (QConv, QConvTranspose, QLinear)


@dataclass(frozen=True, eq=False)
class Proof:
    """Up to which source values no pair of a channel saturates.

    A channel is safe for all inputs if and only if no pair of its weights has positive parts that
    sum to more than 128, or negative parts below -128.

    Attributes:
        src_dtype: uint8 or int8.
        largest: int64 ``[N]``, the largest source value up to which the channel is exact for every
            input; an input that has it plus one can saturate, if there is such a value. Below -128
            never happens, since -128 runs as 0.
        halved: whether these are the halved weights of an s8 convolution.
    """

    src_dtype: torch.dtype
    largest: Tensor
    halved: bool

    @property
    def safe(self) -> Tensor:
        """Bool ``[N]``: exact for all inputs."""
        return self.safe_up_to(torch.iinfo(self.src_dtype).max)

    def safe_up_to(self, value: int) -> Tensor:
        """Bool ``[N]``: exact for all sources whose values are at most ``value``."""
        return self.largest >= value

    def __str__(self) -> str:
        """One line."""
        safe, total = int(self.safe.sum()), self.largest.numel()
        text = f"{safe} of {total} channels are safe for all inputs"
        if safe < total:
            text += f", the others up to a source of {int(self.largest.min())}"
        return text + (" (weights halved)" if self.halved else "")


def prove(weight: Tensor | PackedWeight, src_dtype: torch.dtype, halved: bool = False) -> Proof:
    """Prove what the weights alone can; pairs are consecutive k within a tap.

    Args:
        weight: int8 ``(N, K)`` or ``(OC, C/groups, kernel...)``, or packed, of any kind.
        src_dtype: uint8, or int8, which runs as uint8 with +128.
        halved: whether to halve the weights first, as convolutions with an s8 source do.

    Raises:
        TypeError: ``weight`` is not int8, or ``src_dtype`` neither uint8 nor int8.
    """
    if isinstance(weight, PackedWeight):
        unpacked = weight.unpack()
        weight = as_conv_weight(unpacked, weight.groups) if weight.stride else unpacked
    if weight.dtype != torch.int8 or src_dtype not in (torch.uint8, torch.int8):
        raise TypeError(
            "torchq.saturation.prove: weight must be torch.int8 and src_dtype torch.uint8 or "
            f"torch.int8, got {weight.dtype} and {src_dtype}. Quantize the weight first."
        )
    used = (halve(weight) if halved else weight).to(torch.int16)  # sums of two fit
    rows = used.unsqueeze(-1).flatten(2).transpose(1, 2)  # (N, taps, K)
    rows = F.pad(rows, (0, rows.shape[2] % 2))
    first, second = rows[..., ::2], rows[..., 1::2]
    positive = _largest(first.clamp(min=0) + second.clamp(min=0))
    negative = _largest(-first.clamp(max=0) - second.clamp(max=0))
    up, down = HIGHEST // positive.clamp(min=1), -LOWEST // negative.clamp(min=1)
    largest = torch.minimum(up, down).clamp(max=U8_MAX)
    return Proof(src_dtype, largest - (SHIFT if src_dtype == torch.int8 else 0), halved)


def _largest(sums: Tensor) -> Tensor:
    """Int64 ``[N]``; 0 where there are no pairs."""
    return F.pad(sums.flatten(1), (0, 1)).amax(1).to(torch.int64)


def prove_module(module: QLayer) -> Proof:
    """Return the proof for a quantized linear or convolution and its source.

    Raises:
        NotImplementedError: the weight has zero points.
    """
    if module.weight_shift is not None:
        raise NotImplementedError(
            "torchq.saturation: weights must have no zero points, got those of "
            f"{module.extra_repr()}. Convert with affine=False to see what saturates."
        )
    halved = not isinstance(module, QLinear) and module.src_dtype == torch.int8
    return prove(module.packed(), module.src_dtype, halved)


def prove_recurrent(layer: QRecurrentLayer) -> dict[str, tuple[Proof, int]]:
    """By factor of the layer's products, the proof and the factor's largest value.

    The factors are the source, the hidden state, and what a projection reads.
    """
    state_dtype, state_high = DTYPES[layer.state_code], layer.geometry[-1]
    factors = {"src": (torch.uint8 if layer.dynamic else layer.src_dtype, layer.src_high)}
    factors["state"] = (state_dtype, state_high)
    if layer.projection_size:
        factors["projection"] = (state_dtype, state_high)
    return {
        name: (prove(layer.unpacked(name).flatten(0, 2), dtype), high)
        for name, (dtype, high) in factors.items()
    }


def whole_proof(layer: QRecurrentLayer) -> Proof:
    """All proofs of a recurrent layer as one, in terms of a source of the first one's dtype."""
    proofs = [proof for proof, _ in prove_recurrent(layer).values()]
    dtype = proofs[0].src_dtype
    shifts = [SHIFT if proof.src_dtype == torch.int8 else 0 for proof in proofs]
    both = zip(proofs, shifts, strict=True)
    largest = torch.cat([proof.largest + shift - shifts[0] for proof, shift in both])
    return Proof(dtype, largest, False)


def seven_bits(model: nn.Module) -> dict[str, str]:
    """Return why 7 bits for activations or weights would matter, by the name of the module.

    On torchq nowhere: it is exact. What is listed would be saturated or halved on a CPU without
    VNNI under oneDNN's rules. Modules with weights that are not listed cannot saturate, whatever
    comes. Products of two activations, of matmul and attention, are never listed: their weights
    are data.
    """
    found = {}
    for name, module in computing_modules(model).items():
        if isinstance(module, EMULATED):
            proof = prove_module(module)
            if proof.halved:
                found[name] = (
                    "oneDNN without VNNI halves these weights for the s8 source; u8 with "
                    "activation_bits=7 keeps them whole"
                )
            else:
                _list(found, name, [(proof, module.src_high)])
        elif isinstance(module, DynamicQLinear | DynamicQConv):
            _list(found, name, [(prove(module.packed(), torch.uint8), U8_MAX)], dynamic=True)
    for name, layer in recurrent_layers(model).items():
        _list(found, name, list(prove_recurrent(layer).values()), layer.dynamic)
    order = {name: i for i, (name, _) in enumerate(computing_modules(model).items())}
    return dict(sorted(found.items(), key=lambda item: order.get(item[0], 0)))


def _list(
    found: dict[str, str], name: str, proofs: Sequence[tuple[Proof, int]], dynamic: bool = False
) -> None:
    """Add what the proofs, each up to a source value, leave open."""
    unsafe = sum(int((~proof.safe_up_to(high)).sum()) for proof, high in proofs)
    if not unsafe:
        return
    total = sum(proof.largest.numel() for proof, _ in proofs)
    least = min(int(proof.largest.min()) for proof, _ in proofs if proof.largest.numel())
    unsigned = all(proof.src_dtype == torch.uint8 for proof, _ in proofs)
    remedy = "weight_bits=7" + " or activation_bits=7" * (unsigned and not dynamic)
    found[name] = (
        f"oneDNN without VNNI could saturate {unsafe} of {total} channels above a source of "
        f"{least}; {remedy} rules it out"
    )
