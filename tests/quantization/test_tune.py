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
    with pytest.raises(ValueError, match=r"max_drop must be reached with everything in float"):
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


def close_to(model, x):
    """Return an evaluation in dB on data of its own."""

    def evaluate(other):
        with torch.no_grad():
            return min(60.0, torchq.sqnr(model(x), other(x)))

    return evaluate


def test_a_layer_that_the_first_batch_leaves_float_is_kept_float():
    """The row rule leaves layer 0 float by the first batch, and not by all of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 16, 16, 16), nn.Sigmoid(), nn.Conv1d(16, 8, 1)).eval()
    quiet = torch.exp(torch.randn(4, 1, 100) * 2 - 5).repeat_interleave(16, 2)
    data = [torch.randn(4, 1, 1600) * quiet] + [torch.randn(4, 1, 1600) for _ in range(7)]
    evaluate = close_to(model, torch.randn(4, 1, 1600) * 0.02)
    tuned = torchq.tune(model, data, evaluate, max_drop=12)
    assert tuned.trials[-1].in_float == ("0",) and tuned.trials[-1].score >= 48


def test_a_function_is_kept_float():
    """A sum whose sources nearly cancel: their rounding is all that is left of it."""

    class Difference(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)
            with torch.no_grad():
                self.b.weight.copy_(-self.a.weight * (1 + 0.01 * torch.rand_like(self.a.weight)))
                self.b.bias.copy_(-self.a.bias)

        def forward(self, x):
            return self.c(self.a(x) + self.b(x))

    torch.manual_seed(0)
    model, data = Difference().eval(), [torch.randn(4, 3, 12, 12) for _ in range(4)]
    evaluate = close_to(model, torch.randn(4, 3, 12, 12))
    config = torchq.QConfig(activation_bits=7)
    tuned = torchq.tune(model, data, evaluate, max_drop=18, config=config)
    assert tuned.trials[-1].in_float == ("add",)


def test_two_bad_layers_of_many_are_found_first():
    torch.manual_seed(0)
    parts = [part for _ in range(10) for part in (nn.Conv2d(8, 8, 1), nn.ReLU())]
    model = nn.Sequential(*parts).eval()
    with torch.no_grad():
        for conv in model[::2]:
            nn.init.kaiming_normal_(conv.weight)
            conv.bias.zero_()
        for bad in (6, 14):  # a channel that is constant and large, and that nothing reads
            model[bad - 2].bias[0] = 300
            model[bad - 2].weight[0] = 0
            model[bad].weight[:, 0] = 0
    data = [torch.randn(4, 8, 6, 6) for _ in range(4)]
    config = torchq.QConfig(activation_observer="minmax", recipe="best")
    evaluate = close_to(model, torch.randn(4, 8, 6, 6))
    tuned = torchq.tune(model, data, evaluate, max_drop=45, config=config)
    assert set(tuned.trials[-1].in_float) == {"6", "14"}


def test_embeddings_are_kept_float_at_the_end():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 4)).eval()
    data = [torch.randint(20, (8, 5)) for _ in range(2)]
    config = torchq.QConfig(embedding_bits=4, recipe="best")
    tuned = torchq.tune(model, data, close_to(model, data[0]), max_drop=0, config=config)
    assert tuned.trials[-1].in_float == ("1", "0") and tuned.trials[-1].score == 60
