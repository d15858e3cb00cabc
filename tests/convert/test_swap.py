# SPDX-License-Identifier: Apache-2.0
"""Swapping modules of networks that try to break it: float-correct results or an exception."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import flows
import models
import pytest
import torch
import torch.nn.functional as F
from flows import CONFIGS, sqnr
from torch import Tensor, nn
from torch.nn.utils import prune

import torchq
import torchq.nn as tnn
from torchq import QConfig, eager

pytestmark = pytest.mark.usefixtures("one_thread")


def build(name: str) -> tuple[nn.Module, list[Tensor]]:
    return flows.build(models.CASES[name])


def check(case: models.Case, config: QConfig | None = None, bound: float = 25.0) -> nn.Module:
    return flows.check(case, eager.prepare, eager.convert, config, bound)


@pytest.mark.parametrize("name", models.CASES)
def test_networks(name: str) -> None:
    case = models.CASES[name]
    more = {"exposed": (2, 3), "attention": (5, 5), "transformer": (12, 12)}  # than in a graph
    check(
        (*case[:2], *more.get(name, case[2:])),
        bound=20.0 if name in ("lookups", "exposed") else 25.0,
    )


@pytest.mark.parametrize("name", ["bn_variants", "geometry", "shared_relu6", "in_place_lookup"])
@pytest.mark.parametrize("config", CONFIGS)
def test_configurations(name: str, config: str) -> None:
    chosen = CONFIGS[config]
    converted = check(
        models.CASES[name], chosen, bound=13.0 if config in ("s7", "u8-symmetric") else 18.0
    )
    specs = [m.layer.read_spec() for m in converted.modules() if isinstance(m, tnn.QuantizedLeaf)]
    dtypes = {torch.uint8: "u8", torch.int8: "s8"}
    wanted = dtypes[chosen.activation_dtype], chosen.activation_bits
    assert {(spec["src"], spec["src_bits"]) for spec in specs} == {wanted}
    converted(build(name)[1][0] * 100)  # beyond all that was calibrated


def test_s8_fused_relu_shared_with_plain_relu() -> None:
    """relu on the integers of an affine int8 tensor would be wrong."""
    relu = nn.ReLU()
    model = nn.Sequential(nn.Conv2d(3, 8, 1), relu, nn.Conv2d(8, 8, 1), relu, nn.Conv2d(8, 4, 1))
    check((lambda: model, (2, 3, 6, 6), 3, 3), CONFIGS["s8-affine"])


def int8_sites(converted: nn.Module) -> dict[str, str]:
    """Name -> class, of the quantized modules that compute something."""
    return {
        name: type(module).__name__
        for name, module in converted.named_modules()
        if isinstance(module, tnn.QModule) and not isinstance(module, tnn.QuantizedLeaf)
    }


def convert(name: str, **kwargs: Any) -> nn.Module:
    model, data = build(name)
    return eager.quantize(model, data, data[0], **kwargs)


@pytest.mark.parametrize(
    ("name", "sites"),
    [
        ("add_both", {"a.layer": "QConv2d", "b.layer": "QConv2d", "c.layer": "QConv2d"}),
        ("stubs", {"a.layer": "QConv2d", "b.layer": "QConv2d"}),
        ("called_twice", {"a.layer": "QConv2d", "b.layer": "QConv2d"}),
        ("keyword_layer", {"lin.layer": "QLinear"}),
        ("root", {"layer": "QLinear"}),
        ("dropout", {"0.layer": "QConv2d", "5.layer": "QConv2d"}),
        ("in_place_lookup", {"0.layer": "QConv2d", "2.layer": "QConv2d"}),
    ],
)
def test_what_becomes_int8(name: str, sites: dict[str, str]) -> None:
    converted = convert(name)
    assert int8_sites(converted).items() >= sites.items()
    own = {
        n: m.layer.dst_dtype for n, m in converted.named_modules() if type(m) is tnn.QuantizedLeaf
    }
    assert set(own.values()) <= {torch.float32}
    assert len(own) == sum(n.endswith("layer") for n in sites)


def test_layout_of_view() -> None:
    """`view` needs the float model's strides."""
    converted = convert("lenet")
    assert converted.b.layer.contiguous and converted.a.layer.contiguous
    for a in (nn.Conv2d(8, 4, 3), nn.Sequential(nn.Conv2d(8, 4, 3), nn.ReLU(), nn.MaxPool2d(2))):
        model = models.Wired(lambda m, x: (m.a(x) + 1).view(2, -1), a=a).eval()
        x = torch.randn(models.IMAGE)
        for other in (x, x.to(memory_format=torch.channels_last)):
            converted = eager.quantize(model, [x], x)
            with torch.no_grad():
                assert sqnr(model(x), converted(other)) > 30
    model = models.Wired(lambda m, x: m.a(x), a=nn.Conv2d(8, 4, 3)).eval()
    assert not eager.quantize(model, [x], x).a.layer.contiguous


def test_stash_is_float() -> None:
    """A tensor that the model keeps as an attribute, or hides in an object, is float32."""
    model, data = build("stash")
    converted = eager.quantize(model, data, data[0])
    with torch.no_grad():
        model(data[0]), converted(data[0])
    assert sqnr(model.last, converted.last) > 30
    opaque = partial(models.Wired, models._opaque, a=models.conv(), b=models.conv())
    check((opaque, models.IMAGE, 2, 2))


# Overrides


def test_override_keeps_a_folded_batch_norm_float() -> None:
    """A batch norm behind a layer that stays float must not be folded."""
    model, data = build("resnet")
    prepared = eager.prepare(model, data[0], overrides={"block1.conv1": None})
    with torch.no_grad():
        torch.testing.assert_close(prepared(data[0]), model(data[0]), rtol=1e-5, atol=2e-5)
    converted = eager.convert(eager.calibrate(prepared, data), strict=True)
    assert isinstance(converted.block1.conv1, nn.Conv2d)
    assert isinstance(converted.block1.bn1, nn.BatchNorm2d)
    row = next(r for r in torchq.explain(converted).rows if r.name == "block1.conv1")
    assert (row.quantized, row.requested, row.reason) == (False, True, "kept float by an override")


def test_override_of_a_module_that_would_be_fused() -> None:
    converted = convert("shared_relu6", overrides={"1": None})
    assert isinstance(converted.get_submodule("1"), nn.ReLU6)


def test_overrides_choose_per_module() -> None:
    narrow = QConfig(weight_bits=7)
    converted = convert("sequential", overrides={"*": narrow, "2": replace(narrow, weight_bits=8)})
    assert converted.get_submodule("0.layer").packed().unpack().abs().max() == 63
    assert converted.get_submodule("2.layer").packed().unpack().abs().max() == 127


@pytest.mark.parametrize("flow", [torchq, eager])
def test_override_of_what_holds_layers(flow: Any) -> None:
    """A module's pattern holds for all that is in it; later ones choose among them."""
    model, data = build("resnet")
    inside = {f"block{i}.conv{j}" for i in (1, 2) for j in (1, 2)}

    def rows(overrides: dict[str, QConfig | None]) -> tuple[set[str], nn.Module]:
        converted = flow.quantize(model, data, data[0], overrides=overrides, strict=True)
        matmuls = [row for row in torchq.explain(converted).rows if row.is_matmul]
        assert all(row.quantized != row.requested for row in matmuls)
        return {row.name for row in matmuls if row.requested}, converted

    kept, converted = rows({"block1": None, "block2": None})
    assert kept == inside
    torch.testing.assert_close(converted.block1.conv1.weight, model.block1.conv1.weight)
    kept, converted = rows({"block?": None, "block2.conv2": QConfig(weight_bits=7)})
    assert kept == inside - {"block2.conv2"}
    layer = converted.block2.conv2
    layer = layer.layer if isinstance(layer, tnn.QuantizedLeaf) else layer
    assert layer.packed().unpack().abs().max() == 63
    assert len(rows({"": None})[0]) > len(inside)
    with pytest.raises(ValueError, match=r"'block3' matches none. Did you mean 'block[12]'"):
        flow.prepare(model, data[0], overrides={"block3": None})


def test_override_of_a_sequence() -> None:
    """A later pattern holds for one part."""
    model = models.Wired(lambda m, x: m.b(m.a(x)), a=models.conv(), b=nn.Sequential(
        models.conv(), nn.ReLU(), models.conv())).eval()  # fmt: skip
    x = torch.randn(models.IMAGE)
    converted = eager.quantize(model, [x], x, overrides={"b": None}, strict=True)
    assert [row.quantized for row in torchq.explain(converted).rows] == [True, False, False, False]
    assert type(converted.b) is nn.Sequential
    converted = eager.quantize(model, [x], x, overrides={"b": None, "b.2": QConfig()}, strict=True)
    assert [row.quantized for row in torchq.explain(converted).rows] == [True, False, False, True]
    assert type(converted.get_submodule("b.0")) is nn.Conv2d


def test_unmatched_override() -> None:
    with pytest.raises(ValueError, match=r"'blok1\.\*' matches none. Did you mean 'block1'"):
        convert("resnet", overrides={"blok1.*": None})


# Errors


def test_uncalibrated_names_the_module() -> None:
    model, data = build("sequential")
    prepared = eager.calibrate(eager.prepare(model, data[0]), data)
    prepared[0].observer = eager.prepare(model, data[0])[0].observer  # of no data
    with pytest.raises(RuntimeError, match=r"'0'.*torchq.calibrate") as error:
        eager.convert(prepared)
    assert "overrides={'0': None}" in str(error.value)


def test_nan_in_calibration_names_the_module() -> None:
    model, data = build("sequential")
    prepared = eager.prepare(model, data[0])
    with pytest.raises(ValueError, match=r"'0': src must be finite.*1 NaN"):
        eager.calibrate(prepared, [data[0].index_fill(0, torch.tensor([0]), 0.5), _nan(data[0])])


def _nan(x: Tensor) -> Tensor:
    x = x.clone()
    x[0, 0] = torch.nan
    return x


def test_nan_weight_names_the_module() -> None:
    model, data = build("called_twice")
    prepared = eager.prepare(model, data[0])
    with torch.no_grad():
        prepared.a.module.weight[0, 0] = torch.nan
    with torch.no_grad(), pytest.raises(ValueError, match=r"'a' cannot be quantized: .*finite"):
        prepared.a.observer(data[0])
        eager.convert(prepared)


def test_training_mode() -> None:
    model, data = build("sequential")
    prepared = eager.prepare(model, data[0])
    model[1].train()
    with pytest.raises(ValueError, match=r"training mode in '1' \(1 modules\).*model.eval\(\)"):
        eager.prepare(model, data[0])
    with pytest.raises(ValueError, match=r"torchq.calibrate: .*training mode"):
        eager.calibrate(prepared.train(), data)


def test_other_float_models() -> None:
    model, data = build("sequential")
    why = r"or float16, got torch.float64 in '0'.*model.float\(\)"
    with pytest.raises(TypeError, match=why):
        eager.prepare(model.double(), data[0].double())


def test_wrong_stage() -> None:
    model, data = build("sequential")
    prepared = eager.calibrate(eager.prepare(model, data[0]), data)
    with pytest.raises(ValueError, match=r"must come from torchq.prepare"):
        eager.convert(model)
    for wrong in (prepared, eager.convert(prepared)):
        with pytest.raises(ValueError, match=r"must be a float model"):
            eager.prepare(wrong, data[0])
    with pytest.raises(TypeError, match=r"got one Tensor"):
        eager.calibrate(prepared, data[0])
    with pytest.raises(ValueError, match=r"at least one batch"):
        eager.calibrate(prepared, [])


def test_strict() -> None:
    why = r"1 convolution, linear or.*c: its parameters are used outside of it, and it is not"
    with pytest.raises(RuntimeError, match=why):
        convert("exposed", strict=True)
    convert("exposed", strict=True, overrides={"c": None})


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
@pytest.mark.parametrize("padding", [2, "same"])
def test_padding_modes(mode: str, padding: Any, tmp_path: Path) -> None:
    """A pad in float in front of an int8 convolution without."""
    conv = nn.Conv2d(8, 8, (5, 3), padding=padding, padding_mode=mode)
    model = models.Wired(lambda m, x: m.a(x), a=conv).eval()
    x = torch.randn(models.IMAGE)
    converted = eager.quantize(model, [x], x)
    assert all(row.quantized for row in torchq.explain(converted).rows if row.name == "a")
    y, wide = converted(x), (2, 2, 2, 2) if padding == 2 else (1, 1, 2, 2)
    assert sqnr(model(x), y) > 35
    assert torch.equal(y, converted.a.layer(F.pad(x, wide, mode)))
    assert torch.equal(torch.jit.script(converted.a)(x), y)
    torchq.save(converted, tmp_path / "model")
    assert torch.equal(torchq.load(tmp_path / "model", model)(x), y)


@pytest.mark.parametrize("name", ["sequential", "called_twice"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float64])
def test_wrong_dtype_at_run_time(name: str, dtype: torch.dtype) -> None:
    """As the float model refuses it; uint8 is not what a layer quantized."""
    model, data = build(name)
    converted = convert(name)
    for one in (model, converted, copy.deepcopy(converted)):
        with pytest.raises((TypeError, RuntimeError)):
            one(data[0].to(dtype))
    with pytest.raises(TypeError, match=rf"torch.bfloat16 or torch.float16, got {dtype}"):
        converted(data[0].to(dtype))


def test_gradients() -> None:
    """Parameters do not require grad any more; inputs that do are refused."""
    converted = convert("lstm")
    x = torch.randn(2, 6, 16)
    assert not converted(x).requires_grad
    with pytest.raises(RuntimeError, match=r"requires grad.*torch.no_grad\(\)"):
        converted(x.requires_grad_())
    model = models.Wired(lambda m, x, r: m.add(m.a(x), r), a=models.conv(), add=tnn.Add()).eval()
    pair = (torch.randn(models.IMAGE), torch.randn(models.IMAGE))
    converted = eager.quantize(model, [pair], pair)
    with pytest.raises(RuntimeError, match=r"requires grad"):
        converted(pair[0].requires_grad_(), pair[1])


# Stages can be repeated


def test_calibrating_twice_adds_data() -> None:
    model, data = build("sequential")
    together = eager.calibrate(eager.prepare(model, data[0]), data)
    apart = eager.prepare(model, data[0])
    for batch in data:
        eager.calibrate(apart, [batch])
    assert torch.equal(eager.convert(together)(data[0]), eager.convert(apart)(data[0]))


def test_prepared_can_be_copied_and_converted_twice() -> None:
    model, data = build("resnet")
    prepared = eager.prepare(model, data[0])
    other = copy.deepcopy(prepared)
    eager.calibrate(prepared, data)
    eager.calibrate(other, data)
    results = [eager.convert(p)(data[0]) for p in (prepared, other, prepared)]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_inputs_by_keyword_and_inference_mode() -> None:
    model, data = build("sequential")
    by_name = {"input": data[0]}
    with torch.inference_mode():
        converted = eager.quantize(model, [by_name], by_name)
    assert torch.equal(converted(input=data[0]), eager.quantize(model, data[:1], data[0])(data[0]))


def test_parametrized_weights_are_computed_once() -> None:
    """A layer with parametrizations has a class of its own; the copy has that of torch.nn."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.spectral_norm(model[2])
    model.eval()
    data = [torch.randn(2, 3, 9, 9) for _ in range(3)]
    converted = eager.quantize(model, data, data[0])
    assert [type(converted.get_submodule(f"{n}.layer")) for n in "02"] == [tnn.QConv2d] * 2
    with torch.no_grad():
        assert sqnr(model(data[0]), converted(data[0])) > 30
    assert nn.utils.parametrize.is_parametrized(model[0])


@pytest.mark.parametrize("flow", [torchq, eager])
def test_pruned_weights_are_computed_once(flow) -> None:
    """``prune`` multiplies weights by masks in a hook of each call."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    for amount in (0.5, 0.2):  # the second of two on a tensor puts both in a container
        for layer in (model[0], model[2]):
            prune.random_unstructured(layer, "weight", amount)
    prune.l1_unstructured(model[2], "bias", 0.5)
    data = [torch.randn(2, 3, 9, 9) for _ in range(3)]
    converted = flow.quantize(model, data, data[0], strict=True)
    assert sqnr(model(data[0]), converted(data[0])) > 30
    assert prune.is_pruned(model)
