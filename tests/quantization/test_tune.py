# SPDX-License-Identifier: Apache-2.0
"""torchq.tune: the first quantized model within a budget of accuracy."""

import pytest
import torch
from torch import nn

import torchq


def model_and_data():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    return model, [torch.randn(16, 16) for _ in range(3)]


def scores(values, log):
    """Return an evaluation that gives the values in order, whatever the model."""
    left = iter(values)

    def evaluate(model):
        log.append(model)
        return next(left)

    return evaluate


def in_int8(model):
    return sorted(row.name for row in torchq.explain(model).rows if row.is_matmul and row.quantized)


def test_the_default_is_tried_first_and_returned_if_good_enough():
    model, data = model_and_data()
    log = []
    tuned = torchq.tune(model, data, scores([1.0, 0.9], log), max_drop=0.1001)
    assert tuned.model is log[1] and log[0] is model
    assert [(t.recipe, t.in_float, t.score) for t in tuned.trials] == [("fast", (), 0.9)]
    assert in_int8(tuned.model) == ["0", "2"]


def test_recipes_come_before_layers_in_float():
    model, data = model_and_data()
    tuned = torchq.tune(model, data, scores([1.0, 0.5, 0.6, 0.7, 0.98], []), max_drop=0.05)
    assert [t.recipe for t in tuned.trials] == ["fast", "accurate", "best", "best"]
    kept = tuned.trials[-1].in_float
    assert len(kept) == 1 and in_int8(tuned.model) == sorted({"0", "2"} - set(kept))
    assert str(tuned).splitlines() == [
        "1  float", "0.5  fast", "0.6  accurate", "0.7  best", f"0.98  best, in float: {kept[0]}",
    ]  # fmt: skip


def test_the_search_begins_with_the_recipe_of_the_configuration():
    model, data = model_and_data()
    config = torchq.QConfig(recipe="best", weight_bits=7)
    tuned = torchq.tune(model, data, scores([1.0, 1.0], []), max_drop=0, config=config)
    assert [t.recipe for t in tuned.trials] == ["best"]


def test_layers_that_overrides_keep_float_stay_float():
    model, data = model_and_data()
    tuned = torchq.tune(
        model, data, scores([1.0, 0, 0, 1.0], []), max_drop=0, overrides={"2": None}
    )
    assert in_int8(tuned.model) == ["0"]


def test_a_real_metric_is_met():
    model, data = model_and_data()
    x = torch.randn(400, 16)
    expected = model(x).argmax(1)

    def evaluate(model):
        return float((model(x).argmax(1) == expected).float().mean())

    tuned = torchq.tune(model, data, evaluate, max_drop=0.01)
    assert tuned.baseline == 1 and evaluate(tuned.model) >= 0.99


def test_a_budget_that_nothing_meets_is_an_error():
    model, data = model_and_data()
    # the float model last: a metric that is not the same for the same model
    with pytest.raises(ValueError, match=r"max_drop must be reached with every layer in float"):
        torchq.tune(model, data, scores([1.0, 0, 0, 0, 0, 0], []), max_drop=0.1)


@pytest.mark.parametrize("drop", [-0.1, float("nan")])
def test_a_negative_budget_is_an_error(drop):
    model, data = model_and_data()
    with pytest.raises(ValueError, match=r"max_drop must be >= 0"):
        torchq.tune(model, data, scores([], []), max_drop=drop)


def test_a_score_that_is_not_finite_is_an_error():
    model, data = model_and_data()
    with pytest.raises(ValueError, match=r"evaluate must give the float model a finite score"):
        torchq.tune(model, data, scores([float("inf")], []), max_drop=1)
