# SPDX-License-Identifier: Apache-2.0
"""Accuracy recipes: samples of sources, smoothing, GPTQ, and the presets that use them."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

import torchq
from torchq.quantization.qparams import weight_qparams
from torchq.quantization.recipes.linear import linear_recipe, quantized_rows
from torchq.quantization.recipes.rounding import rounded
from torchq.quantization.recipes.sample import ROWS, SourceSample
from torchq.quantization.recipes.smoothing import ALPHAS, smoothing_factors

RECIPES = ("accurate", "best")


def outliers(rows, channels=48, seed=0):
    """Rows with a few channels that are 10 to 60 times as large as the others."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, channels, generator=generator)
    values[:, :3] *= torch.tensor([60.0, 25.0, 10.0])
    return values


def sample_of(rows):
    sample = SourceSample(rows.shape[1])
    sample(rows)
    return sample


class Block(nn.Module):
    """A norm with large channels in front of a feed-forward block, and a residual connection."""

    def __init__(self, channels=48):
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.first, self.second = nn.Linear(channels, 96), nn.Linear(96, channels)

    def forward(self, src):
        normed = self.norm(src)
        return normed + self.second(nn.functional.gelu(self.first(normed)))


def block():
    torch.manual_seed(0)
    model = Block().eval().requires_grad_(False)
    model.norm.weight[:3] = torch.tensor([60.0, 25.0, 10.0])
    model.norm.bias.normal_()
    return model


def batches(count=4, channels=48):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 24, channels, generator=generator) for _ in range(count)]


# Samples


@pytest.mark.parametrize("total", [1, ROWS - 1, ROWS, ROWS + 1, 5 * ROWS + 3])
def test_a_sample_depends_on_the_set_of_rows_alone(total):
    rows = outliers(total)
    whole, cut, first, second = sample_of(rows), *(SourceSample(48) for _ in range(3))
    shuffled = rows[torch.randperm(total)]
    for i, piece in enumerate([*shuffled.split(77), rows[:50]]):  # some rows twice
        cut(piece)
        (first if i % 3 else second)(piece)
    assert len(whole.kept) == min(total, ROWS)
    assert {*map(tuple, whole.kept.tolist())} <= {*map(tuple, rows.tolist())}
    assert torch.equal(whole.largest, rows.abs().amax(0))
    merged = first.merge(second) if first.calibrated else second
    for other in (cut, merged):
        for name, value in whole.state_dict().items():
            assert torch.equal(other.state_dict()[name], value), name


def test_a_sample_is_a_fair_one():
    rows = torch.arange(50 * ROWS, dtype=torch.float32)[:, None] * torch.tensor([[1.0, -0.5]])
    kept = sample_of(rows).kept[:, 0]
    in_tenths = torch.histc(kept, 10, 0, 50 * ROWS)
    assert in_tenths.min() > 70 and in_tenths.max() < 135  # 102 on average, standard deviation 10


def test_a_sample_survives_a_state_dict():
    sample = sample_of(outliers(700))
    loaded = SourceSample(48)
    loaded.load_state_dict(sample.state_dict())
    assert torch.equal(loaded.kept, sample.kept) and loaded.calibrated


def test_a_sample_refuses_nan_and_names_the_layer():
    with pytest.raises(ValueError, match=r"encoder\.fc"):
        SourceSample(2, "encoder.fc")(torch.tensor([[1.0, float("nan")]]))


# Smoothing


@pytest.mark.parametrize("alpha", ALPHAS)
def test_smoothing_keeps_the_float_products(alpha):
    """But for a rounding of float32, in sources of bfloat16 too."""
    rows, weight = outliers(64), torch.randn(8, 48)
    factors = smoothing_factors(rows.abs().amax(0), weight, alpha)
    torch.testing.assert_close(1 / factors, (1 / factors).bfloat16().float(), rtol=2**-23, atol=0)
    products, smoothed = rows[:, None] * weight, (rows / factors)[:, None] * (weight * factors)
    torch.testing.assert_close(products, smoothed, rtol=2**-22, atol=0)


@pytest.mark.parametrize("zero", ["source", "weight", "both", "all"])
def test_smoothing_takes_channels_without_values(zero):
    largest, weight = torch.rand(6) + 0.1, torch.randn(4, 6)
    if zero in ("source", "both"):
        largest[2] = 0
    if zero in ("weight", "both"):
        weight[:, 2] = 0
    if zero == "all":
        largest, weight = torch.zeros(6), torch.zeros(4, 6)
    factors = smoothing_factors(largest, weight, 0.5)
    assert bool((torch.isfinite(factors) & (factors > 0)).all())


def test_smoothing_makes_large_channels_smaller_in_order_of_size():
    largest = torch.tensor([64.0, 16.0, 1.0, 1.0])
    factors = smoothing_factors(largest, torch.ones(3, 4), 0.5)
    assert factors.tolist() == sorted(factors.tolist(), reverse=True)
    assert factors[0] / factors[2] == 8


# GPTQ


@pytest.mark.parametrize("count", [8, 400], ids=["fewer rows than channels", "many rows"])
def test_gptq_rounds_to_multiples_whose_products_are_nearer(count):
    rows = outliers(count) @ torch.randn(48, 48)  # channels that go together
    weight = torch.randn(24, 48)
    scale = weight_qparams(weight).scale.reshape(-1, 1)
    found = rounded(weight, scale, rows, (-127, 127))
    steps = found / scale
    assert torch.allclose(steps, steps.round(), atol=1e-4) and steps.abs().max() <= 127.001
    nearest = (weight / scale).round() * scale
    errors = [float((rows @ (w - weight).t()).square().sum()) for w in (found, nearest)]
    assert errors[0] < 0.8 * errors[1]


def test_gptq_takes_sources_that_are_always_zero():
    weight = torch.randn(4, 70)
    scale = weight_qparams(weight).scale.reshape(-1, 1)
    found = rounded(weight, scale, torch.zeros(9, 70), (-127, 127))
    assert torch.allclose(found, (weight / scale).round() * scale)


# One layer


@pytest.mark.parametrize("gptq", [False, True])
@pytest.mark.parametrize("bits", [8, 7])
def test_a_recipe_is_nearer_to_the_float_layer_than_plain_rows(gptq, bits):
    torch.manual_seed(0)
    layer, rows = nn.Linear(48, 24), outliers(400)
    weight = layer.weight.detach()
    recipe = linear_recipe(weight, layer.bias, sample_of(rows), "per_channel", bits, gptq)
    plain = torchq.nn.DynamicQLinear.from_float(layer, bits=bits)
    better = torchq.nn.DynamicQLinear.from_float(layer, bits=bits, recipe=recipe)
    test = outliers(200, seed=5)
    expected = layer(test).detach()
    gain = torchq.sqnr(expected, better(test)) - torchq.sqnr(expected, plain(test))
    assert gain > 5
    assert "smoothing" in better.extra_repr() and ("GPTQ" in better.extra_repr()) == gptq


def test_a_recipe_computes_the_float_layer():
    weight, rows = torch.randn(24, 48), outliers(300)
    recipe = linear_recipe(weight, None, sample_of(rows), "per_channel", 8, gptq=False)
    assert recipe.src_factor is not None
    torch.testing.assert_close(recipe.weight * recipe.src_factor, weight, rtol=2**-22, atol=0)


def test_results_that_are_no_numbers_have_no_decibels():
    rows, weight = torch.full((8, 8), torch.finfo(torch.float32).max), 2 * torch.eye(8)
    recipe = linear_recipe(weight, None, sample_of(rows), "per_channel", 8, gptq=False)
    assert "-inf dB -> -inf dB" in recipe.note


def test_a_layer_that_gains_nothing_is_not_smoothed():
    weight = torch.eye(8)
    rows = torch.randint(-127, 128, (64, 8)).float()
    rows[:, 0], rows[:, 1] = -127, 128  # the levels of uint8 hold every row exactly
    recipe = linear_recipe(weight, None, sample_of(rows), "per_channel", 8, gptq=False)
    assert recipe.src_factor is None and "smoothing 0," in recipe.note


def test_the_trial_rounds_rows_as_the_kernel_does():
    rows = outliers(64)
    rows[3], rows[4] = 0.0, 5.0
    eye = torchq.nn.DynamicQLinear.from_float(nn.Linear(48, 48, bias=False))
    eye = torchq.nn.DynamicQLinear(
        torchq.packing.pack_linear(torch.eye(48).to(torch.int8)), torch.ones(1), None
    )
    torch.testing.assert_close(eye(rows), quantized_rows(rows), atol=1e-5, rtol=1e-5)


# Presets


@pytest.mark.parametrize("recipe", RECIPES)
def test_presets_bring_a_block_with_large_channels_nearer(recipe):
    model, data = block(), batches()
    test = batches(1)[0].flip(0) * 1.1
    found = {
        name: torchq.sqnr(model(test), torchq.quantize(model, data, config=config)(test))
        for name, config in {
            "fast": torchq.QConfig(),
            "dynamic": torchq.QConfig(dynamic=True),
            recipe: torchq.QConfig(recipe=recipe),
        }.items()
    }
    assert found[recipe] > found["dynamic"] + 2 and found[recipe] > found["fast"] + 2


def test_explain_says_what_a_preset_did_and_gained():
    qmodel = torchq.quantize(block(), batches(), config=torchq.QConfig(recipe="best"))
    lines = [line for line in str(torchq.explain(qmodel)).splitlines() if "Linear" in line]
    assert len(lines) == 2 and all("smoothing" in x and "GPTQ" in x and " dB" in x for x in lines)


def test_convolutions_stay_static_in_a_preset():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()
    data = [torch.randn(4, 3, 8, 8) for _ in range(3)]
    qmodel = torchq.quantize(model, data, config=torchq.QConfig(recipe="accurate"), strict=True)
    assert torchq.sqnr(model(data[0]), qmodel(data[0])) > 25
    assert "src_range" in str(torchq.explain(qmodel)).split("Linear")[1]


@pytest.mark.parametrize("recipe", RECIPES)
def test_leaves_and_graphs_take_the_same_recipe(recipe):
    """A call that does not meet the guards runs the leaves."""
    model, data = block(), batches()
    qmodel = torchq.quantize(model, data, config=torchq.QConfig(recipe=recipe))
    own = type(model).forward(qmodel, data[0])
    torch.testing.assert_close(own, qmodel(data[0]), atol=1e-5, rtol=1e-5)
    assert torchq.sqnr(model.first.weight, torch.as_tensor(qmodel.first.weight)) > 30


def test_a_linear_layer_alone_takes_the_recipe():
    model, data = nn.Sequential(nn.Linear(48, 8)).eval(), [outliers(100)]
    config = torchq.QConfig(recipe="accurate")
    for layer in (model, model[0]):
        qmodel = torchq.quantize(layer, data, config=config)
        plain = torchq.quantize(layer, data, config=torchq.QConfig(dynamic=True))
        expected = layer(data[0])
        gain = torchq.sqnr(expected, qmodel(data[0])) - torchq.sqnr(expected, plain(data[0]))
        assert gain > 5


@pytest.mark.parametrize("recipe", RECIPES)
def test_files_pickles_and_copies_keep_the_bits(recipe, tmp_path):
    model, data = block(), batches()
    config = torchq.QConfig(recipe=recipe)
    prepared = torchq.calibrate(torchq.prepare(model, data[0], config), data)
    qmodel = torchq.convert(prepared)
    expected = qmodel(data[0])
    torchq.save(qmodel, tmp_path / "model")
    others = [torchq.load(tmp_path / "model"), copy.deepcopy(qmodel)]
    others += [torchq.convert(pickle.loads(pickle.dumps(prepared)))]
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(qmodel, data[0]), file)
    file.seek(0)
    others += [torch.jit.load(file)]
    for other in others:
        assert torch.equal(other(data[0]), expected)


def test_calibration_files_hold_the_samples(tmp_path):
    model, data, config = block(), batches(), torchq.QConfig(recipe="accurate")
    prepared = torchq.calibrate(torchq.prepare(model, data[0], config), data)
    torchq.save_calibration(prepared, tmp_path / "calibration")
    other = torchq.load_calibration(
        torchq.prepare(model, data[0], config), tmp_path / "calibration"
    )
    assert torch.equal(torchq.convert(other)(data[0]), torchq.convert(prepared)(data[0]))


def test_a_preset_needs_calibration():
    model, data = block(), batches()
    with pytest.raises(TypeError, match="data must be batches to calibrate with, got None"):
        torchq.quantize(model, example_inputs=data[0], config=torchq.QConfig(recipe="accurate"))


def test_an_unknown_recipe_is_an_error():
    with pytest.raises(ValueError, match=r"recipe must be .*got 'slow'"):
        torchq.QConfig(recipe="slow")


def test_overrides_choose_a_recipe_for_a_layer():
    overrides = {"first": torchq.QConfig(recipe="accurate")}
    qmodel = torchq.quantize(block(), batches(), overrides=overrides)
    text = str(torchq.explain(qmodel)).splitlines()
    told = {line.split()[0]: "smoothing" in line for line in text if "Linear" in line}
    assert told == {"first": True, "second": False}


def test_compare_takes_a_preset():
    data, config = batches(), torchq.QConfig(recipe="accurate")
    prepared = torchq.calibrate(torchq.prepare(block(), data[0], config), data)
    found = torchq.compare(prepared, torchq.convert(prepared), data)
    assert {layer.name for layer in found.layers} == {"first", "second"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_tier_gives_the_same_bits(recipe):
    data = batches()
    qmodel = torchq.quantize(block(), data, config=torchq.QConfig(recipe=recipe))
    expected = qmodel(data[0])
    for isa in torchq.supported_isas():
        with torchq.use_isa(isa):
            assert torch.equal(qmodel(data[0]), expected), isa


def test_a_smoothed_layer_compiles_to_torchscript_and_exports():
    layer, rows = nn.Linear(48, 24), outliers(200)
    sample = sample_of(rows)
    recipe = linear_recipe(layer.weight.detach(), layer.bias, sample, "per_channel", 8, gptq=False)
    qlayer = torchq.nn.DynamicQLinear.from_float(layer, recipe=recipe)
    assert qlayer.src_factor is not None
    expected = qlayer(rows)
    assert torch.equal(torch.jit.script(qlayer)(rows), expected)
    assert torch.equal(torch.export.export(qlayer, (rows,)).module()(rows), expected)


def test_quantizing_again_gives_the_same_weights():
    config = torchq.QConfig(recipe="best")
    first, second = (torchq.quantize(block(), batches(), config=config) for _ in range(2))
    for one, other in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_layers_without_inputs_take_no_recipe():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: an empty tensor has nothing to initialize
        model = nn.Sequential(nn.Linear(0, 4), nn.ReLU(), nn.Linear(4, 3)).eval()
    data = [torch.zeros(5, 0)]
    qmodel = torchq.quantize(model, data, config=torchq.QConfig(recipe="accurate"))
    torch.testing.assert_close(qmodel(data[0]), model(data[0]), atol=0.05, rtol=0.05)
