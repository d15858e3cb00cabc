# SPDX-License-Identifier: Apache-2.0
"""Mistakes of users: each raises an error that names it, and none gives a wrong result."""

import copy
import functools
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from flows import graph_of
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import torchq

torch.manual_seed(0)
MODEL = nn.Sequential(
    nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
).eval()
DATA = [torch.randn(4, 3, 8, 8) for _ in range(3)]


@pytest.fixture(scope="module")
def prepared():
    return torchq.calibrate(torchq.prepare(MODEL, DATA[0]), DATA)


@pytest.fixture(scope="module")
def qmodel(prepared):
    return torchq.convert(prepared)


def test_batches_with_labels(prepared, qmodel):
    data, told = [(x, torch.zeros(4)) for x in DATA], "leave labels out"
    with pytest.raises(TypeError, match=r"forward\(input\), got 2 positional.*" + told):
        torchq.calibrate(torchq.prepare(MODEL, DATA[0]), data)
    with pytest.raises(TypeError, match=told):
        torchq.compare(prepared, qmodel, data)
    with pytest.raises(TypeError, match=told):
        torchq.quantize(MODEL, data)
    with pytest.raises(TypeError, match=r"got 0 positional, x=: missing"):
        torchq.quantize(MODEL, [{"x": x} for x in DATA], DATA[0])


@pytest.mark.filterwarnings("error")  # that it was swapped would send the user the wrong way
def test_inputs_that_the_model_refuses():
    with pytest.raises(RuntimeError, match="double"):
        torchq.prepare(MODEL, DATA[0].double())
    with pytest.raises(TypeError, match=r"got ndarray. Convert arrays with torch.from_numpy"):
        torchq.quantize(MODEL, [x.numpy() for x in DATA], DATA[0])
    with pytest.raises(TypeError, match="got int"):
        torchq.prepare(MODEL, 5)
    with pytest.raises(TypeError, match=r"got torch.uint8. Give the model .* batch.float\(\)"):
        torchq.quantize(MODEL, [x.to(torch.uint8) for x in DATA], DATA[0])


def test_packed_sequences_are_one_input():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

        def forward(self, x):
            return self.head(pad_packed_sequence(self.rnn(x)[0], batch_first=True)[0])

    lengths = torch.tensor([5, 3, 2])
    data = [pack_padded_sequence(torch.randn(3, 5, 8), lengths, batch_first=True) for _ in range(2)]
    model = Net().eval()
    quantized = torchq.quantize(model, data, strict=True)
    assert torchq.sqnr(model(data[0]), quantized(data[0])) > 30


def test_prepared_and_converted_are_told_apart(prepared, qmodel):
    eager = torchq.eager.prepare(MODEL, DATA[0])
    for one in (prepared, eager):
        with pytest.raises(ValueError, match="prepare: model must be a float model"):
            torchq.prepare(one, DATA[0])
    swapped = torchq.convert(torchq.calibrate(eager, DATA))
    for one in (qmodel, swapped):
        with pytest.raises(ValueError, match=r"convert: prepared must .*, which is converted"):
            torchq.convert(one)
        with pytest.raises(ValueError, match=r"calibrate: prepared must .*, which is converted"):
            torchq.calibrate(one, DATA)
    with pytest.raises(ValueError, match=r"compare: prepared must come from torchq.prepare"):
        torchq.compare(MODEL, qmodel, DATA)
    for pair in ((prepared, qmodel), (qmodel, MODEL), (MODEL, MODEL)):
        with pytest.raises(ValueError, match="profile: model must be the float model and qmodel"):
            torchq.profile(*pair, DATA[0])
    with pytest.raises(
        TypeError, match=r"saturation.emulate: data must be batches, got one Tensor"
    ):
        torchq.saturation.emulate(qmodel, DATA[0])


def test_models_that_are_compiled_or_elsewhere():
    for compiled in (torch.jit.script(MODEL), torch.compile(MODEL, backend="eager")):
        with pytest.raises(TypeError, match=r"model must be the Python module, got a .* compiled"):
            torchq.prepare(compiled, DATA[0])
    with pytest.raises(ValueError, match=r"must be on the CPU, got meta in '0'. Call model.cpu"):
        torchq.prepare(copy.deepcopy(MODEL).to("meta"), DATA[0])


def test_files_of_something_else(prepared, qmodel, tmp_path):
    other, text = tmp_path / "other", tmp_path / "text"
    text.write_text("no model")
    with pytest.raises(ValueError, match="load_calibration: path must be a file written by"):
        torchq.load_calibration(prepared, text)
    for content in (MODEL, MODEL.state_dict(), {"format": "another"}):
        torch.save(content, other)
        with pytest.raises(ValueError, match=r"load: path must be a file written by torchq.save"):
            torchq.load(other, MODEL)
    for refused in (MODEL, prepared, MODEL.state_dict()):
        with pytest.raises(ValueError, match=r"save: model must come from torchq.convert"):
            torchq.save(refused, other)


def test_uint8_images_are_not_quantized_values(qmodel, tmp_path):
    class Moved(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x.permute(0, 3, 1, 2))

    image = torch.randint(0, 256, (2, 8, 8, 3), dtype=torch.uint8)
    moved = torchq.quantize(Moved().eval(), [image.float()])
    torchq.save(qmodel, tmp_path / "file")
    channels = image.permute(0, 3, 1, 2)
    for model, src in (
        (moved, image),
        (qmodel, channels),
        (torchq.load(tmp_path / "file"), channels),
    ):
        model(src.float())
        for run in (model, torch.jit.script(model)):
            with pytest.raises(Exception, match=r"got torch.uint8.*input.float\(\)|is float32"):
                run(src)


@pytest.mark.parametrize("where", ["dict", "list", "rolled", "twice", "chosen"])
def test_uint8_in_what_holds_inputs_is_not_quantized_values(where):
    def held(x):
        return {"dict": {"x": x}, "list": [x]}.get(where, x)

    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, given: dict[str, Tensor]) -> Tensor:
            if where == "rolled":
                return self.fc(torch.roll(given, 1, 0))
            if where == "twice":
                return self.fc(given + given)
            if where == "chosen":
                return self.fc(torch.where(torch.eye(3, 8) > 0, given, given.relu()))
            return self.fc(given["x"] if where == "dict" else given[0])

    image = torch.randint(0, 256, (2, 3, 8), dtype=torch.uint8)
    float_input = (held(image.float()),)
    model = torchq.quantize(Held().eval(), [float_input])
    model(*float_input)
    with pytest.raises(TypeError, match=r"torch.float32.*got torch.uint8"):
        model(held(image))


class Adapted(nn.Linear):
    """Its hooks, or what wraps its forward, make of the arguments what the forward takes."""

    def __init__(self, how):
        super().__init__(8, 8)
        if how == "first":
            self.register_forward_pre_hook(lambda module, args: args[:1])
        elif how == "renamed":
            self.register_forward_pre_hook(
                lambda module, args, kwargs: ((kwargs["y"],), {}), with_kwargs=True
            )
        else:
            forward = self.forward
            self.forward = functools.wraps(forward)(lambda x, *labels: forward(x))


@pytest.mark.parametrize("how", ["first", "renamed", "wrapped"])
@pytest.mark.filterwarnings("ignore:torchq.prepare")
def test_inputs_that_are_changed_on_the_way(how):
    x = torch.randn(2, 8)
    given = {"y": x} if how == "renamed" else (x, x)
    torchq.prepare(Adapted(how).eval(), given)


def test_inputs_in_a_generator_or_a_set():
    model = torchq.quantize(MODEL, [(x for x in DATA[:1])])
    torch.testing.assert_close(model(DATA[0]), MODEL(DATA[0]), atol=0.1, rtol=0.1)
    with pytest.raises(TypeError, match=r"a tuple or list of its positional inputs.* got set"):
        torchq.prepare(MODEL, {DATA[0]})


def test_missing_batch_dimension(qmodel):
    with pytest.raises(ValueError, match=r"conv: src must have 4 dims.* got 3. .*unsqueeze\(0\)"):
        qmodel(DATA[0][0])


def test_memory_format_is_for_images():
    deep = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    quantized = torchq.quantize(deep, [torch.randn(2, 8, 9, 9)])
    x = torch.randn(2, 8, 9, 9)
    expected, state = quantized(x), copy.deepcopy(quantized.state_dict())
    quantized.to(memory_format=torch.channels_last)
    assert torch.equal(quantized(x), expected)
    for name, value in quantized.state_dict().items():
        assert torch.equal(value, state[name]) and value.stride() == state[name].stride()


def test_inference_mode_leaves_usable_models():
    with torch.inference_mode():
        prepared = torchq.prepare(MODEL, DATA[0])
        swapped = torchq.eager.prepare(MODEL, DATA[0])
        torchq.calibrate(prepared, DATA)
        torchq.calibrate(swapped, DATA)
        converted = torchq.convert(prepared), torchq.convert(swapped)
    for one in (prepared, swapped):
        one(DATA[0]).sum().backward()  # its parameters are no tensors of inference mode
    for one in converted:
        one.load_state_dict(copy.deepcopy(one.state_dict()))


def test_layer_that_stays_float_keeps_its_batch_norm():
    report = {r.name: r for r in torchq.sensitivity(MODEL, DATA, DATA[0])}
    assert report["0"].kept > report["0"].all_quantized
    quantized = torchq.quantize(MODEL, DATA, overrides={"0": None})
    assert [r.quantized for r in torchq.explain(quantized).rows] == [False] * 3 + [True] * 2
    before = nn.Sequential(MODEL[0], MODEL[1], MODEL[2])(DATA[0])
    got = DATA[0]
    for name in "012":
        got = quantized.get_submodule(name)(got)
    assert torch.equal(got, before)


Pair = namedtuple("Pair", "first second")


@dataclass
class Result:
    value: Tensor
    parts: list


@pytest.mark.parametrize("wrap", [Result, Pair, lambda a, b: {"a": (a, [b])}])
def test_results_that_hold_tensors(wrap):
    x, y = torch.ones(4), torch.zeros(2)
    assert torchq.sqnr(wrap(x, [y]), wrap(1.1 * x, [y])) == pytest.approx(20, abs=1e-3)


def test_nothing_to_compare_is_no_perfect_result():
    assert np.isnan(torchq.sqnr([], []))
    for values in (1.0, [2], np.ones(3), np.float32(1)):
        with pytest.raises(TypeError, match=r"must hold tensors, got .*as_tensor"):
            torchq.sqnr(values, values)
    assert np.isnan(torchq.sqnr(torch.zeros(2, dtype=torch.int64), torch.ones(2).long()))


def test_state_of_the_float_model(qmodel):
    with pytest.raises(RuntimeError, match=r"'0.weight' of the state .* of the float model"):
        copy.deepcopy(qmodel).load_state_dict(MODEL.state_dict())


def test_parameters_that_are_not_there_yet():
    """A copy would get weights of its own."""
    model = nn.Sequential(nn.LazyConv2d(8, 3), nn.ReLU()).eval()
    for prepare in (torchq.prepare, torchq.eager.prepare):
        with pytest.raises(ValueError, match=r"none yet in '0', a LazyConv2d. Run the model on"):
            prepare(model, DATA[0])
    model(DATA[0])
    assert all(row.quantized for row in torchq.explain(torchq.quantize(model, DATA)).rows)


@pytest.mark.parametrize("flow", [torchq, torchq.eager])
def test_autocast_changes_no_conversion(flow):
    """Every layer stayed float, since its source was bfloat16."""
    expected = flow.quantize(MODEL, DATA, DATA[0])(DATA[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        converted = flow.quantize(MODEL, DATA, DATA[0], strict=True)
        assert torchq.sqnr(expected, converted(DATA[0]).float()) > 30
    assert torch.equal(converted(DATA[0]), expected)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("flow", [torchq, torchq.eager], ids=["fx", "eager"])
@pytest.mark.parametrize("name", ["0.weight", "4.bias"])
def test_nan_in_weights_is_no_nan_of_the_data(flow, name, dynamic):
    model = copy.deepcopy(MODEL)
    model.get_parameter(name).data.flatten()[:2] = torch.tensor([torch.nan, torch.inf])
    told = rf"torchq.prepare: '{name}' of the model must be finite, got 1 NaN and 1 inf among"
    with pytest.raises(ValueError, match=told):
        flow.prepare(model, DATA[0], torchq.QConfig(dynamic=dynamic))


@pytest.mark.parametrize("flow", [torchq, torchq.eager], ids=["fx", "eager"])
def test_nan_in_other_parameters(flow):
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 2), nn.LSTM(2, 2)).eval()
    x = torch.randn(4, 8)
    with pytest.raises(ValueError, match=r"prepare: '2.weight_hh_l0' .* 1 NaN and 0 inf among 16"):
        broken = copy.deepcopy(model)
        broken[2].weight_hh_l0.data[0, 0] = torch.nan
        flow.prepare(broken, x)
    model[0].bias.data[3] = torch.nan
    prepared = flow.prepare(model, x)
    with pytest.raises(ValueError, match=r"calibrate: '0.bias' of the model .* got 1 NaN and 0"):
        flow.calibrate(prepared, [x])


def test_numpy_inputs_are_not_printed(qmodel):
    with pytest.raises(TypeError) as error:
        qmodel(DATA[0].numpy())
    assert "got a numpy array of float32 [" in str(error.value) and "[[" not in str(error.value)
    assert "torch.from_numpy" in str(error.value)


def test_errors_of_sizes_that_do_not_fit():
    body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
    model = nn.Sequential(OrderedDict(body=body, flat=nn.Flatten(), head=nn.Linear(144, 2))).eval()
    qmodel = torchq.quantize(model, [torch.randn(2, 3, 8, 8)])
    with pytest.raises(ValueError, match=r"got 4 in src \[2, 4, 8, 8\].*module is 'body.0'"):
        qmodel(torch.randn(2, 4, 8, 8))  # its own code, which the graph's guards leave it to
    with pytest.raises(
        AssertionError, match=r"must meet its guards: input is float32 of shape \[any, 3, "
    ):
        graph_of(qmodel)(torch.randn(2, 4, 8, 8))


@pytest.mark.parametrize("flow", [torchq, torchq.eager], ids=["graph", "eager"])
def test_save_pretrained_is_refused(flow, tmp_path):
    """from_pretrained would read the file into a float model, and find none of its weights."""

    class Pretrained(nn.Sequential):
        def save_pretrained(self, path):
            raise AssertionError(f"wrote {path}")

    x = torch.randn(4, 8)
    model = nn.Sequential(Pretrained(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 2)).eval()
    prepared = flow.calibrate(flow.prepare(model, x), [x])
    qmodel = flow.convert(prepared)
    torchq.save(qmodel, tmp_path / "q")
    for made in (prepared, qmodel, copy.deepcopy(qmodel), torchq.load(tmp_path / "q", model)):
        with pytest.raises(NotImplementedError, match=r"Call torchq.save\(model, path\)"):
            made[0].save_pretrained(tmp_path / "p")
    with pytest.raises(AssertionError, match="wrote"):
        model[0].save_pretrained(tmp_path / "p")


def test_a_forgotten_calibration_names_the_call():
    for flow in (torchq, torchq.eager):
        prepared = flow.prepare(nn.Sequential(nn.Linear(8, 4)).eval(), torch.randn(8, 8))
        with pytest.raises(RuntimeError, match=r"no data. Call torchq.calibrate\(prepared"):
            flow.convert(prepared)


@pytest.mark.parametrize(
    ("pattern", "remedy"),
    [
        ("blocks.7.haed", "Did you mean 'blocks.7.head'"),
        ("blocks.7.haed.dst", "Did you mean 'blocks.7.head.dst'"),
        ("zzz", "Names begin with 'blocks'."),
    ],
)
def test_overrides_that_match_nothing_suggest_names(pattern, remedy):
    blocks = [nn.ModuleDict({"head": nn.Linear(4, 4), "tail": nn.Linear(4, 4)}) for _ in range(80)]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(blocks)

        def forward(self, x):
            for block in self.blocks:
                x = block["tail"](block["head"](x))
            return x

    with pytest.raises(ValueError) as error:
        torchq.prepare(Net().eval(), torch.randn(8, 4), overrides={pattern: None})
    assert remedy in str(error.value) and len(str(error.value)) < 250


@pytest.mark.parametrize("flow", [torchq, torchq.eager], ids=["graph", "eager"])
def test_errors_of_a_model_that_is_one_layer(flow):
    layer, x = nn.Linear(8, 4).eval(), torch.randn(8, 8)
    with pytest.raises(ValueError, match="The model is one module, which only '' and"):
        flow.prepare(layer, x, overrides={"head": None})
    assert type(flow.prepare(layer, x, overrides={"": None})) is nn.Linear
    for other in (flow.prepare(layer, x), flow.quantize(layer, [x], x)):
        with pytest.raises(ValueError, match=r"got \w+Leaf in the model\."):
            flow.prepare(other, x)
    with pytest.raises(ValueError, match=r"torchq.HistogramObserver: src .* data\.$"):
        flow.quantize(layer, [x / 0], x)


@pytest.mark.parametrize(
    ("field", "remedy"),
    [("activation_bit", "Did you mean 'activation_bits'?"), ("foo", "got 'foo'. Leave it out.")],
)
def test_wrong_fields_of_a_config(field, remedy):
    with pytest.raises(TypeError, match=r"torchq.QConfig: fields must be of") as error:
        torchq.QConfig(**{field: 7})
    assert str(error.value).endswith(remedy)
