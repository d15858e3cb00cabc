# SPDX-License-Identifier: Apache-2.0
"""torchq.explain: what runs in int8, and the reason of what does not."""

from __future__ import annotations

import models
import pytest
import torch
from torch import nn

import torchq
from torchq import eager
from torchq.report import reasons


def explained(name: str) -> torchq.Explanation:
    make, shape, _, _ = models.CASES[name]
    x = torch.randn(shape)
    return torchq.explain(eager.quantize(models.randomize(make()), [x, 2 * x], x))


OWN = "the model's own code calls it, which gets and gives float32"


def test_explain_table() -> None:
    lines = str(explained("shared_relu6")).splitlines()
    assert " ".join(lines[0].split()) == "module class runs in attributes, or why it is float"
    assert lines[1].startswith("0       Conv2d    int8     [8, 8, 1, 1], u8 -> f32, scales:src:0+")
    assert lines[2] == f"1       ReLU6 x2  float    {OWN}"
    assert lines[-1] == "3 of 3 convolutions and linears run in int8"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("unbatched", {"a": "its source [8, 10, 10] has no batch dimension"}),
        ("never_called", {"b": "not called with example_inputs"}),
        ("keyword_layer", {"lin": ""}),
        ("exposed", {"b": "",
                     "c": "its parameters are used outside of it, and it is not called"}),
        ("forward_directly", {"a": "its parameters are used outside of it, and it is not called"}),
        ("attention", {"mha.out_proj": f"{reasons.DYNAMIC}{reasons.LENGTH}", "mha.q_proj": ""}),
        ("add_both", {"add": OWN, "relu": OWN}),
        ("bn_other_reader", {"bn": OWN}),
        ("residual", {"a": "", "b": ""}),
        ("dropout", {"1": OWN, "3": OWN}),
        ("stubs", {"q": OWN, "dq": OWN}),
    ],
)  # fmt: skip
def test_reasons(name: str, expected: dict[str, str]) -> None:
    got = {row.name: row.reason for row in explained(name).rows}
    assert {key: got[key] for key in expected} == expected


def test_custom_modules_are_reported() -> None:
    class Swish(nn.Module):
        def forward(self, src: torch.Tensor) -> torch.Tensor:
            return src * torch.sigmoid(src)

    class MyLinear(nn.Linear):
        def forward(self, src: torch.Tensor) -> torch.Tensor:
            return super().forward(src) * 2

    model = nn.Sequential(nn.Linear(4, 4), Swish(), MyLinear(4, 4)).eval()
    x = torch.randn(2, 4)
    prepared = eager.prepare(model, x)
    rows = {row.name: row for row in torchq.explain(prepared).rows}
    for name in ("1", "2"):
        assert not rows[name].quantized
        assert rows[name].reason == "only leaf modules of torch.nn and torchq.nn have an int8 form"
    with pytest.raises(RuntimeError, match="strict=True, but 1 convolution"):
        eager.convert(eager.calibrate(prepared, [x]), strict=True)
