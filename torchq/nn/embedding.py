# SPDX-License-Identifier: Apache-2.0
"""Embeddings whose tables have 8-bit or 4-bit rows."""

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from torchq.attributes.arguments import HALVES
from torchq.attributes.options import BagMode, EmbeddingBits
from torchq.functional.embeddings import (
    PackedEmbedding,
    code_bytes,
    default_scale_dtype,
    pack_embedding,
    quantize_embedding,
)
from torchq.functional.placeholders import check_sizes, placeholder
from torchq.nn.leaf import Leaf
from torchq.nn.module import QModule, Spec, half_entry, half_from_entry


class _Embedding(Leaf, QModule):
    """Base of both: the table, and the attributes of the float module."""

    rows: Tensor
    _dtype: torch.dtype

    def __init__(
        self,
        weight: PackedEmbedding,
        padding_idx: int | None,
        dtype: torch.dtype,
        **spec: object,
    ) -> None:
        super().__init__()
        self._dtype = dtype
        self.register_buffer("rows", weight.weight)
        self.num_embeddings, self.embedding_dim = weight.num_embeddings, weight.embedding_dim
        self.bits: int = weight.bits
        self.padding_idx = padding_idx
        scales = "f16" if weight.scale_dtype == torch.float16 else "f32"
        shape = [self.num_embeddings, self.embedding_dim]
        known = {"weight": shape, "bits": self.bits, "scales": scales, "padding": padding_idx}
        self._set_spec(**known, **half_entry(dtype), **spec)
        vars(self).update(spec)
        fixed = ("num_embeddings", "embedding_dim", "padding_idx", *spec)
        vars(self)["_fixed"] = {name: vars(self)[name] for name in fixed}

    @classmethod
    def _placeholder(cls, spec: Spec) -> PackedEmbedding:
        rows, dim = spec["weight"]
        check_sizes([rows, dim, spec["bits"]])
        size = code_bytes(dim, spec["bits"]) + (4 if spec["scales"] == "f16" else 8)
        return PackedEmbedding(placeholder(rows, size, dtype=torch.uint8), dim, spec["bits"])

    def packed(self) -> PackedEmbedding:
        """Return the table."""
        return PackedEmbedding(self.rows, self.embedding_dim, self.read_spec()["bits"])

    @torch.jit.unused
    def _weight_shape(self) -> torch.Size:
        return torch.Size((self.num_embeddings, self.embedding_dim))

    @torch.jit.unused
    def _weight_dtype(self) -> torch.dtype:
        return self._dtype

    def _weight_values(self) -> Tensor:
        every = torch.arange(self.num_embeddings, device=self.rows.device)
        dst: Tensor = torch.ops.torchq.embedding(self.rows, every, self.embedding_dim, self.bits)
        return dst.to(self._dtype)

    def _bias_values(self) -> Tensor | None:
        return None

    def _own_repr(self) -> str:
        spec = self.read_spec()
        parts = [f"{self.num_embeddings}, {self.embedding_dim}"]
        if self.padding_idx is not None:
            parts.append(f"padding_idx={self.padding_idx}")
        if "mode" in spec:
            parts.append(f"mode={spec['mode']}")
        return ", ".join([*parts, f"bits={self.bits}, scales={spec['scales']}"])


class QEmbedding(_Embedding):
    """Looks up rows of a quantized table: :func:`torchq.functional.embedding`.

    ``weight`` is a tensor of the values that it computes with, made when something reads it: a tied
    output layer, say.

    Buffers:
        rows: uint8, the ``weight`` of :class:`~torchq.packing.PackedEmbedding`.

    Shapes:
        input: int64 or int32, any.
        dst: ``(*, embedding_dim)``, bfloat16 or float16 where the float module was, else float32.

    Raises:
        IndexError: an index is no row of the table.
    """

    def __init__(
        self,
        weight: PackedEmbedding,
        padding_idx: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """``padding_idx`` is for readers: its row is one like all; :meth:`from_float` is usual."""
        super().__init__(weight, padding_idx, dtype)

    @classmethod
    def from_float(
        cls,
        module: nn.Embedding,
        *,
        bits: EmbeddingBits = 8,
        scale_dtype: torch.dtype | None = None,
    ) -> Self:
        """Quantize the table row by row; see :func:`torchq.functional.quantize_embedding`.

        Args:
            module: the float module. Its ``max_norm`` is applied to all rows, once.
            bits: of a code, 8 or 4.
            scale_dtype: ``torch.float32``, ``torch.float16``, or None for the default of ``bits``.

        Example:
            >>> table = torchq.nn.QEmbedding.from_float(nn.Embedding(100, 16))
            >>> table(torch.tensor([[3, 99]])).shape
            torch.Size([1, 2, 16])
        """
        return cls(_packed(module, bits, scale_dtype), module.padding_idx, _result(module))

    @classmethod
    def from_spec(cls, spec: Spec) -> Self:
        """See the base class."""
        return cls(cls._placeholder(spec), spec["padding"], half_from_entry(spec))

    def forward(self, input: Tensor) -> Tensor:
        """Look up; the argument is called as that of ``torch.nn.Embedding``."""
        dst: Tensor = torch.ops.torchq.embedding(self.rows, input, self.embedding_dim, self.bits)
        return dst.to(self._dtype)


class QEmbeddingBag(_Embedding):
    """Sums, means or maxima of rows: :func:`torchq.functional.embedding_bag`.

    Buffers:
        rows: uint8, the ``weight`` of :class:`~torchq.packing.PackedEmbedding`.

    Shapes:
        input: int64 or int32, ``(n,)`` with ``offsets``, or ``(bags, n)``.
        dst: ``(bags, embedding_dim)``, bfloat16 or float16 where the float module was, else
            float32.

    Raises:
        IndexError: an index is no row of the table.
    """

    mode: str
    include_last_offset: bool

    def __init__(
        self,
        weight: PackedEmbedding,
        mode: BagMode = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Take a packed table; :meth:`from_float` is the usual way."""
        super().__init__(
            weight, padding_idx, dtype, mode=mode, include_last_offset=include_last_offset
        )

    @classmethod
    def from_float(
        cls,
        module: nn.EmbeddingBag,
        *,
        bits: EmbeddingBits = 8,
        scale_dtype: torch.dtype | None = None,
    ) -> Self:
        """Quantize the table row by row, as :meth:`QEmbedding.from_float` does.

        Example:
            >>> bag = torchq.nn.QEmbeddingBag.from_float(nn.EmbeddingBag(100, 16), bits=4)
            >>> bag(torch.tensor([3, 99, 7]), torch.tensor([0, 2])).shape
            torch.Size([2, 16])
        """
        packed = _packed(module, bits, scale_dtype)
        mode: Any = module.mode
        last = module.include_last_offset
        return cls(packed, mode, last, module.padding_idx, _result(module))

    @classmethod
    def from_spec(cls, spec: Spec) -> Self:
        """See the base class."""
        mode, last = spec["mode"], spec["include_last_offset"]
        dtype = half_from_entry(spec)
        return cls(cls._placeholder(spec), mode, last, spec["padding"], dtype)

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Reduce bags; the arguments are those of ``torch.nn.EmbeddingBag``."""
        dst: Tensor = torch.ops.torchq.embedding_bag(
            self.rows,
            input,
            offsets,
            per_sample_weights,
            self.embedding_dim,
            self.bits,
            self.mode,
            self.include_last_offset,
            self.padding_idx,
        )
        return dst.to(self._dtype)


def _result(module: nn.Embedding | nn.EmbeddingBag) -> torch.dtype:
    dtype: torch.dtype = module.weight.dtype
    return dtype if dtype in HALVES else torch.float32


def _packed(
    module: nn.Embedding | nn.EmbeddingBag, bits: EmbeddingBits, scale_dtype: torch.dtype | None
) -> PackedEmbedding:
    weight = module.weight.detach().float()
    if module.max_norm is not None:
        weight = torch.renorm(weight, module.norm_type, 0, module.max_norm)
    scale_dtype = default_scale_dtype(bits) if scale_dtype is None else scale_dtype
    return pack_embedding(*quantize_embedding(weight, bits, scale_dtype), bits)
