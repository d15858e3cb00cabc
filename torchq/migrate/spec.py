# SPDX-License-Identifier: Apache-2.0
"""The ``qconfig_spec`` of torch.ao: which modules become dynamic, and how."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from difflib import get_close_matches

import torch
from torch import nn

from torchq.attributes.options import EmbeddingBits
from torchq.convert.tables import TABLES
from torchq.quantization.config import QConfig

DEFAULT = (nn.Linear, nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell)
"""What becomes dynamic where a spec names a module around it, or nothing."""
ASKED = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention, *TABLES)
"""What becomes dynamic only where a spec names it: torch.ao leaves it float."""

QINT8: torch.dtype = getattr(torch, "qint8", torch.int8)
_TABLE_BITS: dict[object, EmbeddingBits] = {
    getattr(torch, "quint8", torch.uint8): 8,
    torch.uint8: 8,
    getattr(torch, "quint4x2", None): 4,
}
"""Dtypes of the tables of embeddings, which torch.ao gives to nothing else."""
_TABLES_BY_BITS = {8: TABLES, 4: (nn.EmbeddingBag,)}
"""What such a dtype is for where a spec names nothing: torch.ao's choice."""
_DYNAMIC = QConfig(dynamic=True)
_KINDS = ", ".join(cls.__name__ for cls in (*DEFAULT, *ASKED))


class Spec:
    """A checked ``qconfig_spec``, for the modules of one model."""

    def __init__(
        self,
        model: nn.Module,
        qconfig_spec: object,
        dtype: torch.dtype,
        layers: Mapping[str, nn.Module],
    ) -> None:
        """Refuse what has no meaning here.

        Args:
            model: float.
            qconfig_spec: of :func:`torchq.quantize_dynamic`.
            dtype: where the spec has no configurations.
            layers: what has a dynamic form, by name.

        Raises:
            ValueError: a key, a configuration or ``dtype`` has no dynamic form.
        """
        self._model, self._layers = model, layers
        self._configs: dict[object, QConfig | None] = {}
        self._of_tables: set[object] = set()
        if isinstance(qconfig_spec, Mapping):
            for key, value in qconfig_spec.items():
                self._configs[key] = None if value is None else self._config(key, value)
        else:
            bits = _TABLE_BITS.get(dtype)
            if bits is None:
                _check_dtype("dtype", dtype)
            keys: object = qconfig_spec
            if keys is None:
                keys = DEFAULT if bits is None else _TABLES_BY_BITS[bits]
            if isinstance(keys, str | type) or not isinstance(keys, Collection):
                keys = {keys}
            self._configs = dict.fromkeys(keys, replace(_DYNAMIC, embedding_bits=bits))
            self._of_tables = set() if bits is None else set(keys)
        for key, config in self._configs.items():
            self._check_key(key, config)

    def config(self, name: str) -> QConfig | None:
        """Return how to quantize a module; None leaves it float.

        Its own name goes before its type, and both before the module around it.
        """
        found: QConfig | None = None
        own = False
        path = name.split(".") if name else []
        for depth in range(len(path) + 1):
            key = ".".join(path[:depth])
            module = self._model.get_submodule(key)
            keys = [key, *(cls for cls in type(module).__mro__ if cls is not nn.Module)]
            is_table = isinstance(self._model.get_submodule(name), TABLES)
            known = [
                k for k in keys if k in self._configs and (is_table or k not in self._of_tables)
            ]
            if known:
                found = self._configs[known[0]]
            own = bool(known)
        wanted = found is not None and found.embedding_bits is not None
        if own or not isinstance(module, ASKED) or (wanted and isinstance(module, TABLES)):
            return found
        return None

    def names(self, name: str) -> bool:
        """Return whether a key is the name of a module, not a type or what is around it."""
        return name in self._configs

    def _check_key(self, key: object, config: QConfig | None) -> None:
        """Raise ValueError for a key that reaches nothing, unless it keeps something float."""
        modules = dict(self._model.named_modules(remove_duplicate=False))
        if isinstance(key, str):
            if key not in modules:
                near = get_close_matches(key, modules, 3, 0.5)
                raise _error(f"a module '{key}'", f"the model has {near or 'no name like it'}")
            reached = [key]
        elif isinstance(key, type) and issubclass(key, nn.Module):
            reached = [name for name, module in modules.items() if isinstance(module, key)]
            forms = TABLES if key in self._of_tables else (*DEFAULT, *ASKED)
            if config is None or issubclass(key, forms):
                return
        else:
            raise _error(f"{key!r}", "it is no type of modules and no name of one")
        inside = tuple(f"{name}." if name else "" for name in reached)
        layers = [
            name
            for name, layer in self._layers.items()
            if key not in self._of_tables or isinstance(layer, TABLES)
        ]
        if config is None or any(f"{layer}.".startswith(inside) for layer in layers):
            return
        what = f"'{key}', a {type(modules[key]).__name__}" if isinstance(key, str) else key.__name__
        raise _error(what, "nothing in it has a dynamic form")

    def _config(self, key: object, value: object) -> QConfig:
        """Return the configuration that one of torchq or torch.ao is for dynamic layers."""
        name = getattr(key, "__name__", key)
        if isinstance(value, QConfig):
            if value.min_sqnr is not None:
                raise ValueError(
                    f"torchq.quantize_dynamic: qconfig_spec[{name}] must have no min_sqnr, got "
                    f"{value.min_sqnr:g}: it takes calibration data. Call torchq.quantize(model, "
                    "data, config=config)."
                )
            return replace(value, dynamic=True)
        make = getattr(value, "weight", None)
        if not callable(make):
            raise ValueError(
                f"torchq.quantize_dynamic: qconfig_spec[{name}] must be None, a torchq.QConfig or "
                f"a QConfig of torch.ao, got {type(value).__name__}. A set of types or names needs "
                "none."
            )
        observer = make()
        scheme = str(getattr(observer, "qscheme", ""))
        if "float_qparams" in scheme and observer.dtype in _TABLE_BITS:
            self._of_tables.add(key)
            return replace(_DYNAMIC, embedding_bits=_TABLE_BITS[observer.dtype])
        _check_dtype(f"the weight's dtype in qconfig_spec[{name}]", observer.dtype)
        rows = "per_channel" in scheme
        return replace(_DYNAMIC, weight_granularity="per_channel" if rows else "per_tensor")


def _error(got: str, why: str) -> ValueError:
    return ValueError(
        "torchq.quantize_dynamic: qconfig_spec must have types or names of modules with a dynamic "
        f"form, or of modules around them, got {got}: {why}. Those forms are of {_KINDS}."
    )


def _check_dtype(where: str, dtype: object) -> None:
    if dtype in (QINT8, torch.int8):
        return
    remedy = "Leave it out, or keep these modules float."
    if dtype == torch.float16:
        remedy = "Leave it out for int8 weights, which are half as large as float16 ones."
    raise ValueError(
        f"torchq.quantize_dynamic: {where} must be torch.qint8 or torch.int8, or torch.quint8 or "
        f"torch.quint4x2 for embeddings, got {dtype}: there is no other dynamic form. {remedy}"
    )
