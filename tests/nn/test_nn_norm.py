# SPDX-License-Identifier: Apache-2.0
"""The modules of softmax and the normalizations: what the functions compute, everywhere.

test_rows.py holds the functions to the oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import F32, S8, U8, assert_same, assert_same_deployed
from cases import random_q
from torch import Tensor, nn

import torchq
import torchq.functional as TF
import torchq.nn as tnn
from torchq import Attr, PostOps, QParams

IN = QParams.per_tensor(0.021, 117)
OUT = QParams.per_tensor(0.03, -9, S8)
SEVEN = QParams(torch.tensor(0.003), torch.tensor(60, dtype=torch.int32), U8, None, 7)
CHAIN = PostOps.parse("eltwise_linear:0.5:0.25")


def attr_of(dst: QParams | None, src: QParams | None = IN) -> Attr:
    attr = Attr()
    if src is not None:
        attr.set_scales("src", 0, src.scale).set_zero_points("src", 0, src.zero_point)
    if dst is not None:
        attr.set_scales("dst", 0, dst.scale).set_zero_points("dst", 0, dst.zero_point)
    return attr.set_post_ops(CHAIN)


WEIGHT, BIAS = torch.randn(6, 5), torch.randn(6, 5)
Function = Callable[..., Tensor]
MODULES: dict[str, tuple[Callable[[Any], tnn.QModule], Function, tuple[int, ...]]] = {
    "softmax": (
        lambda d: tnn.QSoftmax(IN, d, 1, False, CHAIN),
        lambda x, **k: TF.softmax(x, 1, **k),
        (3, 6, 5),
    ),
    "log_softmax": (lambda d: tnn.QSoftmax(IN, d, -1, True, CHAIN), TF.log_softmax, (3, 6, 5)),
    "layer_norm": (
        lambda d: tnn.QLayerNorm(IN, d, (6, 5), WEIGHT, BIAS, 1e-3, CHAIN),
        lambda x, **k: TF.layer_norm(x, (6, 5), WEIGHT, BIAS, 1e-3, **k),
        (4, 6, 5),
    ),
    "plain layer_norm": (
        lambda d: tnn.QLayerNorm(IN, d, (5,), post_ops=CHAIN),
        lambda x, **k: TF.layer_norm(x, (5,), **k),
        (4, 6, 5),
    ),
    "rms_norm": (
        lambda d: tnn.QRMSNorm(IN, d, (6, 5), WEIGHT, 1e-3, CHAIN),
        lambda x, **k: TF.rms_norm(x, (6, 5), WEIGHT, 1e-3, **k),
        (4, 6, 5),
    ),
    "layer_norm of float": (
        lambda d: tnn.QLayerNorm(None, d, (6, 5), WEIGHT, BIAS, 1e-3, CHAIN),
        lambda x, **k: TF.layer_norm(x, (6, 5), WEIGHT, BIAS, 1e-3, **k),
        (4, 6, 5),
    ),
    "rms_norm of float": (
        lambda d: tnn.QRMSNorm(None, d, (5,), post_ops=CHAIN),
        lambda x, **k: TF.rms_norm(x, (5,), **k),
        (4, 6, 5),
    ),
    "group_norm": (
        lambda d: tnn.QGroupNorm(IN, d, 3, 6, WEIGHT[:, 0], None, 1e-3, CHAIN),
        lambda x, **k: TF.group_norm(x, 3, WEIGHT[:, 0].contiguous(), None, 1e-3, **k),
        (2, 6, 5, 3),
    ),
    "group_norm of float": (
        lambda d: tnn.QGroupNorm(None, d, 3, 6, WEIGHT[:, 0], BIAS[:, 0], 1e-3, CHAIN),
        lambda x, **k: TF.group_norm(
            x, 3, WEIGHT[:, 0].contiguous(), BIAS[:, 0].contiguous(), 1e-3, **k
        ),
        (2, 6, 5, 3),
    ),
    "softmax of float": (
        lambda d: tnn.QSoftmax(None, d, 1, False, CHAIN),
        lambda x, **k: TF.softmax(x, 1, **k),
        (3, 6, 5),
    ),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("dst", [None, OUT, SEVEN], ids=["f32", "s8", "u7"])
def test_modules_are_the_functions(name: str, dst: QParams | None, isa: str) -> None:
    make, function, shape = MODULES[name]
    module, src = make(dst), random_q(shape, U8)
    dtype = F32 if dst is None else dst.dtype
    real = IN.scale * (src.float() - IN.zero_point)
    if name.endswith("of float"):
        want = function(real, attr=attr_of(dst, None), dst_dtype=dtype)
    else:
        want = function(src, attr=attr_of(dst), dst_dtype=dtype)
    if dst is SEVEN:
        assert int(want.max()) > 127, "the limit matters"
        want = want.clamp(0, 127)
    assert_same(module(real), want)
    if name.endswith("of float"):
        with pytest.raises(TypeError, match=r"must be float32, got torch.uint8"):
            module(src)
    else:
        assert_same(module(src), want)


@pytest.mark.parametrize("name", MODULES)
def test_modules_everywhere(name: str, tmp_path: Any) -> None:
    make, _, shape = MODULES[name]
    model, src = nn.Sequential(make(OUT)).eval(), torch.randn(shape)
    want = model(src)
    assert_same_deployed(model, (src,), want)
    torchq.save(model, tmp_path / "model")
    loaded = torchq.load(tmp_path / "model", nn.Sequential(nn.Identity()))
    assert_same(loaded(src), want)
    assert repr(loaded) == repr(model) and "s8, post_ops='eltwise_linear:0.5:0.25'" in repr(model)


def test_from_float_is_close() -> None:
    """Within the steps of both tensors; a float destination shows the source's only."""
    x = torch.randn(4, 6, 5)
    floats = [nn.Softmax(-1), nn.LogSoftmax(1), nn.LayerNorm((6, 5)), nn.GroupNorm(2, 6)]
    floats += [nn.RMSNorm((6, 5)), nn.RMSNorm(5, 1e-3)]
    kinds = [tnn.QSoftmax, tnn.QSoftmax, tnn.QLayerNorm, tnn.QGroupNorm, *[tnn.QRMSNorm] * 2]
    fine = QParams.per_tensor(float(x.abs().max()) / 127, 0, S8)
    for module, kind in zip(floats, kinds, strict=True):
        for parameter in module.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)
        q = TF.quantize(x, fine.scale, 0, S8)
        real = fine.scale * q.float()
        got = kind.from_float(module, fine, None)(q)
        assert torch.allclose(got, module(real), atol=1e-5)
        assert torch.allclose(kind.from_float(module, None, None)(x), module(x), atol=1e-5)


def test_errors() -> None:
    q = random_q((2, 6, 5), U8)
    per_channel = QParams(torch.ones(6), torch.zeros(6, dtype=torch.int32), U8, 1)
    with pytest.raises(NotImplementedError, match="src and dst must have one scale"):
        tnn.QSoftmax(per_channel)
    with pytest.raises(NotImplementedError, match="post_ops must be eltwise ones, which"):
        tnn.QSoftmax(IN, post_ops=PostOps().append_sum())
    with pytest.raises(ValueError, match="dim must be given, got None"):
        tnn.QSoftmax.from_float(nn.Softmax(), IN)
    with pytest.raises(ValueError, match=r"must end in \[6\], got \[2, 6, 5\]"):
        tnn.QLayerNorm(IN, None, (6,))(q)
    with pytest.raises(ValueError, match=r"QRMSNorm: src must end in \[6\], got \[2, 6, 5\]"):
        tnn.QRMSNorm(IN, None, (6,))(q)
    with pytest.raises(ValueError, match=r"weight of a normalization must have shape \[6\]"):
        tnn.QLayerNorm(IN, None, (6,), torch.ones(5))
    with pytest.raises(ValueError, match=r"must be \(N, 4, ...\), got \[2, 6, 5\]"):
        tnn.QGroupNorm(IN, None, 2, 4)(q)
    for module in (
        tnn.QSoftmax(IN),
        tnn.QLayerNorm(IN, None, (5,)),
        tnn.QRMSNorm(IN, None, (5,)),
        tnn.QGroupNorm(IN, None, 2, 6),
    ):
        with pytest.raises(TypeError, match="must be float32, bfloat16 or float16, or the"):
            module(q.view(S8))
