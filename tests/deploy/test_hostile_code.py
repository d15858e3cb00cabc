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


WIDE = "\uff46orward"
"""``forward`` with a first letter that Python reads as f."""
CELL = {"input_size": 1, "hidden_size": 1, "bias": False, "nonlinearity": "tanh"}


def _graph_file(path: Path, nodes: list[Any], tensors: dict[str, Tensor] | None = None) -> None:
    """Write a graph of ``x``, which returns the last of some nodes."""
    first, last = ["placeholder", "x", "x", [], {"dict": {}}], [{"node": nodes[-1][1]}]
    nodes = [first, *nodes, ["output", "output", "output", last, {"dict": {}}]]
    text = json.dumps({"version": 3, "name": "Graph", "nodes": nodes}).encode()
    write_tensors(
        "test", path, {**(tensors or {}), "torchq_graph": torch.tensor(list(text)).byte()}
    )


def _calls(target: str, *args: Any, check: str = "torchq_check_1") -> list[Any]:
    """Return nodes that call a float module of this name, as a check of arguments, and a result."""
    plain = {"class": "RNNCell", "fields": CELL}
    call = ["call_module", check, target, list(args), {"dict": {}}, "a", plain]
    return [call, ["call_function", "y", "torch.relu", [{"node": "x"}], {"dict": {}}]]


@pytest.mark.parametrize(
    "target",
    [
        *(f"{WIDE}.__globals__.get", "\uff3f_setattr__", f"a.{WIDE}", "a.forward", "forward"),
        *("_modules", "training", "meta", "_graph", "_run", "_forward_hooks", "a.reset_parameters"),
        *("a.weight_ih.add_", "a.input_size"),
    ],
)
def test_names_of_what_is_no_module(target: str, tmp_path: Path) -> None:
    """The code of checks has modules as attributes, and an attribute of another kind is first."""
    names = {target, *(["a"] if target.startswith("a.") else [])}
    tensors = {f"{n}.{w}": torch.zeros(1, 1) for n in names for w in ("weight_ih", "weight_hh")}
    _graph_file(tmp_path / "file", _calls("a", {"node": "x"}, check="torchq_check_0")[:1]
                + _calls(target, "torch"), tensors)  # fmt: skip
    with pytest.raises(ValueError, match=r"must be names of Python|file"):
        torchq.load(tmp_path / "file")


def test_modules_of_such_a_file_are_called(tmp_path: Path) -> None:
    """The names above are what is wrong with it."""
    names = ("a", "b.c", "b-c")
    cells = {f"{n}.{w}": torch.ones(1, 1) for n in names for w in ("weight_ih", "weight_hh")}
    nodes = [node for i, n in enumerate(names) for node in _calls(n, {"node": "x"}, check=f"z{i}")]
    kept = [node for node in nodes if node[1] != "y"] + [nodes[-1]]
    _graph_file(tmp_path / "file", kept, cells)
    assert torch.equal(torchq.load(tmp_path / "file")(torch.ones(2, 1)), torch.ones(2, 1))


@pytest.mark.parametrize("name", ["torch._inductor", "aten::_inductor.default", "torch.onnx"])
def test_no_attribute_of_torch_is_asked_for_by_a_name_of_a_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()
    monkeypatch.setattr(torch, "__getattr__", asked.append)
    _graph_file(tmp_path / "file", [["call_function", "y", name, [{"node": "x"}], {"dict": {}}]])
    with pytest.raises(ValueError, match="which is not allowed"):
        torchq.load(tmp_path / "file")
    assert not asked


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("aten::native_group_norm.default", [None, None, 1, 1 << 33, 1 << 31, 4, 1e-5]),
        ("aten::native_group_norm.default", [None, None, 2, 4, 1 << 62, 2, 1e-5]),
        ("aten::to.prim_dtype", [128]),
        ("aten::to.prim_dtype", [-1]),
        ("torch.to", [128]),
    ],
)
def test_functions_that_torch_does_not_check(name: str, args: list[Any], tmp_path: Path) -> None:
    node = ["call_function", "y", name, [{"node": "x"}, *args], {"dict": {}}]
    tail = ["call_function", "z", "operator.getitem", [{"node": "y"}, 0], {"dict": {}}]
    _graph_file(tmp_path / "file", [node, tail] if "norm" in name else [node])
    with pytest.raises(ValueError, match=r"must be those of|which is not|other arguments"):
        torchq.load(tmp_path / "file")(torch.zeros(0) if "norm" in name else torch.zeros(2))


def test_group_norm_by_its_native_name(tmp_path: Path) -> None:
    x = torch.randn(2, 6, 5)
    args = [{"node": "x"}, None, None, 2, 6, 5, 3, 1e-5]
    norm = ["call_function", "y", "aten::native_group_norm.default", args, {"dict": {}}]
    tail = ["call_function", "z", "operator.getitem", [{"node": "y"}, 0], {"dict": {}}]
    _graph_file(tmp_path / "file", [norm, tail])
    assert torch.equal(torchq.load(tmp_path / "file")(x), nn.functional.group_norm(x, 3))
    scripted = torch.jit.script(torchq.load(tmp_path / "file"))
    assert torch.equal(scripted(x), nn.functional.group_norm(x, 3))


def test_a_report_does_not_hide_parts(tmp_path: Path) -> None:
    """Its names are attributes of the model, which code reads before tensors of these names."""
    path, x = tmp_path / "file", torch.randn(4, 8)
    torchq.save(torchq.quantize(Net().eval(), [x]), path)
    report = {k: v for k, v in read_tensors(path)[0].items() if k.endswith("torchq_report")}
    assert len(report) == 1
    part = ["get_attr", "part", "torchq_report", [], {"dict": {}}]
    last = ["call_function", "y", "torch.add", [{"node": "x"}, {"node": "part"}], {"dict": {}}]
    key = "torchq_graph.torchq_report"
    _graph_file(path, [part, last], {**report, key: torch.ones(1)})
    with pytest.raises(ValueError, match="report has the name of a part"):
        torchq.load(path)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([["get_attr", "a", "a", [], {"dict": {}}, "a", {"class": "RNNCell", "fields": CELL}],
          ["get_attr", "b", "a", [], {"dict": {}}]], "names of Python"),
        ([["call_function", "\u4e2db", "torch.relu", [{"node": "x"}], {"dict": {}}]], "of Python"),
        (_calls("a..b"), "names of Python"),
    ],
    ids=["a tensor that is a module", "no ASCII", "an empty part"],
)  # fmt: skip
def test_other_names_that_fx_does_not_write(nodes: list[Any], message: str, tmp_path: Path) -> None:
    cells = {f"a.{w}": torch.ones(1, 1) for w in ("weight_ih", "weight_hh")}
    _graph_file(tmp_path / "file", nodes, cells)
    with pytest.raises(ValueError, match=message):
        torchq.load(tmp_path / "file")


def test_the_name_of_a_graph_is_a_name(tmp_path: Path) -> None:
    path, x = tmp_path / "file", torch.randn(2)
    _graph_file(path, [["call_function", "y", "torch.relu", [{"node": "x"}], {"dict": {}}]])
    tensors, metadata = read_tensors(path)
    fields = json.loads(bytes(tensors["torchq_graph"].tolist()))
    text = json.dumps({**fields, "name": "A(Module):\n  x : int\nclass B"}).encode()
    forged = {**tensors, "torchq_graph": torch.tensor(list(text), dtype=torch.uint8)}
    write_tensors("test", path, forged, metadata)
    loaded = torchq.load(path)
    torch.jit.script(loaded).save(tmp_path / "script")
    assert torch.equal(torch.jit.load(tmp_path / "script")(x), loaded(x))
    assert type(loaded).__name__ == "QuantizedGraph"
