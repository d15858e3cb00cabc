# SPDX-License-Identifier: Apache-2.0
"""What a model's Python code asks about dtypes, and about being one tensor: as in the example."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flows import sqnr
from torch import Tensor, nn

import torchq


class Model(nn.Module):
    """Two layers, behind code that asks."""

    def __init__(self, code: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.code = nn.Linear(8, 8), nn.Linear(8, 8), [code]
        self.embedding = nn.Embedding(256, 8)

    def forward(self, x: Any) -> Tensor:
        y: Tensor = self.b(self.a(self.code[0](self, x)))
        return y


def by_dtype(m: Model, x: Tensor) -> Tensor:
    return x.float() / 255 if x.dtype == torch.uint8 else x.float()


def by_method(m: Model, x: Tensor) -> Tensor:
    return x.float() if x.is_floating_point() else x / 255


def by_function(m: Model, x: Tensor) -> Tensor:
    return x.float() if torch.is_floating_point(x) else x / 255


def by_size(m: Model, x: Tensor) -> Tensor:
    return x / 255 if x.element_size() == 1 else x.float()


def by_name(m: Model, x: Tensor) -> Tensor:
    return x / 255 if x.type() == "torch.ByteTensor" else x.float()


def of_a_result(m: Model, x: Tensor) -> Tensor:
    return x.float() if (x + 1).dtype == torch.float32 else x / 255


def of_items(m: Model, x: dict[str, list[Tensor]]) -> Tensor:
    return by_dtype(m, x["images"][0])


def of_an_item(m: Model, x: dict[str, Tensor]) -> Tensor:
    given = x.get("image")
    assert given is not None
    return by_method(m, given)


CODES = [by_dtype, by_method, by_function, by_size, by_name, of_a_result]
IMAGES = torch.randint(
    0, 256, (4, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)


def given(code: Callable[..., Tensor], x: Tensor) -> Any:
    return {of_items: {"images": [x]}, of_an_item: {"image": x}}.get(code, x)


@pytest.mark.parametrize("example", [torch.float32, torch.uint8])
@pytest.mark.parametrize("code", [*CODES, of_items, of_an_item])
def test_other_dtypes_raise(code: Callable[..., Tensor], example: torch.dtype) -> None:
    """They went the way of the example, without dividing by 255, say."""
    torch.manual_seed(0)
    model = Model(code).eval().requires_grad_(False)
    source = given(code, IMAGES.to(example))
    result = torchq.quantize(model, [(source,)])
    assert isinstance(result, torch.fx.GraphModule)
    assert sqnr(model(source), result(source)) > 25
    for dtype in {torch.float32, torch.uint8, torch.int64, torch.float64} - {example}:
        with pytest.raises(RuntimeError, match=rf"a tensor of {example}, got one of {dtype}"):
            result(given(code, IMAGES.to(dtype)))


def test_integers_behind_an_embedding() -> None:
    def code(m: Model, x: Tensor) -> Tensor:
        found = m.embedding(x)
        return found + torch.zeros(8, dtype=found.dtype)

    torch.manual_seed(0)
    model = Model(code).eval().requires_grad_(False)
    result = torchq.quantize(model, [IMAGES.long()])
    assert torch.equal(result(IMAGES.long()), result(IMAGES.int()))


def test_questions_leave_the_layers_int8(tmp_path: Path) -> None:
    """And the guard goes wherever the model does."""
    torch.manual_seed(0)
    float_model = Model(lambda m, x: x.to(x.dtype)).eval().requires_grad_(False)
    source = torch.randn(4, 8)
    model = torchq.quantize(float_model, [source])
    assert (
        "a.dst" in str(torchq.explain(model)) or model.get_submodule("a").dst_dtype != torch.float
    )
    torchq.save(model, tmp_path / "model")
    ways = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.jit.script(model)]
    ways += [torchq.load(tmp_path / "model", Model(float_model.code[0]).eval())]
    for way in ways:
        assert torch.equal(way(source), model(source))
        with pytest.raises((RuntimeError, torch.jit.Error), match=r"a tensor of"):
            way(source.double())
    exported = torch.export.export(model, (source,)).module()
    assert torch.equal(exported(source), model(source))


def test_one_tensor_given_twice() -> None:
    """Code may ask whether two arguments are one tensor: the example's are when it is traced."""

    class Asks(Model):
        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            y: Tensor = self.a(query) if query is key else self.b(key)
            return y

    torch.manual_seed(0)
    model = Asks(lambda m, x: x).eval().requires_grad_(False)
    x, other = torch.randn(4, 8), torch.randn(4, 8)
    with pytest.warns(UserWarning, match="modules are swapped"):
        prepared = torchq.prepare(model, (x, x))
    for given in ((x, x), (x, other)):
        torch.testing.assert_close(prepared(*given), model(*given))


@pytest.mark.parametrize("dynamic", [False, True])
def test_casts_of_what_is_float_already_are_kept(dynamic: bool) -> None:
    """The next call may give another dtype: 20 times an uint8 wraps around."""
    casts: list[Callable[[Tensor], Tensor]] = [lambda x: x.to(torch.float32), lambda x: x.float()]
    for cast in casts:
        model = Model(lambda m, x, cast=cast: cast(x) * 20 / 4000).eval()
        x, given = torch.rand(4, 8) * 200, (torch.rand(4, 8) * 200).to(torch.uint8)
        converted = torchq.quantize(model, [x], x, torchq.QConfig(dynamic=dynamic))
        assert torch.equal(converted(given), converted(given.float()))
