# SPDX-License-Identifier: Apache-2.0
"""Large channels of transformers in the default recipe."""

import io
import pickle
import sys

import pytest
import torch
from torch import nn

import torchq
from torchq.quantization.qparams import choose_qparams, weight_qparams
from torchq.quantization.recipes.smoothing import static_smoothing

_OUTLIERS = sys.modules["torchq.convert.recipes.outliers"]


class Feed(nn.Module):
    """A norm, a feed-forward block and a residual connection."""

    def __init__(self, function):
        super().__init__()
        self.norm, self.function = nn.LayerNorm(48), function
        self.first, self.second = nn.Linear(48, 96), nn.Linear(96, 48)

    def forward(self, src):
        normed = self.norm(src)
        return normed + self.second(self.function(self.first(normed)))


def feed(norm=True, hidden=True, function=None):
    """A block, perhaps with a large channel of the norm, and two hidden ones."""
    torch.manual_seed(0)
    model = Feed(function or nn.GELU()).eval().requires_grad_(False)
    if norm:
        model.norm.weight[3] = 30.0
        model.first.weight[:, 3] /= 30.0
    if hidden:
        model.first.weight[[5, 70]] *= 25.0
        model.second.weight[:, [5, 70]] /= 25.0
    return model


def batches(count=4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 24, 48, generator=generator) for _ in range(count)]


def quality(model, qmodel):
    """SQNR of what the block adds to its residual."""
    src = batches(1, seed=9)[0]
    normed = model.norm(src)
    return torchq.sqnr(model(src) - normed, qmodel(src) - normed)


def plain(model, monkeypatch):
    """The same without a look at channels."""
    with monkeypatch.context() as patch:
        patch.setattr(_OUTLIERS.Outliers, "watch", lambda self, plan: iter(()))
        return torchq.quantize(model, batches())


def notes(qmodel):
    lines = [line for line in str(torchq.explain(qmodel)).splitlines() if "Linear" in line]
    return "smoothing" in lines[0], "channels apart" in lines[1]


@pytest.mark.parametrize(
    ("norm", "hidden", "gain"), [(True, False, 4), (False, True, 4), (True, True, 8)]
)
def test_large_channels_no_longer_coarsen_the_others(norm, hidden, gain, monkeypatch):
    model = feed(norm, hidden)
    qmodel = torchq.quantize(model, batches())
    assert notes(qmodel) == (norm, hidden)
    assert quality(model, qmodel) > max(quality(model, plain(model, monkeypatch)) + gain, 26)


@pytest.mark.parametrize("behind", [nn.Identity(), nn.ReLU(), nn.LeakyReLU(0.2)])
def test_another_layer_reads_the_sum(behind):
    """The block's result is int8, which the sum of both groups of channels is not yet."""

    class Read(Feed):
        def forward(self, src):
            return self.third(behind(super().forward(src)))

    torch.manual_seed(0)
    model = Read(nn.GELU())
    model.third = nn.Linear(48, 8)
    model.load_state_dict(feed(norm=False).state_dict(), strict=False)
    qmodel = torchq.quantize(model.eval().requires_grad_(False), batches())
    assert notes(qmodel) == (False, True)
    src = batches(1, seed=9)[0]
    assert torchq.sqnr(model(src), qmodel(src)) > 30
    assert torchq.explain(qmodel).graphs[0].own_calls == 0


def test_a_model_without_large_channels_stays_as_it_is(monkeypatch):
    model, src = feed(norm=False, hidden=False), batches(1)[0]
    qmodel = torchq.quantize(model, batches())
    assert notes(qmodel) == (False, False)
    assert torch.equal(qmodel(src), plain(model, monkeypatch)(src))


@pytest.mark.parametrize("function", [nn.SiLU(), nn.ELU(4.0), nn.Softplus(), nn.Tanhshrink()])
def test_other_functions(function, monkeypatch):
    model = feed(function=function)
    qmodel = torchq.quantize(model, batches())
    assert quality(model, qmodel) > quality(model, plain(model, monkeypatch)) + 4


@pytest.mark.parametrize("largest", [1.0, 8.0, 40.0])
def test_the_expected_error_is_near_the_measured_one(largest):
    torch.manual_seed(0)
    rows, weight = torch.randn(2000, 64), torch.randn(32, 64)
    rows[:, 7] *= largest
    weight[:, 7] /= largest
    alpha, factors, error = static_smoothing(rows.amin(0), rows.amax(0), weight)

    def measured(factors):
        src, own = rows / factors, weight * factors
        q, scale = choose_qparams(src.min(), src.max()), weight_qparams(own).scale.reshape(-1, 1)
        levels = (src / q.scale + q.zero_point).round().clamp(0, 255)
        near = (levels - q.zero_point) * q.scale
        products = near @ ((own / scale).round() * scale).t()
        return float((products - rows @ weight.t()).double().square().sum())

    assert 0 < alpha < 1 and error == pytest.approx(
        measured(factors) / measured(torch.ones(64)), rel=0.5
    )
    assert (error < 0.2) == (largest > 1)


def test_projections_that_share_a_source_share_its_factors():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.LayerNorm(48), nn.Linear(48, 48)
            self.query, self.key, self.value = (nn.Linear(48, 48) for _ in range(3))

        def forward(self, src):
            normed = self.norm(src)
            projected = self.query(normed), self.key(normed), self.value(normed)
            dst = nn.functional.scaled_dot_product_attention(*projected)
            return normed + self.head(dst)

    torch.manual_seed(0)
    model = Attention().eval().requires_grad_(False)
    model.norm.weight[3] = 40.0
    for layer in (model.query, model.key, model.value):
        layer.weight[:, 3] /= 40.0
    qmodel = torchq.quantize(model, batches())
    lines = [line for line in str(torchq.explain(qmodel)).splitlines() if "smoothing" in line]
    assert [line.split()[0] for line in lines] == ["query", "key", "value"]
    assert len({line.partition("smoothing")[2] for line in lines}) == 1
    assert quality(model, qmodel) > 28


def test_ranges_that_the_user_chose_stay():
    config = torchq.QConfig(activation_observer="minmax")
    assert notes(torchq.quantize(feed(), batches(), config=config)) == (False, False)


@pytest.mark.parametrize("options", [{"activation_dtype": torch.int8}, {"activation_bits": 7}])
def test_other_integers(options):
    model = feed()
    qmodel = torchq.quantize(model, batches(), config=torchq.QConfig(**options))
    assert notes(qmodel) == (True, True) and quality(model, qmodel) > 18


def test_a_value_that_something_else_reads_as_int8_is_not_smoothed():
    class Shared(Feed):
        def forward(self, src):
            normed = self.norm(src)
            products = normed @ normed.transpose(1, 2)
            return self.first(normed), products

    torch.manual_seed(0)
    model = Shared(nn.GELU()).eval().requires_grad_(False)
    model.norm.weight[3] = 30.0
    qmodel = torchq.quantize(model, batches())
    assert "smoothing" not in str(torchq.explain(qmodel))
    for expected, found in zip(model(batches()[0]), qmodel(batches()[0]), strict=True):
        assert torchq.sqnr(expected, found) > 20


def test_the_order_of_data_and_merged_shares_change_no_bit(tmp_path):
    model, data = feed(), batches()
    src = batches(1, seed=9)[0]
    expected = torchq.quantize(model, data)(src)
    assert torch.equal(torchq.quantize(model, data[::-1])(src), expected)
    shares = [torchq.prepare(model, data[0]) for _ in range(2)]
    for share, part in zip(shares, (data[:1], data[1:]), strict=True):
        torchq.calibrate(share, part)
    torchq.save_calibration(shares[1], tmp_path / "share")
    both = torchq.load_calibration(shares[0], tmp_path / "share", merge=True)
    assert torch.equal(torchq.convert(both)(src), expected)


@pytest.mark.slow
def test_files_pickles_and_programs_keep_the_bits(tmp_path):
    model, data = feed(), batches()
    prepared = torchq.calibrate(torchq.prepare(model, data[0]), data)
    qmodel = torchq.convert(prepared)
    expected = qmodel(data[0])
    torchq.save(qmodel, tmp_path / "model")
    loaded = torchq.load(tmp_path / "model")
    assert notes(loaded) == notes(qmodel) == (True, True)
    others = [loaded, torchq.convert(pickle.loads(pickle.dumps(prepared)))]
    others += [torch.export.export(qmodel, (data[0],)).module()]
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(qmodel, data[0]), file)
    file.seek(0)
    others += [torch.jit.load(file)]
    for other in others:
        assert torch.equal(other(data[0]), expected)


def test_every_tier_gives_the_same_bits():
    data = batches()
    qmodel = torchq.quantize(feed(), data)
    expected = qmodel(data[0])
    for isa in torchq.supported_isas():
        with torchq.use_isa(isa):
            assert torch.equal(qmodel(data[0]), expected), isa


def test_a_part_of_a_histogram_counts_what_lies_within():
    observer = torchq.observers.HistogramObserver()
    values = torch.cat([torch.linspace(-6, 2, 4001), torch.tensor([30.0])])
    observer(values)
    part = observer.within(-1.0, 2.0)
    width = part.histogram().width
    inside = int(((values >= -1 - width) & (values <= 2 + width)).sum())
    assert abs(int(part.counts.sum()) - inside) <= 2 * 4001 * width / 8 + 2
    assert float(part.qparams().scale) <= 3.0 / 255 * 1.01
    assert observer.max_value == 30.0
