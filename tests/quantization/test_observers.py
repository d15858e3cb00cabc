# SPDX-License-Identifier: Apache-2.0
import copy
import io
import math
import pickle
import random

import pytest
import torch
from torch import nn

from torchq.quantization.observers import (
    EntropyObserver,
    HistogramObserver,
    MinMaxObserver,
    MovingAverageObserver,
    Observer,
    PercentileObserver,
    PerChannelMinMaxObserver,
)
from torchq.quantization.qparams import QParams, choose_qparams

BINNED = [PercentileObserver, HistogramObserver, EntropyObserver]
MERGEABLE = [MinMaxObserver, PerChannelMinMaxObserver, *BINNED]
ALL = [*MERGEABLE, MovingAverageObserver]


def activations(seed=0, n=60):
    """Batches whose ranges differ by orders of magnitude, with zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(-6, 5, n)[torch.randperm(n, generator=generator)]
    batches = [torch.randn(4, 3, 5, generator=generator) * scale for scale in scales]
    batches[3].relu_()
    batches[7] = -batches[7].relu()
    batches.insert(seed, torch.zeros(4, 3, 5))
    return batches


def observe(make, batches, name="layer"):
    observer = make()
    observer.name = name
    for batch in batches:
        observer(batch)
    return observer


def assert_same_state(left, right):
    left, right = left.state_dict(), right.state_dict()
    assert left.keys() == right.keys()
    for key in left:
        assert left[key].dtype == right[key].dtype
        assert left[key].numpy().tobytes() == right[key].numpy().tobytes(), key


@pytest.mark.parametrize("make", MERGEABLE)
@pytest.mark.parametrize("seed", range(5))
def test_state_depends_on_the_data_only(make, seed):
    """Bit for bit: any order, any split into batches, any tree of merges."""
    batches = activations(seed)
    expected = observe(make, batches)
    rng = random.Random(seed)
    rng.shuffle(batches)
    pieces = [piece for batch in batches for piece in batch.split(rng.randint(1, 4))]
    assert_same_state(observe(make, pieces), expected)
    parts = [observe(make, pieces[start::7]) for start in range(7)]
    parts += [make(), make()]  # a process without data changes nothing
    while len(parts) > 1:
        rng.shuffle(parts)
        last = parts.pop()
        assert parts[0].merge(last) is parts[0]
    assert_same_state(parts[0], expected)
    assert parts[0].qparams() == expected.qparams()


@pytest.mark.parametrize("make", BINNED)
def test_merge_of_extreme_ranges(make):
    values = [1e-45, -1e-45, 1e-38, -1e-38, 1.0, 0.0, -0.0, 3e38, -3e38]
    expected = observe(make, [torch.tensor(values)])
    parts = [observe(make, [torch.tensor([value])]) for value in values]
    random.Random(0).shuffle(parts)
    for part in parts[1:]:
        parts[0].merge(part)
    assert_same_state(parts[0], expected)
    assert expected.counts.sum() == 9
    assert expected.zeros == 2


def test_merge_leaves_the_other_alone():
    left, right = observe(HistogramObserver, activations(0)), observe(HistogramObserver, [])
    right.merge(left)
    before = copy.deepcopy(left)
    right(torch.full((3,), 1e9))
    assert_same_state(left, before)


def test_merge_errors():
    observer = observe(MinMaxObserver, [torch.ones(2)], "encoder.fc")
    with pytest.raises(TypeError, match=r"MinMaxObserver of 'encoder.fc': other must be a MinMaxO"):
        observer.merge(HistogramObserver())
    with pytest.raises(ValueError, match=r"settings \(percentile=99.99, bins=2048\), got \(perc"):
        PercentileObserver().merge(PercentileObserver(99.0))
    with pytest.raises(ValueError, match=r"settings \(bins=2048\), got \(bins=1024\)"):
        HistogramObserver().merge(HistogramObserver(1024))
    moving = observe(MovingAverageObserver, [torch.ones(2)], "encoder.fc")
    message = r"'encoder.fc': merge is impossible, a moving average depends on the order.*histogram"
    with pytest.raises(RuntimeError, match=message):
        moving.merge(moving)
    left = observe(PerChannelMinMaxObserver, [torch.ones(2, 3)])
    with pytest.raises(ValueError, match="axis 1 must have 3 channels, got 4"):
        left.merge(observe(PerChannelMinMaxObserver, [torch.ones(2, 4)]))


def test_min_max():
    observer = observe(MinMaxObserver, [torch.tensor([1.0, 2.0]), torch.tensor([[-1.0]])])
    assert (observer.min_value, observer.max_value) == (-1.0, 2.0)
    assert observer.qparams(torch.int8, 7, True) == choose_qparams(-1.0, 2.0, torch.int8, 7, True)


def test_moving_average():
    batches = [torch.tensor([0.0, 4.0]), torch.tensor([-1.0, 8.0]), torch.tensor([3.0])]
    observer = observe(lambda: MovingAverageObserver(0.25), batches)
    assert observer.min_value == (0.0 * 0.75 - 1.0 * 0.25) * 0.75 + 3 * 0.25
    assert observer.max_value == (4.0 * 0.75 + 8.0 * 0.25) * 0.75 + 3 * 0.25
    for momentum in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match=r"momentum must be in \(0, 1\], got"):
            MovingAverageObserver(momentum)


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_per_channel(axis):
    batches = [torch.randn(4, 3, 5) for _ in range(3)]
    observer = observe(lambda: PerChannelMinMaxObserver(axis), batches)
    data = torch.stack(batches).movedim(axis % 3 + 1, 0).flatten(1)
    qparams = observer.qparams(torch.int8)
    assert qparams == choose_qparams(data.amin(1), data.amax(1), torch.int8, axis=axis)
    assert qparams.broadcast(3)[0].numel() == (4, 3, 5)[axis]


def test_per_channel_shapes():
    assert observe(lambda: PerChannelMinMaxObserver(0), [torch.arange(3.0)]).max_value.tolist() == [
        0.0,
        1.0,
        2.0,
    ]
    observer = observe(PerChannelMinMaxObserver, [torch.ones(2, 3)], "conv1")
    with pytest.raises(ValueError, match="'conv1': axis 1 must have 3 channels, got 4"):
        observer(torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"'conv1': src must have dimension 1, got shape \[3\]"):
        observer(torch.ones(3))


@pytest.mark.parametrize("make", ALL)
def test_uncalibrated(make):
    observer = make()
    observer.name = "encoder.layer.3.fc"
    assert not observer.calibrated
    observer(torch.empty(0, 4))
    message = (
        f"torchq.{make.__name__} of 'encoder.layer.3.fc': data must be recorded before qparams"
        r"\(\), got none\. Run torchq\.calibrate .*overrides=\{'encoder.layer.3.fc': None\}"
    )
    with pytest.raises(RuntimeError, match=message):
        observer.qparams()


@pytest.mark.parametrize("make", ALL)
def test_non_finite_data(make):
    observer = observe(make, [torch.randn(2, 3)], "stem.conv")
    before = copy.deepcopy(observer)
    bad = torch.tensor([[math.nan, 1.0, math.inf], [0.0, -math.inf, math.nan]])
    message = "'stem.conv': src must be finite in float32, got 2 NaN and 2 inf among 6 values"
    with pytest.raises(ValueError, match=message):
        observer(bad)
    with pytest.raises(ValueError, match="got 0 NaN and 1 inf among 3 values"):
        observer(torch.tensor([[1.0, 1e39, 0.0]], dtype=torch.float64))
    assert_same_state(observer, before)
    observer(torch.zeros(2, 3))  # still usable


@pytest.mark.parametrize("make", ALL)
def test_only_floating_point(make):
    with pytest.raises(TypeError, match=r"src must be a floating-point tensor, got torch.uint8"):
        make()(torch.zeros(2, 2, dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"src must be a floating-point tensor, got list"):
        make()([1.0])


@pytest.mark.parametrize("make", ALL)
def test_forward_returns_its_argument(make):
    x = torch.randn(2, 3, requires_grad=True)
    assert make()(x) is x
    assert make()(x[:0]).shape == (0, 3)


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_floating_dtypes(make, dtype):
    x = torch.randn(4, 3, 8).to(dtype)
    assert_same_state(observe(make, [x]), observe(make, [x.float()]))


@pytest.mark.parametrize("make", ALL)
def test_converting_the_model_keeps_statistics_exact(make):
    observer = observe(make, activations())
    before = copy.deepcopy(observer)
    nn.Sequential(observer).bfloat16()
    assert_same_state(observer, before)


@pytest.mark.parametrize("make", ALL)
def test_layout_does_not_matter(make):
    x = torch.randn(2, 3, 4, 5)
    strided = x.to(memory_format=torch.channels_last)
    assert_same_state(observe(make, [strided]), observe(make, [x]))


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("calibrated_target", [False, True])
def test_state_dict_round_trip(make, calibrated_target):
    source = observe(make, activations(0))
    target = observe(make, activations(1) if calibrated_target else [])
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=True))
    assert_same_state(target, source)
    assert target.qparams() == source.qparams()
    for observer in (source, target):
        observer(activations(2)[0])
    assert_same_state(target, source)
    target.load_state_dict(make().state_dict())
    assert not target.calibrated


@pytest.mark.parametrize("make", ALL)
def test_state_dict_within_a_model(make):
    source = nn.ModuleDict({"act": observe(make, activations(0))})
    target = nn.ModuleDict({"act": make()})
    target.load_state_dict(source.state_dict())
    assert_same_state(target, source)


@pytest.mark.parametrize("make", ALL)
def test_copies_are_independent(make):
    source = observe(make, activations(0), "fc")
    before = copy.deepcopy(source)
    for clone in (copy.deepcopy(source), pickle.loads(pickle.dumps(source))):
        assert_same_state(clone, source)
        assert clone.name == "fc"
        clone(activations(1)[0] * 1e6)
    assert_same_state(source, before)


@pytest.mark.parametrize("make", ALL)
def test_inference_mode_and_no_grad_mix(make):
    batches = activations()[:6]
    with torch.inference_mode():
        observer = observe(make, batches[:2])  # the buffers are normal tensors even here
    observe(lambda: observer, batches[2:4])
    with torch.no_grad():
        observe(lambda: observer, batches[4:])
    assert_same_state(observer, observe(make, batches))
    with torch.inference_mode():
        inside = observer.qparams()
    assert inside == observer.qparams()


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(
    "values",
    [
        [0.0],
        [-0.0],
        [3.3],
        [-3.3],
        [1e-38],
        [-1e-45],
        [3.4e38],
        [-3.4e38, 3.4e38],
        [1e-38, 1e38],
        [0.0, 7.0],
        [-2.0, -1.0],
        [100.0, 101.0],
    ],
    ids=str,
)
def test_extreme_and_constant_data(make, dtype, symmetric, values):
    """Valid parameters everywhere; constants and extremes are reproduced to half a step."""
    observer = observe(make, [torch.tensor(values).reshape(-1, 1)])
    qparams = observer.qparams(dtype, 8, symmetric)
    assert isinstance(qparams, QParams)
    if len(set(values)) == 1:
        info = torch.iinfo(dtype)
        scale, zero_point = qparams.scale.double().item(), int(qparams.zero_point)
        q = min(max(round(values[0] / scale) + zero_point, info.min), info.max)
        assert abs((q - zero_point) * scale - values[0]) <= scale / 2


@pytest.mark.parametrize("make", BINNED)
def test_memory_is_bounded(make):
    observer = observe(make, activations())
    assert sum(buffer.numel() for buffer in observer.buffers()) == 2048 + 4


def test_float_and_double_binning_agree():
    """Above width 1 binning runs in double: both must follow the same definition."""
    x = torch.randn(1000)
    small, large = HistogramObserver(), HistogramObserver()
    small(x)
    large(x * 2.0**20)
    assert large.exponent == small.exponent + 20
    assert large.exponent > 0 > small.exponent
    assert torch.equal(small.counts, large.counts)


def test_histogram_beats_min_max_on_heavy_tails():
    torch.manual_seed(0)
    x = torch.distributions.StudentT(3.0).sample((100_000,))

    def error(observer):
        observer(x)
        qparams = observer.qparams()
        q = (x / qparams.scale).round().add(qparams.zero_point).clamp(0, 255)
        return ((q - qparams.zero_point) * qparams.scale - x).square().mean()

    assert error(HistogramObserver()) < 0.9 * error(MinMaxObserver())


def test_settings_are_validated():
    with pytest.raises(ValueError, match=r"percentile must be in \(50, 100\], got 0.9999"):
        PercentileObserver(0.9999)
    with pytest.raises(ValueError, match=r"HistogramObserver: bins must be >= 512.*got 100"):
        HistogramObserver(100)
    with pytest.raises(ValueError, match="bits must be 8 or 7, got 4"):
        observe(MinMaxObserver, [torch.ones(1)]).qparams(torch.uint8, 4)
    assert repr(PercentileObserver(99.9)) == "PercentileObserver(percentile=99.9, bins=2048)"


def test_observer_is_abstract():
    with pytest.raises(NotImplementedError):
        Observer()(torch.ones(1))
