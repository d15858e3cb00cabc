# SPDX-License-Identifier: Apache-2.0
"""Models as other people write them: untouched through quantize, and everything after it."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import repository_computed  # noqa: F401
import repository_sequences  # noqa: F401
import repository_styles  # noqa: F401
import repository_vision  # noqa: F401
import torch
from flows import sqnr, tensors
from repository import MODELS
from repository_models import Options, Output
from torch import Tensor, nn

import torchq
from tests.support.slow import rest_slow
from torchq.models.attached import graphs_of

# Parts that have graphs, where torch.export does not capture the whole.
PARTS = {
    "translation": ["body.encoder", "body.decoder.layers.0"],
    "attempts": [],
    "grouped_experts": [],
}
# One of each kind of result, argument and layer; the others differ in nothing that is deployed.
DEPLOYED = ("siamese", "functional", "bert", "text_cnn", "patches", "unet_bilinear", "gpt")


def call(model: nn.Module, inputs: Any) -> list[Tensor]:
    if isinstance(inputs, dict):
        return tensors(model(**inputs))
    return tensors(model(*inputs) if isinstance(inputs, tuple) else model(inputs))


def first(inputs: Any) -> Any:
    """The first of a batch."""
    return torch.utils._pytree.tree_map(lambda x: x[:1], inputs)


@pytest.fixture(scope="module")
def converted() -> Callable[[str], tuple[nn.Module, nn.Module, Any]]:
    done: dict[str, tuple[nn.Module, nn.Module, Any]] = {}

    def get(name: str) -> tuple[nn.Module, nn.Module, Any]:
        if name not in done:
            torch.manual_seed(0)
            make, inputs, _, _ = MODELS[name]
            model, data = models.randomize(make()), [inputs() for _ in range(3)]
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                done[name] = model, torchq.quantize(model, data, data[0]), data[1]
        return done[name]

    return get


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize(
    "name",
    rest_slow(MODELS, *DEPLOYED),
)
def test_converts(name: str, converted: Any) -> None:
    """Its convolutions and linears are int8, and it computes what the model does."""
    model, quantized, inputs = converted(name)
    assert type(quantized) is type(model)
    rows = torchq.explain(quantized).rows
    matmuls = [row for row in rows if row.is_matmul]
    assert (sum(r.quantized for r in matmuls), len(matmuls)) == MODELS[name][2:]
    assert all(row.reason for row in rows if not row.quantized)
    graphs = dict(graphs_of(quantized))
    assert list(graphs) == PARTS.get(name, [""])
    with torch.no_grad():
        for given in (inputs, first(inputs)):
            want, got = call(model, given), call(quantized, given)
            assert len(want) == len(got)
            assert all(sqnr(a, b) > 24 for a, b in zip(want, got, strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DEPLOYED)
def test_goes_everywhere(name: str, converted: Any, tmp_path: Path) -> None:
    model, quantized, inputs = converted(name)
    want = call(quantized, inputs)
    assert same(want, call(copy.deepcopy(quantized), inputs))
    assert same(want, call(pickle.loads(pickle.dumps(quantized)), inputs))
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    args = args if isinstance(args, tuple) else (args,)
    assert same(want, call(torch.export.export(quantized, args, kwargs).module(), inputs))
    torchq.save(quantized, tmp_path / "model")
    loaded = torchq.load(tmp_path / "model", model)
    assert same(want, call(loaded, inputs))
    assert torchq.explain(loaded).rows == torchq.explain(quantized).rows
    if name != "patches":  # a graph alone takes tensors, and no list of them
        assert same(want, call(torch.jit.script(quantized), inputs))
        assert same(want, call(torchq.load(tmp_path / "model"), inputs))


def test_results_keep_their_class(converted: Any, tmp_path: Path) -> None:
    model, quantized, inputs = converted("siamese")
    torchq.save(quantized, tmp_path / "model")
    for other in (quantized, torchq.load(tmp_path / "model", model)):
        assert type(other(*inputs)) is Output


class Arguments(nn.Module):
    """Arguments of each kind that a caller may omit or change."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, mode: str = "mean", t: float = 1.0
    ) -> Tensor:
        y = self.a(x)
        y = self.b(y if mask is None else y * mask) * t
        return y.sum(1) if mode == "sum" else y.mean(1)


@pytest.mark.parametrize("changed", [{"mask": torch.rand(2, 8, 8)}, {"mode": "mean"}, {"t": 0.25}])
def test_other_arguments_than_the_example_has(changed: dict[str, Any]) -> None:
    """A mask that is given after all must not be ignored; the model's own code sees it."""
    inputs = {"x": torch.randn(2, 8, 8), "mask": None, "mode": "sum", "t": 0.5}
    model = Arguments().eval()
    quantized = torchq.quantize(model, [inputs], inputs)
    with torch.no_grad():
        assert sqnr(model(**inputs), quantized(**inputs)) > 24
        with pytest.warns(UserWarning, match="does not run its int8 graph"):
            got = quantized(**(inputs | changed))
        assert sqnr(model(**(inputs | changed)), got) > 24


def test_sizes_that_values_decide_about() -> None:
    """A branch on the number of pixels above zero holds for one image only."""

    class Selects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            found = y.permute(0, 2, 3, 1)[y.mean(1) > 0]
            return y.new_zeros(1, 2) if found.shape[0] < 9 else self.b(found)

    model, data = Selects().eval(), [torch.randn(2, 3, 8, 8) for _ in range(3)]
    quantized = torchq.quantize(model, data, data[0], strict=True)
    assert "is not captured" in str(torchq.explain(quantized))
    for x in data:
        with torch.no_grad():
            assert quantized(x).shape[1] == 2


def test_a_part_that_torchscript_compiled() -> None:
    """It stays float; its convolutions are counted."""
    se = nn.Sequential(nn.Conv2d(8, 4, 1), nn.ReLU(), nn.Conv2d(4, 8, 1))
    model = nn.Sequential(nn.Conv2d(3, 8, 3), torch.jit.script(se), nn.Conv2d(8, 4, 1)).eval()
    x = torch.randn(2, 3, 8, 8)
    quantized = torchq.quantize(model, [x], x)
    rows = {row.name: row for row in torchq.explain(quantized).rows if row.is_matmul}
    assert [name for name, row in rows.items() if not row.quantized] == ["1.0", "1.2"]
    assert rows["1.2"].kind == "Conv2d" and "TorchScript compiled it" in rows["1.2"].reason
    with torch.no_grad():
        assert sqnr(model(x), quantized(x)) > 30
    with pytest.raises(RuntimeError, match=r"1\.0: TorchScript compiled it"):
        torchq.quantize(model, [x], x, strict=True)


def test_sizes_that_decide_otherwise() -> None:
    """An odd size is padded, an even one is not: one of them is the graph's."""
    model, x = Options().eval(), torch.randn(2, 8, 15, 15)
    quantized = torchq.quantize(model, [x])
    for size in (15, 16, 9, 30):
        other = torch.randn(2, 8, size, size)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pairs = zip(model(other), quantized(other), strict=True)
            assert all(sqnr(a, b) > 24 for a, b in pairs)


def with_cache(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adds a keyword that was left out, as decorators of transformers do."""

    @functools.wraps(forward)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("use_cache") is None:
            kwargs["use_cache"] = False
        return forward(self, *args, **kwargs)

    return wrapper


def test_decorators_may_add_keywords() -> None:
    class Decorated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        @with_cache
        def forward(self, x: Tensor, mask: Tensor | None = None, use_cache: Any = None) -> Tensor:
            y = self.a(x).relu()
            return y if mask is None else y * mask

    model, x, mask = Decorated().eval(), torch.randn(4, 8), torch.rand(4, 1)
    for inputs in ({"x": x}, {"x": x, "mask": mask}, {"mask": mask, "x": x}):
        converted = torchq.quantize(model, [inputs])
        assert "" in dict(graphs_of(converted))
        with torch.no_grad():
            assert sqnr(model(**inputs), converted(**inputs)) > 30


def test_modules_that_keep_results() -> None:
    """A submodule that keeps its last result, and all of them: it has no graph."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.last, self.all = nn.Linear(8, 8), None, []

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            if self.last is not None:
                x = x + 0 * self.last
            self.last = x
            self.all.append(x)
            return x

    x = torch.randn(2, 8)
    model = nn.Sequential(Keeps(), nn.ReLU(), nn.Linear(8, 4)).eval()
    converted = torchq.quantize(model, [x], x, strict=True)
    assert converted[0].last is None and not converted[0].all
    with torch.no_grad():
        assert sqnr(model(x), converted(x)) > 30
    assert len(converted[0].all) == 1


def test_what_a_first_call_works_out(converted: Any) -> None:
    """Codes of positions that a module makes once, and anew for longer inputs."""
    model, quantized, _ = converted("speech")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for length in (25, 40, 90, 33):
            inputs = torch.randn(2, length, 16), torch.tensor([4, 3])
            assert sqnr(model(*inputs), quantized(*inputs)) > 24
