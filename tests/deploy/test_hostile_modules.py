# SPDX-License-Identifier: Apache-2.0
"""A graph of a file calls float modules of the model, with tensors of the file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.quantization as torch_ao
from torch import Tensor, nn

import torchq
from torchq.convert.dispatch import dispatch_of
from torchq.functional.packing import unproven
from torchq.graphs.loading import load_each
from torchq.nn.module import QModule
from torchq.serialization.tensor_file import read_tensors, write_tensors

X = torch.randn(4, 8)
each_library = pytest.mark.parametrize(
    "library", ["torch.ao.quantization", "torchao.quantization.pt2e"]
)


def node(name: str) -> dict[str, str]:
    return {"node": name}


class Host(nn.Module):
    """Has a part that its own code does not call."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.layer, self.part = nn.Linear(8, 16), part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def calling(
    path: Path,
    model: nn.Module,
    args: list[Any],
    given: dict[str, Tensor],
    result: str = "o",
    aliases: dict[str, str] | None = None,
) -> Path:
    """Write a graph that calls the model's part; ``given`` are tensors of the graph.

    ``aliases`` are more names of tensors, of the graph and of the file.
    """
    torchq.save(torchq.quantize(model, [X]), path)
    tensors, metadata = read_tensors(path)
    key = next(key for key in tensors if key.endswith("torchq_graph"))
    fields = json.loads(bytes(tensors[key].tolist()))
    nodes = [["get_attr", n, n, [], {"dict": {}}] for n in given if "." not in n]
    nodes.append(["call_module", "o", "part", args, {"dict": {}}, "part"])
    fields["nodes"][-1:-1] = nodes
    fields["nodes"][-1][3] = [node(result)]
    tensors[key] = torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)
    tensors |= {f"{key}.{name}": value for name, value in given.items()}
    if aliases:
        more = json.dumps({f"{key}.{name}": place for name, place in aliases.items()})
        tensors["torchq_aliases"] = torch.tensor(list(more.encode()), dtype=torch.uint8)
    metadata.pop("digest", None)
    write_tensors("test", path, tensors, metadata)
    return path


@pytest.mark.parametrize(
    "part", [nn.EmbeddingBag(10, 8, mode="sum"), nn.CTCLoss(), nn.Linear(3, 3)]
)
def test_float_modules_that_a_graph_does_not_call(part: nn.Module, tmp_path: Path) -> None:
    """The first two read where tensors of the file say."""
    given = {"i": torch.tensor([1, 2, 3]), "n": torch.tensor([0, -1_000_000_000, 3])}
    given |= {f"part.{name}": value.detach() for name, value in part.state_dict().items()}
    model = Host(part).eval()
    path = calling(tmp_path / "m", model, [node("i"), node("n")], given)
    with pytest.raises(ValueError, match=f"fake quantizers, got a {type(part).__name__}"):
        torchq.load(path, model)


@each_library
def test_fake_quantizers_observe_nothing(library: str, tmp_path: Path) -> None:
    """torch writes ranges for each row of the source, also where there are less of them."""
    kinds = pytest.importorskip(library)
    observer = kinds.MovingAveragePerChannelMinMaxObserver
    symmetric = {"dtype": torch.qint8, "qscheme": torch.per_channel_symmetric}
    part = kinds.FusedMovingAvgObsFakeQuantize(observer, quant_min=-128, quant_max=127, **symmetric)
    model = Host(part).eval()
    given = {"i": torch.full((300, 3), 7.4), "part.observer_enabled": part.observer_enabled + 0}
    given |= {"part.scale": torch.ones(300), "part.zero_point": torch.zeros(300).int()}
    given |= {f"part.activation_post_process.{end}_val": torch.ones(1) for end in ("min", "max")}
    for name in ("scale", "zero_point"):
        getattr(part, name).resize_(300)
    for end in ("min", "max"):
        getattr(part.activation_post_process, f"{end}_val").resize_(1)
    own = part.state_dict().items()
    given |= {f"part.{name}": value for name, value in own if f"part.{name}" not in given}
    loaded = torchq.load(calling(tmp_path / "m", model, [node("i")], given), model)
    graph: Any = dispatch_of(loaded).graph  # type: ignore[union-attr]
    assert not graph.part.observer_enabled.any()  # else the call ends the process
    assert torch.equal(loaded(X)[1:], torch.full((299, 3), 7.0))


SYMMETRIC = {"dtype": torch.qint8, "qscheme": torch.per_channel_symmetric}


def fake_quantizer(channels: int, library: Any = torch_ao) -> Any:
    """Return one that has seen data."""
    part = library.FusedMovingAvgObsFakeQuantize(
        library.MovingAveragePerChannelMinMaxObserver, quant_min=-128, quant_max=127, **SYMMETRIC
    )
    part(torch.randn(channels, 8))
    return part


@pytest.mark.parametrize(
    "name",
    ["scale", "zero_point", *(f"activation_post_process.{end}_val" for end in ("min", "max"))],
)
@each_library
def test_fake_quantizers_have_the_shapes_of_the_model(
    name: str, library: str, tmp_path: Path
) -> None:
    """torch read beyond the largest values where there were more smallest ones."""
    model = Host(fake_quantizer(4, pytest.importorskip(library))).eval()
    given = {f"part.{key}": value for key, value in model.part.state_dict().items()}
    given |= {"i": torch.ones(4, 3)}
    loaded = torchq.load(calling(tmp_path / "m", model, [node("i")], given), model)
    assert loaded(X).shape == (4, 3)
    for shape in ((3,), (5,), (0,), (2, 2)):
        forged = given | {f"part.{name}": torch.ones(shape, dtype=given[f"part.{name}"].dtype)}
        path, told = (
            calling(tmp_path / "m", model, [node("i")], forged),
            re.escape(f"'part.{name}'"),
        )
        with pytest.raises(RuntimeError, match=rf"{told} of the state must have shape \[4\]"):
            torchq.load(path, model)


def test_calls_write_to_no_tensor_of_another_name(tmp_path: Path) -> None:
    """One wrote zero points to the bounds of a layer, which were proved: other tiers differed."""
    torch.manual_seed(0)
    model, x = Host(fake_quantizer(4)), torch.randn(4, 8)
    model.layer = nn.Linear(8, 64)  # of four panels
    nn.init.constant_(model.layer.weight, 0.3)
    model.eval()
    given = {f"part.{key}": value.clone() for key, value in model.part.state_dict().items()}
    bounds = "layer.layer.pair_bound"
    del given["part.zero_point"]
    args, aliases = [node("x")], {"part.zero_point": bounds}
    path = calling(tmp_path / "m", model, args, given, "layer", aliases)
    loaded = torchq.load(path, model)
    graph: Any = dispatch_of(loaded).graph  # type: ignore[union-attr]
    layers = [layer for layer in graph.modules() if isinstance(layer, QModule)]
    packed = [weight for layer in layers for weight in layer._packed_weights().values()]
    for _ in range(2):
        loaded(x)
        assert [unproven(weight) for weight in packed] == [""]


def test_tensors_of_unknown_names_are_not_copied() -> None:
    """A file of 17 MB took 1.6 GB with 100 names of one tensor."""
    part = fake_quantizer(4)
    huge = torch.zeros(1).expand(1 << 45)
    assert load_each(part, {**part.state_dict(), "x": huge}) == ([], ["x"])


class Writing(nn.Module):
    """Its own code writes to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 64)  # of four panels
        self.register_buffer("seen", torch.zeros(4))
        self.also = nn.Module()
        self.also.register_buffer("seen", self.seen)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.seen.zero_()
        return y


def test_a_models_code_writes_to_no_tensor_of_a_quantized_layer(tmp_path: Path) -> None:
    """One wrote to bounds that were proved: the second call differed from other tiers'."""
    model, path = Writing().eval(), tmp_path / "m"
    torchq.save(torchq.quantize(model, [X]), path)
    tensors, metadata = read_tensors(path)
    del tensors["seen"]
    aliases = json.dumps(dict.fromkeys(("seen", "also.seen"), "layer.layer.pair_bound"))
    tensors["torchq_aliases"] = torch.tensor(list(aliases.encode()), dtype=torch.uint8)
    write_tensors("test", path, tensors, metadata)
    loaded: Any = torchq.load(path, model)
    expected = loaded(X)
    packed = list(loaded.layer.layer._packed_weights().values())
    assert [unproven(weight) for weight in packed] == [""]
    assert torch.equal(loaded(X), expected)
    assert loaded.also.seen is loaded.seen and not loaded.seen.any()


def test_results_of_a_graph_are_no_tensors_of_a_quantized_layer(tmp_path: Path) -> None:
    """The caller of a graph may write to its results."""
    model = Host(fake_quantizer(4)).eval()
    given = {f"part.{key}": value for key, value in model.part.state_dict().items()}
    given |= {"i": torch.ones(4, 3)}
    bounds, args = "layer.layer.pair_bound", [node("i")]
    path = calling(tmp_path / "m", model, args, {**given, "c": X}, "c", {"c": bounds})
    loaded: Any = torchq.load(path, model)
    loaded(X).zero_()
    packed = list(loaded.layer.layer._packed_weights().values())
    assert [unproven(weight) for weight in packed] == [""]


def test_results_of_a_graph_are_no_tensors_of_a_layer_by_a_name_of_another(tmp_path: Path) -> None:
    """Zero points of an addition were a layer's bounds, and a graph returned them."""
    model, path = nn.Sequential(nn.Linear(8, 48)).eval(), tmp_path / "m"
    torchq.save(torchq.quantize(model, [X]), path)
    tensors, metadata = read_tensors(path)
    key = next(key for key in tensors if key.endswith("torchq_graph"))
    fields = json.loads(bytes(tensors[key].tolist()))
    fields["nodes"].insert(-1, ["get_attr", "a", "a", [], {"dict": {}}, None])
    fields["nodes"].insert(-1, ["get_attr", "c", "a.zero_points", [], {"dict": {}}])
    fields["nodes"][-1][3] = [node("c")]
    tensors[key] = torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)
    add = torchq.nn.QAdd([torchq.QParams.per_tensor(1.0, 0, torch.int8)] * 2, None)
    tensors |= {f"{key}.a.{name}": value for name, value in add.state_dict().items()}
    bounds = next(name for name in tensors if name.endswith("pair_bound"))
    del tensors[f"{key}.a.zero_points"]
    aliases = json.loads(bytes(tensors["torchq_aliases"].tolist()))
    text = json.dumps({**aliases, f"{key}.a.zero_points": bounds}).encode()
    tensors["torchq_aliases"] = torch.tensor(list(text), dtype=torch.uint8)
    write_tensors("test", path, tensors, metadata)
    for given in (model, None):
        loaded: Any = torchq.load(path, given)
        result = loaded(X)
        assert torch.equal(result, tensors[bounds])
        result.zero_()
        graph: Any = loaded if given is None else dispatch_of(loaded).graph  # type: ignore[union-attr]
        layers = [part for part in graph.modules() if isinstance(part, QModule)]
        packed = [weight for part in layers for weight in part._packed_weights().values()]
        assert [unproven(weight) for weight in packed] == [""]


def test_graphs_read_no_tensor_of_a_quantized_layer(tmp_path: Path) -> None:
    """The caller of a graph may write to its results."""
    model, path = nn.Sequential(nn.Linear(8, 64)).eval(), tmp_path / "m"
    torchq.save(torchq.quantize(model, [X]), path)
    tensors, metadata = read_tensors(path)
    key = next(key for key in tensors if key.endswith("torchq_graph"))
    fields = json.loads(bytes(tensors[key].tolist()))
    bounds = "0.pair_bound"
    fields["nodes"].insert(-1, ["get_attr", "c", bounds, [], {"dict": {}}])
    fields["nodes"][-1][3] = [node("c")]
    tensors[key] = torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)
    for name in [name for name in tensors if name.startswith("0.layer.")]:
        tensors.setdefault(f"{key}.0.{name.removeprefix('0.layer.')}", tensors[name].clone())
    write_tensors("test", path, tensors, metadata)
    for given in (model, None):
        with pytest.raises(ValueError, match=f"names of Python, got '{bounds}'"):
            torchq.load(path, given)


def test_layers_share_whole_packed_weights(tmp_path: Path) -> None:
    """Another state for both gave one layer the bounds of the other: avx2 differed by 9."""
    layers, path = nn.Sequential(nn.Linear(8, 48), nn.Linear(48, 48)), tmp_path / "m"
    for layer in layers:
        nn.init.constant_(layer.weight, 0.3)
    torchq.save(torchq.quantize(layers.eval(), [X]), path)
    tensors, metadata = read_tensors(path)
    aliases = json.loads(bytes(tensors["torchq_aliases"].tolist()))
    first, second = (aliases.get(k, k) for k in (f"{i}.layer.pair_bound" for i in (0, 1)))
    assert torch.equal(tensors[first], tensors.pop(second))
    moved = {name: first if own == second else own for name, own in aliases.items()}
    text = json.dumps({**moved, second: first}).encode()
    tensors["torchq_aliases"] = torch.tensor(list(text), dtype=torch.uint8)
    write_tensors("test", path, tensors, metadata)
    for given in (layers, None):
        with pytest.raises(ValueError, match="share all of their tensors or none"):
            torchq.load(path, given)


def test_tied_layers_share_their_packed_weights(tmp_path: Path) -> None:
    layers, path = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), tmp_path / "m"
    layers[1].weight = layers[0].weight
    qmodel = torchq.quantize(layers.eval(), [X])
    torchq.save(qmodel, path)
    for given in (layers, None):
        assert torch.equal(torchq.load(path, given)(X), qmodel(X))


@pytest.mark.parametrize("name", ["0.lookup.spec", ""])
def test_a_graph_takes_all_of_its_tensors(name: str, tmp_path: Path) -> None:
    """Without the spec of its table a layer left the table out."""
    model, path = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8)).eval(), tmp_path
    torchq.save(torchq.quantize(model, [X]), path / "m")
    tensors, metadata = read_tensors(path / "m")
    assert "torchq_graph.0.lookup.table" in tensors
    if name:
        del tensors[f"torchq_graph.{name}"]
    else:
        tensors["torchq_graph.0.lookup.more.values"] = torch.ones(3)
    write_tensors("test", path / "m", tensors, metadata)
    for given in (model, None):
        with pytest.raises(RuntimeError, match=r"has \['(torchq_graph\.)?0\.lookup\..*too many"):
            torchq.load(path / "m", given)
