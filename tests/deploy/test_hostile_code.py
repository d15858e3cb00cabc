# SPDX-License-Identifier: Apache-2.0
"""Text of a file becomes a part of generated code; loading refuses what is no name or condition."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.serialization.conditions import is_path
from torchq.serialization.tensor_file import read_tensors, write_tensors

Fields = dict[str, Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, return_dict: Any = None) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def _guard(fields: Fields, code: str) -> None:
    fields["guards"].append(f"{code} == 0")


def _limit(fields: Fields, code: str) -> None:
    fields["limits"].append(code)


def _size(fields: Fields, code: str) -> None:
    fields["arguments"][0][2][1] = code


def _option(fields: Fields, code: str) -> None:
    fields["neutral"] = {"return_dict": [code]}


def _input(fields: Fields, code: str) -> None:
    node = next(node for node in fields["nodes"] if node[0] == "placeholder")
    node[2] = f"x={code}"


def _keyword(fields: Fields, code: str) -> None:
    node = next(node for node in fields["nodes"] if node[0] == "call_module")
    node[4]["dict"][f"x={code}, y"] = 1


def _shadow(fields: Fields, code: str) -> None:
    """A tensor in place of the module: ``self.up(x)`` would call what the tensor has."""
    node = next(node for node in fields["nodes"] if node[0] == "placeholder")
    fields["nodes"] = json.loads(json.dumps(fields["nodes"]).replace(f'"{node[1]}"', '"self"'))


def _torch(fields: Fields, code: str) -> None:
    node = next(node for node in fields["nodes"] if node[0] == "placeholder")
    node[2] = "torch"


def _own(fields: Fields, code: str) -> None:
    node = next(node for node in fields["nodes"] if node[0] == "call_module")
    node[1] = "_torchq_module_0"


def _twice(fields: Fields, code: str) -> None:
    node = next(node for node in fields["nodes"] if node[0] == "placeholder")
    fields["nodes"].insert(0, [node[0], "other", *node[2:]])


def _internal(fields: Fields, code: str) -> None:
    node = next(node for node in fields["nodes"] if node[0] == "call_module")
    node[2] = "_modules"


CHANGES: dict[str, tuple[str, Callable[[Fields, str], None]]] = {
    "guard": ("torchq_call", _guard),
    "limit": ("torchq_call", _limit),
    "size": ("torchq_call", _size),
    "option": ("torchq_call", _option),
    "input": ("torchq_graph", _input),
    "keyword": ("torchq_graph", _keyword),
    "self": ("torchq_graph", _shadow),
    "torch": ("torchq_graph", _torch),
    "own name": ("torchq_graph", _own),
    "two inputs of a name": ("torchq_graph", _twice),
    "part of every module": ("torchq_graph", _internal),
}


@pytest.mark.parametrize("name", CHANGES)
def test_code_in_a_file_does_not_run(name: str, tmp_path: Path) -> None:
    path, proof, x = tmp_path / "file", tmp_path / "ran", torch.randn(4, 8)
    torchq.save(torchq.quantize(Net().eval(), [x]), path)
    tensors, metadata = read_tensors(path)
    where, change = CHANGES[name]
    key = next(key for key in tensors if key.endswith(where))
    fields = json.loads(bytes(tensors[key].tolist()))
    change(fields, f"__import__('pathlib').Path({str(proof)!r}).touch()")
    tensors = {**tensors, key: torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)}
    write_tensors("test", path, tensors, metadata)
    with pytest.raises(ValueError, match=r"file|refuse|must") as error:
        torchq.load(path, Net().eval())(x, return_dict=True)
    assert str(path) in str(error.value) and not proof.exists()


def test_names_that_are_no_names_of_python_load(tmp_path: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"a-b": nn.Linear(8, 8), "3x3/c d": nn.Linear(8, 8)})

        def forward(self, x: Tensor) -> Tensor:
            return self.parts["3x3/c d"](torch.relu(self.parts["a-b"](x)))

    x, path = torch.randn(4, 8), tmp_path / "file"
    converted = torchq.quantize(Named().eval(), [x])
    torchq.save(converted, path)
    for loaded in (torchq.load(path, Named().eval()), torchq.load(path)):
        assert torch.equal(loaded(x), converted(x))


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", 7])
def test_names_that_end_a_quotation(name: Any) -> None:
    assert not is_path(name) and is_path("a-b.0.weight")


def test_text_of_another_encoding_imports_no_decoder(tmp_path: Path) -> None:
    path, x = tmp_path / "file", torch.randn(4, 8)
    torchq.save(torchq.quantize(Net().eval(), [x]), path)
    tensors, metadata = read_tensors(path)
    key = next(key for key in tensors if key.endswith(".spec"))
    raw = bytes(tensors[key].tolist()).decode().encode("utf-32-le")
    tensors[key] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    write_tensors("test", path, tensors, metadata)
    with pytest.raises(ValueError, match="spec must be the JSON text"):
        torchq.load(path, Net().eval())
