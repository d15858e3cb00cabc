# SPDX-License-Identifier: Apache-2.0
"""RMS norms that a model spells out are one op; group norms read convolutions in place.

What a model computes in each layer is computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from onnx_runtime import session
from torch import Tensor, nn

import torchq
import torchq.nn as tnn
from torchq.convert.dispatch import dispatch_of

SIZE = 16


def llama(x: Tensor, w: Tensor) -> Tensor:
    dtype = x.dtype
    x = x.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)
    return w * x.to(dtype)


def gemma(x: Tensor, w: Tensor) -> Tensor:
    x = x * torch.rsqrt((x * x).mean(2, keepdim=True) + 1e-3)
    return x * (1.0 + w.float())


def plain(x: Tensor, w: Tensor) -> Tensor:
    return torch.rsqrt(torch.mean(x**2, dim=-1, keepdim=True).add(1e-3)) * x


NORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "as Llama": llama,
    "as Gemma": gemma,
    "without a weight": plain,
    "torch's": lambda x, w: nn.functional.rms_norm(x, (SIZE,), w, 1e-3),
    "default eps": lambda x, w: nn.functional.rms_norm(x, (SIZE,)),
}
"""Where the weight is one plus what is given for Gemma, and 1 where it is not read."""
OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "another dim": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-3)),
    "a sum": lambda x, w: w * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-3)),
    "a cube": lambda x, w: w * (x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + 1e-3)),
    "another factor": lambda x, w: w * (x.abs() * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-3)),
    "a square of others": lambda x, w: w * (x * torch.rsqrt((x * w).pow(2).mean(-1, True) + 1e-3)),
    "eps times two": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, True).add(1e-3, alpha=2))),
    "a tensor added": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, True) + w.abs().max())),
}


class Model(nn.Module):
    def __init__(self, norm: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = norm
        self.first, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 8)
        self.weight = nn.Parameter(torch.rand(SIZE) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x), self.weight))


def converted(model: nn.Module, x: Tensor) -> tuple[nn.Module, Any]:
    """Return the converted model, and its graph; all layers are dynamic, which float reads show."""
    qmodel = torchq.quantize(model, example_inputs=x, config=torchq.QConfig(dynamic=True))
    dispatch = dispatch_of(qmodel)
    assert dispatch is not None
    return qmodel, dispatch.graph


def norms(graph: Any) -> list[tnn.QRMSNorm]:
    return [m for m in graph.modules() if isinstance(m, tnn.QRMSNorm)]


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_one_op(name: str) -> None:
    torch.manual_seed(0)
    model = Model(NORMS[name]).eval()
    qmodel, graph = converted(model, torch.randn(2, 5, SIZE))
    (norm,) = norms(graph)
    assert "rsqrt" not in graph.code
    assert "rsqrt" not in str(torchq.explain(qmodel))
    weight = {"as Gemma": 1 + model.weight, "as Llama": model.weight, "torch's": model.weight}
    eps = torch.finfo(torch.float32).eps if name == "default eps" else 1e-3
    for shape in ((2, 5, SIZE), (1, 1, SIZE), (7, 130, SIZE)):
        x = torch.randn(shape)
        real = x.double()
        want = real / (real.square().mean(-1, keepdim=True) + eps).sqrt()
        want = want * weight.get(name, torch.ones(SIZE)).double()
        assert torch.allclose(norm(x).double(), want, rtol=1e-6, atol=1e-6)
        assert torchq.sqnr(model(x), qmodel(x)) > 30


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_norm_stays(name: str) -> None:
    torch.manual_seed(0)
    model = Model(OTHERS[name]).eval()
    qmodel, graph = converted(model, torch.randn(2, 5, SIZE))
    assert not norms(graph)
    x = torch.randn(3, 5, SIZE)
    assert torchq.sqnr(model(x), qmodel(x)) > 30


def test_a_norm_of_rows_whose_size_varies_stays() -> None:
    class OfSteps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv1d(4, 8, 3), nn.Conv1d(8, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return self.last(y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6))

    torch.manual_seed(0)
    model = OfSteps().eval()
    qmodel = torchq.quantize(model, [torch.randn(2, 4, steps) for steps in (20, 24, 28, 32)])
    x = torch.randn(3, 4, 40)
    assert torchq.sqnr(model(x), qmodel(x)) > 25


def test_a_factor_of_the_call_stays_behind_the_norm() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(SIZE, 8)

        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return self.last(llama(x, w))

    model, x, w = Scaled().eval(), torch.randn(2, 5, SIZE), torch.rand(SIZE) + 0.5
    qmodel = torchq.quantize(model, example_inputs=(x, w), config=torchq.QConfig(dynamic=True))
    dispatch = dispatch_of(qmodel)
    assert dispatch is not None and len(norms(dispatch.graph)) == 1
    for factor in (w, 3 * w):
        assert torchq.sqnr(model(x, factor), qmodel(x, factor)) > 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_everywhere(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Model(llama).eval().to(dtype), torch.randn(2, 5, SIZE, dtype=dtype)
    qmodel, _ = converted(model, x)
    want = qmodel(x)
    assert torchq.sqnr(model(x).float(), want.float()) > 20
    assert torch.equal(torch.jit.script(qmodel)(x), want)
    torchq.save(qmodel, tmp_path / "model")
    assert torch.equal(torchq.load(tmp_path / "model", Model(llama).eval().to(dtype))(x), want)


def test_onnx(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Model(llama).eval(), torch.randn(2, 5, SIZE)
    qmodel = torchq.quantize(model, [x])
    path = tmp_path / "model.onnx"
    torchq.to_onnx(qmodel, path, x)
    run = session(path)
    (got,) = run.run(None, {run.get_inputs()[0].name: x.numpy()})
    assert torchq.sqnr(qmodel(x), torch.from_numpy(got)) > 35


class Masked(nn.Module):
    """Makes its mask in each of its layers, as T5 does of the bias and the padding."""

    def __init__(self, write: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))
        self.bias, self.write = nn.Parameter(torch.randn(SIZE)), write

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        for layer in self.layers:
            bias = self.bias * 2
            if self.write:
                bias += 1
            x = layer(x) + torch.where(keep, bias, -4.0)
        return x


@pytest.mark.parametrize("write", [False, True])
def test_equal_calls_are_one(write: bool) -> None:
    model, keep = Masked(write).eval(), torch.rand(4, SIZE) > 0.5
    call = (torch.randn(4, SIZE), keep)
    qmodel = torchq.quantize(model, example_inputs=call, config=torchq.QConfig(dynamic=True))
    dispatch = dispatch_of(qmodel)
    assert dispatch is not None
    assert write or dispatch.graph.code.count("torch.where") == 1
    for x in (call[0], torch.randn(4, SIZE)):
        assert torchq.sqnr(model(x, keep), qmodel(x, keep)) > 30


class Apart(nn.Module):
    """Calls that are equal as text, and no others in their place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.layer(x)
        noise = torch.rand_like(y) - torch.rand_like(y)
        changed = y * 2
        kept = y * 2
        changed.add_(1)
        changed.add_(1)
        return noise, changed - kept, y + 3, y + 3


def test_calls_that_must_stay_apart() -> None:
    model = Apart().eval()
    qmodel, _ = converted(model, torch.randn(4, SIZE))
    noise, two, first, second = qmodel(torch.randn(4, SIZE))
    assert noise.abs().min() > 0
    assert torch.allclose(two, torch.full_like(two, 2.0))
    first.zero_()
    assert second.abs().sum() > 0, "the caller has two tensors"


class Sequence(nn.Module):
    """As wav2vec2 begins: a group norm between convolutions of (N, C, L)."""

    def __init__(self, groups: int = SIZE, affine: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(2, SIZE, 3), nn.Conv1d(SIZE, 8, 3)
        self.norm = nn.GroupNorm(groups, SIZE, affine=affine)
        if affine:
            nn.init.uniform_(self.norm.weight, 0.5, 1.5)
            nn.init.uniform_(self.norm.bias, -1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.gelu(self.norm(self.first(x))))


class Residual(nn.Module):
    """As in diffusion models: sums and functions between convolutions and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.last, self.norm = nn.Conv2d(8, 4, 3), nn.GroupNorm(4, 8)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        x = self.first(x)
        y = self.middle(nn.functional.silu(self.norm(x + level[:, :, None, None])))
        return self.last(nn.functional.group_norm(torch.tanh(y + x), 2))


GROUPS: dict[str, tuple[nn.Module, tuple[Tensor, ...], int]] = {
    "one channel a group": (Sequence(), (torch.randn(2, 2, 90),), 1),
    "without weights": (Sequence(4, False), (torch.randn(1, 2, 90),), 1),
    "residual": (Residual(), (torch.randn(2, 3, 9, 7), torch.randn(2, 8)), 2),
}


@pytest.mark.parametrize("name", GROUPS)
def test_group_norms_read_convolutions_in_place(name: str, tmp_path: Path) -> None:
    model, call, count = GROUPS[name]
    qmodel = torchq.quantize(model.eval(), example_inputs=call, data=[call])
    dispatch = dispatch_of(qmodel)
    assert dispatch is not None
    found = [m for m in dispatch.graph.modules() if isinstance(m, tnn.QGroupNorm)]
    assert len(found) == count

    def check(norm: tnn.QGroupNorm, given: tuple[Tensor], got: Tensor) -> None:
        (x,) = given
        assert x.dtype == torch.float32 and x.movedim(1, -1).is_contiguous()
        affine = [None if t is None else t.double() for t in (norm.weight, norm.bias)]
        want = nn.functional.group_norm(x.double(), norm.num_groups, *affine, norm.eps)
        assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-5)
        seen.append(norm)

    seen: list[tnn.QGroupNorm] = []
    for norm in found:
        norm.register_forward_hook(check)
    want = qmodel(*call)
    assert seen == found
    for norm in found:
        norm._forward_hooks.clear()
    assert torchq.sqnr(model(*call), want) > 25
    assert torch.equal(torch.jit.script(qmodel)(*call), want)
    torchq.save(qmodel, tmp_path / "model")
    loaded = torchq.load(tmp_path / "model", GROUPS[name][0])
    assert torch.equal(loaded(*call), want)


def test_other_group_norms_stay() -> None:
    """In front of them are no convolutions, or sums with what is contiguous."""

    class Others(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.GroupNorm(2, 4), nn.Conv1d(4, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(self.norm(x))
            y = torch.nn.functional.group_norm(y.mT.contiguous().mT + x, 2)
            return self.layer(y)

    model, x = Others().eval(), torch.randn(2, 4, 50)
    qmodel = torchq.quantize(model, [x])
    dispatch = dispatch_of(qmodel)
    assert dispatch is not None
    assert not any(isinstance(m, tnn.QGroupNorm) for m in dispatch.graph.modules())
    assert torchq.sqnr(model(x), qmodel(x)) > 25


@pytest.mark.parametrize("affine", [True, False])
def test_group_norms_in_onnx(affine: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Sequence(4, affine).eval(), torch.randn(2, 2, 40)
    qmodel = torchq.quantize(model, [x])
    path = tmp_path / "model.onnx"
    torchq.to_onnx(qmodel, path, x)
    run = session(path)
    (got,) = run.run(None, {run.get_inputs()[0].name: x.numpy()})
    assert torchq.sqnr(qmodel(x), torch.from_numpy(got)) > 35
