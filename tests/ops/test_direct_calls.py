# SPDX-License-Identifier: Apache-2.0
"""Calls from Python go past torch.ops' matching of arguments; only a clock can tell."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from calls import F32, S32, U8, assert_same, sampled
from cases import LinearShape, conv, random_q
from fresh import python
from test_memory import resident_bytes
from test_opcheck import elementwise
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import torchq
from torchq import _C

ops = torch.ops.torchq
LINEAR = sampled(LinearShape(4, 20, 10), U8, U8, "sum:0.5:3+eltwise_relu")
ARGS = list(LINEAR.args.values())


def ordinary(name: str) -> Callable[..., Any]:
    """torch.ops' own callable."""
    callable_, *_ = torch._C._get_operation_overload(f"torchq::{name}", "")
    return callable_


class Spy:
    """A short call whose ordinary one is counted."""

    def __init__(self, name: str) -> None:
        self.count = 0
        self.ordinary = ordinary(name)
        self.call = _C.shortcut(f"torchq::{name}", self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.ordinary(*args, **kwargs)


def outcome(function: Callable[..., Any], args: Sequence[Any], **kwargs: Any) -> Any:
    """Returns a call's result, or the type and text of its error."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return type(error), str(error)


def assert_same_outcome(got: Any, expected: Any, label: object = "") -> None:
    if isinstance(expected, Tensor):
        assert type(got) is type(expected) and got.stride() == expected.stride()
        assert_same(got.as_subclass(Tensor), expected.as_subclass(Tensor), label)
    elif isinstance(expected, tuple) and isinstance(expected[0], Tensor):
        assert type(got) is tuple and len(got) == len(expected)
        for mine, theirs in zip(got, expected, strict=True):
            assert_same_outcome(mine, theirs, label)
    else:
        assert got == expected, label


def test_every_op_has_it():
    every = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("torchq::")]
    names = [n.removeprefix("torchq::") for n in every if "::_" not in n]
    assert len(names) > 30
    for name in names:
        for op in (getattr(ops, name), getattr(ops, name).default):
            assert op._op.__name__ == "call" and op._op.__module__ == "torch._ops.torchq", name


@pytest.mark.parametrize("private", ["torch.jit._builtins._register_builtin", "op._op"])
def test_a_torch_without_what_it_needs(private: str):
    """Calls stay as they are, and torchq imports."""
    program = f"""
import torch
import torchq.runtime.library as library
torch.ops.torchq.add, torch.ops.torchq.add.default
op = torch.ops.torchq.add.default
ordinary = torch.ops.torchq.add._op
del {private}
library.shorten_calls("add")
assert torch.ops.torchq.add._op is ordinary
"""
    result = python(program)
    assert result.returncode == 0, result.stderr


def test_results():
    src = random_q((2, 5, 6, 7), U8).contiguous(memory_format=torch.channels_last)
    calls = elementwise(src, src.clone())
    calls["linear"] = tuple(ARGS)
    calls["conv"] = tuple(sampled(conv("conv", (8, 20), (6, 7), 3, 1, 1)).args.values())
    calls["pack_conv"] = (random_q((4, 2, 3, 3), torch.int8), 2, [1, 1])
    for name, args in calls.items():
        spy = Spy(name)
        assert_same_outcome(spy.call(*args), spy.ordinary(*args), name)
        assert spy.count == 0, name


class Sub(Tensor):
    pass


def with_arg(index: int, value: Any) -> list[Any]:
    return [*ARGS[:index], value, *ARGS[index + 1 :]]


# Positions: 8 in_features, 9 dst_dtype, 10 post_ops, 12 post_op_srcs.
RESIDUAL = ARGS[12][0]
OTHERS = {
    "subclass": (with_arg(0, ARGS[0].as_subclass(Sub)), True),
    "subclass in a list": (with_arg(12, [RESIDUAL.as_subclass(Sub)]), True),
    "tuple": (with_arg(12, (RESIDUAL,)), True),
    "bool as int": (with_arg(9, False), True),
    "tensor as int": (with_arg(8, torch.tensor(10)), True),
    "too few": (ARGS[:-1], False),
    "none": ([], False),
    "too many": ([*ARGS, None, None, None, None], False),
    "None": (with_arg(1, None), False),
    "number": (with_arg(1, 3), False),
    "text": (with_arg(0, "src"), False),
    "list as tensor": (with_arg(0, [ARGS[0]]), False),
    "float as int": (with_arg(8, 10.0), False),
    "large int": (with_arg(8, 1 << 70), False),
    "bytes": (with_arg(10, b"eltwise_relu"), False),
    "surrogate": (with_arg(10, "\ud800"), False),
    "None in a list": (with_arg(12, [None]), False),
    "tensor as list": (with_arg(12, RESIDUAL), False),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_it_leaves_to_torch(name: str):
    args, right = OTHERS[name]
    spy = Spy("linear")
    got, expected = outcome(spy.call, args), outcome(spy.ordinary, args)
    assert spy.count == 1
    assert isinstance(expected, Tensor) == right, expected
    assert_same_outcome(got, expected)
    assert_same_outcome(outcome(ops.linear.default, args), expected)
    packet, _ = torch._C._jit_get_operation("torchq::linear")
    assert_same_outcome(outcome(ops.linear, args), outcome(packet, args))


def test_keywords():
    spy = Spy("linear")
    schema = [a.name for a in ops.linear.default._schema.arguments]
    assert_same(spy.call(**dict(zip(schema, ARGS, strict=False))), LINEAR.expected)
    assert_same(spy.call(*ARGS, row_sums=None), LINEAR.expected)
    assert spy.count == 2
    assert_same_outcome(outcome(spy.call, ARGS, src=1), outcome(spy.ordinary, ARGS, src=1))


def test_errors_of_the_op():
    wrong = {
        "dtype": with_arg(0, ARGS[0].float()),
        "shape": with_arg(8, 21),
        "code": with_arg(9, 5),
        "grammar": with_arg(10, "relu?"),
        "meta": with_arg(0, ARGS[0].to("meta")),
    }
    spy = Spy("linear")
    for name, args in wrong.items():
        expected = outcome(spy.ordinary, args)
        assert isinstance(expected, tuple) or name == "meta"
        if isinstance(expected, tuple):
            assert outcome(spy.call, args) == expected
    assert spy.count == 0


def test_parameters_and_grad():
    src, scale, zero = torch.nn.Parameter(torch.rand(3)), torch.ones(()), torch.zeros((), dtype=S32)
    args, spy = (src, scale, zero, 0), Spy("quantize")
    expected = outcome(spy.ordinary, args)
    assert expected[0] is RuntimeError and "no_grad" in expected[1]
    assert outcome(spy.call, args) == expected
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got, expected = spy.call(*args), spy.ordinary(*args)
            assert_same(got, expected)
            assert got.is_inference() == expected.is_inference()
    assert spy.count == 0


def test_function_modes_see_the_op():
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        got = ops.linear(*ARGS), ops.linear.default(*ARGS)
    assert seen == [ops.linear, ops.linear.default]
    assert_same(got[0], LINEAR.expected)
    assert_same(got[1], LINEAR.expected)


def test_dispatch_modes_see_the_op():
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(func)
            if len(seen) == 2:
                raise KeyError("mine")
            return func(*args, **(kwargs or {}))

    with Mode():
        got = ops.linear(*ARGS)
        with pytest.raises(KeyError, match="mine"):
            ops.linear(*ARGS)
    assert seen == [ops.linear.default] * 2
    assert_same(got, LINEAR.expected)
    assert_same(ops.linear(*ARGS), LINEAR.expected)


def test_fakes_and_profiles():
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in ARGS]
        fakes[12] = [mode.from_tensor(RESIDUAL)]
        fake = ops.linear(*fakes)
    assert fake.shape == LINEAR.expected.shape and fake.dtype == LINEAR.expected.dtype
    with torch.profiler.profile(record_shapes=True) as profile:
        ops.linear(*ARGS)
    events = [e for e in profile.events() if e.name == "torchq::linear"]
    assert len(events) == 1 and events[0].input_shapes[0] == [4, 10]


def lookups(x: Tensor, table: Tensor) -> Tensor:
    y: Tensor = torch.ops.torchq.lookup(x, table)
    z: Tensor = torch.ops.torchq.lookup(y, table)
    return z


def test_captures():
    x, table = random_q((3, 4), U8), random_q((256,), U8)
    expected = lookups(x, table)
    graph = torch.fx.symbolic_trace(lookups)
    assert [node.target for node in graph.graph.nodes].count(ops.lookup) == 2
    compiled = torch.compile(lookups, fullgraph=True, backend="aot_eager")
    ways = [graph, compiled, torch.jit.script(lookups), torch.jit.trace(lookups, (x, table))]
    assert all("torchq::lookup" in str(way.graph) for way in ways[2:])
    other = random_q((5, 6), U8)
    for way in ways:
        assert_same(way(x, table), expected)
        assert_same(way(other, table), lookups(other, table))


def test_references_and_memory():
    good, late = ARGS, with_arg(12, [RESIDUAL, None])  # `late` is given up at its last argument
    wrong = with_arg(8, 21)
    watched = [*ARGS, RESIDUAL, None]

    def run(count: int) -> None:
        for i in range(count):
            ops.linear(*good)
            if i % 5 == 0:  # a call that raises takes 20 times as long
                outcome(ops.linear, wrong)
                outcome(ops.linear, late)

    def drift() -> int:
        """Returns the largest change of a count over 10,000 calls and 2000 that raise."""
        gc.collect()
        before = [sys.getrefcount(a) for a in watched]
        run(10_000)
        return max(abs(sys.getrefcount(a) - b) for a, b in zip(watched, before, strict=True))

    run(1000)
    uses, resident = [a._use_count() for a in watched[:6]], resident_bytes()
    # A call that keeps or drops a reference shifts its count by 2000 every time. None and small
    # numbers are also in what other tests have left, which is freed at any time, once.
    assert min(drift() for _ in range(3)) < 1_000
    assert [a._use_count() for a in watched[:6]] == uses
    assert resident_bytes() - resident < 4 << 20


def test_other_threads_run_meanwhile():
    """The op holds no lock of Python's while it computes."""
    args = list(sampled(LinearShape(256, 1024, 256)).args.values())
    done = threading.Event()

    def work() -> None:
        with torchq.use_isa("reference"):
            ops.linear(*args)
        done.set()

    thread = threading.Thread(target=work)
    start = time.perf_counter()
    thread.start()
    turns = 0
    while not done.wait(1e-3):
        turns += 1
    thread.join()
    assert turns >= 5, f"{turns} turns in {time.perf_counter() - start:.3f} s"


def test_threads_with_one_list():
    """Arguments that another thread changes are read once."""
    srcs, stop = [RESIDUAL], threading.Event()
    args = with_arg(12, srcs)

    def change() -> None:
        while not stop.is_set():
            srcs[0] = RESIDUAL.clone()

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(3000):
            assert torch.equal(ops.linear(*args), LINEAR.expected)
    finally:
        stop.set()
        thread.join()


def test_floats_and_missing_values():
    src, scales, zeros = random_q((4, 8), U8), torch.tensor([0.5, 1]), torch.tensor([1, 0])
    args = (src, 1, None, None, 1e-5, scales, zeros.to(S32), 6, "")
    spy = Spy("layer_norm")
    assert_same(spy.call(*args), spy.ordinary(*args, None))
    assert spy.call(*args).dtype == F32 and spy.count == 0
    spy.call(*args[:4], 1, *args[5:])  # an int as a float
    assert spy.count == 1
