# SPDX-License-Identifier: Apache-2.0
"""Names for type checkers and readers: imports, options as words, examples that run."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import nn

import torchq
import torchq.functional as TF
from torchq.attributes import options
from torchq.quantization.config import OBSERVERS

MODULES = torchq, TF, torchq.eager, torchq.nn, torchq.observers, torchq.packing, torchq.saturation
PUBLIC = {
    f"{module.__name__}.{name}": value
    for module in MODULES
    for name, value in vars(module).items()
    if name in getattr(module, "__all__", [name]) and not name.startswith("_")
    if inspect.isclass(value) or inspect.isfunction(value)
    if hasattr(module, "__all__") or value.__module__ == module.__name__
}
EXAMPLES: dict[str, Any] = {
    **{name: value for name, value in PUBLIC.items() if ">>> " in (inspect.getdoc(value) or "")},
    "post_ops": torchq.attributes,
    "QLinear": torchq.nn.QLinear.from_float,
    "QConv2d": torchq.nn.QConv2d.from_float,
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the README's imports."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {"torch": torch, "nn": nn, "torchq": torchq}
    text = inspect.getdoc(EXAMPLES[name]) or ""
    if "torchao" in text:
        pytest.importorskip("torchao")
    test = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    assert test.examples, f"{name} has no example"
    said: list[str] = []
    assert doctest.DocTestRunner().run(test, out=said.append).failed == 0, "".join(said)


def test_each_public_name_has_one_example() -> None:
    """In its docstring, or under its heading in docs/reference/examples."""
    pages = (Path(__file__).parents[2] / "docs/reference/examples").glob("*.md")
    headings = [name for page in pages for name in re.findall(r"(?m)^## (\S+)$", page.read_text())]
    in_docstrings = [n for n, x in PUBLIC.items() if "\nExample" in (inspect.getdoc(x) or "")]
    documented = [*headings, *in_docstrings]
    assert sorted(documented) == sorted(PUBLIC)


def test_modules_are_imported_by_name() -> None:
    """Type checkers know of a submodule what __init__.py imports."""
    tree = ast.parse(Path(torchq.__file__).read_text())
    statements = (node for node in tree.body if isinstance(node, ast.ImportFrom))
    names = {alias.name for node in statements for alias in node.names}
    modules = {"eager", "functional", "nn", "observers", "packing", "saturation"}
    assert modules <= names and modules <= set(torchq.__all__)


def parameters() -> Iterator[tuple[str, Any]]:
    functions = {name: getattr(TF, name) for name in TF.__all__}
    functions |= {"QConfig": torchq.QConfig, "use_isa": torchq.use_isa}
    for cls in (torchq.PostOps, torchq.Attr):
        functions |= {f"{cls.__name__}.{n}": m for n, m in vars(cls).items() if callable(m)}
    functions |= {
        f"{cls.__name__}.from_float": cls.from_float
        for cls in vars(torchq.nn).values()
        if isinstance(cls, type) and hasattr(cls, "from_float")
    }
    for name, function in functions.items():
        if not name.partition(".")[2].startswith("_"):
            yield from ((f"{name}: {key}", h) for key, h in get_type_hints(function).items())


FREE = ("arg", "text", "kind", "op_name", "return")  # src<i>, a chain as text, getters


def test_options_are_words() -> None:
    checked = 0
    for where, hint in parameters():
        if where.rpartition(" ")[2] not in FREE:
            kinds = [hint, *get_args(hint)]
            assert str not in kinds, where
            checked += any(typing.get_origin(kind) is typing.Literal for kind in kinds)
    assert checked > 12


WORDS: dict[str, Any] = {
    "EltwiseAlg": lambda word: TF.eltwise(torch.ones(2), word, 1.0, 1.0),
    "BinaryAlg": lambda word: torchq.PostOps().append_binary(word, None, 0),
    "BinaryOp": lambda word: TF.binary(
        *(torch.ones(2), torch.ones(2), word),
        condition=torch.ones(2).bool() if word == "select" else None,
    ),
    "ReductionAlg": lambda word: TF.reduction(torch.ones(2, dtype=torch.uint8), word, 0),
    "ResamplingAlg": lambda word: TF.resampling(torch.ones(1, 1, 2, 2, dtype=torch.uint8), 3, word),
    "SrcRange": lambda word: TF.dynamic_linear(
        torch.ones(1, 2), torch.ones(1, 2, dtype=torch.int8), 1.0, None, word
    ),
    "OffsetC": lambda word: TF.gemm_u8s8s32(
        *(torch.ones(1, 1, dtype=torch.uint8), torch.ones(1, 1, dtype=torch.int8)), offsetc=word
    ),
    "Rounding": lambda word: torchq.Attr().set_rounding("dst", word),
    "DtypeName": lambda word: torchq.PostOps().append_sum(1.0, 0, word),
    "Granularity": lambda word: torchq.QConfig(weight_granularity=word),
    "ObserverName": lambda word: torchq.QConfig(activation_observer=word).make_observer(),
    "Bits": lambda word: torchq.QConfig(weight_bits=word, activation_bits=word),
    "WeightBits": lambda word: torchq.QConfig(weight_bits=word, dynamic=True),
    "GroupSize": lambda word: torchq.QConfig(weight_bits=4, dynamic=True, group_size=word),
    "EmbeddingBits": lambda word: torchq.QConfig(embedding_bits=word),
    "BagMode": lambda word: TF.embedding_bag(
        torch.zeros(1, 1, dtype=torch.int64),
        torchq.packing.pack_embedding(*TF.quantize_embedding(torch.ones(1, 2))),
        mode=word,
    ),
    "Convention": lambda word: torchq.compose([], convention=word, channels=1),
}


@pytest.mark.parametrize("name", WORDS)
def test_words_are_those_that_run(name: str) -> None:
    alias = getattr(options, name)
    words = [w for part in get_args(alias) for w in (get_args(part) or (part,))]
    for word in words:
        WORDS[name](word)
    with pytest.raises((ValueError, NotImplementedError)) as error:
        WORDS[name](0 if isinstance(words[0], int) else "none_of_them")
    assert all(str(word) in str(error.value) for word in words)


def test_observers_are_all_named() -> None:
    assert set(OBSERVERS) == set(get_args(options.ObserverName))
    assert set(torchq.supported_isas()) <= set(get_args(options.Tier))
