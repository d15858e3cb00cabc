# SPDX-License-Identifier: Apache-2.0
"""Float modules that a graph calls and a file can hold without the model: recurrent ones."""

from __future__ import annotations

from torch import nn

from torchq.attributes.json_text import JsonObject
from torchq.functional.placeholders import count_modules

_NETWORK = {
    "input_size": int,
    "hidden_size": int,
    "num_layers": int,
    "bias": bool,
    "batch_first": bool,
    "dropout": float,
    "bidirectional": bool,
}
_CELL = {"input_size": int, "hidden_size": int, "bias": bool}
_FIELDS: dict[type[nn.Module], dict[str, type]] = {
    nn.LSTM: {**_NETWORK, "proj_size": int},
    nn.GRU: _NETWORK,
    nn.RNN: {**_NETWORK, "nonlinearity": str},
    nn.LSTMCell: _CELL,
    nn.GRUCell: _CELL,
    nn.RNNCell: {**_CELL, "nonlinearity": str},
}
"""Class -> its options, which a file may name."""
_MOST_LAYERS = 256
"""Of one module: torch takes the square of their number. Each is worth a module of the file."""
_CLASSES = {cls.__name__: cls for cls in _FIELDS}


def describe_plain(module: nn.Module) -> dict[str, object] | None:
    """Return what :func:`plain_module` takes; None for any other module."""
    fields = _FIELDS.get(type(module))
    hooked = bool(module._forward_hooks or module._forward_pre_hooks)
    if fields is None or hooked or len(module._modules) > 0:
        return None
    given = {name: kind(getattr(module, name)) for name, kind in fields.items()}
    return {"class": type(module).__name__, "fields": given}


def plain_module(plain: JsonObject) -> nn.Module:
    """Return a module of torch.nn, its tensors still to be loaded.

    Args:
        plain: from :func:`describe_plain`.

    Raises:
        ValueError: it is another class, its options are others, or it has more layers than the
            file allows.
    """
    cls = _CLASSES.get(plain["class"])
    fields = {} if cls is None else _FIELDS[cls]
    given = {name: value for name, value in plain["fields"].items() if name in fields}
    fits = all(
        type(v) is fields[k] or (fields[k], type(v)) == (float, int) for k, v in given.items()
    )
    layers = given.get("num_layers", 1)
    if cls is None or given.keys() != fields.keys() or not fits or not 0 < layers <= _MOST_LAYERS:
        raise ValueError(
            "torchq.load: the file's float modules must be recurrent ones of torch.nn, got "
            f"'{str(plain['class'])[:60]}'. Was it written by torchq.save?"
        )
    count_modules(layers)
    return cls(**given, device="meta").eval()
