# SPDX-License-Identifier: Apache-2.0
"""Embeddings: tables of 8-bit or 4-bit rows, each with a scale and an offset of its own."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchq.attributes.arguments import check_type
from torchq.attributes.options import BagMode, EmbeddingBits

_SCALES = (torch.float32, torch.float16)
_PACK = "Pass a float weight to torchq.functional.quantize_embedding, and what it returns here."


class PackedEmbedding(NamedTuple):
    """Table of an embedding, as the ops read it; made by :func:`torchq.packing.pack_embedding`.

    A row is its codes (two of 4 bits share a byte, the first in the low half), its scale and its
    offset: ``real = code * scale + offset``. torch.ao's packed weights have the same rows.

    Attributes:
        weight: uint8 ``[num_embeddings, bytes of codes + 8]``, or ``+ 4`` with float16 scales.
        embedding_dim: codes in a row.
        bits: of a code, 8 or 4.
    """

    weight: Tensor
    embedding_dim: int
    bits: EmbeddingBits

    @property
    def num_embeddings(self) -> int:
        """Rows."""
        return self.weight.shape[0]

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of scales and offsets."""
        extra = self.weight.shape[1] - code_bytes(self.embedding_dim, self.bits)
        return torch.float32 if extra == 8 else torch.float16

    def unpack(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return uint8 codes ``[num_embeddings, embedding_dim]``, scales and offsets."""
        size = code_bytes(self.embedding_dim, self.bits)
        codes = self.weight[:, :size]
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1)[:, : self.embedding_dim]
        params = self.weight[:, size:].contiguous().view(self.scale_dtype)
        return codes.contiguous(), params[:, 0].clone(), params[:, 1].clone()

    def dequantize(self) -> Tensor:
        """Return the float32 weight that the ops compute with."""
        rows = torch.arange(self.num_embeddings, device="cpu")
        return embedding(rows, self)


def code_bytes(embedding_dim: int, bits: int) -> int:
    """Return the bytes that the codes of a row take."""
    return (embedding_dim * bits + 7) // 8


def check_table(op: str, bits: object, scale_dtype: object = torch.float32) -> None:
    """Raise ValueError unless these have a row format."""
    if isinstance(bits, bool) or bits not in (8, 4):
        raise ValueError(
            f"torchq.{op}: bits must be 8 or 4, got {bits!r}. Take 4 for a table half as large."
        )
    if scale_dtype not in _SCALES:
        raise ValueError(
            f"torchq.{op}: scale_dtype must be torch.float32 or torch.float16, got {scale_dtype}. "
            "Leave it out for float32 with 8 bits, and float16 with 4."
        )


def quantize_embedding(
    weight: Tensor, bits: EmbeddingBits = 8, scale_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a float table ``(num_embeddings, embedding_dim)``, row by row.

    A row's offset is its smallest value. Its scale takes its largest value to the largest code.

    Args:
        weight: float32, or another float dtype.
        bits: of a code, 8 or 4.
        scale_dtype: of scales and offsets, ``torch.float32`` or ``torch.float16``. None is float32
            for 8 bits and float16 for 4, as in torch.ao.

    Returns:
        uint8 codes of the weight's shape, scales and offsets: see
        :func:`~torchq.packing.pack_embedding`.

    Raises:
        TypeError: ``weight`` is not float.
        ValueError: it is not 2-D or has no columns, has NaN or inf, or values beyond float16 where
            scales are that.
    """
    scale_dtype = default_scale_dtype(bits) if scale_dtype is None else scale_dtype
    check_table("quantize_embedding", bits, scale_dtype)
    check_type("torchq.quantize_embedding: weight", weight, Tensor, "Pass a float table.")
    if not weight.is_floating_point():
        raise TypeError(
            f"torchq.quantize_embedding: weight must be float32, got {weight.dtype}. Pass the "
            "float table."
        )
    if weight.dim() != 2 or weight.shape[1] < 1:
        raise ValueError(
            "torchq.quantize_embedding: weight must be (num_embeddings, embedding_dim), got "
            f"{list(weight.shape)}."
        )
    values = weight.detach().float()
    levels = 2**bits - 1
    offset = values.amin(1).to(scale_dtype)
    scale = ((values.amax(1) - offset.float()).clamp(min=0) / levels).to(scale_dtype)
    if not bool((scale.isfinite() & offset.isfinite()).all()):
        row = int((~(scale.isfinite() & offset.isfinite())).nonzero()[0])
        remedy = "Check the table." if scale_dtype == torch.float32 else "Take float32 scales."
        raise ValueError(
            f"torchq.quantize_embedding: weight must be finite in {scale_dtype}, got "
            f"{float(values[row].amin())} to {float(values[row].amax())} in row {row}. {remedy}"
        )
    step = torch.where(scale == 0, 1.0, scale.float())[:, None]
    codes = ((values - offset.float()[:, None]) / step).round_().clamp_(0, levels)
    return codes.to(torch.uint8), scale, offset


def default_scale_dtype(bits: int) -> torch.dtype:
    """Return torch.ao's dtype of scales: float32 for 8 bits, float16 for 4."""
    return torch.float16 if bits == 4 else torch.float32


def pack_embedding(
    codes: Tensor, scale: Tensor, offset: Tensor, bits: EmbeddingBits = 8
) -> PackedEmbedding:
    """Pack a table with a scale and an offset for each row.

    Args:
        codes: uint8 ``(num_embeddings, embedding_dim)``, below 16 for 4 bits.
        scale: float32 or float16 ``(num_embeddings,)``.
        offset: the real value of code 0 of each row, in the dtype of ``scale``.
        bits: of a code, 8 or 4.

    Raises:
        TypeError: a dtype other than these.
        ValueError: shapes do not fit, or codes beyond 15 for 4 bits.
    """
    check_table("pack_embedding", bits)
    for name, value in (("codes", codes), ("scale", scale), ("offset", offset)):
        check_type(f"torchq.pack_embedding: {name}", value, Tensor, _PACK)
    if codes.dtype != torch.uint8:
        raise TypeError(f"torchq.pack_embedding: codes must be uint8, got {codes.dtype}. {_PACK}")
    if scale.dtype not in _SCALES or offset.dtype != scale.dtype:
        raise TypeError(
            "torchq.pack_embedding: scale and offset must be both float32 or both float16, got "
            f"{scale.dtype} and {offset.dtype}. {_PACK}"
        )
    rows = (codes.shape[0],) if codes.dim() == 2 and codes.shape[1] > 0 else None
    if rows is None or scale.shape != rows or offset.shape != rows:
        raise ValueError(
            "torchq.pack_embedding: codes must be (num_embeddings, embedding_dim), scale and "
            f"offset (num_embeddings,), got {list(codes.shape)}, {list(scale.shape)} and "
            f"{list(offset.shape)}. {_PACK}"
        )
    dim = codes.shape[1]
    if bits == 4:
        if codes.numel() and not codes.is_meta and int(codes.max()) > 15:
            raise ValueError(
                "torchq.pack_embedding: codes must be below 16 for 4 bits, got "
                f"{int(codes.max())}. {_PACK}"
            )
        codes = torch.nn.functional.pad(codes, (0, dim % 2))
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    params = torch.stack([scale, offset], 1).view(torch.uint8)
    return PackedEmbedding(torch.cat([codes, params], 1), dim, bits)


def _check_weight(op: str, weight: object) -> None:
    check_type(
        f"torchq.{op}: weight", weight, PackedEmbedding, "Make it with torchq.packing."
        "pack_embedding, from what torchq.functional.quantize_embedding returns."
    )  # fmt: skip


def embedding(indices: Tensor, weight: PackedEmbedding) -> Tensor:
    """Return the rows of a quantized table: ``code * scale + offset``.

    Args:
        indices: int64 or int32, of any shape.
        weight: packed by :func:`torchq.packing.pack_embedding`.

    Returns:
        float32 ``(*indices.shape, embedding_dim)``.

    Raises:
        TypeError: ``indices`` are no integers.
        IndexError: one of them is no row of ``weight``.
    """
    _check_weight("embedding", weight)
    dst: Tensor = torch.ops.torchq.embedding(
        weight.weight, indices, weight.embedding_dim, weight.bits
    )
    return dst


def embedding_bag(
    indices: Tensor,
    weight: PackedEmbedding,
    offsets: Tensor | None = None,
    mode: BagMode = "mean",
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Return the sum, mean or maximum of the rows in each bag, as torch's ``embedding_bag`` does.

    Rows are added in float32, in their order in the bag. An empty bag gives zeros.

    Args:
        indices: int64 or int32; 1-D with ``offsets``, or 2-D with a bag in each row.
        weight: packed by :func:`torchq.packing.pack_embedding`.
        offsets: int64 or int32 ``(bags,)``: where each bag begins in ``indices``.
        mode: "sum", "mean" or "max".
        per_sample_weights: float32, a factor for each index; only for sums.
        include_last_offset: ``offsets`` has one more value, the end of the last bag.
        padding_idx: a row that counts for nothing in any bag.

    Returns:
        float32 ``(bags, embedding_dim)``.

    Raises:
        TypeError: dtypes other than these.
        ValueError: shapes or offsets that do not fit.
        IndexError: an index is no row of ``weight``.
        NotImplementedError: ``per_sample_weights`` for means or maxima.
    """
    _check_weight("embedding_bag", weight)
    dst: Tensor = torch.ops.torchq.embedding_bag(
        weight.weight,
        indices,
        offsets,
        per_sample_weights,
        weight.embedding_dim,
        weight.bits,
        mode,
        include_last_offset,
        padding_idx,
    )
    return dst
