# SPDX-License-Identifier: Apache-2.0
"""Arguments that a call leaves out, and as many as there may be: none takes another one's place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flows import sqnr
from torch import Tensor, fx, nn

import torchq

ERRORS = (RuntimeError, TypeError, torch.jit.Error)
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Rest(nn.Module):
    """An argument by keyword behind as many as there may be."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor, *rest: Tensor, y: Tensor | None = None) -> Tensor:
        for part in rest:
            x = x * part
        return self.a(x if y is None else x + y)


def test_one_more_of_args_is_not_taken_for_a_keyword() -> None:
    model, y = Rest().eval(), torch.randn(4, 8)
    converted = torchq.quantize(model, [{"x": X, "y": y}])
    with torch.no_grad():
        assert sqnr(model(X, y=y), converted(X, y=y)) > 30
        assert sqnr(model(X, y), converted(X, y)) > 25
    assert isinstance(torchq.quantize(model, [(X, y)]), fx.GraphModule)


class LeftOut(nn.Module):
    """Arguments in the middle that a call may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(
        self, x: Tensor, mask: Any = None, y: Any = None, flag: Any = None, scale: float = 1.0
    ) -> Tensor:
        x = self.a(x) if mask is None else self.a(x) * mask
        x = x if y is None else x + y
        return x * scale if flag else x


def ways(
    model: nn.Module, given: dict[str, Any], folder: Path
) -> tuple[nn.Module, list[nn.Module]]:
    """The float model, and the converted one: itself, loaded, scripted."""
    converted = torchq.quantize(model, [given])
    torchq.save(converted, folder / "model")
    loaded = torchq.load(folder / "model")
    return model, [converted, loaded, torch.jit.script(converted)]


@pytest.mark.parametrize("flag", [{}, {"flag": True}, {"flag": 2}, {"flag": "a"}, {"flag": 2.5}])
def test_no_argument_takes_the_place_of_one_left_out(flag: dict[str, Any], tmp_path: Path) -> None:
    """A second tensor by position is the mask, as in the float model, and not ``y``."""
    model, converted = ways(LeftOut().eval(), {"x": X, "y": X, **flag}, tmp_path)
    for found in converted:
        for args, kwargs in (
            ((X,), {"y": X, **flag}),
            ((X, None, X), flag),
            ((X, None, X, *flag.values()), {}),
            ((X, None, X), {**flag, "scale": 1.0}),
        ):
            assert sqnr(model(*args, **kwargs), found(*args, **kwargs)) > 25
        for args, kwargs, message in (
            ((X, X), flag, "was None, got a tensor"),
            ((X, X, X), flag, "was None, got a tensor"),
            ((X,), flag, "was traced with 'y'.*got None"),
            ((X, None, X), {**flag, "scale": 2.0}, r"was 1.*, got 2"),
        ):
            with pytest.raises(ERRORS, match=message):
                found(*args, **kwargs)
        if flag:
            with pytest.raises(ERRORS, match=f"was {flag['flag']}, got None"):
                found(X, None, X)


def test_arguments_behind_the_given_ones(tmp_path: Path) -> None:
    """They are the model's own, too: their defaults are taken, other values are refused."""
    model, converted = ways(LeftOut().eval(), {"x": X}, tmp_path)
    for found in converted:
        for args in ((X,), (X, None), (X, None, None), (X, None, None, None, 1.0)):
            assert sqnr(model(*args), found(*args)) > 25
        for args, message in (
            ((X, X), "was None, got a tensor"),
            ((X, None, X), "was None, got a tensor"),
            ((X, None, None, None, 2.0), r"was 1.*, got 2"),
        ):
            with pytest.raises(ERRORS, match=message):
                found(*args)


def test_a_default_without_a_literal() -> None:
    """Behind what is given it is no argument, in the middle it is."""

    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor, by: Any = (1, 2), y: Any = None) -> Tensor:
            x = self.a(x) * by[1]
            return x if y is None else x + y

    model = Sized().eval()
    converted = torchq.quantize(model, [X])
    assert sqnr(model(X), converted(X)) > 25
    torch.jit.script(converted)
    converted = torchq.quantize(model, [{"x": X, "y": X}])
    assert sqnr(model(X, (1, 2), X), converted(X, (1, 2), X)) > 25
    with pytest.raises(RuntimeError, match=r"was \(1, 2\), got \(1, 3\)"):
        converted(X, (1, 3), X)
    with pytest.raises(RuntimeError):
        converted(X, X)
