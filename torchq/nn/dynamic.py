# SPDX-License-Identifier: Apache-2.0
"""Fully connected layer whose source is quantized by the range it has in each call."""

import torch
from torch import Tensor, nn

from torchq.attributes.options import Granularity, SrcRange
from torchq.functional.conversions import quantize_weight
from torchq.functional.linears import RANGES, check_dynamic_weight
from torchq.functional.packing import PackedWeight, empty_packed, pack_linear
from torchq.functional.placeholders import placeholder
from torchq.nn.direct_call import GIVEN, DirectCall, state
from torchq.nn.module import Spec
from torchq.nn.row_quantized import RowQuantizedLinear
from torchq.nn.weight import QuantizedWeight, packed_weight
from torchq.quantization.ranges import check_choice
from torchq.quantization.recipes.linear import Recipe


class DynamicQLinear(RowQuantizedLinear):
    """Float in, float out, int8 inside; see :func:`torchq.functional.dynamic_linear`.

    It needs no calibration, and saves the weight's memory traffic more than it saves time on
    small sources.

    Buffers:
        weight, compensation, pair_bound: see :class:`~torchq.packing.PackedWeight`.
        weight_scale: float32 ``[out_features]``, real units per weight step.
        bias: float32 ``[out_features]``, or absent.
        src_factor: float32 ``[in_features]`` of SmoothQuant, or absent. The source is multiplied by
            them first, and the weight has their inverses in it.

    Shapes:
        src: float32, bfloat16 or float16 ``(*, in_features)``.
        dst: ``(*, out_features)`` of the source's dtype.

    Raises:
        TypeError: ``src`` has another dtype.
        ValueError: the last dimension of ``src`` is not ``in_features``, or it has NaN or inf.
    """

    weight: Tensor
    compensation: Tensor
    pair_bound: Tensor
    weight_scale: Tensor

    _WEIGHT = state("weight", "compensation", "pair_bound", "weight_scale", "bias")
    _direct = DirectCall(
        "dynamic_linear",
        (GIVEN, *_WEIGHT, *state("in_features", "per_row"), GIVEN, GIVEN),
        unless=("src_factor",),
    )

    def __init__(
        self,
        weight: PackedWeight,
        weight_scale: Tensor,
        bias: Tensor | None,
        src_range: SrcRange = "per_row",
        src_factor: Tensor | None = None,
        recipe: str = "",
    ) -> None:
        """``weight_scale`` has one value, or one per output; :meth:`from_float` is the usual way.

        ``src_range`` is what one scale of the source covers, "per_row" or "per_tensor"; ``recipe``
        is what the report says of ``src_factor`` and the weight.
        """
        super().__init__()
        check_choice("nn.DynamicQLinear", "src_range", src_range, RANGES)
        check_dynamic_weight("nn.DynamicQLinear", weight)
        self.out_features, self.in_features = weight.shape
        self.per_row = src_range == "per_row"
        self._add_packed(weight)
        scale = weight_scale.reshape(-1).expand(self.out_features).clone()
        self.register_buffer("weight_scale", scale)
        self._add_floats("bias", bias)
        self._add_floats("src_factor", src_factor)
        more: dict[str, object] = {"smoothed": True} if src_factor is not None else {}
        more |= {"recipe": recipe} if recipe else {}
        self._set_spec(
            weight=list(weight.shape), bias=bias is not None, src_range=src_range, **more
        )

    @classmethod
    def from_float(
        cls,
        module: nn.Linear,
        *,
        src_range: SrcRange = "per_row",
        granularity: Granularity = "per_channel",
        bits: int = 8,
        weight_scale: Tensor | None = None,
        recipe: Recipe | None = None,
        quantized: QuantizedWeight | None = None,
    ) -> "DynamicQLinear":
        """Quantize the weight symmetrically and pack it.

        Args:
            module: the float layer.
            src_range: what one scale of the source covers, "per_row" or "per_tensor". Per row, a
                row's result depends on nothing but the row.
            granularity: of the weight scale, "per_channel" or "per_tensor".
            bits: of the weight, 8 or 7.
            weight_scale: of the weight, where it is known: one, or one per output.
            recipe: another weight and bias, for a source that is multiplied by its factors.
            quantized: the weight, quantized and packed already; without a recipe.
        """
        if recipe is not None:
            scale = recipe.weight_scale.reshape(-1, 1)
            packed = pack_linear(quantize_weight(recipe.weight, scale, bits))
            return cls(packed, scale, recipe.bias, src_range, recipe.src_factor, recipe.note)
        packed, scale, _ = quantized or packed_weight(module, granularity, bits, weight_scale)
        return cls(packed, scale, module.bias, src_range)

    @classmethod
    def from_spec(cls, spec: Spec) -> "DynamicQLinear":
        """See the base class."""
        outputs, inputs = spec["weight"]
        bias = placeholder(outputs) if spec["bias"] else None
        factor = placeholder(inputs) if spec.get("smoothed") else None
        more = bias, spec["src_range"], factor, spec.get("recipe", "")
        return cls(empty_packed((outputs, inputs)), placeholder(1), *more)

    def packed(self) -> PackedWeight:
        """Return the weight with the shape it was packed from."""
        shape = (self.out_features, self.in_features)
        return PackedWeight(self.weight, self.compensation, self.pair_bound, shape, 1, ())

    def _packed_weights(self) -> dict[str, PackedWeight]:
        return {"": self.packed()}

    def forward(
        self, input: Tensor, post_ops: str = "", post_op_srcs: list[Tensor] | None = None
    ) -> Tensor:
        """Apply the layer; ``input`` is called as that of ``torch.nn.Linear``.

        Post-ops, the text of a :class:`torchq.PostOps`, and their sources are those of
        :func:`torchq.functional.dynamic_linear`.
        """
        dst: Tensor = torch.ops.torchq.dynamic_linear(
            self._smoothed(input),
            self.weight,
            self.compensation,
            self.pair_bound,
            self.weight_scale,
            self.bias,
            self.in_features,
            self.per_row,
            post_ops,
            post_op_srcs,
        )
        return self._as_source(dst, input, post_op_srcs)

    def _own_repr(self) -> str:
        spec = self.read_spec()
        note = f", {spec['recipe']}" if "recipe" in spec else ""
        return f"{spec['weight']}, src_range={spec['src_range']}{note}"
