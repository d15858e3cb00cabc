# SPDX-License-Identifier: Apache-2.0
"""``torchq.load`` into a model of another architecture: one error that names every difference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq

IMAGES, ROWS, IDS = torch.randn(2, 3, 8, 8), torch.randn(2, 5, 64), torch.randint(0, 9, (2, 5))
DYNAMIC = torchq.QConfig(dynamic=True)


class Net(nn.Module):
    """Layers by name, one after the other; the last result of a recurrent one is its output."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x, x, x) if isinstance(layer, nn.MultiheadAttention) else layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return x


def heads(width: int) -> Net:
    return Net(body=nn.Linear(64, 64), act=nn.ReLU(), head=nn.Linear(64, width))


def image(**options: Any) -> Net:
    given: dict[str, Any] = {"kernel_size": 3, "padding": 1} | options
    return Net(conv=nn.Conv2d(3, 6, **given), flat=nn.Flatten(), act=nn.ReLU())


def sequences(cls: Any = nn.LSTM, inputs: int = 64, hidden: int = 16, **options: Any) -> Net:
    return Net(rnn=cls(inputs, hidden, batch_first=True, **options))


def words(count: int = 9, dim: int = 64) -> Net:
    return Net(words=nn.Embedding(count, dim), fc=nn.Linear(dim, 4))


def normed(width: int = 64, norm: Any = nn.LayerNorm) -> Net:
    return Net(norm=norm(width), fc=nn.Linear(64, 4))


CASES: dict[str, tuple[Callable[[], Net], Callable[[], Net], list[str]]] = {
    "head": (
        lambda: heads(10),
        lambda: heads(12),
        ["'head.out_features' is 10", "12 in the model"],
    ),
    "two": (
        lambda: heads(10),
        lambda: Net(body=nn.Linear(64, 32), act=nn.ReLU(), head=nn.Linear(32, 12)),
        ["body.out_features' is 64", "'head.in_features' is 64", "'head.out_features' is 10"],
    ),
    "class": (
        lambda: image(),
        lambda: Net(conv=nn.Linear(8, 6), flat=nn.Flatten(), act=nn.ReLU()),
        ["'conv' is a Conv2d in the file, a Linear in the model"],
    ),
    "no layer": (
        lambda: image(),
        lambda: Net(conv=nn.Sequential(nn.Conv2d(3, 6, 3)), flat=nn.Flatten(), act=nn.ReLU()),
        ["'conv' is a Conv2d in the file, a Sequential in the model"],
    ),
    "kernel": (
        lambda: image(),
        lambda: image(kernel_size=5, padding=2),
        [r"'conv.kernel_size' is (3, 3) in the file, (5, 5)", "'conv.padding' is (1, 1)"],
    ),
    "stride": (lambda: image(), lambda: image(stride=2), ["'conv.stride' is (1, 1)"]),
    "groups": (lambda: image(groups=3), lambda: image(), ["'conv.groups' is 3 in the file, 1"]),
    "padding mode": (
        lambda: image(),
        lambda: image(padding_mode="reflect"),
        ["'conv.padding_mode' is zeros in the file, reflect"],
    ),
    "fewer": (
        lambda: heads(10),
        lambda: Net(body=nn.Linear(64, 64), act=nn.ReLU()),
        ["'head' is a Linear in the file, not in the model"],
    ),
    "more": (
        lambda: heads(10),
        lambda: Net(**dict(heads(10).named_children()), more=nn.Linear(10, 10)),
        ["'more.weight' is [10, 10] in the model, not in the file"],
    ),
    "lstm": (
        lambda: sequences(),
        lambda: sequences(hidden=24, num_layers=2),
        ["'rnn.hidden_size' is 16 in the file, 24", "'rnn.num_layers' is 1 in the file, 2"],
    ),
    "directions": (
        lambda: sequences(),
        lambda: sequences(bidirectional=True),
        ["'rnn.bidirectional' is False in the file, True"],
    ),
    "gru": (
        lambda: sequences(),
        lambda: sequences(nn.GRU),
        ["'rnn' is a LSTM in the file, a GRU in the model"],
    ),
    "table": (
        lambda: words(),
        lambda: words(20),
        ["'words.num_embeddings' is 9 in the file, 20 in the model"],
    ),
    "dim": (lambda: words(), lambda: words(9, 32), ["'words.embedding_dim' is 64", "fc.in_feat"]),
    "norm": (lambda: normed(), lambda: normed(5), ["'norm.weight' is [64] in the file, [5]"]),
    "no norm": (
        lambda: normed(),
        lambda: normed(64, lambda width: nn.Identity()),
        ["'norm.weight' is [64] in the file, not in the model"],
    ),
    "attention": (
        lambda: Net(a=nn.MultiheadAttention(64, 4, batch_first=True), fc=nn.Linear(64, 4)),
        lambda: Net(a=nn.MultiheadAttention(32, 4, batch_first=True), fc=nn.Linear(64, 4)),
        ["'a.q_proj.in_features' is 64 in the file, 32 in the model"],
    ),
}


def source(model: Net) -> Tensor:
    if hasattr(model, "words"):
        return IDS
    return IMAGES if hasattr(model, "conv") else ROWS


@pytest.mark.filterwarnings("ignore:torchq.convert. nothing runs")
@pytest.mark.parametrize("flow", ["static", "dynamic", "swapped"])
@pytest.mark.parametrize("case", CASES)
def test_every_difference_is_told(case: str, flow: str, tmp_path: Path) -> None:
    make, other, parts = CASES[case]
    model = make().eval()
    x, path = source(model), tmp_path / "model"
    if flow == "swapped":
        converted = torchq.eager.quantize(model, [x], x, torchq.QConfig(embedding_bits=8))
    elif flow == "dynamic":
        kinds = {nn.Linear, nn.Conv2d, nn.LSTM, nn.Embedding, nn.MultiheadAttention}
        converted = torchq.quantize_dynamic(model, kinds)
    else:
        converted = torchq.quantize(model, [x], config=torchq.QConfig(embedding_bits=8))
    torchq.save(converted, path)
    assert torch.equal(torchq.load(path, make().eval())(x), converted(x))
    assert torch.equal(torchq.load(path, make().eval().to("meta"))(x), converted(x))
    if flow == "dynamic" and case in ("attention", "groups"):
        return  # they stay float, and their tensors tell
    with pytest.raises(ValueError, match="must be of one architecture, got these diff") as caught:
        torchq.load(path, other().eval())
    text = str(caught.value)
    assert str(path) in text and "Pass the architecture the file was saved from" in text
    for part in parts:
        assert part in text, text


def test_a_layer_with_code_of_its_own_is_compared_by_what_it_computes(tmp_path: Path) -> None:
    class Turned(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.1)
            self.bias = nn.Parameter(torch.randn(outputs))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight + self.bias

    def model(width: int) -> nn.Module:
        return nn.Sequential(Turned(64, width), nn.ReLU()).eval()

    rows = torch.randn(6, 64)
    converted = torchq.quantize(model(16), [rows])
    torchq.save(converted, tmp_path / "model")
    assert torch.equal(torchq.load(tmp_path / "model", model(16))(rows), converted(rows))
    with pytest.raises(ValueError, match=r"'0.weight' is \[16, 64\] in the file, \[24, 64\] in"):
        torchq.load(tmp_path / "model", model(24))


def test_many_differences_are_counted(tmp_path: Path) -> None:
    def model(width: int) -> nn.Module:
        return nn.Sequential(*[nn.Linear(width, width) for _ in range(15)]).eval()

    torchq.save(torchq.quantize_dynamic(model(8)), tmp_path / "model")
    with pytest.raises(ValueError, match=r"; and 10 more\. Pass the architecture"):
        torchq.load(tmp_path / "model", model(16))


@pytest.mark.parametrize("kind", [nn.Linear, nn.LayerNorm])
def test_a_module_of_two_names_that_the_file_has_twice(kind: Any, tmp_path: Path) -> None:
    """Both names got the values of the second one."""

    class Stack(nn.Module):
        def __init__(self, shared: bool) -> None:
            super().__init__()
            first, second = (kind(*[8] * (1 + (kind is nn.Linear))) for _ in range(2))
            nn.init.normal_(second.weight)
            self.first, self.second = first, first if shared else second
            self.last = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.last(self.second(x if float(x.sum()) < 1e9 else -x))

    rows, path = torch.randn(6, 8), tmp_path / "model"
    for shared in (True, False):
        model = Stack(shared).eval()
        converted = torchq.quantize(model, [rows])
        torchq.save(converted, path)
        assert torch.equal(torchq.load(path, Stack(shared).eval())(rows), converted(rows))
    with pytest.raises(ValueError, match=r"is that of 'first.*' in the model, another one"):
        torchq.load(path, Stack(True).eval())
