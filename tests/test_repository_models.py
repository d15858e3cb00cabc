# SPDX-License-Identifier: Apache-2.0
"""Models as other people write them: untouched through quantize, and everything after it."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import repository_computed  # noqa: F401
import repository_sequences  # noqa: F401
import repository_styles  # noqa: F401
import torch
from flows import sqnr, tensors
from repository import MODELS
from repository_models import Options, Output
from repository_vision import Swish
from torch import Tensor, fx, nn

import torchq

# What torch itself cannot do with such a model.
NOT_SCRIPTED: set[str] = set()


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


@pytest.mark.parametrize("name", MODELS)
def test_converts(name: str, converted: Any) -> None:
    """Its convolutions and linears are int8, and it computes what the model does."""
    model, quantized, inputs = converted(name)
    rows = torchq.explain(quantized).rows
    matmuls = [row for row in rows if row.is_matmul]
    assert (sum(r.quantized for r in matmuls), len(matmuls)) == MODELS[name][2:]
    assert all(row.reason for row in rows if not row.quantized)
    with torch.no_grad():
        for given in (inputs, first(inputs)):
            want, got = call(model, given), call(quantized, given)
            assert len(want) == len(got)
            assert all(sqnr(a, b) > 24 for a, b in zip(want, got, strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_goes_everywhere(name: str, converted: Any, tmp_path: Path) -> None:
    _, quantized, inputs = converted(name)
    want = call(quantized, inputs)
    assert same(want, call(copy.deepcopy(quantized), inputs))
    assert same(want, call(pickle.loads(pickle.dumps(quantized)), inputs))
    buffer = io.BytesIO()
    torch.save(quantized, buffer)
    buffer.seek(0)
    assert same(want, call(torch.load(buffer, weights_only=False), inputs))
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    args = args if isinstance(args, tuple) else (args,)
    assert same(want, call(torch.export.export(quantized, args, kwargs).module(), inputs))
    if name not in NOT_SCRIPTED:
        assert same(want, call(torch.jit.script(quantized), inputs))
    torchq.save(quantized, tmp_path / "model")
    loaded = torchq.load(tmp_path / "model")  # needs no float model
    assert same(want, call(loaded, inputs))
    assert str(torchq.explain(loaded)) == str(torchq.explain(quantized))


def test_results_keep_their_class(converted: Any, tmp_path: Path) -> None:
    _, quantized, inputs = converted("siamese")
    assert type(quantized(*inputs)) is Output
    torchq.save(quantized, tmp_path / "model")
    assert type(torchq.load(tmp_path / "model")(*inputs)) is Output
    state = torchq.serialization.read_state(tmp_path / "model")
    text = bytes(state["torchq_graph"].tolist()).replace(
        b"class:repository_models:Output", b"class:subprocess:Popen"
    )
    state["torchq_graph"] = torch.tensor(list(text), dtype=torch.uint8)
    torch.save(state, tmp_path / "other")
    with pytest.raises(ValueError, match=r"returns a subprocess.Popen, a tuple, dict or dataclass"):
        torchq.load(tmp_path / "other")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mask": torch.zeros(2, 8)}, "was None, got a tensor"),
        ({"mode": "mean"}, "was sum, got mean"),
        ({"t": 0.25}, "was 0.5, got 0.25"),
    ],
)
def test_arguments_that_the_graph_does_not_look_at(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """A mask that is given after all must not be ignored."""

    class Options(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(
            self, x: Tensor, mask: Tensor | None = None, mode: str = "mean", t: float = 1.0
        ) -> Tensor:
            y = self.a(x)
            y = self.b(y if mask is None else y * mask) * t
            return y.sum(1) if mode == "sum" else y.mean(1)

    inputs = {"x": torch.randn(2, 8), "mask": None, "mode": "sum", "t": 0.5}
    model = Options().eval()
    quantized = torchq.quantize(model, [inputs], inputs)
    torchq.save(quantized, tmp_path / "model")
    loaded = torchq.load(tmp_path / "model")
    with torch.no_grad():
        assert sqnr(model(**inputs), quantized(**inputs)) > 24
    for other in (quantized, loaded, torch.jit.script(quantized), torch.jit.script(loaded)):
        assert torch.equal(other(**inputs), quantized(**inputs))
        with pytest.raises((RuntimeError, torch.jit.Error), match=message):
            other(**(inputs | changed))


def test_sizes_that_values_decide_about() -> None:
    """What the code does with the number of pixels above zero holds for one image only."""

    class Selects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            found = y.permute(0, 2, 3, 1)[y.mean(1) > 0]
            return y.new_zeros(1, 2) if found.shape[0] < 9 else self.b(found)

    model, data = Selects().eval(), [torch.randn(2, 3, 8, 8) for _ in range(3)]
    with pytest.warns(UserWarning, match="its Python code acts on values in a tensor"):
        quantized = torchq.quantize(model, data, data[0])
    assert all(row.quantized for row in torchq.explain(quantized).rows if row.is_matmul)
    for x in data:
        quantized(x)  # none of them raises


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
    with pytest.raises(RuntimeError, match=r"1\.0: it is a part of 1: TorchScript compiled it"):
        torchq.quantize(model, [x], x, strict=True)


def test_sizes_that_a_condition_was_true_for() -> None:
    model, x = Options().eval(), torch.randn(2, 8, 15, 15)
    quantized = torchq.quantize(model, [x])
    with pytest.raises(RuntimeError, match="traced where a size or condition was"):
        quantized(torch.randn(2, 8, 16, 16))


def test_modules_of_a_file_are_of_torch(tmp_path: Path) -> None:
    x = torch.randn(2, 8)
    torchq.save(
        torchq.quantize(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).eval(), [x], x),
        tmp_path / "model",
    )
    state = torchq.serialization.read_state(tmp_path / "model")
    text = bytes(state["torchq_graph"].tolist()).replace(b'"LayerNorm"', b'"Transformer9"')
    state["torchq_graph"] = torch.tensor(list(text), dtype=torch.uint8)
    torch.save(state, tmp_path / "other")
    with pytest.raises(ValueError, match=r"must be of torch.nn, got 'Transformer9'"):
        torchq.load(tmp_path / "other")


def test_threads_may_run_models_while_one_is_traced() -> None:
    """Tracing replaces functions of torch; other threads do not notice."""
    other, x = nn.Sequential(nn.Linear(8, 8), Swish(), nn.Linear(8, 8)).eval(), torch.randn(4, 8)
    with torch.no_grad():
        want = other(x)
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            while not done.is_set():
                with torch.no_grad():
                    assert torch.equal(other(x) + torch.zeros(4, 8), want)
        except BaseException as error:
            errors.append(error)

    def trace() -> None:
        try:
            torchq.prepare(models.randomize(MODELS["unet"][0]()), torch.randn(1, 3, 16, 16))
        except BaseException as error:
            errors.append(error)

    zeros, call_module = torch.zeros, nn.Module.__call__
    threads = [threading.Thread(target=trace) for _ in range(2)]
    runner = threading.Thread(target=run)
    for thread in (runner, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    runner.join()
    assert not errors, errors
    assert torch.zeros is zeros and nn.Module.__call__ is call_module


def with_cache(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adds a keyword that was left out, as decorators of transformers do."""

    @functools.wraps(forward)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("use_cache") is None:
            kwargs["use_cache"] = False
        return forward(self, *args, **kwargs)

    return wrapper


def test_decorators_may_add_keywords() -> None:
    """Tracing calls the model as its example does: what is given by keyword is not by position."""

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
        assert isinstance(converted, fx.GraphModule)
        with torch.no_grad():
            assert sqnr(model(**inputs), converted(**inputs)) > 30


def test_threads_may_make_tuples_while_a_model_is_traced() -> None:
    """``tuple(generator)`` raises where somebody else has a reference to its unfinished tuple."""
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        while not done.is_set():
            try:
                tuple(i for i in range(200))
            except BaseException as error:
                errors.append(error)

    runner = threading.Thread(target=run)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        runner.start()
        for _ in range(5):
            torchq.prepare(nn.Linear(4, 4).eval(), torch.randn(2, 4))
    finally:
        sys.setswitchinterval(interval)
        done.set()
        runner.join()
    assert not errors, errors


def test_a_view_that_is_written_to_reaches_its_source() -> None:
    """``view`` becomes ``reshape``, which may copy: not here."""

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(3, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            y.view(y.size(0), -1).mul_(2)
            return y

    x = torch.randn(2, 3, 8, 8)
    model = Written().eval()
    converted = torchq.quantize(model, [x], x)
    with torch.no_grad():
        assert sqnr(model(x), converted(x)) > 30


def test_modules_forget_what_was_traced() -> None:
    """A submodule that keeps its last result, and one that keeps all of them."""

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
    converted = torchq.quantize(model, [x], x)
    with torch.no_grad():
        assert sqnr(model(x), converted(x)) > 30
