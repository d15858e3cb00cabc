# SPDX-License-Identifier: Apache-2.0
"""A graph of a file calls what torch does not check; loading refuses it, or its call raises."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from torchq.serialization.report_text import REPORT_KEY, read_report, write_report
from torchq.serialization.tensor_file import read_tensors, write_tensors

X = torch.randn(4, 8)


def node(name: str) -> dict[str, str]:
    return {"node": name}


def call(name: str, target: str, *args: Any) -> list[Any]:
    return ["call_function", name, target, list(args), {"dict": {}}]


def full(name: str, *shape: int) -> list[Any]:
    return call(name, "torch.full", [*shape], 1.0)


def forged(path: Path, nodes: list[Any]) -> Path:
    """Write a model whose graph gives the last of these nodes."""
    torchq.save(torchq.quantize(nn.Sequential(nn.Linear(8, 16)).eval(), [X]), path)
    tensors, metadata = read_tensors(path)
    key = next(key for key in tensors if key.endswith("torchq_graph"))
    fields = json.loads(bytes(tensors[key].tolist()))
    at = next(i for i, one in enumerate(fields["nodes"]) if one[0] == "output")
    fields["nodes"][at:at] = nodes
    fields["nodes"][-1][3] = [node(nodes[-1][1])]
    tensors[key] = torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)
    metadata.pop("digest", None)
    write_tensors("test", path, tensors, metadata)
    return path


def size_of_x() -> list[Any]:
    source = node("input_1")
    return [call("s", "Tensor.size", source), call("n", "operator.getitem", node("s"), 1)]


AA = "aten::_upsample_bilinear2d_aa.default"
REFUSED: dict[str, list[Any]] = {
    "statistics of another size": [
        full("a", 1, 50, 1),
        full("b", 1),
        call("r", "aten::native_batch_norm.default", node("a"), *[node("b")] * 4, False, 0.1, 1e-5),
        call("o", "operator.getitem", node("r"), 0),
    ],
    "scales beside sizes": [
        full("a", 1, 1, 4, 4),
        call("o", AA, node("a"), [8, 8], False, 2**-20, 2**-20),
    ],
    "a median of what is expanded": [
        full("a", 1, 1),
        call("e", "Tensor.expand", node("a"), [1, 4001]),
        call("r", "aten::median.dim", node("e"), 1),
        call("o", "operator.getitem", node("r"), 0),
    ],
    "circular padding that leaves elements out": [
        full("a", 1, 1, 8, 16),
        call("o", "aten::pad.default", node("a"), [0, 0, -8, 8], "circular"),
    ],
    "a bare number in place of a list": [
        full("a", 1, 4, 8),
        call("o", "torch.max_pool1d", node("a"), 5, 1, 0, 2**62),
    ],
    "a range to the least integer": [call("o", "torch.arange", 0, -(2**63), -1)],
    "a divisor that is -1 of 32 bits": [
        call("i", "torch.full", [4], 1.0),
        call("e", "Tensor.to", node("i"), {"constant": "torch.int32"}),
        [
            "call_function",
            "o",
            "torch.div",
            [node("e"), 2**32 - 1],
            {"dict": {"rounding_mode": "trunc"}},
        ],
    ],
    "a dtype by its number": [call("o", "aten::view", node("input_1"), 100)],
    "a computed dtype": [*size_of_x(), call("o", "aten::to", node("input_1"), node("n"))],
    "an expansion that a script leaves out": [
        full("a"),
        [*call("o", "aten::expand.default", node("a"), [4])[:4], {"dict": {"implicit": True}}],
    ],
    "a copy of no dtype": [call("o", "aten::to.prim_other", node("input_1"), False, True)],
    "a dtype for a tensor": [call("o", "aten::to.other", node("input_1"), -1)],
    "a function of tensors on a number": [*size_of_x(), call("o", "aten::neg", node("n"))],
    "a bool of a tensor": [
        call("b", "operator.not_", node("input_1")),
        call("o", "Tensor.__lshift__", node("b"), 2**33),
    ],
    "a division by nothing": [*size_of_x(), call("o", "operator.mod", node("n"), 0)],
    "a division by -1": [*size_of_x(), call("o", "operator.floordiv", node("n"), -1)],
    "a method of int": [*size_of_x(), call("o", "Tensor.__lshift__", node("n"), 2**33)],
    "a size without a list": [call("o", "Tensor.view", node("input_1"), 32)],
    "what an assertion gives": [
        call("a", "torch._assert", 1, "text"),
        call("o", "aten::add.Tensor", node("input_1"), node("a")),
    ],
    "an unknown mode": [
        full("a", 1, 1, 4, 4),
        full("g", 1, 5, 5, 2),
        call("o", "aten::grid_sampler_2d.default", node("a"), node("g"), 0, 7, False),
    ],
}
RAISES: dict[str, list[Any]] = {
    "more values than keys": [
        full("q", 1, 4, 2, 8),
        full("v", 1, 4, 40000, 8),
        call("o", "aten::scaled_dot_product_attention.default", *map(node, "qqv")),
    ],
    "bins of a range that overflows": [
        call("a", "torch.full", [16], 1.0),
        call("o", "torch.histc", node("a"), 100, -(10**38), 10**38),
    ],
    "bins without a range": [
        call("a", "torch.full", [16], 1.0),
        call("o", "torch.histc", node("a"), 100),
    ],
    "bins between numbers that are one in float32": [
        call("a", "torch.full", [16], 1.0),
        call("o", "torch.histc", node("a"), 100, 1.0, 1.0000000001),
    ],
    "no head to repeat": [
        full("q", 1, 4, 2, 8),
        full("k", 1, 0, 2, 8),
        [
            *call("o", "aten::scaled_dot_product_attention.default", *map(node, "qkq"))[:4],
            {"dict": {"enable_gqa": True}},
        ],
    ],
    "groups with gaps": [
        call("i", "torch.zeros", [2]),
        call("e", "Tensor.to", node("i"), {"dtype": "int32"}),
        call("a", "torch.full", [16, 16], 1.0),
        call("w", "torch.full", [2, 16, 16], 1.0),
        call("o", "torch._grouped_mm", node("a"), node("w"), node("e")),
    ],
}


def computed(value: int) -> list[Any]:
    """Nodes that give a number."""
    return [*size_of_x(), call("z", "operator.sub", node("n"), node("n")),
            call("big", "operator.add", node("z"), value)]  # fmt: skip


BIG = node("big")
IM2COL = "aten::im2col.default"
RAISES |= {
    "a computed dilation": [
        *computed(2**62), full("a", 1, 4, 8),
        call("o", "torch.max_pool1d", node("a"), 5, 1, 0, [BIG]),
    ],
    "a computed padding of patches": [
        *computed(2**61 + 1), full("a", 1, 1, 8, 16),
        call("o", IM2COL, node("a"), [3, 2], [1, 7], [1, BIG], [2, 1]),
    ],
    "a computed kernel of patches": [
        *computed(2**63 - 1), full("a", 1, 1, 8, 16),
        call("o", IM2COL, node("a"), BIG, [1, 2], [1, 1], [2, 1]),
    ],
    "computed padding": [
        *computed(2**63 - 1), full("a", 1, 1, 8, 16),
        call("o", "aten::replication_pad2d.default", node("a"), [BIG] * 4),
    ],
    "computed padding by its mode": [
        *computed(2**63 - 1), full("a", 1, 1, 8, 16),
        call("o", "aten::pad.default", node("a"), [BIG] * 4, "replicate"),
    ],
    "a computed range": [*computed(-(2**63)), call("o", "torch.arange", 0, BIG, -1)],
}  # fmt: skip


# In a process of its own, which a fault ends.
CALL = """
import sys, torch, torchq
for path in sys.argv[2:]:
    try:
        model = torchq.load(path)
        model = torch.jit.script(model) if sys.argv[1] == "scripted" else model
        print(repr(model(torch.randn(4, 8))))
    except Exception as error:
        print(repr(f"{type(error).__name__}: {error}"), flush=True)
"""


def errors(paths: list[Path], scripted: bool = False) -> list[str]:
    """Return what each file raises when it is loaded and called."""
    command = [sys.executable, "-c", CALL, "scripted" if scripted else "eager", *map(str, paths)]
    result = subprocess.run(command, capture_output=True, text=True)
    found = result.stdout.splitlines()
    assert result.returncode == 0 and len(found) == len(paths), (found, result.stderr)
    return found


def test_divisors_that_are_computed(tmp_path: Path) -> None:
    """TorchScript does not check them, and the least integer by -1 ends the process."""
    calls = [(name, by) for name in ("operator.mod", "operator.floordiv") for by in (0, -1)]
    paths = [tmp_path / f"{name}{by}" for name, by in calls]
    for path, (name, by) in zip(paths, calls, strict=True):
        nodes = [*computed(by), call("q", name, node("n"), BIG)]
        forged(path, [*nodes, call("o", "torch.full", [2], node("q"))])
    for scripted in (False, True):
        for error in errors(paths, scripted):
            assert "divisors that the graph" in error


@pytest.mark.parametrize(
    ("target", "argument", "error"),
    [
        ("aten::var.dim", False, "Expected a value of type .* for argument 'dim'"),
        ("aten::view.dtype", {"constant": "torch.int32"}, "Argument size not provided"),
        ("Tensor.view", {"constant": "torch.int32"}, "Argument size not provided"),
    ],
)
def test_scripts_take_no_other_overload(
    target: str, argument: Any, error: str, tmp_path: Path
) -> None:
    """By types alone they took another axis, and sizes in place of a dtype."""
    path = forged(tmp_path / "m", [full("a", 1, 3), call("o", target, node("a"), argument)])
    loaded = torchq.load(path)
    assert loaded(X).shape[-1] == 3
    with pytest.raises(RuntimeError, match=error):
        torch.jit.script(loaded)


def test_modules_are_called_with_tensors(tmp_path: Path) -> None:
    """One that passes its source on would give a number as a tensor."""
    path = forged(tmp_path / "m", size_of_x())
    tensors, metadata = read_tensors(path)
    key = next(key for key in tensors if key.endswith("torchq_graph"))
    fields = json.loads(bytes(tensors[key].tolist()))
    (called,) = (entry for entry in fields["nodes"] if entry[0] == "call_module")
    for source in (3, None, node("n"), [node("n")], []):
        called[3] = [source]
        fields["nodes"].remove(called)
        fields["nodes"].insert(-1, called)
        tensors[key] = torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)
        write_tensors("test", path, tensors, metadata)
        with pytest.raises(ValueError, match="modules in the file's graph must be called with"):
            torchq.load(path)


def test_sizes_that_are_computed(tmp_path: Path) -> None:
    """Ordinary ones give what they gave, and the file can be written and scripted again."""
    nodes = [*computed(2), full("f", 1, 2, 4)]
    nodes += [call("p", "aten::pad.default", node("f"), [BIG, 1], "reflect")]
    nodes += [call("r", "torch.arange", BIG), call("t", "torch.max_pool1d", node("p"), [BIG])]
    nodes += [call("s0", "Tensor.sum", node("r")), call("o", "operator.add", node("t"), node("s0"))]
    loaded, expected = torchq.load(forged(tmp_path / "m", nodes)), torch.full((1, 2, 3), 2.0)
    assert torch.equal(loaded(X), expected)
    torchq.save(loaded, tmp_path / "again")
    again = torchq.load(tmp_path / "again")
    assert torch.equal(again(X), expected) and torch.equal(torch.jit.script(again)(X), expected)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    path = forged(tmp_path / "m", REFUSED[name])
    with pytest.raises(ValueError, match="file's graph must call functions of torch"):
        torchq.load(path)


def test_they_raise(tmp_path: Path) -> None:
    found = errors([forged(tmp_path / name, nodes) for name, nodes in RAISES.items()])
    for name, error in zip(RAISES, found, strict=True):
        assert error[1:].startswith("ValueError: torchq.load: "), (name, error)


def test_sizes_are_numbers_of_a_bounded_length(tmp_path: Path) -> None:
    squares = [
        call(f"p{i}", "operator.mul", *[node(f"p{i - 1}" if i else "n")] * 2) for i in range(40)
    ]
    nodes = [*size_of_x(), *squares, call("o", "torch.full", [2], node("p39"))]
    with pytest.raises(ValueError, match=r"operator\.mul"):
        torchq.load(forged(tmp_path / "m", nodes))


def test_sizes_are_read(tmp_path: Path) -> None:
    """A list of sizes is one of numbers: its items count, and it is a shape."""
    nodes = [*size_of_x(), call("f", "torch.full", node("s"), 2.0)]
    nodes += [call("o", "operator.mul", node("f"), node("n"))]
    assert torch.equal(torchq.load(forged(tmp_path / "m", nodes))(X), torch.full((4, 8), 16.0))


def test_parts_with_two_names_each(tmp_path: Path) -> None:
    """Thirty levels of parts would be 2^30 modules."""
    path, spec = forged(tmp_path / "m", size_of_x()), {"class": "QExperts", "version": 1}
    tensors, metadata = read_tensors(path)
    text = torch.tensor(list(json.dumps(spec).encode()), dtype=torch.uint8)
    aliases, name = dict[str, str](), "torchq_graph.a"
    for _ in range(30):
        tensors[f"{name}.spec"] = text.clone()
        aliases[f"{name}.down.spec"], name = f"{name}.up.spec", f"{name}.up"
    tensors[f"{name}.spec"] = text.clone()
    tensors["torchq_aliases"] = torch.tensor(list(json.dumps(aliases).encode()), dtype=torch.uint8)
    write_tensors("test", path, tensors, metadata)
    with pytest.raises(ValueError, match="parts of QExperts must be its own"):
        torchq.load(path)


def test_fields_of_a_report_have_their_types(tmp_path: Path) -> None:
    model = torchq.quantize(nn.Sequential(nn.Linear(8, 16)).eval(), [X])
    fields = json.loads(zlib.decompress(bytes(write_report(model).tolist())))
    assert read_report(write_report(model))[REPORT_KEY] == vars(model)[REPORT_KEY]
    fields["rows"][0][-1] = "a" * 100  # a text for a list of names
    text = zlib.compress(json.dumps(fields).encode())
    with pytest.raises(ValueError, match="report must be rows"):
        read_report(torch.tensor(list(text), dtype=torch.uint8))
