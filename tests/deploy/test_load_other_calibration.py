# SPDX-License-Identifier: Apache-2.0
"""A state loads into the same model calibrated on other data, numbers in post-ops included."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
from calls import assert_same
from torch import Tensor, nn

import torchq
from torchq import PostOps, QConfig, QParams
from torchq.nn import QLinear

U8 = torch.uint8


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(x + self.second(x))
        return self.last(x.mean((2, 3)))


def converted(factor: float, config: QConfig) -> nn.Module:
    torch.manual_seed(0)
    model = Residual().eval()
    torch.manual_seed(1)
    data = [factor * torch.rand(2, 3, 8, 8) for _ in range(3)]
    return torchq.quantize(model, [(x,) for x in data], (data[0],), config)


@pytest.mark.parametrize("bits", (8, 7))
@pytest.mark.parametrize("assign", (False, True))
def test_residual_model_loads_the_state_of_another_calibration(bits: int, assign: bool) -> None:
    config = QConfig(activation_bits=bits)
    one, other = converted(1.0, config), converted(5.0, config)
    x = 3 * torch.rand(2, 3, 8, 8)
    expected = other(x)
    assert not torch.equal(one(x), expected)
    one.load_state_dict(other.state_dict(), assign=assign)
    assert_same(one(x), expected)
    saved = io.BytesIO()
    torch.save(one.state_dict(), saved)
    saved.seek(0)
    again = converted(0.1, config)
    again.load_state_dict(torch.load(saved, weights_only=True))
    assert_same(again(x), expected)


def layer(chain: PostOps, seed: int = 0) -> QLinear:
    torch.manual_seed(seed)
    src, dst = QParams.per_tensor(0.1, 128, U8), QParams.per_tensor(0.2 + seed, 7, U8)
    return QLinear.from_float(nn.Linear(6, 5), src, dst, post_ops=chain)


def test_sums_and_clips_are_taken_over() -> None:
    chains = [
        PostOps().append_sum(0.5, 3, "u8").append_eltwise("tanh").append_eltwise("clip", 0, 6),
        PostOps().append_sum(0.25, 199, "u8").append_eltwise("tanh").append_eltwise("clip", -1, 9),
    ]
    one, other = (layer(chain, seed) for seed, chain in enumerate(chains))
    src, residual = torch.randint(0, 256, (9, 6), dtype=U8), torch.randint(0, 256, (9, 5), dtype=U8)
    one.load_state_dict(other.state_dict())
    assert_same(one(src, residual), other(src, residual))
    assert one.read_spec() == other.read_spec()
    assert str(one.attr) == str(other.attr)


@pytest.mark.parametrize(
    "text",
    (
        "eltwise_tanh+eltwise_clip:0:6",
        "sum:0.5:3:s8+eltwise_tanh+eltwise_clip:0:6",
        "sum:0.5:3:u8+eltwise_relu+eltwise_clip:0:6",
        "sum:0.5:3:u8+eltwise_tanh+eltwise_clip:0:6:2",
        "eltwise_tanh+sum:0.5:3:u8+eltwise_clip:0:6",
    ),
)
def test_other_post_ops_are_refused(text: str) -> None:
    one = layer(PostOps.parse("sum:0.5:3:u8+eltwise_tanh+eltwise_clip:0:6"))
    with pytest.raises(RuntimeError, match=r"has spec .* but this module is"):
        one.load_state_dict(layer(PostOps.parse(text)).state_dict())


@pytest.mark.parametrize("changes", ({"src": "s8"}, {"post_ops": "no:chain"}, {"post_ops": 3}))
def test_other_fields_are_refused(changes: dict[str, Any]) -> None:
    one = layer(PostOps().append_sum(0.5, 3, "u8"))
    state = layer(PostOps().append_sum(0.75, 3, "u8")).state_dict()
    text = json.dumps(json.loads(bytes(state["spec"].tolist())) | changes, separators=(",", ":"))
    state["spec"] = torch.tensor(list(text.encode()), dtype=U8)
    with pytest.raises(RuntimeError, match=r"has spec .* but this module is"):
        one.load_state_dict(state)
