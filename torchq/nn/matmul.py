# SPDX-License-Identifier: Apache-2.0
"""Quantized matrix product of two activations, as attention has it."""

import torch
from torch import Tensor

from torchq.attributes.post_op import Binary, Eltwise, PReLU, Sum
from torchq.attributes.post_ops import PostOps
from torchq.nn.binary import _QCombine
from torchq.nn.layer import sources_of
from torchq.nn.module import Spec
from torchq.quantization.qparams import QParams


class QMatMul(_QCombine):
    """``quantize(post_ops(real(src0) @ real(src1)))``; batch dimensions broadcast.

    Both sources are given at run time; ``src1`` is packed in every call. A transposed view
    (``key.mT``) is read as it is.

    Shapes:
        src0: ``(..., M, K)``, src1: ``(..., K, N)``, each of its own dtype; float32 is quantized
            with the source's parameters.
        post_op_srcs: what the post-ops read, in their order: dst's shape (expand an attention
            mask to it), ``(..., M, 1)`` for mask 1.
        dst: ``(..., M, N)``, uint8, int8 or float32.

    Raises:
        TypeError: a source has another dtype.
        ValueError: the shapes do not fit.
    """

    multiplier: Tensor
    offset: Tensor
    post_op_params: Tensor

    def __init__(
        self, srcs: list[QParams], dst: QParams | None, post_ops: PostOps | None = None
    ) -> None:
        """``srcs`` has two; ``dst`` None means float32.

        ``post_ops`` may hold eltwise operations (a factor ``1 / sqrt(d)`` is
        ``append_eltwise("linear", 1 / sqrt(d), 0)``), sums, and binaries and prelu whose operand
        comes with each call (mask 1 per row, 3 for each value): an attention mask. Masks index
        (rows, columns) whatever the sources' dims are, unlike those of
        :func:`torchq.functional.matmul`.

        Raises:
            NotImplementedError: other post-ops; use :func:`torchq.functional.matmul`.
        """
        chain = post_ops or PostOps()
        for op in chain:
            at_run_time = isinstance(op, Binary | PReLU) and op.mask in (1, 3) and op.values is None
            if not isinstance(op, Eltwise | Sum) and not at_run_time:
                raise NotImplementedError(
                    f"torchq.nn.QMatMul: post_ops must be eltwise or sum, or have an operand of "
                    f"mask 1 or 3 without values, got {op} in '{chain}'. The nearest supported "
                    "form is torchq.functional.matmul with these post-ops, whose masks index all "
                    "dims there."
                )
        super().__init__(srcs, dst, post_ops=str(chain))
        self.post_ops = str(chain)
        self._add_folded("multiplier", "offset", "post_op_params")
        self.refold()

    @classmethod
    def from_spec(cls, spec: Spec) -> "QMatMul":
        """See the base class."""
        return cls(**cls._arguments_from_spec(spec), post_ops=PostOps.parse(spec["post_ops"]))

    def refold(self) -> None:
        """Fold scales and post-ops anew, for one column; all columns are alike."""
        quantized = self.dst_dtype != torch.float32
        self.multiplier, self.offset, self.post_op_params = torch.ops.torchq.fold(
            self.scales[:1],
            self.scales[1:2],
            None,
            self.scales[2:] if quantized else None,
            self.zero_points[2:] if quantized else None,
            1,
            self.dst_code,
            self.post_ops,
            [],
        )

    def forward(
        self, src0: Tensor, src1: Tensor, post_op_srcs: list[Tensor] | None = None
    ) -> Tensor:
        """Multiply."""
        src0, src1 = self._quantized(src0, 0), self._quantized(src1, 1)
        columns = src1.shape[-1]
        params = self.post_op_params
        if params.numel() > 1:
            params = torch.cat([params[:1], params[1:].repeat_interleave(columns)])
        dst: Tensor = torch.ops.torchq.matmul(
            src0,
            src1,
            self.multiplier.expand(columns).contiguous(),
            self.offset.expand(columns).contiguous(),
            None,
            self.zero_points[:1],
            self.zero_points[1:2],
            self.dst_code,
            self.post_ops,
            params,
            sources_of(None, post_op_srcs),
        )
        return self._limited(dst)
