# SPDX-License-Identifier: Apache-2.0
"""Same bits on any thread, in any floating-point mode and at any address; no byte out of bounds."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from calls import F32, S8, S32, U8, Call, assert_same, make_call, sampled
from cases import ConvShape, LinearShape
from hypothesis import given, settings
from hypothesis import strategies as st
from memory import (
    before_guard_page,
    flushing_denormals,
    misaligned,
    rounding_upward,
    run_on_guarded_heap,
)
from torch import Tensor

import torchq

DTYPES = (U8, S8, S32, F32)
CHAINS = cases.FOLDED_CHAINS + cases.FLOAT_CHAINS
Shape = LinearShape | ConvShape

# Work enough for two threads, by rows, by panels, and by groups.
LARGE = [
    LinearShape(200, 96, 100, "rows"),
    LinearShape(2, 1500, 400, "panels"),
    LinearShape(9, 17, 9000, "few_panels"),
    LinearShape(60, 1100, 700, "large_weights"),
    cases.conv("conv", (32, 48), (20, 21), 3, 1, 1),
    cases.conv("stem", (3, 33), (60, 61), 7, 2, 3),
    cases.conv("grouped", (96, 96), (14, 15), 3, 1, 1, groups=3, batch=2),
    cases.conv("1d", (64, 80), (150,), 3, 1, 1),
    cases.depthwise("dw", 96, (40, 41), padding=1, batch=2),
]
# Tails in every direction, and every form of packed weights.
TAILS = [
    LinearShape(5, 21, 7, "linear"),
    LinearShape(7, 64, 16, "linear_whole"),
    LinearShape(6, 16, 13, "linear_k"),
    LinearShape(1, 1, 1, "linear_1"),
    LinearShape(37, 70, 64, "linear_unit"),
    cases.conv("dense", (4, 17), (4, 5), 3, 1, 1, batch=2),
    cases.conv("dense_unit", (64, 70), (6, 9), 3),
    cases.conv("dense_unit_tail", (36, 70), (6, 9), 3),
    cases.conv("pointwise_unit_tail", (70, 33), (3, 7), 1),
    cases.conv("dense_tail", (7, 33), (3, 4), 1),
    cases.conv("dilated_tail", (3, 5), (7, 8), 3, 1, 2, dilation=2),
    cases.conv("padded_copy", (8, 16), (3, 3), 3, 1, 1),
    cases.conv("row_runs", (3, 19), (6, 7), 3, 2, 1),
    cases.conv("grouped", (12, 20), (4, 5), 3, 1, 1, groups=4),
    cases.conv("grouped_tail", (9, 15), (4, 5), 3, 1, 1, groups=3),
    cases.conv("3d", (4, 6), (3, 4, 5), 2, 1, 1),
    cases.depthwise("dw", 21, (4, 5), padding=1, batch=2),
    cases.depthwise("dw_whole", 64, (4, 5), padding=1),
    cases.depthwise("dw_valid", 37, (6, 7), stride=2),
    cases.depthwise("dw_1d", 5, (9,), kernel=5, padding=2),
]
PARAMETERS = ("weight", "compensation", "pair_bound", "multiplier", "offset", "post_op_params")
OPTIONAL = ("acc_bias", "src_zero_point")


def calls(shape: Shape) -> Iterator[tuple[str, Call]]:
    """The same shape through the different ends of the kernels."""
    for src, dst, chain, narrow, bias in (
        (U8, U8, "", False, None),
        (S8, S8, "sum:0.05+eltwise_relu", True, S32),
        (U8, F32, "sum:0.04+eltwise_clip:0:6", False, F32),
        (S8, S32, "sum:0.04:3+binary_mul:2", True, None),
        (U8, S8, "eltwise_relu:0.1+sum:0.05+binary_add:2+eltwise_clip:-3:3", False, F32),
    ):
        yield chain, sampled(shape, src, dst, chain, narrow, bias=bias)


def moved(call: Call, to: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """All tensors of a call, somewhere else in memory."""
    args = {name: to(call.args[name]) for name in ("src", *PARAMETERS)}
    args |= {name: to(t) for name in OPTIONAL if (t := call.args[name]) is not None}
    return args | {"post_op_srcs": [to(t) for t in call.args["post_op_srcs"]]}


def channels_last(t: Tensor) -> Tensor:
    """Strides with which nothing is copied."""
    return t.movedim(1, -1).contiguous().movedim(-1, 1) if t.ndim > 2 else t


def in_place(call: Call) -> dict[str, Any]:
    """Arguments for which the op makes no copy, where it can avoid one."""
    srcs = [channels_last(t) for t in call.args["post_op_srcs"]]
    return {"src": channels_last(call.args["src"]), "post_op_srcs": srcs}


# Threads


@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_number_of_threads(isa: str, shape: Shape):
    call = sampled(shape, S8, U8, "sum:0.03+eltwise_relu")
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        call.check(count)
        sampled(shape, narrow=True).check((count, "narrow"))
        sampled(shape, few_pairs=True).check((count, "few pairs"))


def test_concurrent_threads_with_their_own_isa():
    torch.set_num_threads(1)
    shapes = [LARGE[0], LARGE[4], LARGE[8], TAILS[0], TAILS[8], TAILS[12]]
    work = [sampled(shape, S8, U8, "sum:0.03+eltwise_relu") for shape in shapes]
    isas = torchq.supported_isas()
    start, failures = threading.Barrier(4), []

    def run(isa: str) -> None:
        try:
            start.wait()
            with torchq.use_isa(isa):
                for call in work * 4:
                    call.check(isa)
                    assert torchq.last_kernel().endswith(f":{isa}")
        except BaseException as error:
            failures.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    workers = [threading.Thread(target=run, args=(isas[i % len(isas)],)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    sys.setswitchinterval(before)
    assert not failures, failures[0]


# Floating-point modes


def mode_args(shape: Shape, dst: torch.dtype, chain: str) -> dict[str, Any]:
    args = cases.sample(shape, S8, dst, chain)
    if dst == F32 and "sum" in chain:
        args["post_op_srcs"] = [cases.random_s8(shape.dst, i) for i in range(chain.count("sum"))]
    return args


MODE_CHAINS = (
    *CHAINS,
    "eltwise_relu:0.1+eltwise_linear:0.7:0.3:0.1",
    "eltwise_relu:0.3333333+sum:0.0123456:7+eltwise_clip:0.001:6.1",
)


@pytest.mark.parametrize("mode", (rounding_upward, flushing_denormals))
@pytest.mark.parametrize("chain", MODE_CHAINS, ids=lambda chain: chain or "none")
def test_floating_point_mode(isa: str, mode: Callable[[], Any], chain: str):
    """Folding included, which make_call repeats within the mode: only the oracle must not."""
    for shape in (LinearShape(13, 69, 37), TAILS[4], TAILS[12]):
        for dst in DTYPES:
            args = mode_args(shape, dst, chain)
            expected = make_call(args, shape).expected
            with mode():
                got = make_call(args, shape).run()
            assert_same(got, expected, (shape, dst))


@pytest.mark.parametrize("mode", (rounding_upward, flushing_denormals))
def test_floating_point_mode_of_workers(isa: str, mode: Callable[[], Any]):
    """Worker threads have a mode of their own, and the calling one takes its share of the work."""
    torch.set_num_threads(2)
    for shape in (LARGE[0], LARGE[4], LARGE[8]):
        args = cases.sample(shape, U8, F32)
        args["src_scale"] = torch.tensor(1e-39)
        args["bias"] = args["bias"] * 1e-38
        call = make_call(args, shape)
        with mode():
            got = call.run()
        assert_same(got, call.expected, shape)


def test_denormal_results_and_sources(isa: str):
    """Scales, sums and destinations below 2^-126 are numbers like any other."""
    for shape, chain in [
        (s, c) for s in (TAILS[0], TAILS[1], TAILS[4], TAILS[13]) for c in ("", "sum:1", CHAINS[14])
    ]:
        args = cases.sample(shape, U8, F32, chain, bias=None)
        args["src_scale"] = torch.tensor(1e-39)
        old = torch.randn(shape.dst) * 1e-40
        args["post_op_srcs"] = [old] * chain.count("sum")
        call = make_call(args, shape)
        assert (call.expected.abs().double() < 2.0**-126).any() and call.expected.any()
        call.check((shape, chain))
        with flushing_denormals():
            got = call.run()
        assert_same(got, call.expected, (shape, chain, "folded outside"))


@pytest.mark.parametrize("mode", (nullcontext, flushing_denormals))
def test_denormal_scales_fold_in_any_mode(mode: Callable[[], AbstractContextManager[None]]):
    tiny, one = torch.tensor(1e-40), torch.ones(())
    with mode():
        multiplier, *_ = torch.ops.torchq.fold(tiny, one, None, None, None, 3, 6, "", [])
    assert multiplier.view(S32).tolist() == tiny.view(S32).expand(3).tolist()


# Addresses


@pytest.mark.parametrize("by", (1, 4, 31, 63))
def test_any_address(isa: str, by: int):
    for shape in TAILS:
        for label, call in calls(shape):
            args = moved(call, lambda t: misaligned(t, by)) | {
                name: misaligned(t, by) if isinstance(t, Tensor) else [misaligned(x, by) for x in t]
                for name, t in in_place(call).items()
            }
            assert args["src"].data_ptr() % 64 == by
            call.check((shape, label), **args)


@pytest.mark.parametrize("shape", TAILS, ids=str)
def test_nothing_is_read_past_the_end(isa: str, shape: Shape):
    """Every argument ends where its memory does."""
    for label, call in calls(shape):
        args = moved(call, before_guard_page)
        call.check((label, "as given"), **args)
        no_copies = in_place(call)
        args["src"] = before_guard_page(no_copies["src"])
        args["post_op_srcs"] = [before_guard_page(t) for t in no_copies["post_op_srcs"]]
        call.check((label, "channels-last"), **args)


def written_shapes() -> Iterator[Shape]:
    """Every number of channels, hence every width of the last store."""
    for n in range(1, 36):
        yield LinearShape(n % 3 + 1, n, 5)
        yield cases.depthwise("dw", n + 1, (3,), kernel=2)
    for n in range(60, 70):
        yield LinearShape(1, n, 4)
        yield cases.conv("conv", (4, n), (2, 2), 2, 1, 1)
        yield cases.depthwise("dw", n, (3,), kernel=2)
        yield LinearShape(17, n, 64)
        yield cases.conv("conv_unit", (64, n), (4, 20), 3)
        yield cases.conv("conv_tail", (36, n), (4, 20), 3)


WRITE_EVERYTHING = """
import torch, torchq
from test_robustness import calls, written_shapes
work = [(shape, label, call) for shape in written_shapes() for label, call in calls(shape)]
guard_heap(True)
probe = torch.empty(5, dtype=torch.uint8)
assert (probe.data_ptr() + 5) % 4096 == 0
for isa in torchq.supported_isas():
    with torchq.use_isa(isa):
        for shape, label, call in work:
            call.check((isa, shape, label))
print("written", len(work))
"""


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs LD_PRELOAD"
)
def test_nothing_is_written_past_the_end(tmp_path: Path):
    """Destinations too end where their memory does: the op allocates them on a guarded heap."""
    result = run_on_guarded_heap(WRITE_EVERYTHING, tmp_path)
    assert result.returncode == 0 and "written" in result.stdout, result.stderr[-3000:]


def test_sources_stay_as_they_are(isa: str):
    for shape in TAILS:
        for label, call in calls(shape):
            before = moved(call, Tensor.clone)
            call.run(**in_place(call))
            call.run()
            for name, t in before.items():
                now = call.args[name]
                pairs = zip(t, now, strict=True) if isinstance(t, list) else [(t, now)]
                assert all(torch.equal(a, b) for a, b in pairs), (shape, label, name)


# Anything


def draw_call(data: st.DataObject, shape: Shape) -> Call:
    src, dst = data.draw(st.sampled_from((U8, S8))), data.draw(st.sampled_from(DTYPES))
    chain = data.draw(st.sampled_from([c for c in CHAINS if dst != F32 or "sum" not in c]))
    bias = data.draw(st.sampled_from((None, F32, S32)))
    scales = data.draw(st.booleans())
    args = cases.sample(
        shape, src, dst, chain, bias, output_scales=scales, seed=data.draw(st.integers(0, 999))
    )
    low, high = cases.RANGE[src]
    if data.draw(st.booleans()):
        values = torch.tensor([low, high, 0, 1]).to(src)
        args["src"] = values[torch.randint(4, shape.src)]
    if data.draw(st.booleans()):
        values = torch.tensor([-128, 127, 64, -64], dtype=S8)
        args["weight"] = values[torch.randint(4, shape.weight)]
    args["src_zero_point"] = torch.tensor(data.draw(st.integers(low, high)), dtype=S32)
    return make_call(args, shape)


def check_on_all(call: Call, label: object) -> None:
    for isa in torchq.supported_isas():
        with torchq.use_isa(isa):
            call.check((isa, label))


@settings(max_examples=70, deadline=None)
@given(st.data())
def test_any_linear_on_any_tier(data: st.DataObject):
    shape = LinearShape(*(data.draw(st.integers(1, 70)) for _ in "mnk"))
    check_on_all(draw_call(data, shape), shape)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_any_conv_on_any_tier(data: st.DataObject):
    dims, seed = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 9999))
    [shape] = cases.random_conv_shapes(1, seed, dims)
    check_on_all(draw_call(data, shape), shape)
