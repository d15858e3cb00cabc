# SPDX-License-Identifier: Apache-2.0
"""The structure of a module's results as text, and back; reading it imports nothing.

The text is the one that torch.utils._pytree writes. Its reader imports modules that a text names,
so this one takes a small grammar only: tuples, lists, dicts with plain keys, and classes of results
that the program has imported before.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict, namedtuple
from dataclasses import fields, is_dataclass
from typing import Any

from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils import _pytree as pytree

from torchq.attributes.json_text import JsonObject, read_json
from torchq.serialization.tensor_file import is_short

_PLAIN = {f"{cls.__module__}.{cls.__name__}": cls for cls in (tuple, list)}
_DICTS = {f"{cls.__module__}.{cls.__name__}": cls for cls in (dict, OrderedDict)}
_OF_GRAPHS = {immutable_dict: dict, immutable_list: list}
"""Classes that graphs of torch.fx return, and those that stand for them in files."""
_NAMED = "namedtuple:"


def write_structure(spec: pytree.TreeSpec) -> str:
    """Return a structure as text.

    Raises:
        NotImplementedError: it holds something else than the grammar has.
    """
    return json.dumps([1, _written(spec)])


def _written(spec: pytree.TreeSpec) -> dict[str, object]:
    name, context, cls = None, None, _OF_GRAPHS.get(spec.type, spec.type)
    if not spec.is_leaf():
        parts = {cls: name for name, cls in {**_PLAIN, **_DICTS}.items()}
        if cls in parts:
            name = parts[cls]
            context = "null" if cls in _PLAIN.values() else json.dumps(spec.context)
            known = spec.context is None or all(type(key) in (str, int) for key in spec.context)
        elif cls is namedtuple:
            cls, known = spec.context, True
            name = f"{_NAMED}{cls.__module__}:{cls.__qualname__}"
        else:
            name, context = f"{cls.__module__}.{cls.__qualname__}", json.dumps(spec.context)
            known = _names_of(cls, spec.context) is not None
        if not known or _class_of(name, ()) not in (cls, None):
            raise NotImplementedError(
                "torchq.save: results must be tuples, lists, dicts with plain keys, or registered "
                f"dataclasses, got a {cls.__name__}. Save the whole model with torch.save."
            )
    children = [_written(child) for child in spec.children()]
    return {"type": name, "context": context, "children_spec": children}


def read_structure(text: object, own: str) -> pytree.TreeSpec:
    """Return the structure of a text.

    Args:
        text: from :func:`write_structure`.
        own: name of the module that defines the model; its dataclasses are known.

    Raises:
        ValueError: the text is another one, or names a class that is not imported yet.
    """
    found = read_json(text.encode()) if isinstance(text, str) else None
    if not isinstance(found, list) or len(found) != 2 or found[0] != 1:
        raise ValueError("a structure that torchq does not write")
    return _read(found[1], (own,))


def _read(node: JsonObject, own: tuple[str, ...]) -> pytree.TreeSpec:
    children = [_read(child, own) for child in node["children_spec"]]
    name, context = node["type"], node["context"]
    if isinstance(name, str) and not is_short(name):
        raise ValueError(f"'{name[:100]}...'")
    if name is None:
        if children:
            raise ValueError("a leaf with parts")
        return pytree.treespec_leaf()
    if name in _PLAIN:
        return pytree.TreeSpec(_PLAIN[name], None, children)
    cls: Any = _DICTS.get(name) or _class_of(name, own)
    kind = cls
    if cls is None:
        raise ValueError(f"'{str(name)[:100]}'")
    if name.startswith(_NAMED):
        names, kind, context = cls._fields, namedtuple, cls
    else:
        context = read_json(context.encode())
        names = _keys(context) if name in _DICTS else _names_of(cls, context)
    if names is None or len(names) != len(children):
        raise ValueError(f"a {cls.__name__} of other parts than it has")
    return pytree.TreeSpec(kind, context, children)


def _keys(context: object) -> list[object] | None:
    """Return the keys of a dict, if they are plain and each there once."""
    if not isinstance(context, list) or any(type(key) not in (str, int) for key in context):
        return None
    return context if len({*context}) == len(context) else None


def _names_of(cls: type, context: object) -> list[str] | None:
    """Return the fields of a class of results that have values; None where it has no such fields.

    The context is that of pytree: these fields, or a pair of them and of those that are None.
    """
    known = {field.name for field in fields(cls)} if is_dataclass(cls) else set()
    if not isinstance(context, list):
        return None
    pair = len(context) == 2 and isinstance(context[0], list)
    given = [*context[0], *context[1]] if pair else context
    if len({*given}) != len(given) or not known.issuperset(given):
        return None
    return context[0] if pair else given


def _class_of(name: str, own: tuple[str, ...]) -> type | None:
    """Return an imported class of results: a namedtuple, or a dataclass that pytree knows.

    Nothing is asked for attributes: those of a module may import others.
    """
    named = name.startswith(_NAMED)
    module, _, path = name[len(_NAMED) :].partition(":") if named else name.rpartition(".")
    parts = path.split(".")
    while module and module not in sys.modules and not named:  # of a class within a class
        module, _, outer = module.rpartition(".")
        parts.insert(0, outer)
    found: object = sys.modules.get(module)
    for part in parts:
        found = vars(found).get(part) if isinstance(found, type(sys) | type) else None
    if not isinstance(found, type):
        return None
    if named:
        plain = issubclass(found, tuple) and isinstance(getattr(found, "_fields", None), tuple)
        return found if plain else None
    registered = found in pytree.SUPPORTED_NODES
    return found if is_dataclass(found) and (registered or module in own) else None
