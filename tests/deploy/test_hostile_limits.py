# SPDX-License-Identifier: Apache-2.0
"""A short file can ask for layers, checks, texts, copies and levels of names many times over."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import torchq
from tests.support.calls import python_calls
from torchq.capture.chooser import leaders
from torchq.capture.condition import Condition, by_size
from torchq.capture.guards import Example
from torchq.capture.likeness import Argument
from torchq.nn.experts import QExperts
from torchq.serialization.allowed import divisor, size
from torchq.serialization.graph_text import encode
from torchq.serialization.tensor_file import write_tensors

NONE: dict[str, Any] = {"dict": {}}
INPUT = ["placeholder", "x", "x", [], NONE]
OUTPUT = ["output", "output", "output", [{"node": "x"}], NONE]
CALL: dict[str, Any] = {
    **{"guards": [], "limits": [], "result": None, "strict": False},
    **{"arguments": [[0, "torch.float32", [None]]], "values": {"input": {"argument": 0}}},
}


def text(fields: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(fields).encode()), dtype=torch.uint8)


def graph(*nodes: list[Any], name: str = "G") -> Tensor:
    return text({"version": 3, "name": name, "nodes": [INPUT, *nodes, OUTPUT]})


def written(path: Path, tensors: dict[str, Tensor], aliases: dict[str, str]) -> Path:
    tensors["torchq_aliases"] = text(aliases)
    write_tensors("test", path, tensors)
    return path


def told(what: str) -> str:
    return f"no more {what} than its tensors allow, .* too many"


@pytest.mark.parametrize(("modules", "layers"), [(5, 240), (60, 20)])
def test_layers_of_float_networks(modules: int, layers: int, tmp_path: Path) -> None:
    """An alias is a name, so that names of tensors are no limit."""
    fields = {"input_size": 1, "hidden_size": 1, "num_layers": layers, "bias": True}
    fields |= {"batch_first": False, "dropout": 0.0, "bidirectional": True, "proj_size": 0}
    plain = {"class": "LSTM", "fields": fields}
    nodes = [
        ["call_module", f"y{i}", f"a{i}", [{"node": "x"}], NONE, "a", plain] for i in range(modules)
    ]
    aliases = {f"a{i}.{j}": "z" for i in range(modules) for j in range(layers)}
    tensors = {"torchq_graph": graph(*nodes), "z": torch.zeros(1)}
    with pytest.raises(ValueError, match=told("modules")):
        torchq.load(written(tmp_path / "file", tensors, aliases))
    fields["num_layers"] = 257  # of one module: torch takes the square
    tensors["torchq_graph"] = graph(nodes[0])
    with pytest.raises(ValueError, match="modules must be recurrent ones"):
        torchq.load(written(tmp_path / "file", tensors, {f"a0.{i}": "z" for i in range(257)}))


def _number(name: str) -> list[Any]:
    return ["call_function", name, "aten::size.int", [{"node": "x"}, 0], NONE]


def test_a_computed_number_is_checked_once(tmp_path: Path) -> None:
    n, x = {"node": "n"}, {"node": "x"}
    pads = [
        ["call_function", f"p{i}", "aten::pad.default", [x, [n, n, n, n]], NONE] for i in range(3)
    ]
    divided = ["call_function", "d", "operator.floordiv", [8, n], NONE]
    path = written(tmp_path / "file", {"torchq_graph": graph(_number("n"), *pads, divided)}, {})
    loaded = torchq.load(path)
    assert isinstance(loaded, fx.GraphModule)
    targets = [node.target for node in loaded.graph.nodes]
    assert (targets.count(size), targets.count(divisor), len(targets)) == (1, 1, 9)
    value = torch.ones(2, 2)
    assert torch.equal(loaded(value), value)
    again = torchq.load(written(tmp_path / "again", {"torchq_graph": encode(loaded)}, {}))
    assert isinstance(again, fx.GraphModule)
    assert [node.target for node in again.graph.nodes] == targets


def test_checks_are_nodes(tmp_path: Path) -> None:
    names = [f"n{i}" for i in range(4600)]
    pad = ["call_function", "p", "aten::pad.default", [{"node": "x"}, []], NONE]
    pad[3][1] = [{"node": name} for name in names]
    tensors = {"torchq_graph": graph(*map(_number, names), pad)}
    with pytest.raises(ValueError, match=told("nodes of graphs")):
        torchq.load(written(tmp_path / "file", tensors, {}))


def test_levels_of_names_in_graphs(tmp_path: Path) -> None:
    """Each level of a name becomes a module of the graph."""
    names = [f"a{i}.{'b.' * 60}c" for i in range(160)]
    nodes = [["get_attr", f"y{i}", name, [], NONE] for i, name in enumerate(names)]
    tensors = {"torchq_graph": graph(*nodes), "z": torch.zeros(1)}
    with pytest.raises(ValueError, match=told("nodes of graphs")):
        torchq.load(written(tmp_path / "file", tensors, dict.fromkeys(names, "z")))
    long = ["get_attr", "y", f"{'b.' * 64}c", [], NONE]
    with pytest.raises(ValueError, match=r"names in the file's graph must be names of Python"):
        torchq.load(written(tmp_path / "file", {"torchq_graph": graph(long)}, {}))


DEEP = ".".join("a" * 60)
QUANTIZE = torchq.nn.Quantize(torchq.QParams.per_tensor(1.0))


@pytest.mark.parametrize(
    "node",
    [
        ["call_module", DEEP, [{"node": "x"}], NONE, None],
        ["get_attr", f"{DEEP}.src_scale", [], NONE],
        [
            "call_module",
            DEEP,
            [{"node": "x"}, functools.reduce(lambda inner, _: [inner], range(90), 1)],
            NONE,
            None,
        ],
    ],
    ids=["calls", "tensors", "lists"],
)
def test_levels_in_the_code_of_nodes(node: list[Any], tmp_path: Path) -> None:
    """Each level of a name or a list is a part of the code, once for each node that has it."""
    nodes = [[node[0], f"y{i}", *node[1:]] for i in range(1800)]
    tensors = {f"{DEEP}.{name}": value for name, value in QUANTIZE.state_dict().items()}
    with pytest.raises(ValueError, match=told("values in graphs")):
        torchq.load(written(tmp_path / "file", {**tensors, "torchq_graph": graph(*nodes)}, {}))


def test_modules_of_many_calls_are_looked_at_once(tmp_path: Path) -> None:
    """Each call, and each reader of what it gives, asked for the module and its parts."""
    table = torchq.nn.QLookup(torch.relu, *[torchq.QParams.per_tensor(1.0)] * 2)
    tensors = dict[str, Tensor]()
    tensors["e.spec"] = QExperts.from_spec({}).spec
    places = {"q": QUANTIZE, "t": table, "e.up": QUANTIZE, "e.down": QUANTIZE}
    for place, module in places.items():
        tensors |= {f"{place}.{n}": value.clone() for n, value in module.state_dict().items()}
    x, q = {"node": "x"}, [{"node": f"q{i}"} for i in range(40)]
    nodes = [["call_module", f"q{i}", "q", [x], NONE, None] for i in range(40)]
    nodes += [["call_module", f"t{i}", "t", [q], NONE, None] for i in range(40)]
    nodes += [["call_module", f"e{i}", "e", [x], NONE, None] for i in range(40)]
    path = written(tmp_path / "file", {**tensors, "torchq_graph": graph(*nodes)}, {})
    with python_calls() as called:
        torchq.load(path)
    assert called.count("name_source") < 400 and called.count("get_submodule") < 400


@pytest.mark.parametrize("key", ["torchq_graph", "torchq_call"])
def test_one_text_of_many_names(key: str, tmp_path: Path) -> None:
    """It is parsed for each of them, whatever stands in it."""
    parts = 20
    junk = "a" * 300_000
    tensors = {"0.torchq_graph": graph(), "0.torchq_call": text(CALL)}
    tensors[f"0.{key}"] = graph(name=junk) if key == "torchq_graph" else text({**CALL, "j": junk})
    aliases = {
        f"{i}.{own}": f"0.{own}" for i in range(1, parts) for own in ("torchq_graph", "torchq_call")
    }
    model = nn.Sequential(*(nn.ReLU() for _ in range(parts))).eval()
    with pytest.raises(ValueError, match=told("bytes of texts")):
        torchq.load(written(tmp_path / "file", tensors, aliases), model)


def test_one_spec_of_many_graphs(tmp_path: Path) -> None:
    qmodel = torchq.quantize(nn.Sequential(nn.Linear(8, 8)).eval(), [torch.randn(4, 8)])
    layer = next(m for m in qmodel.modules() if isinstance(m, torchq.nn.QLinear))
    parts = 20
    tensors = {"0.torchq_graph": graph(), "0.torchq_call": text(CALL)}
    tensors["0.torchq_graph.l.spec"] = text({**layer.read_spec(), "recipe": "a" * 300_000})
    aliases = {f"{i}.{key[2:]}": key for i in range(1, parts) for key in tensors}
    model = nn.Sequential(*(nn.ReLU() for _ in range(parts))).eval()
    with pytest.raises(ValueError, match=told("bytes of texts")):
        torchq.load(written(tmp_path / "file", tensors, aliases), model)


@pytest.mark.parametrize("names", [("0", "0.0"), ("", "1"), ("1", "2")])
def test_graphs_within_graphs(names: tuple[str, str], tmp_path: Path) -> None:
    """Each calls its own module, so that a copy for one would hold the copies for the other."""
    shared = nn.Sequential(nn.ReLU())
    model = nn.Sequential(nn.Sequential(nn.ReLU()), shared, shared).eval()
    own = graph(["call_module", "y", "m", [{"node": "x"}], NONE, ""])
    tensors: dict[str, Tensor] = {}
    for name in names:
        prefix = f"{name}." if name else ""
        tensors |= {f"{prefix}torchq_graph": own.clone(), f"{prefix}torchq_call": text(CALL)}
    with pytest.raises(ValueError, match="modules with graphs must be apart, got others within"):
        torchq.load(written(tmp_path / "file", tensors, {}), model)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("conditions", {"guards": [f"s0[0] > {i}" for i in range(3000)]}),
        ("sizes of arguments", {"arguments": [[i, "torch.float32", []] for i in range(6000)]}),
    ],
)
def test_tensors_that_nothing_needs_raise_no_limit(
    what: str, change: dict[str, Any], tmp_path: Path
) -> None:
    tensors = {"torchq_graph": graph(), "torchq_call": text(CALL | change)}
    tensors["torchq_graph.pad"] = torch.zeros(6_000_000, dtype=torch.uint8)
    with pytest.raises(ValueError, match=told(what)):
        torchq.load(written(tmp_path / "file", tensors, {}), nn.Sequential(nn.ReLU()))


def test_one_module_of_many_names(tmp_path: Path) -> None:
    """Each name is asked for the parts of the module."""
    model = nn.LSTM(1, 1).eval()
    model.parts = nn.Sequential(*[nn.ReLU() for _ in range(100)])
    nodes = [["call_module", f"y{i}", f"m{i}", [{"node": "x"}], NONE, ""] for i in range(50)]
    tensors = {"torchq_graph": graph(*nodes), "torchq_call": text(CALL), **model.state_dict()}
    with pytest.raises(ValueError, match=told("modules")):
        torchq.load(written(tmp_path / "file", tensors, {}), model)


def test_one_tensor_of_many_parameters_is_converted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"input_size": 1, "hidden_size": 1, "num_layers": 50, "bias": False}
    fields |= {"batch_first": False, "dropout": 0.0, "bidirectional": False, "proj_size": 0}
    node = [{"node": "x"}], NONE, "a", {"class": "LSTM", "fields": fields}
    names = [f"m.weight_{h}_l{i}" for h in ("ih", "hh") for i in range(50)]
    tensors = {"torchq_graph": graph(["call_module", "y", "m", *node])}
    tensors[names[0]] = torch.zeros(4, 1, dtype=torch.bfloat16)
    calls = 0
    to = Tensor.to

    def counted(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal calls
        calls += args == (torch.float32,)
        return to(self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "to", counted)
    torchq.load(written(tmp_path / "file", tensors, dict.fromkeys(names[1:], names[0])))
    assert calls == 1


NORM = {"src": "f32", "src_bits": 8, "dst": "u8", "dst_bits": 8, "post_ops": ""}
TABLE = {"bits": 8, "scales": "f32", "padding": None}
LAYER = {"dilation": [1], "stride": [1]}
LINEAR = {"weight": [1, 1], "groups": 1, "dilation": [], "dst": "f32"}


@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        ("QLayerNorm", NORM | {"arguments": {"normalized_shape": [2**62] * 999, "eps": 0.0,
                                             "has_weight": True}}),
        ("DynamicQConv1d", LAYER | {"weight": [2**62] * 999, "groups": 1}),
        ("QEmbedding", TABLE | {"weight": [[0], 8]}),
        ("QEmbedding", TABLE | {"weight": [8, 8], "bits": [0]}),
        ("QLinear", LINEAR | {"post_op_values": [0] * 65}),
        ("QConvTranspose1d", LAYER | {"weight": [8, [0], 3], "groups": 8, "geometry": []}),
    ],
)  # fmt: skip
def test_sizes_of_specs_are_few_numbers(cls: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """The product of 150,000 took a minute; a list by a number was a list of gigabytes.

    Each of 490,000 values was a tensor, which took 200 MB and 4 s.
    """
    node = ["call_module", "y", "m", [{"node": "x"}], NONE, None]
    tensors = {"torchq_graph": graph(node)}
    tensors["m.spec"] = text({"class": cls, "version": 1, **fields})
    with pytest.raises(ValueError, match="sizes in the file's specs must be up to 64 whole"):
        torchq.load(written(tmp_path / "file", tensors, {}))


def test_shapes_of_many_sizes(tmp_path: Path) -> None:
    """Their product took a minute, too."""
    entry = {"dtype": "U8", "shape": [2**62] * 100_000, "data_offsets": [0, 8]}
    header = json.dumps({"a.spec": entry}).encode()
    path = tmp_path / "file"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    began = time.process_time()
    with pytest.raises(ValueError, match="its header is not one of safetensors"):
        torchq.load(path)
    assert time.process_time() - began < 2


def test_names_of_layers_are_compared_by_their_parts(tmp_path: Path) -> None:
    """Each name of a tensor with each of these would take 7 s."""
    model = nn.Sequential(nn.Linear(8, 8)).eval()
    layer = torchq.nn.DynamicQLinear.from_float(nn.Linear(8, 8))
    tensors = {f"0.{key}": value for key, value in layer.state_dict().items()}
    path = written(tmp_path / "file", tensors, {f"{i}.spec": "0.spec" for i in range(1, 60_000)})
    began = time.process_time()
    with pytest.raises(ValueError, match="and the model must be of one architecture"):
        torchq.load(path, model)
    assert time.process_time() - began < 2


def test_sizes_that_are_equal_in_a_chain() -> None:
    calls = {}
    for tensors in (200, 400):
        arguments = [Argument(i, torch.float32, (None,)) for i in range(2 * tensors)]
        guards = [Condition.parse(f"s{i}[0] == s{i + 1}[0]") for i in reversed(range(tensors - 1))]
        values: dict[str, object] = {"input": arguments}
        example = Example(nn.Sequential, arguments, guards, values, None)
        with python_calls() as called:
            found = leaders(example)
        calls[tensors] = len(called)
        assert found == [0] * tensors + list(range(tensors, 2 * tensors))
    assert calls[400] < 2.2 * calls[200], calls


def test_conditions_on_one_size_are_joined_at_once() -> None:
    """In pairs, what torchq.explain says took 10 s, and would take an hour of 100 MB."""
    sizes = [range(begin, begin + 2400, 2) for begin in range(2, 12_000, 2400)]
    texts = [" and ".join(f"s0[0] != {size}" for size in some) for some in sizes]
    conditions, began = [Condition.parse(text) for text in texts], time.process_time()
    found, others = by_size(conditions)
    (ranges,), told = found.values(), conditions[-1].words(str)
    assert time.process_time() - began < 5
    assert len(ranges.ranges) == 6001 and not others and told.endswith(" or 11998 or 12000")


ACCENTS = "a" + "\u0301" * 50_000 + "\u0323" * 49_000
"""A name of Python, which takes the square of its accents to be put in order: 15 s."""


@pytest.mark.parametrize(
    ("node", "call"),
    [
        (["call_function", ACCENTS, "torch.relu", [{"node": "x"}], NONE], {}),
        (["placeholder", "y", ACCENTS, [], NONE], {}),
        (["call_module", "y", "m", [{"node": "x"}], {"dict": {ACCENTS: 1}}, ""], {}),
        (["call_module", "y", ACCENTS, [{"node": "x"}], NONE, ""], {}),
        (None, {"neutral": {ACCENTS: [None]}}),
        (None, {"guards": [f"{ACCENTS} == 1"]}),
    ],
    ids=["node", "input", "keyword", "module", "option", "guard"],
)
def test_names_of_many_accents(
    node: list[Any] | None, call: dict[str, Any], tmp_path: Path
) -> None:
    tensors = {"torchq_graph": graph(*([node] if node else [])), "torchq_call": text(CALL | call)}
    path, began = written(tmp_path / "file", tensors, {}), time.process_time()
    with pytest.raises(ValueError, match=r"must be (names of Python|conditions on sizes)"):
        torchq.load(path, nn.Sequential(nn.ReLU()).eval())
    assert time.process_time() - began < 3


def test_a_graph_of_a_name_with_many_accents(tmp_path: Path) -> None:
    path = written(tmp_path / "file", {"torchq_graph": graph(name=ACCENTS)}, {})
    began = time.process_time()
    assert type(torchq.load(path)).__name__ == "QuantizedGraph"
    assert time.process_time() - began < 3


@pytest.mark.parametrize("key", ["header", "m.spec", "torchq_graph", "torchq_aliases"])
def test_texts_of_wide_characters_are_short(key: str, tmp_path: Path) -> None:
    """One of them makes four bytes of each character: seven times the file were taken."""
    wide = json.dumps("a" * 8_000_000 + "\U0001f600")
    path, known = tmp_path / "file", {"torchq_graph": graph()}
    if key == "header":
        header = json.dumps({json.loads(wide): 0})
        path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(8))
    else:
        own = torch.frombuffer(
            bytearray(f'{{"version": 3, "x": {wide}}}'.encode()), dtype=torch.uint8
        )
        write_tensors("test", path, {**known, key: own})
    with pytest.raises(
        ValueError, match=f"its header is not|must have at most|{told('bytes of texts')}"
    ):
        torchq.load(path)
