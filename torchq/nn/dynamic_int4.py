# SPDX-License-Identifier: Apache-2.0
"""Fully connected layer with 4-bit weights, whose source is quantized row by row in each call."""

import torch
from torch import Tensor, nn

from torchq.attributes.arguments import check_type
from torchq.attributes.options import GroupSize
from torchq.functional.int4 import (
    PackedInt4,
    dequantize_int4,
    empty_packed_int4,
    pack_linear_int4,
    quantize_weight_int4,
)
from torchq.functional.placeholders import placeholder
from torchq.nn.direct_call import GIVEN, DirectCall, state
from torchq.nn.module import Spec
from torchq.nn.row_quantized import RowQuantizedLinear
from torchq.quantization.int4 import int4_codes
from torchq.quantization.recipes.linear import Recipe


class DynamicQLinearInt4(RowQuantizedLinear):
    """Float in, float out, 4-bit weights; see :func:`torchq.functional.dynamic_linear_int4`.

    Few rows wait for weights from memory, which are half of those of
    :class:`~torchq.nn.DynamicQLinear`. Shapes and errors of a call are the same.

    Buffers:
        weight, params: see :class:`~torchq.packing.PackedInt4`.
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
    params: Tensor

    _WEIGHT = state("weight", "params", "bias", "in_features", "out_features")
    _direct = DirectCall(
        "dynamic_linear_int4",
        (GIVEN, *_WEIGHT, *state("group_size", "symmetric"), GIVEN, GIVEN),
        unless=("src_factor",),
    )

    def __init__(
        self,
        weight: PackedInt4,
        bias: Tensor | None,
        src_factor: Tensor | None = None,
        recipe: str = "",
    ) -> None:
        """Take a packed weight; :meth:`from_float` is the usual way.

        ``recipe`` is what the report says of ``src_factor`` and the weight.
        """
        super().__init__()
        pack = "Pack codes and scales with torchq.packing.pack_linear_int4."
        check_type("torchq.nn.DynamicQLinearInt4: weight", weight, PackedInt4, pack)
        self.out_features, self.in_features = weight.shape
        self.group_size, self.symmetric = weight.group_size, weight.symmetric
        self.register_buffer("weight", weight.weight)
        self.register_buffer("params", weight.params)
        self._add_floats("bias", bias)
        self._add_floats("src_factor", src_factor)
        self._set_spec(
            weight=list(weight.shape),
            bias=bias is not None,
            group_size=weight.group_size,
            symmetric=weight.symmetric,
            smoothed=src_factor is not None,
            recipe=recipe,
        )

    @classmethod
    def from_float(
        cls, module: nn.Linear, *, group_size: GroupSize = 32, recipe: Recipe | None = None
    ) -> "DynamicQLinearInt4":
        """Quantize the weight by :func:`torchq.functional.quantize_weight_int4`, and pack it.

        Args:
            module: the float layer.
            group_size: values of a row of the weight that share a scale, 32, 64 or 128.
            recipe: another weight and bias, for a source that is multiplied by its factors.

        Example:
            >>> layer = torchq.nn.DynamicQLinearInt4.from_float(nn.Linear(256, 64))
            >>> layer(torch.randn(2, 256)).shape
            torch.Size([2, 64])
        """
        if recipe is None:
            codes, scale = quantize_weight_int4(module.weight, group_size)
            return cls(pack_linear_int4(codes, scale, None, group_size), module.bias)
        scale = recipe.weight_scale.reshape(len(recipe.weight), -1)
        codes = int4_codes(recipe.weight, scale, group_size)
        packed = pack_linear_int4(codes, scale, None, group_size)
        return cls(packed, recipe.bias, recipe.src_factor, recipe.note)

    @classmethod
    def from_spec(cls, spec: Spec) -> "DynamicQLinearInt4":
        """See the base class."""
        outputs, inputs = spec["weight"]
        bias = placeholder(outputs) if spec["bias"] else None
        factor = placeholder(inputs) if spec["smoothed"] else None
        packed = empty_packed_int4((outputs, inputs), spec["group_size"], spec["symmetric"])
        return cls(packed, bias, factor, spec["recipe"])

    def packed(self) -> PackedInt4:
        """Return the weight with the shape it was packed from."""
        shape = (self.out_features, self.in_features)
        return PackedInt4(self.weight, self.params, shape, self.group_size, self.symmetric)

    def weight_values(self) -> Tensor:
        """Return the float32 weight that the layer computes with."""
        values = dequantize_int4(
            self.weight,
            self.params,
            self.out_features,
            self.in_features,
            self.group_size,
            self.symmetric,
        )
        factor = self.src_factor
        return values if factor is None else values * factor

    def forward(
        self, input: Tensor, post_ops: str = "", post_op_srcs: list[Tensor] | None = None
    ) -> Tensor:
        """Apply the layer; ``input`` is called as that of ``torch.nn.Linear``.

        Post-ops, the text of a :class:`torchq.PostOps`, and their sources are those of
        :func:`torchq.functional.dynamic_linear_int4`.
        """
        dst: Tensor = torch.ops.torchq.dynamic_linear_int4(
            self._smoothed(input),
            self.weight,
            self.params,
            self.bias,
            self.in_features,
            self.out_features,
            self.group_size,
            self.symmetric,
            post_ops,
            post_op_srcs,
        )
        return self._as_source(dst, input, post_op_srcs)

    def _own_repr(self) -> str:
        spec = self.read_spec()
        kind = f"groups of {self.group_size}{'' if self.symmetric else ', affine'}"
        note = f", {spec['recipe']}" if spec["recipe"] else ""
        return f"{spec['weight']}, 4-bit weights in {kind}, src_range=per_row{note}"
