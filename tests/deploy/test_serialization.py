# SPDX-License-Identifier: Apache-2.0
"""torchq.save, torchq.load and torchq.explain."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import torchq
import torchq.nn as tnn
from torchq import eager
from torchq.serialization import read_state
from torchq.serialization.tensor_file import write_tensors


@functools.cache
def build(
    name: str, flow: Any = torchq, config: torchq.QConfig | None = None
) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    make, shape, _, _ = models.CASES[name]
    model, x = models.randomize(make()), torch.randn(shape)
    return model, flow.quantize(model, [x, 2 * x], x, config), x


NAMES = ["resnet", "shared_relu6", "tied", "root", "lookups", "lenet", "lstm", "stubs",
         "called_twice", "module_list"]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "flow"), [*((name, torchq) for name in NAMES), ("mul_gate", eager), ("resnet", eager)]
)
def test_round_trip(name: str, flow: Any, tmp_path: Path) -> None:
    _, converted, x = build(name, flow)
    torchq.save(converted, tmp_path / "model")
    fresh = models.randomize(models.CASES[name][0]())
    before = copy.deepcopy(fresh.state_dict())
    loaded = torchq.load(os.fspath(tmp_path / "model"), fresh)
    assert torch.equal(loaded(x), converted(x)) and not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())
    assert all(torch.equal(before[k], v) for k, v in fresh.state_dict().items())
    assert repr(loaded) == repr(converted)


def test_narrow_configurations(tmp_path: Path) -> None:
    for config in (
        torchq.QConfig(activation_bits=7),
        torchq.QConfig(activation_dtype=torch.int8, weight_granularity="per_tensor"),
    ):
        model, converted, x = build("mul_gate", torchq, config)
        torchq.save(converted, tmp_path / "model")
        loaded = torchq.load(tmp_path / "model", model)
        assert torch.equal(loaded(100 * x), converted(100 * x))


def test_module_registered_twice(tmp_path: Path) -> None:
    shared = nn.Linear(8, 8)
    model = models.Wired(
        lambda m, x: m.b(m.chain(m.again(m.a(torch.relu(x))))), a=shared, b=shared,
        chain=(chain := nn.Sequential(nn.Linear(8, 8), nn.ReLU())), again=chain,
    ).eval()  # fmt: skip
    x = torch.randn(4, 8)
    converted = eager.quantize(model, [x], x)
    assert converted.a is converted.b and isinstance(converted.a, tnn.QuantizedLeaf)
    assert converted.chain is converted.again
    torchq.save(converted, tmp_path / "model")
    loaded = torchq.load(tmp_path / "model", model)
    assert loaded.a is loaded.b and torch.equal(loaded(x), converted(x))
    assert loaded.chain is loaded.again


class Twice(nn.Module):
    """Calls a part by two names; what it asks of a value keeps the whole from being captured."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return x if float(x.sum()) > 1e9 else self.second(x)


def test_a_graph_of_two_names(tmp_path: Path) -> None:
    model, x = Twice().eval(), torch.randn(4, 8)
    qmodel = torchq.quantize(model, [x])
    assert "first" in str(torchq.explain(qmodel))
    torchq.save(qmodel, tmp_path / "model")
    loaded = torchq.load(tmp_path / "model", model)
    assert loaded.first is loaded.second
    assert torch.equal(loaded(x), qmodel(x))


def test_float_weights_of_any_strides(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()).eval()
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 6, 6)
    converted = eager.quantize(model, [x], x, overrides={"0": None})
    torchq.save(converted, tmp_path / "model")
    assert torch.equal(torchq.load(tmp_path / "model", model)(x), converted(x))


def test_float_weights_that_are_tied_in_the_file_alone(tmp_path: Path) -> None:
    """Each name gets the dtype that the model has there."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.LayerNorm(8)).eval()
    own = copy.deepcopy(model)
    own[2].double()
    model[2].weight = model[1].weight
    x = torch.randn(4, 8)
    torchq.save(eager.quantize(model, [x], x), tmp_path / "model")
    loaded = torchq.load(tmp_path / "model", own)
    assert [loaded[i].weight.dtype for i in (1, 2)] == [torch.float32, torch.float64]
    assert torch.equal(loaded[1].weight, loaded[2].weight.float())


class Kept(nn.Module):
    """Keeps tied tensors where ``nn.Module`` does not see them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.register_buffer("shift", torch.randn(16))
        self.kept = [self.table.weight, {"shift": self.shift}]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.table(x))
        x = x if float(x.sum()) < 1e9 else -x
        return x @ self.kept[0].T + self.kept[1]["shift"]  # type: ignore[call-overload]


def test_tensors_that_a_model_keeps_in_lists(tmp_path: Path) -> None:
    """They had the values of the model that was given, not of the file."""
    model, other, ids = Kept().eval(), Kept().eval(), torch.arange(16)
    given = copy.deepcopy(other.state_dict())
    converted = torchq.quantize(model, [ids])
    torchq.save(converted, tmp_path / "model")
    assert torch.equal(torchq.load(tmp_path / "model", other)(ids), converted(ids))
    assert all(torch.equal(value, given[key]) for key, value in other.state_dict().items())


def _no_leaf(layer: nn.Module) -> nn.Module:
    layer.twice = layer.weight * 2
    return layer


COMPUTED: list[Callable[[nn.Module], nn.Module]] = [
    nn.utils.weight_norm,
    nn.utils.parametrizations.weight_norm,
    partial(prune.l1_unstructured, name="weight", amount=0.5),
    _no_leaf,
]


@pytest.mark.parametrize("overrides", [None, {"b": None}])
@pytest.mark.parametrize("computed", COMPUTED)
def test_computed_weights_of_swapped_models(computed: Any, overrides: Any, tmp_path: Path) -> None:
    """``deepcopy`` refuses some, and prepare settles them: the file has their values."""
    made = [
        models.Wired(
            lambda m, x: m.n(m.b(m.a(x if x.sum() < 1e9 else -x))),
            a=nn.Linear(8, 8), b=computed(nn.Linear(8, 8)), n=computed(nn.LayerNorm(8)),
        ).eval()
        for _ in range(2)
    ]  # fmt: skip
    x = torch.randn(4, 8)
    converted = torchq.quantize(made[0], [x], x, overrides=overrides)
    torchq.save(converted, tmp_path / "model")
    for model in made:
        assert torch.equal(torchq.load(tmp_path / "model", model)(x), converted(x))


ENCODER = partial(nn.TransformerEncoderLayer, 16, 2, 32, batch_first=True)


@pytest.mark.parametrize("make", [ENCODER, lambda: nn.TransformerEncoder(ENCODER(), 2)])
def test_swapped_encoders_have_no_fast_path(make: Any, tmp_path: Path) -> None:
    """It would read float weights, which are not there after loading either."""
    model, x = make().eval(), torch.randn(2, 5, 16)
    converted = eager.quantize(model, [x], x)
    torchq.save(converted, tmp_path / "model")
    for guard in (torch.no_grad, torch.enable_grad):
        with guard():
            assert torch.equal(torchq.load(tmp_path / "model", model)(x), converted(x))


def test_shapes_of_computed_weights(tmp_path: Path) -> None:
    """Each loaded layer answers for itself."""
    norm = nn.utils.parametrizations.weight_norm
    model = models.Wired(
        lambda m, x: m.c(m.b(m.a(x))) * m.b.weight.shape[0] + m.c.weight.shape[0],
        a=norm(nn.Linear(8, 16)), b=norm(nn.Linear(16, 24)), c=norm(nn.Linear(24, 5)),
    ).eval()  # fmt: skip
    x = torch.randn(4, 8)
    converted = eager.quantize(model, [x], x)
    torchq.save(converted, tmp_path / "model")
    loaded = torchq.load(tmp_path / "model", model)
    assert torch.equal(loaded(x), converted(x)) and loaded.a.weight is not loaded.b.weight


class OldNames(nn.Module):
    """Reads and writes files of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x if x.sum() < 1e9 else -x)

    def state_dict(self) -> Any:  # type: ignore[override]
        return {f"old.{name}": value for name, value in super().state_dict().items()}

    def load_state_dict(self, state: Any, strict: bool = True) -> None:  # type: ignore[override]
        super().load_state_dict({n.removeprefix("old."): v for n, v in state.items()}, strict)


def test_models_with_a_state_dict_of_their_own(tmp_path: Path) -> None:
    model, x = OldNames().eval(), torch.randn(4, 8)
    converted = torchq.quantize(model, [x], x)
    torchq.save(converted, tmp_path / "model")
    assert torch.equal(torchq.load(tmp_path / "model", model)(x), converted(x))


def test_file_is_small(tmp_path: Path) -> None:
    """Weights are bytes, and calibration is not saved."""
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).eval()
    x = torch.randn(4, 512)
    torchq.save(eager.quantize(model, [x], x), tmp_path / "model")
    assert (tmp_path / "model").stat().st_size < 1.1 * 512 * 512 * 2


def test_errors(tmp_path: Path) -> None:
    model, converted, _ = build("module_list")
    path = tmp_path / "model"
    with pytest.raises(FileNotFoundError, match=r"torchq.load: .*absent does not exist"):
        torchq.load(tmp_path / "absent", model)
    torchq.save(converted, path)
    with pytest.raises(ValueError, match=r"'layers.0' is a Conv2d in the file, not in the model"):
        torchq.load(path, nn.ModuleDict({"a": nn.Linear(8, 4)}))
    larger = copy.deepcopy(model)
    larger.more = nn.Linear(4, 4)
    with pytest.raises(
        ValueError, match=r"'more.weight' is \[4, 4\] in the model, not in the file"
    ):
        torchq.load(path, larger)
    state = read_state(path)
    text = bytes(state["layers.0.layer.spec"].tolist())
    for wrong, message in (
        (text.replace(b"QConv2d", b"QNonsense"), "class must be one of .*'QNonsense'"),
        (b"[1]", r"spec must be the JSON text of a torchq module, got b'\[1\]'"),
        (text.replace(b'"version":1', b'"version":9'), "has spec .*but this module is"),
    ):
        state["layers.0.layer.spec"] = torch.tensor(list(wrong), dtype=torch.uint8)
        write_tensors("test", path, state)
        with pytest.raises((ValueError, RuntimeError), match=message):
            torchq.load(path, model)


def test_exporting_does_not_disturb_loading(tmp_path: Path) -> None:
    """torch.export subclasses the modules it traces."""
    qparams = torchq.QParams.per_tensor(0.1)
    module = tnn.QLinear.from_float(nn.Linear(8, 4), qparams)
    torch.export.export(module, (torch.zeros(2, 8),))
    torchq.save(module, tmp_path / "file")
    loaded = torchq.load(tmp_path / "file", nn.Linear(8, 4))
    assert type(loaded) is tnn.QLinear


class Given(nn.Module):
    """Acts on values, so that it is not traced, and is given a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        return x if x.sum() > 1e9 else self.a(x) + layer(x)


class Giver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.given, self.layer, self.head = Given(), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[1] / 2
        return self.head(self.given(x, self.layer) if half.is_integer() else x)


def test_modules_as_arguments(tmp_path: Path) -> None:
    model, x = Giver().eval(), torch.randn(2, 6, 8)
    converted = torchq.quantize(model, [x], x)
    torchq.save(converted, tmp_path / "model")
    assert torch.equal(torchq.load(tmp_path / "model", Giver())(x), converted(x))


def test_complex_numbers_in_the_graph(tmp_path: Path) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        wave = torch.exp(m.a(x) * 1j) * (0.5 - 2j)
        return wave.real + wave.imag

    model, x = models.Wired(forward, a=nn.Linear(8, 4)).eval(), torch.rand(4, 8)
    quantized = torchq.quantize(model, [x], x)
    torchq.save(quantized, tmp_path / "m")
    assert torch.equal(torchq.load(tmp_path / "m")(x), quantized(x))


def test_functions_of_private_names(tmp_path: Path) -> None:
    """The call of an antialiased interpolation is ``_upsample_bicubic2d_aa``."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.interpolate(m.a(x), (5, 5), mode="bicubic", antialias=True)
        return m.b(x)

    model = models.Wired(forward, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 4, 1)).eval()
    x = torch.randn(2, 3, 10, 12)
    quantized = torchq.quantize(model, [x], x)
    torchq.save(quantized, tmp_path / "m")
    assert torch.equal(torchq.load(tmp_path / "m")(x), quantized(x))
    assert torch.equal(torch.jit.script(quantized)(x), quantized(x))


class Gridded(nn.Module):
    """A grid from a list of ranges, as detectors make it, and an entry that a dict may lack."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x, mask = self.conv(batch["x"]), batch.get("mask")
        sizes = [torch.arange(x.shape[2]), torch.arange(x.shape[3])]
        rows, columns = torch.meshgrid(sizes, indexing="ij")
        x = x + rows - columns
        return x if mask is None else x * mask


@pytest.mark.parametrize("masked", [False, True])
def test_lists_of_ranges_and_entries_of_dicts(masked: bool, tmp_path: Path) -> None:
    batch = {"x": torch.randn(2, 3, 9, 7)} | ({"mask": torch.ones(1, 8, 1, 1)} if masked else {})
    converted = torchq.quantize(Gridded().eval(), [(batch,)])
    torchq.save(converted, tmp_path / "model")
    graph, loaded = torchq.load(tmp_path / "model"), torchq.load(tmp_path / "model", Gridded())
    for x in (batch["x"], torch.randn(1, 3, 12, 20)):
        given = {**batch, "x": x}
        assert torch.equal(loaded(given), converted(given))
        assert torch.equal(graph(*given.values()), converted(given))


def _images() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 5), nn.Softmax(-1))


@pytest.mark.parametrize(
    ("make", "shape"), [(_images, (2, 3, 9, 9)), (partial(nn.LSTM, 8, 8), (5, 2, 8))]
)
def test_deferred_initialization(make: Any, shape: tuple[int, ...]) -> None:
    """On meta with ``assign``, and in memory that has no values yet."""
    x = torch.randn(shape)
    nets = [torchq.quantize(make().eval(), [k * x], x) for k in (1, 3)]
    meta, empty = copy.deepcopy(nets[1]).to("meta"), copy.deepcopy(nets[1]).to("meta")
    meta.load_state_dict(nets[0].state_dict(), assign=True)
    empty = empty.to_empty(device="cpu")
    for tensor in empty.buffers():
        tensor.view(-1).view(torch.uint8).fill_(0xF7)
    empty.load_state_dict(nets[0].state_dict())
    expected = torch.utils._pytree.tree_leaves(nets[0](x))
    for loaded in (meta, empty):
        for a, b in zip(torch.utils._pytree.tree_leaves(loaded(x)), expected, strict=True):
            assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match=r"has spec .* but this module is"):
        empty.load_state_dict({n: v.flip(0) if n.endswith("spec") else v
                               for n, v in nets[0].state_dict().items()})  # fmt: skip
