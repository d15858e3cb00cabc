# SPDX-License-Identifier: Apache-2.0
"""Embeddings with quantized rows, which need no data: they take the float modules' places first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor, nn

from torchq.attributes.options import EmbeddingBits
from torchq.convert.swap.leaves import equivalent_layer
from torchq.nn.embedding import QEmbedding, QEmbeddingBag
from torchq.nn.from_float import quantized_class
from torchq.nn.leaf import take_hooks, without_hooks
from torchq.quantization.config import Overrides, QConfig, resolve
from torchq.report.rows import Row

TABLES = (nn.Embedding, nn.EmbeddingBag)


class TableMaker:
    """Makes quantized embeddings; those of one float table share their rows."""

    def __init__(self) -> None:
        """Start without tables."""
        self._rows: dict[object, tuple[Tensor, Tensor]] = {}

    def __call__(self, module: nn.Module, bits: EmbeddingBits) -> QEmbedding | QEmbeddingBag:
        """Return the quantized form of an ``nn.Embedding`` or ``nn.EmbeddingBag``."""
        assert isinstance(module, TABLES)
        made: QEmbedding | QEmbeddingBag
        made = quantized_class(module).from_float(without_hooks(module), bits=bits)
        key = id(module.weight), bits, module.max_norm, module.norm_type
        made.rows = self._rows.setdefault(key, (made.rows, module.weight))[0]
        take_hooks(made, module)
        return made


def with_tables(
    model: nn.Module, config: QConfig, overrides: Overrides | None
) -> tuple[nn.Module, dict[str, str]]:
    """Return a model, changed in its places, with quantized embeddings where a QConfig says so.

    Returns:
        The model, and the classes of the embeddings that were replaced, by name.
    """
    make, kinds = TableMaker(), {}
    for name, module in list(model.named_modules()):
        own = resolve(overrides, name, config)
        bits = None if own is None else own.embedding_bits
        layer = equivalent_layer(module) if isinstance(module, TABLES) else None
        if bits is None or not isinstance(layer, TABLES):
            continue
        kinds[name] = type(module).__name__
        if not name:
            return make(layer, bits), kinds
        places = [n for n, m in model.named_modules(remove_duplicate=False) if m is module]
        made = make(layer, bits)
        for place in places:
            model.set_submodule(place, made)
    return model, kinds


def share_rows(captured: nn.Module, module: nn.Module) -> None:
    """Let the embeddings of a captured copy of a module read the rows of the module's own."""
    for name, table in captured.named_modules():
        if isinstance(table, QEmbedding | QEmbeddingBag):
            own = module.get_submodule(name)
            assert isinstance(own, QEmbedding | QEmbeddingBag)
            table.rows = own.rows


def with_rows(rows: Iterable[Row], kinds: dict[str, str]) -> list[Row]:
    """Return a report in which embeddings with quantized rows are int8.

    The functions that a graph has in their places are no rows of their own.
    """
    inside = tuple(f"{name}." for name in kinds if name)
    found = {row.name: row for row in rows if not row.name.startswith(inside)}
    for name, kind in kinds.items():
        row = found.get(name, Row(name, kind, True, "", name, False, False))
        found[name] = replace(row, kind=kind, quantized=True, reason="", site=name)
    return list(found.values())
