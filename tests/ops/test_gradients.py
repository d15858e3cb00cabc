# SPDX-License-Identifier: Apache-2.0
"""No op of torchq has a derivative, and nobody gets zeros for one: each way to ask raises."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.autograd.forward_ad as fwd
from torch import Tensor, nn

import torchq
import torchq.functional as TF

BACKWARD = r"torchq\.\w+: \w+ requires grad, but torchq's ops have no backward.*torch\.no_grad\(\)"
FORWARD = r"torchq\.\w+: \w+ has a tangent.*no forward-mode derivative.*unpack_dual"

Function = Callable[[Tensor], Tensor]


def dual(f: Function, x: Tensor) -> Tensor:
    with fwd.dual_level():
        return f(fwd.make_dual(x, torch.ones_like(x)))


def twice(f: Function, x: Tensor) -> Tensor:
    """Backward of a backward whose graph holds the op."""
    y = x.clone().requires_grad_()
    [first] = torch.autograd.grad((y**3).sum(), y, create_graph=True)
    [second] = torch.autograd.grad(f(first).sum(), y)
    return second


WAYS: dict[str, tuple[Callable[[Function, Tensor], object], str]] = {
    "requires_grad": (lambda f, x: f(x.clone().requires_grad_()), BACKWARD),
    "jacobian": (torch.autograd.functional.jacobian, BACKWARD),
    "twice": (twice, BACKWARD),
    "grad": (lambda f, x: torch.func.grad(lambda v: f(v).sum())(x), BACKWARD),
    "vjp": (lambda f, x: torch.func.vjp(f, x), BACKWARD),
    "jacrev": (lambda f, x: torch.func.jacrev(f)(x), BACKWARD),
    "hessian": (lambda f, x: torch.func.hessian(lambda v: f(v).sum())(x), "requires|tangent"),
    "jvp": (lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)), FORWARD),
    "jacfwd": (lambda f, x: torch.func.jacfwd(f)(x), FORWARD),
    "dual": (dual, FORWARD),
    "grad of vmap": (lambda f, x: torch.func.grad(lambda v: torch.vmap(f)(v).sum())(x), BACKWARD),
}


def linear(x: Tensor) -> Tensor:
    weight = torch.ones(4, 8, dtype=torch.int8)
    return TF.dynamic_linear(x, weight, torch.ones(4))


FUNCTIONS: dict[str, Function] = {
    "quantize": lambda x: TF.dequantize(TF.quantize(x, 0.1), 0.1),
    "dynamic_linear": linear,
    "eltwise": lambda x: TF.eltwise(x, "tanh"),
    "sum": lambda x: TF.binary(x, x, "add", dst_dtype=torch.float32),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_an_op_refuses_derivatives(function: str, way: str):
    ask, message = WAYS[way]
    with pytest.raises(RuntimeError, match=message):
        ask(FUNCTIONS[function], torch.rand(3, 8))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_converted_model_refuses_derivatives(way: str):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    x = torch.rand(3, 8)
    ask, message = WAYS[way]
    with pytest.raises(RuntimeError, match=message):
        ask(torchq.quantize(model, [x]), x)


def test_every_op_is_guarded():
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("torchq::")]
    ops = [s.name for s in schemas if any("Tensor" in str(a.type) for a in s.arguments)]
    assert len(ops) > 30
    for name in ops:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "Autograd"), name


def test_tensors_in_lists_are_seen():
    x = torch.rand(3, requires_grad=True)
    params = torch.ones(3), torch.zeros(3, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"torchq\.sum: srcs requires grad"):
        torch.ops.torchq.sum([x.detach(), x], *params, 6)


def test_remedies_of_the_messages():
    x, f = torch.rand(3, 8), FUNCTIONS["quantize"]
    expected = f(x)
    trained = x.clone().requires_grad_()
    assert torch.equal(f(trained.detach()), expected)
    with torch.no_grad():
        assert torch.equal(f(trained), expected)
    with torch.inference_mode():
        assert torch.equal(f(trained), expected)
    with fwd.dual_level():
        assert torch.equal(f(fwd.unpack_dual(fwd.make_dual(x, x)).primal), expected)
    result, tangent = torch.func.jvp(lambda v: v * f(fwd.unpack_dual(v).primal), (x,), (x,))
    assert torch.equal(result, x * expected) and torch.equal(tangent, x * expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_computes_row_by_row():
    x, f = torch.rand(5, 3, 8), FUNCTIONS["quantize"]
    assert torch.equal(torch.vmap(f)(x), f(x))
