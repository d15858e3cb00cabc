# SPDX-License-Identifier: Apache-2.0
"""The state that linear layers and convolutions share."""

from typing import Any

import torch
from torch import Tensor
from torch._jit_internal import is_scripting
from typing_extensions import Self

from torchq.attributes.arguments import check_type
from torchq.attributes.attr import Attr
from torchq.attributes.post_op import CHANNEL_MASKS, Binary, Eltwise, PReLU
from torchq.attributes.post_ops import PostOps, post_ops_of
from torchq.functional.folding import fold
from torchq.functional.packing import PackedWeight, empty_packed
from torchq.functional.placeholders import are_limited, check_sizes, placeholder, take
from torchq.nn.direct_call import NONE, OTHERS, source, state
from torchq.nn.module import QModule, Spec, dtype_from_name, dtype_name, placeholder_qparams
from torchq.nn.quantize import QLookup
from torchq.quantization.qparams import QParams
from torchq.runtime.library import dtype_code


def with_destination_range(post_ops: PostOps, dst: QParams | None) -> PostOps:
    """Return the chain, ended by a clip to the destination's 7 bits where it has only 7.

    8 bits need none: the conversion saturates. A relu or clip at the end and this clip become one,
    so that the chain still folds.

    Raises:
        NotImplementedError: 7 bits with one scale per channel.
    """
    if dst is None or dst.bits == 8:
        return post_ops
    if dst.is_per_channel:
        raise NotImplementedError(
            "torchq.nn: dst must have one scale for 7 bits, got one per channel. Use 8 bits, or "
            "one scale."
        )
    scale, zero_point = float(dst.scale), int(dst.zero_point)
    low, high = (scale * (q - zero_point) for q in dst.integers)
    ops = list(post_ops)
    last = ops[-1] if ops else None
    if isinstance(last, Eltwise) and last.scale == 1:
        if last.alg == "clip":
            low, high = (min(max(bound, low), high) for bound in (last.alpha, last.beta))
            ops.pop()
        elif last.alg == "relu" and last.alpha == 0:
            low = max(low, 0.0)  # high is not negative: zero is always in the range
            ops.pop()
    return post_ops_of(ops).append_eltwise("clip", low, high)


def _placeholder_weight(spec: Spec) -> PackedWeight:
    """Memory for a weight that is packed as the spec says."""
    shape, groups, stride = spec["weight"], spec["groups"], spec.get("stride", ())
    check_sizes([*shape, groups])
    if stride:
        shape = [shape[1] * groups, shape[0] // groups, *shape[2:]]
    dtype = dtype_from_name(spec.get("weight_dtype", "s8"))
    return empty_packed(shape, dtype, groups, stride, spec["dilation"])


def _module_chain(post_ops: PostOps) -> PostOps:
    """Return the chain with its constants as float32, which is what the ops compute with.

    Raises:
        NotImplementedError: for what only the functional API takes.
    """
    post_ops.check_supported("nn")
    chain = PostOps()
    for op in post_ops:
        if isinstance(op, Binary | PReLU) and op.mask not in CHANNEL_MASKS:
            if op.values is not None:
                raise NotImplementedError(
                    f"torchq.nn: constants of post_ops must have mask 0 or 2, got {op}. Leave its "
                    "values out, and pass the operand in post_op_srcs of each call."
                )
        elif isinstance(op, Binary) and op.values is not None:
            chain.append_binary(op.alg, op.values.float(), op.mask)
            continue
        chain._append(op)
    return chain


def sources_of(residual: Tensor | None, post_op_srcs: list[Tensor] | None) -> list[Tensor] | None:
    """Return the sources that the chain reads at run time, the residual first.

    None if it reads nothing: AOTInductor's programs cannot call an op with an empty list.
    """
    if residual is None:
        return post_op_srcs
    srcs = [residual]
    return srcs if post_op_srcs is None else srcs + list(post_op_srcs)


SOURCE = (
    source("src_dtype"),
    *state("weight", "compensation", "pair_bound", "multiplier", "offset"),
    NONE,
    *state("src_zero_point"),
)
DESTINATION = (*state("dst_code", "post_ops", "post_op_params"), OTHERS, *state("weight_shift"))
"""The arguments that the layers' ops share, for ``QModule._direct``."""


class QLayer(QModule):
    """Packed weight, scales and post-ops of a linear layer or convolution.

    Buffers:
        weight, compensation, pair_bound: see :class:`~torchq.packing.PackedWeight`.
        weight_scale: float32 ``[1]`` or ``[OC]``, real units per weight step.
        weight_zero_point: int32 ``[1]`` or ``[OC]``, or absent.
        bias: float32 ``[OC]`` in real units, or absent.
        src_scale, src_zero_point, dst_scale, dst_zero_point: ``[1]`` (dst_scale also ``[OC]``).
        post_op_values: float32, the values of the binary post-ops one after another; operands with
            other masks than 0 and 2 come with each call.
        multiplier, offset, post_op_params: folded from these, not saved.

    ``lookup`` is None or the table that :meth:`with_lookup` added.
    """

    weight: Tensor
    compensation: Tensor
    pair_bound: Tensor
    weight_scale: Tensor
    weight_zero_point: Tensor | None
    bias: Tensor | None
    dst_scale: Tensor
    dst_zero_point: Tensor
    post_op_values: Tensor
    multiplier: Tensor
    offset: Tensor
    post_op_params: Tensor
    weight_shift: Tensor | None

    __jit_unused_properties__ = ("attr",)

    def __init__(
        self,
        weight: PackedWeight,
        weight_scale: Tensor,
        bias: Tensor | None,
        src: QParams,
        dst: QParams | None,
        post_ops: PostOps | None,
        weight_zero_point: Tensor | None = None,
        **spec: object,
    ) -> None:
        """``dst`` None means a float32 destination.

        A uint8 weight, and one with zero points, costs a sum over the source in every call.
        """
        super().__init__()
        if post_ops is not None:
            remedy = "Read text with torchq.PostOps.parse."
            check_type(f"torchq.nn.{type(self).__name__}: post_ops", post_ops, PostOps, remedy)
        chain = with_destination_range(_module_chain(post_ops or PostOps()), dst)
        self._add_src(src)
        self.dst_dtype = torch.float32 if dst is None else dst.dtype
        self.dst_code = dtype_code(self.dst_dtype)
        self._add_qparams("dst", QParams.per_tensor(1.0) if dst is None else dst)
        self._add_packed(weight)
        self._add_weight_params(weight_scale, weight_zero_point)
        if weight_zero_point is not None:
            spec["weight_zero_points"] = weight_zero_point.numel()
        if weight.dtype != torch.int8:
            spec["weight_dtype"] = dtype_name(weight.dtype)
        self._add_floats("bias", bias)
        self.post_ops = str(chain)
        none = torch.empty(0, dtype=torch.float32, device="cpu")
        values = torch.cat(chain.channel_values or [none])
        self.register_buffer("post_op_values", values)
        self._set_spec(
            weight=list(weight.shape),
            groups=weight.groups,
            dilation=list(weight.dilation),
            weight_scales=weight_scale.numel(),
            bias=bias is not None,
            src=dtype_name(src.dtype),
            src_bits=src.bits,
            dst=dtype_name(self.dst_dtype),
            dst_scales=self.dst_scale.numel(),
            post_ops=self.post_ops,
            post_op_values=[value.numel() for value in chain.channel_values],
            **spec,
        )
        self.lookup: QLookup | None = None  # a plain None costs no look-up through nn.Module
        self._add_folded("multiplier", "offset", "post_op_params")
        if not are_limited():
            self.refold()

    def _add_weight_params(self, scale: Tensor, zero_point: Tensor | None) -> None:
        self.register_buffer("weight_scale", scale.reshape(-1).clone())
        own = None if zero_point is None else zero_point.reshape(-1).clone()
        self.register_buffer("weight_zero_point", own)
        self.register_buffer("weight_shift", None, persistent=False)  # has values if that has

    def with_lookup(self, lookup: QLookup) -> Self:
        """Apply a table to the destination, in the same op; return the module.

        The bits are those of the module and ``lookup`` one after the other. The destination is that
        of ``lookup``, the module's own scale and zero point those of what goes into the table.

        Raises:
            ValueError: ``lookup`` takes another source than this module's destination.
            NotImplementedError: the module has ``dw``, or a table already.
        """
        name = f"torchq.nn.{type(self).__name__}"
        if self.lookup is not None or getattr(self, "dw", None) is not None:
            raise NotImplementedError(
                f"{name}: a layer must have neither a table nor dw to get a table, got "
                f"{self.extra_repr()}. Call the QLookup behind it."
            )
        if not self._is_source_of(lookup):
            raise ValueError(
                f"{name}: lookup must take what this module gives, {self.dst_dtype} with scale "
                f"{self.dst_scale.tolist()[:1]} and zero point {self.dst_zero_point.tolist()}, got "
                f"{lookup.src_dtype} with {lookup.src_scale.tolist()} and "
                f"{lookup.src_zero_point.tolist()}. Make lookup with this module's dst as its src."
            )
        self.lookup = lookup
        return self

    def _is_source_of(self, reader: QModule) -> bool:
        """Return whether a module takes this one's destination as it is."""
        same = self.dst_dtype == reader.src_dtype
        same = same and torch.equal(self.dst_scale, reader.src_scale)
        return same and torch.equal(self.dst_zero_point, reader.src_zero_point)

    def _table(self) -> Tensor | None:
        if self.lookup is not None:
            return self.lookup.table
        return None

    def _hot(
        self,
    ) -> tuple[
        Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None
    ]:
        """Return what each call passes on; nn.Module.__getattr__ would cost 5 us."""
        if is_scripting():
            return (
                self.weight,
                self.compensation,
                self.pair_bound,
                self.multiplier,
                self.offset,
                self.src_zero_point,
                self.post_op_params,
                self.weight_shift,
                self._table(),
            )
        b = self._buffers
        return (  # type: ignore[return-value]
            b["weight"],
            b["compensation"],
            b["pair_bound"],
            b["multiplier"],
            b["offset"],
            b["src_zero_point"],
            b["post_op_params"],
            b["weight_shift"],
            None if self.lookup is None else self.lookup._buffers["table"],
        )

    def packed(self) -> PackedWeight:
        """Return the weight with the shape it was packed from."""
        spec = self.read_spec()
        return PackedWeight(
            self.weight,
            self.compensation,
            self.pair_bound,
            tuple(spec["weight"]),
            spec["groups"],
            tuple(spec["dilation"]),
            tuple(spec.get("stride", ())),
            dtype_from_name(spec.get("weight_dtype", "s8")),
        )

    def _packed_weights(self) -> dict[str, PackedWeight]:
        return {"": self.packed()}

    @property
    def attr(self) -> Attr:
        """Scales, zero points and post-ops; weight scales have mask 3 with groups, else mask 1."""
        return self._own_attr()

    def _own_attr(self) -> Attr:
        groups = self.read_spec()["groups"]
        per_channel = 0 if self.weight_scale.numel() == 1 else 1 if groups == 1 else 3
        attr = Attr().set_scales("src", 0, self.src_scale)
        attr.set_zero_points("src", 0, self.src_zero_point)
        attr.set_scales("weights", per_channel, self.weight_scale)
        if self.weight_zero_point is not None:
            several = 1 if groups == 1 else 3
            mask = 0 if self.weight_zero_point.numel() == 1 else several
            attr.set_zero_points("weights", mask, self.weight_zero_point)
        if self.dst_dtype != torch.float32:
            mask = 0 if self.dst_scale.numel() == 1 else 2
            attr.set_scales("dst", mask, self.dst_scale)
            attr.set_zero_points("dst", mask, self.dst_zero_point)
        values = torch.split(self.post_op_values, self.read_spec()["post_op_values"])
        return attr.set_post_ops(PostOps.parse(self.post_ops).with_channel_values(values))

    def refold(self) -> None:
        """Fold scales, zero points, bias and post-ops anew."""
        folded = fold(
            type(self).__name__, self._own_attr(), self.packed(), self.bias, self.dst_dtype
        )
        self._buffers.update(  # to assign each takes 30 us
            multiplier=folded.multiplier,
            offset=folded.offset,
            post_op_params=folded.post_op_params,
            weight_shift=folded.weight_zero_point,
        )
        self.post_ops = folded.post_ops  # with one scale per channel, a relu became a clip

    @classmethod
    def _arguments_from_spec(cls, spec: Spec) -> dict[str, Any]:
        """Return constructor arguments with the right shapes and arbitrary values."""
        packed = _placeholder_weight(spec)
        # Bits of dst are in the chain already: the clip at its end.
        dst = None if spec["dst"] == "f32" else placeholder_qparams(spec["dst"])
        if dst is not None and spec["dst_scales"] > 1:
            scale = placeholder(spec["dst_scales"])
            dst = QParams(scale, torch.zeros_like(scale, dtype=torch.int32), dst.dtype, 1)
        zeros = spec.get("weight_zero_points")
        check_sizes(spec["post_op_values"])
        values = [placeholder(n) for n in spec["post_op_values"]]
        take(4 * packed.channels * len(values))  # folding makes one per channel of each
        return {
            "weight": packed,
            "weight_scale": placeholder(spec["weight_scales"]),
            "weight_zero_point": None if zeros is None else placeholder(zeros, dtype=torch.int32),
            "bias": placeholder(spec["weight"][0]) if spec["bias"] else None,
            "src": placeholder_qparams(spec["src"], spec["src_bits"]),
            "dst": dst,
            "post_ops": PostOps.parse(spec["post_ops"]).with_channel_values(values),
        }

    def extra_repr(self) -> str:
        """Shapes, dtypes and attributes on one line."""
        spec = self.read_spec()
        groups = f", groups={spec['groups']}" if spec["groups"] > 1 else ""
        bits = "/7" if spec["src_bits"] == 7 else ""
        attr = "?" if self.spec.is_meta else self.attr
        return f"{spec['weight']}{groups}, {spec['src']}{bits} -> {spec['dst']}, {attr}"
