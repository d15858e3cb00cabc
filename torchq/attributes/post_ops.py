# SPDX-License-Identifier: Apache-2.0
"""`PostOps`, a chain of post-ops; ``__init__.py`` has the formulas and the text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from torchq.attributes.arguments import (
    INT32,
    Values,
    check_choice,
    check_count,
    check_tensors,
    check_type,
    content,
    selected_dims,
    to_dtype,
    to_float32,
    to_int,
    to_mask,
)
from torchq.attributes.options import BinaryAlg, DtypeLike, EltwiseAlg
from torchq.attributes.post_op import (
    BINARY_ALGS,
    CHANNEL_MASKS,
    Binary,
    DwConv,
    Eltwise,
    PostOp,
    PReLU,
    Sum,
    check_zero_point,
    has_full_values,
    make_dw_conv,
    make_eltwise,
    merged_sources,
    operand_values,
    owners_of,
    read_post_ops,
    with_dw_values,
)

MAX_POST_OPS = 32


class PostOps:
    """An ordered list of post-ops; the ``append_*`` methods return self for chaining.

    Equality and hash go by content (text and values), so do not append while it is a dict key.
    """

    def __init__(self) -> None:
        """Start an empty chain."""
        self._ops: list[PostOp] = []

    def append_sum(
        self, scale: float = 1.0, zero_point: int = 0, dtype: DtypeLike | None = None
    ) -> PostOps:
        """Append ``x = x + scale * (old - zero_point)``.

        Args:
            scale: Any finite float32.
            zero_point: In the range of ``dtype``; 0 if that is float32. With ``dtype`` None it is
                checked against dst's dtype where that is known: `check_supported`, `foldable`.
            dtype: That of the run-time source; None is that of dst. All sums share one dtype.
        """
        where = "torchq.PostOps.append_sum"
        sum_dtype = None if dtype is None else to_dtype(f"{where}: dtype", dtype)
        zero_point = to_int(f"{where}: zero_point", zero_point, INT32.min, INT32.max)
        check_zero_point(where, zero_point, sum_dtype)
        for other in self._sums():
            if other.dtype != sum_dtype:
                raise ValueError(
                    f"{where}: dtype must be {other.dtype} as in the earlier sum, got {sum_dtype}. "
                    "Give every sum the same dtype."
                )
        return self._append(Sum(to_float32(f"{where}: scale", scale), zero_point, sum_dtype))

    def append_eltwise(
        self,
        alg: EltwiseAlg,
        alpha: float | None = None,
        beta: float | None = None,
        scale: float = 1.0,
    ) -> PostOps:
        """Append ``x = scale * f(x)`` with f the algorithm ``alg``, such as ``"relu"``.

        Args:
            alg: One of the table in :doc:`/concepts/post_ops`.
            alpha: Parameter of ``alg``; None is the default of that table.
            beta: Second parameter of ``alg``; None is the default of that table.
            scale: Factor of the result.

        Raises:
            ValueError: ``alg`` is unknown, needs alpha or beta, or has another range of them.
        """
        return self._append(make_eltwise(alg, alpha, beta, scale))

    def append_binary(
        self, alg: BinaryAlg, src1: Values | None, mask: int, dtype: DtypeLike | None = None
    ) -> PostOps:
        """Append ``x = alg(x, src1)``.

        Args:
            alg: Such as ``"add"`` or ``"mul"``.
            src1: Copied. uint8, int8 and int32 tensors keep their dtype, all else becomes float32.
                None: the values are supplied at execution, see `with_values`.
            mask: The dims of dst that src1 has: bit ``d`` selects dim ``d``.
            dtype: That of values still to come; default float32.
        """
        where = "torchq.PostOps.append_binary"
        check_choice(f"{where}: alg", alg, BINARY_ALGS)
        mask = to_mask(where, mask)
        wanted = None if dtype is None else to_dtype(f"{where}: dtype", dtype)
        if src1 is None:
            return self._append(Binary(alg, mask, wanted or torch.float32))
        values = operand_values(f"{where}: src1", src1, mask, wanted)
        return self._append(Binary(alg, mask, values.dtype, values))

    def append_prelu(self, weight: Values | None, mask: int) -> PostOps:
        """Append ``x = x >= 0 ? x : x * weight`` (float32; None: supplied at execution)."""
        where = "torchq.PostOps.append_prelu"
        mask = to_mask(where, mask)
        if weight is None:
            return self._append(PReLU(mask))
        return self._append(
            PReLU(mask, operand_values(f"{where}: weight", weight, mask, torch.float32))
        )

    def append_dw_conv(
        self,
        weight: Tensor | None,
        bias: Tensor | None = None,
        kernel: int = 3,
        stride: int = 1,
        padding: int = 1,
        dtype: DtypeLike = torch.uint8,
        bias_dtype: DtypeLike | None = None,
    ) -> PostOps:
        """Append a depthwise convolution of the result so far, for conv1d, conv2d and conv3d.

        The result so far is quantized to ``dtype`` with the scale and zero point that the Attr has
        for ``dst``. The depthwise convolution has the weights' scales ``dw_weights`` (masks 0 or 1:
        per channel) and the destination ``dw_dst``. It gives ``ceil(size / stride)`` outputs per
        dimension: padding behind is what that takes. Post-ops appended later belong to it.

        Args:
            weight: int8 or uint8 ``(C, 1, k...)``, the same k in each dimension, C being the
                channels in front of it. None: supplied at execution, see `with_values`.
            bias: ``[C]``, float32 or int32 as in :func:`torchq.functional.conv2d`.
            kernel: Of a weight still to come.
            stride: The same in each dimension; so is ``padding``, in front.
            padding: Below ``kernel``.
            dtype: torch.uint8 or torch.int8, of the result so far.
            bias_dtype: Of a bias still to come; None for no bias.
        """
        window = (kernel, stride, padding)
        return self._append(make_dw_conv(weight, bias, window, dtype, bias_dtype))

    @classmethod
    def parse(cls, text: str, values: Sequence[Values] | None = None) -> PostOps:
        """Read the chain with this text; ``values`` are the keyword of `with_values`."""
        check_type("torchq.PostOps.parse: text", text, str, "Pass what str(post_ops) gave.")
        post_ops = cls()
        read_post_ops(post_ops, text, 0, "PostOps.parse")
        return post_ops if values is None else post_ops.with_values(values)

    def with_values(self, values: Sequence[Values]) -> PostOps:
        """Return a copy with values in order: of binary, prelu, weight and bias of dw_conv."""
        slots = len(self._operands())
        if len(values) != slots:
            raise ValueError(
                f"torchq.PostOps.with_values: values must be {slots} tensors for "
                f"{str(self)!r}, got {len(values)}. Give one per binary and prelu, in order, and "
                "weight and bias of dw_conv."
            )
        remaining, result = iter(values), PostOps()
        for op in self:
            if isinstance(op, Binary):
                result.append_binary(op.alg, next(remaining), op.mask, op.dtype)
            elif isinstance(op, PReLU):
                result.append_prelu(next(remaining), op.mask)
            elif isinstance(op, DwConv):
                result._append(with_dw_values(op, [next(remaining) for _ in op.values]))
            else:
                result._append(op)
        return result

    @property
    def values(self) -> list[Tensor]:
        """Return what `with_values` takes: 1-D values, weight and bias of dw_conv."""
        operands = self._operands()
        missing = next((str(op) for op, value in operands if value is None), None)
        if missing is not None:
            raise ValueError(
                f"torchq.PostOps.values: values must be present for every post-op, got none for "
                f"{missing}. Supply them: post_ops.with_values([...])."
            )
        return [value for _, value in operands if value is not None]

    @property
    def channel_values(self) -> list[Tensor]:
        """Those of `values` with mask 0 or 2, which `torch.ops.torchq.fold` takes."""
        operands = [op for op in self if isinstance(op, Binary | PReLU)]
        return post_ops_of([op for op in operands if op.mask in CHANNEL_MASKS]).values

    def with_channel_values(self, values: Sequence[Values]) -> PostOps:
        """Return a copy with `channel_values` in order; other operands stay as they are."""
        remaining, ops = iter(values), list[PostOp]()
        for op in self:
            missing = isinstance(op, Binary | PReLU) and op.mask in CHANNEL_MASKS
            ops.append(post_ops_of([op]).with_values([next(remaining)])[0] if missing else op)
        return post_ops_of(ops)

    @property
    def num_srcs(self) -> int:
        """Return how many run-time sources the caller supplies, in the order of the chain.

        One per sum, per binary or prelu with a mask other than 0 and 2 and no values, and per
        condition of a select.
        """
        return len(owners_of(self)) - sum(has_full_values(op) for op in self)

    @property
    def source_owners(self) -> list[PostOp]:
        """The post-op that each of `sources` belongs to."""
        return owners_of(self)

    def sources(
        self,
        op_name: str,
        dims: Callable[[], Sequence[int]],
        srcs: Sequence[Tensor],
        every: bool = False,
    ) -> list[Tensor]:
        """Return the op's ``post_op_srcs``: the caller's, and values with masks other than 0 and 2.

        Args:
            op_name: For errors.
            dims: Gives those of dst; for linear and matmul its rows count as one dim in a mask.
            srcs: `num_srcs` tensors.
            every: Whether values with masks 0 and 2 are sources too: they are, of ops that fold
                nothing.

        Raises:
            TypeError: ``srcs`` is no sequence of tensors.
            ValueError: their number is another, or values are missing.
        """
        check_tensors(f"torchq.{op_name}: post_op_srcs", srcs)
        if len(srcs) != self.num_srcs:
            raise ValueError(
                f"torchq.{op_name}: post_op_srcs must be {self.num_srcs} tensors for "
                f"{str(self)!r}, got {len(srcs)}. Pass what each sum adds, the operand of each "
                "binary or prelu with another mask than 0 and 2 and without values, and the "
                "condition of each select, in order."
            )
        return merged_sources(self, op_name, dims, srcs, every)

    def check(self, dims: Sequence[int], masks: Sequence[int] | None = None) -> None:
        """Raise ValueError unless masks and numbers of values fit dst's logical ``dims``.

        With ``masks`` only the post-ops that have one of these are looked at.
        """
        for op in self:
            if isinstance(op, DwConv):  # what follows acts on its destination
                dims = (*dims[:2], *(-(-size // op.stride) for size in dims[2:]))
            if isinstance(op, Binary | PReLU) and (masks is None or op.mask in masks):
                where = f"torchq.PostOps.check: values of {op}"
                check_count(where, op.mask, op.values, selected_dims(where, op.mask, dims), dims)

    def check_supported(self, op_name: str, dst_dtype: torch.dtype | None = None) -> None:
        """Raise ValueError for a sum whose zero point its source cannot have.

        Every post-op but dw_conv (NotImplementedError) has a kernel in the matmul-like ops;
        ``op_name`` is for errors.
        """
        for op in self:
            if isinstance(op, DwConv):
                raise NotImplementedError(
                    f"torchq.{op_name}: post_ops must have one dw_conv behind a convolution and "
                    f"none elsewhere, got {op}. The nearest supported form is a conv2d with "
                    "groups equal to its channels behind this op."
                )
        if dst_dtype is not None:
            self._check_sums(dst_dtype, f"torchq.{op_name}: post_ops")

    def split_at_dw_conv(self) -> tuple[PostOps, DwConv, PostOps] | None:
        """Return the chains in front of the first dw_conv and behind it; None without one."""
        for i, op in enumerate(self._ops):
            if isinstance(op, DwConv):
                return post_ops_of(self._ops[:i]), op, post_ops_of(self._ops[i + 1 :])
        return None

    def _operands(self) -> list[tuple[PostOp, Tensor | None]]:
        """Each value that a post-op has or needs, in order."""
        found = list[tuple[PostOp, Tensor | None]]()
        for op in self:
            if isinstance(op, Binary | PReLU):
                found.append((op, op.values))
            elif isinstance(op, DwConv):
                found += [(op, value) for value in op.values]
        return found

    def _append(self, op: PostOp) -> PostOps:
        if len(self._ops) == MAX_POST_OPS:
            raise ValueError(
                f"torchq.PostOps: a chain must have at most {MAX_POST_OPS} post-ops, got "
                f"{op} as number {MAX_POST_OPS + 1}. Split the chain over two ops."
            )
        self._ops.append(op)
        return self

    def _sums(self) -> list[Sum]:
        """Those that read the destination: a dw_conv has another one than what is in front."""
        steps = [i for i, op in enumerate(self._ops) if isinstance(op, DwConv)]
        return [op for op in self._ops[max(steps, default=0) :] if isinstance(op, Sum)]

    def _check_sums(self, dst_dtype: torch.dtype, where: str = "torchq.PostOps") -> None:
        for op in self._sums():
            check_zero_point(where, op.zero_point, op.dtype or dst_dtype)

    def _key(self) -> tuple[object, ...]:
        return str(self), *(content(value) for _, value in self._operands())

    def __len__(self) -> int:
        """Return the number of post-ops."""
        return len(self._ops)

    def __iter__(self) -> Iterator[PostOp]:
        """Iterate over the post-ops in order."""
        return iter(self._ops)

    def __getitem__(self, index: int) -> PostOp:
        """Return the post-op at ``index``."""
        return self._ops[index]

    def __str__(self) -> str:
        """Return the chain as text, without values."""
        return "+".join(map(str, self._ops))

    def __repr__(self) -> str:
        """``PostOps('<text>')``."""
        return f"PostOps({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        """Compare text and bits of values."""
        return self._key() == other._key() if isinstance(other, PostOps) else NotImplemented

    def __hash__(self) -> int:
        """Hash text and values."""
        return hash(self._key())


def post_ops_of(ops: Iterable[PostOp]) -> PostOps:
    """Return the chain of these post-ops."""
    post_ops = PostOps()
    for op in ops:
        post_ops._append(op)
    return post_ops


def foldable(post_ops: PostOps, dst_dtype: torch.dtype) -> bool:
    """Return whether the whole chain folds into multiplier, offset, source scales and bounds.

    So it does if it has only sums, linears, and adds and multiplies with mask 0 or 2 (all of them
    affine in x; a linear with a scale is ``linear(alpha * scale, beta * scale)``), then at most one
    relu with alpha 0, or clip, as the last post-op: scaling to destination units and rounding are
    monotone, so bounding after them by the scaled and rounded bounds gives the same bits, for
    every ``dst_dtype``. (A floating destination is not rounded and keeps its bounds real.)

    That relu or clip must have scale 1. ``s * relu(x)`` is ``relu(s * x)`` for s > 0 only, and
    an upper bound for s < 0: write ``eltwise_linear:s`` before the relu, which folds.
    """
    to_dtype("torchq.foldable: dst_dtype", dst_dtype)
    post_ops._check_sums(dst_dtype)
    last = len(post_ops) - 1
    return all(_affine(op) or (i == last and _bounding(op)) for i, op in enumerate(post_ops))


def _affine(op: PostOp) -> bool:
    if isinstance(op, Binary):
        return op.alg in ("add", "mul") and op.mask in CHANNEL_MASKS
    return isinstance(op, Sum) or (isinstance(op, Eltwise) and op.alg == "linear")


def _bounding(op: PostOp) -> bool:
    if not isinstance(op, Eltwise) or op.scale != 1:
        return False
    return op.alg == "clip" or (op.alg == "relu" and op.alpha == 0)
