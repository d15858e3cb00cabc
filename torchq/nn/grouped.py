# SPDX-License-Identifier: Apache-2.0
"""Linear layers of rows in groups: each group has a weight of its own, as experts of a mixture."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torchq.attributes.options import Granularity, GroupSize
from torchq.functional.grouped import PANEL, stacked
from torchq.functional.packing import PackedWeight
from torchq.functional.placeholders import check_sizes
from torchq.nn.direct_call import GIVEN, DirectCall, state
from torchq.nn.dynamic import DynamicQLinear
from torchq.nn.dynamic_int4 import DynamicQLinearInt4
from torchq.nn.module import QModule, Spec
from torchq.quantization.config import QConfig

if TYPE_CHECKING:
    from torchq.nn.packed_weights import PackedWeights


def stacked_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return one float layer of the weights of all groups, each filled up to whole panels.

    It shares the memory of a contiguous weight whose groups need no filling.

    Args:
        weight: ``(groups, out_features, in_features)``.
        bias: ``(groups, out_features)``, or None.
    """
    linear = nn.Linear(1, 1, device="meta")
    linear.weight = nn.Parameter(stacked(weight.detach()), False)
    own = None if bias is None else nn.Parameter(stacked(bias.detach()), False)
    linear.register_parameter("bias", own)
    linear.out_features, linear.in_features = linear.weight.shape
    return linear


class GroupedLinearBase(QModule):
    """Base: sizes and the bias of a stack.

    Attributes:
        groups: how many weights there are.
        in_features, out_features: of one group.
        channels: of the stack.
    """

    bias: Tensor | None

    def __init__(
        self, stack: DynamicQLinear | DynamicQLinearInt4, groups: int, out_features: int
    ) -> None:
        """Take sizes and bias of a dynamic layer of all groups."""
        super().__init__()
        self.groups, self.in_features, self.out_features = groups, stack.in_features, out_features
        self.channels = _channels(groups, out_features)
        if stack.out_features != self.channels or stack.src_factor is not None:
            raise ValueError(
                f"torchq.nn.{type(self).__name__}: stack must have {self.channels} outputs, for "
                f"{groups} groups of {out_features}, and no factors of its source, got "
                f"{stack.out_features} outputs. Make it with from_float."
            )
        self._add_floats("bias", stack.bias)

    def _own_repr(self) -> str:
        return f"{self.groups} groups of [{self.out_features}, {self.in_features}]"


def _channels(groups: int, out_features: int) -> int:
    """Return how many channels a stack has."""
    check_sizes((groups, out_features))  # of a file
    return groups * -(-out_features // PANEL) * PANEL


class DynamicQGroupedLinear(GroupedLinearBase):
    """Rows of each group times its own int8 weight; :func:`torchq.functional.grouped_linear`.

    Buffers:
        weight, compensation, pair_bound: a :class:`~torchq.packing.PackedWeight` of the channels of
            all groups, those of each filled up with zeros to a multiple of 16.
        weight_scale: float32, one for each of these channels.
        bias: the same, or absent.

    Shapes:
        src: float32, bfloat16 or float16 ``(rows, in_features)``, group by group.
        offsets: int32 ``[groups]``, ascending: where the rows of each group end.
        dst: ``(rows, out_features)`` of the source's dtype; zeros behind the last group.

    Raises:
        TypeError: ``src`` or ``offsets`` has another dtype.
        ValueError: sizes or offsets do not fit, or ``src`` has NaN or inf.
    """

    weight: Tensor
    compensation: Tensor
    pair_bound: Tensor
    weight_scale: Tensor

    _direct = DirectCall(
        "grouped_linear",
        (
            *(GIVEN, GIVEN),
            *state("weight", "compensation", "pair_bound", "weight_scale", "bias"),
            *state("in_features", "out_features"),
        ),
    )

    def __init__(self, stack: DynamicQLinear, groups: int, out_features: int) -> None:
        """Take the tensors of a dynamic layer of all groups; :meth:`from_float` makes it."""
        super().__init__(stack, groups, out_features)
        self._add_packed(stack.packed())
        self.register_buffer("weight_scale", stack.weight_scale)
        self._set_spec(
            groups=groups, weight=[out_features, stack.in_features], bias=stack.bias is not None
        )

    @classmethod
    def from_float(
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        granularity: Granularity = "per_channel",
        bits: int = 8,
    ) -> "DynamicQGroupedLinear":
        """Quantize the weights of all groups symmetrically, and pack them.

        Args:
            weight: float ``(groups, out_features, in_features)``.
            bias: float ``(groups, out_features)``.
            granularity: "per_channel", or "per_tensor" for one scale of all groups.
            bits: of the weights, 8 or 7.

        Example:
            >>> layer = torchq.nn.DynamicQGroupedLinear.from_float(torch.randn(4, 8, 16))
            >>> layer(torch.randn(5, 16), torch.tensor([2, 2, 3, 5], dtype=torch.int32)).shape
            torch.Size([5, 8])
        """
        linear = stacked_linear(weight, bias)
        stack = DynamicQLinear.from_float(linear, granularity=granularity, bits=bits)
        return cls(stack, weight.shape[0], weight.shape[1])

    @classmethod
    def from_spec(cls, spec: Spec) -> "DynamicQGroupedLinear":
        """See the base class."""
        outputs, inputs = spec["weight"]
        channels = _channels(spec["groups"], outputs)
        own = {"weight": [channels, inputs], "bias": spec["bias"], "src_range": "per_row"}
        return cls(DynamicQLinear.from_spec(own), spec["groups"], outputs)

    def packed(self) -> PackedWeight:
        """Return the stack with the shape it was packed from."""
        shape = (self.channels, self.in_features)
        return PackedWeight(self.weight, self.compensation, self.pair_bound, shape, 1, ())

    def _packed_weights(self) -> dict[str, PackedWeight]:
        return {"": self.packed()}

    def forward(self, src: Tensor, offsets: Tensor) -> Tensor:
        """Multiply the rows of each group by its weight."""
        dst: Tensor = torch.ops.torchq.grouped_linear(
            src,
            offsets,
            self.weight,
            self.compensation,
            self.pair_bound,
            self.weight_scale,
            self.bias,
            self.in_features,
            self.out_features,
        )
        return dst


class DynamicQGroupedLinearInt4(GroupedLinearBase):
    """Rows of each group times its own 4-bit weight; see :class:`DynamicQGroupedLinear`.

    Buffers:
        weight, params: a :class:`~torchq.packing.PackedInt4` of the channels of all groups, those
            of each filled up with zeros to a multiple of 16.
        bias: float32, one for each of these channels, or absent.
    """

    weight: Tensor
    params: Tensor

    _direct = DirectCall(
        "grouped_linear_int4",
        (
            *(GIVEN, GIVEN),
            *state("weight", "params", "bias", "in_features", "out_features"),
            *state("group_size", "symmetric"),
        ),
    )

    def __init__(self, stack: DynamicQLinearInt4, groups: int, out_features: int) -> None:
        """Take the tensors of a dynamic layer of all groups; :meth:`from_float` makes it."""
        super().__init__(stack, groups, out_features)
        self.group_size, self.symmetric = stack.group_size, stack.symmetric
        self.register_buffer("weight", stack.weight)
        self.register_buffer("params", stack.params)
        self._set_spec(
            groups=groups,
            weight=[out_features, stack.in_features],
            bias=stack.bias is not None,
            group_size=stack.group_size,
            symmetric=stack.symmetric,
        )

    @classmethod
    def from_float(
        cls, weight: Tensor, bias: Tensor | None = None, *, group_size: GroupSize = 32
    ) -> "DynamicQGroupedLinearInt4":
        """Quantize the weights by :func:`torchq.functional.quantize_weight_int4`, and pack them.

        Args:
            weight: float ``(groups, out_features, in_features)``.
            bias: float ``(groups, out_features)``.
            group_size: values of a row of a weight that share a scale, 32, 64 or 128.

        Example:
            >>> layer = torchq.nn.DynamicQGroupedLinearInt4.from_float(torch.randn(4, 8, 64))
            >>> layer(torch.randn(5, 64), torch.tensor([2, 2, 3, 5], dtype=torch.int32)).shape
            torch.Size([5, 8])
        """
        stack = DynamicQLinearInt4.from_float(stacked_linear(weight, bias), group_size=group_size)
        return cls(stack, weight.shape[0], weight.shape[1])

    @classmethod
    def from_spec(cls, spec: Spec) -> "DynamicQGroupedLinearInt4":
        """See the base class."""
        outputs, inputs = spec["weight"]
        channels = _channels(spec["groups"], outputs)
        own = {key: spec[key] for key in ("bias", "group_size", "symmetric")}
        own |= {"weight": [channels, inputs], "smoothed": False, "recipe": ""}
        return cls(DynamicQLinearInt4.from_spec(own), spec["groups"], outputs)

    def forward(self, src: Tensor, offsets: Tensor) -> Tensor:
        """Multiply the rows of each group by its weight."""
        dst: Tensor = torch.ops.torchq.grouped_linear_int4(
            src,
            offsets,
            self.weight,
            self.params,
            self.bias,
            self.in_features,
            self.out_features,
            self.group_size,
            self.symmetric,
        )
        return dst

    def _own_repr(self) -> str:
        kind = f"groups of {self.group_size}{'' if self.symmetric else ', affine'}"
        return f"{super()._own_repr()}, 4-bit weights in {kind}"


Grouped = DynamicQGroupedLinear | DynamicQGroupedLinearInt4


def grouped_from_float(
    name: str, weight: Tensor, bias: Tensor | None, config: QConfig, packed: "PackedWeights"
) -> Grouped:
    """Return the dynamic form of a float weight of several groups.

    Args:
        name: qualified, of the weight; layers of one name share their tensors.
        weight: ``(groups, out_features, in_features)``.
        bias: ``(groups, out_features)``, or None.
        config: how to quantize the weight.
        packed: the weights of the conversion.
    """
    groups, channels, _ = weight.shape
    stack = packed.dynamic(name, stacked_linear(weight, bias), config)
    if isinstance(stack, DynamicQLinearInt4):
        return DynamicQGroupedLinearInt4(stack, groups, channels)
    assert isinstance(stack, DynamicQLinear)
    return DynamicQGroupedLinear(stack, groups, channels)
