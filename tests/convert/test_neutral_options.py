# SPDX-License-Identifier: Apache-2.0
"""Options of a call that change nothing take the graph, such as ``return_dict=True``."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from flows import MISSES, calls, sqnr
from torch import Tensor, nn

import torchq


class Keywords(nn.Module):
    """A model that takes options as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, **options: Any) -> Any:
        hidden = torch.relu(self.up(x))
        result = self.down(hidden)
        if options.get("output_hidden_states"):
            return {"y": result, "hidden": hidden}
        return {"y": result} if options.get("return_dict", True) in (None, True) else (result,)


class Named(Keywords):
    """The same with options that forward names."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        keywords = {} if return_dict is None else {"return_dict": return_dict}
        return super().forward(x, output_hidden_states=output_hidden_states, **keywords)


USUAL = ({"return_dict": True}, {"output_hidden_states": False}, {"return_dict": None})
OTHERS = ({"return_dict": False}, {"output_hidden_states": True})


@pytest.mark.parametrize("model", [Keywords(), Named()], ids=["keywords", "named"])
@pytest.mark.parametrize("given", [{}, {"return_dict": True}], ids=["plain", "given"])
@pytest.mark.filterwarnings(f"ignore:.*{MISSES}")
def test_options_that_change_nothing_take_the_graph(
    model: nn.Module, given: dict[str, Any], tmp_path: Path
) -> None:
    model.eval()
    x = torch.randn(4, 8)
    converted = torchq.quantize(model, [{"x": x, **given}])
    path = tmp_path / "model.safetensors"
    torchq.save(converted, path)
    for other in (converted, pickle.loads(pickle.dumps(converted)), torchq.load(path, model)):
        for options in ({}, *USUAL):
            assert sqnr(model(x, **options)["y"], other(x, **options)["y"]) > 25
        assert calls(other) == (4, 0)
        assert isinstance(other(x, return_dict=False), tuple)
        assert other(x, output_hidden_states=True)["hidden"].shape == (4, 16)
        assert calls(other) == (4, 2)


def test_the_warning_names_the_option() -> None:
    x = torch.randn(4, 8)
    converted = torchq.quantize(Keywords().eval(), [x])
    with pytest.warns(UserWarning, match="its argument 'return_dict' is False, which"):
        converted(x, return_dict=False)


class Doubles(Keywords):
    """An option of the same name with another meaning."""

    def forward(self, x: Tensor, return_dict: bool = False) -> Any:  # type: ignore[override]
        return self.down(torch.relu(self.up(x))) * (2 if return_dict else 1)


@pytest.mark.filterwarnings(f"ignore:.*{MISSES}")
def test_options_that_change_the_result_run_own_code() -> None:
    model = Doubles().eval()
    x = torch.randn(4, 8)
    converted = torchq.quantize(model, [x])
    assert sqnr(model(x, return_dict=True), converted(x, return_dict=True)) > 25
    assert calls(converted) == (0, 1)


class Absent(Keywords):
    """Gives another result where the option is left out than where it has its usual value."""

    def forward(self, x: Tensor, k: Any = 0, **options: Any) -> Any:  # type: ignore[override]
        y = self.down(torch.relu(self.up(x)))
        y = y if k is None else -y
        return {"y": y} if options.get("return_dict") else (y,)


@pytest.mark.filterwarnings(f"ignore:.*{MISSES}")
def test_an_option_that_is_left_out_may_change_the_result() -> None:
    model, x = Absent().eval(), torch.randn(4, 8)
    converted = torchq.quantize(model, [{"x": x, "return_dict": True}])
    assert isinstance(converted(x), tuple) and set(converted(x, return_dict=True)) == {"y"}
    assert calls(converted) == (1, 1)


@pytest.mark.filterwarnings(f"ignore:.*{MISSES}")
def test_a_name_that_begins_that_of_the_keywords() -> None:
    model, x = Absent().eval(), torch.randn(4, 8)
    converted = torchq.quantize(model, [x])
    assert sqnr(model(x, k=None)[0], converted(x, k=None)[0]) > 25
    assert calls(converted) == (0, 1)
