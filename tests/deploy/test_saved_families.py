# SPDX-License-Identifier: Apache-2.0
"""Models whose graphs have uncommon calls: saved and loaded with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.convert.dispatch import dispatches


class Scaled(nn.Module):
    """Divides by the root of a size: torch.export writes sym_float, and graphs call float."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / x.shape[0] ** 0.5


@pytest.mark.parametrize("dynamic", [False, True])
def test_floats_of_sizes(dynamic: bool, tmp_path: Path) -> None:
    x, path = torch.randn(4, 8), tmp_path / "file"
    config = torchq.QConfig(dynamic=dynamic)
    qmodel = torchq.quantize(Scaled().eval(), [x, torch.randn(6, 8)], config=config)
    (dispatch,) = dispatches(qmodel)
    assert any(node.target is float for node in dispatch.graph.graph.nodes)  # type: ignore[union-attr]
    torchq.save(qmodel, path)
    for loaded in (torchq.load(path), torchq.load(path, Scaled())):
        for batch in (x, torch.randn(9, 8)):
            assert torch.equal(loaded(batch), qmodel(batch))


def _mixtral(tf: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    config = tf.MixtralConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, vocab_size=100, num_local_experts=4,
    )  # fmt: skip
    return tf.MixtralForCausalLM(config), {"input_ids": torch.randint(5, 90, (2, 12))}


def _dpt(tf: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    config = tf.DPTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64,
        image_size=32, patch_size=8, backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 16, 24, 32], fusion_hidden_size=16,
    )  # fmt: skip
    return tf.DPTForDepthEstimation(config), {"pixel_values": torch.randn(1, 3, 32, 32)}


@pytest.mark.slow
@pytest.mark.parametrize("make", [_mixtral, _dpt])
def test_transformers(make: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.24")
    model, x = make(transformers)
    qmodel, path = torchq.quantize(model.eval(), [x, x]), tmp_path / "file"
    torchq.save(qmodel, path)
    loaded = torchq.load(path, model)
    with torch.inference_mode():
        assert torch.equal(loaded(**x)[0], qmodel(**x)[0])
