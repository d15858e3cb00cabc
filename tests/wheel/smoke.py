# SPDX-License-Identifier: Apache-2.0
"""Uses an installed torchq as a user would, and prints a digest of each result.

python smoke.py write FOLDER   quantizes and saves models, and prints their digests
python smoke.py read FOLDER    loads these files, and prints the digests again

Float layers of two torch releases may round differently, and so may scales that come from them.
Saved models without float layers have to give the same bits. Models that are quantized anew, and
those with float layers, have to be close.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import torchq
import torchq.functional as TF


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind()
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(batch, length, 32))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = Attention(), nn.LayerNorm(32), nn.LayerNorm(32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(32, 24, batch_first=True), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0])


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv2(torch.relu(self.norm1(self.conv1(x)))) + x)


def network() -> nn.Sequential:
    pool = [nn.MaxPool2d(2), Residual(16), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    stem = [nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), Residual(16)]
    return nn.Sequential(*stem, *pool, nn.Linear(16, 10))


def bert() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(60, 32), nn.LayerNorm(32), Block(), Block())


def values(*shape: int) -> Tensor:
    """Values that look random and are the same in every release."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64).square() * 0.37).sin().float().view(shape)


def fill(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.data = values(*parameter.shape) * (parameter[0].numel() ** -0.5)
    return model.eval()


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(40, 24), nn.GELU(), nn.Linear(24, 9)), values(5, 40)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), values(2, 3, 9, 11)),
    "lstm": (Recurrent, values(2, 6, 32)),
    "attention": (Attention, values(2, 9, 32)),
    "network": (network, values(2, 3, 33, 31)),
    "bert": (bert, torch.arange(18).square().view(2, 9) % 60),
}
# Has functions of torch in float, whose last bits differ between machines.
FLOAT = "bert"


def digest(result: Tensor) -> str:
    return hashlib.sha256(result.contiguous().numpy().tobytes()).hexdigest()[:16]


def expect_error(kind: type[Exception], words: str) -> None:
    """Linear of 9 columns with 8 rows of weights raises, with these words."""
    try:
        TF.linear(torch.zeros(2, 9, dtype=torch.uint8), torch.zeros(4, 8, dtype=torch.int8))
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError("no error")


def main(action: str, folder: Path) -> dict[str, str]:
    digests = {}
    for tier in torchq.supported_isas():
        src = (values(7, 65) * 127 + 128).to(torch.uint8)
        weight = (values(33, 65) * 127).to(torch.int8)
        expected = (src.double() @ weight.double().T).int()
        with torchq.use_isa(tier):
            assert torch.equal(TF.linear(src, weight, dst_dtype=torch.int32), expected), tier
    expect_error(ValueError, "torchq.linear")
    for name, (build, x) in MODELS.items():
        model = fill(build())
        anew = torchq.quantize(model, [x])
        assert torchq.sqnr(model(x), anew(x)) > 20, name
        path = folder / f"{name}.tq"
        if action == "write":
            torchq.save(anew, path)
        loaded = torchq.load(path, build())
        assert type(loaded) is type(model)
        result = folder / f"{name}.pt"
        if action == "write":
            torch.save(loaded(x), result)
        assert torchq.sqnr(torch.load(result), loaded(x)) > 60, name
        digests[name] = digest(loaded(x))
        for tier in torchq.supported_isas():
            with torchq.use_isa(tier):
                assert digest(loaded(x)) == digests[name], (name, tier)
        assert digest(torch.jit.script(loaded)(x)) == digests[name], name
        compiled = torch.compile(loaded, backend="aot_eager", fullgraph=True)
        assert digest(compiled(x)) == digests[name], name
        exported = torch.export.export(loaded, (x,)).module()
        assert digest(exported(x)) == digests[name], name
    digests.pop(FLOAT)
    return digests


if __name__ == "__main__":
    with torch.no_grad():
        print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
