# SPDX-License-Identifier: Apache-2.0
"""TORCHQ_VERBOSE=1 prints one line per executed op; 2 adds the choices."""

import re
from collections.abc import Iterable

import pytest
from fresh import python

import torchq

HEAD = """
import torch, torchq
import torchq.functional as TF
from torchq import Attr, PostOps

def attr(post_ops="", values=(), dst=1.0, zero=None):
    a = Attr().set_scales("src", 0, 0.01).set_scales("weights", 0, 0.01)
    if dst:
        a.set_scales("dst", 0, dst)
    if zero is not None:
        a.set_zero_points("src", 0, zero)
    return a.set_post_ops(PostOps.parse(post_ops).with_values(values))

def weights_from(zero):
    return attr().set_zero_points("weights", 0, zero)

def conv(src, weight, dtype=torch.uint8, a=None, srcs=(), fill=0, src_dtype=torch.uint8, **window):
    x, w = torch.zeros(src, dtype=src_dtype), torch.full(weight, fill, dtype=torch.int8)
    f = getattr(TF, f"conv{len(src) - 2}d")
    a = attr() if a is None else a
    return f(x, w, attr=a, dst_dtype=dtype, post_op_srcs=srcs, **window)

def conv_transpose(src, weight, **window):
    x, w = torch.zeros(src, dtype=torch.uint8), torch.zeros(weight, dtype=torch.int8)
    return TF.conv_transpose2d(x, w, attr=attr(), dst_dtype=torch.uint8, **window)

def matmul(m, k, n):
    x, w = torch.zeros(m, k, dtype=torch.uint8), torch.zeros(k, n, dtype=torch.int8)
    return TF.matmul(x, w, attr=attr(), dst_dtype=torch.uint8)

def rnn(kind, inputs, units, steps, batch):
    a = Attr().set_rnn_data_qparams(63, 128).set_rnn_weights_qparams(0, 200.0)
    layer = getattr(torch.nn, kind)(inputs, units)
    x = torch.zeros(steps, batch, inputs, dtype=torch.uint8)
    return getattr(torchq.nn, "Q" + kind).from_float(layer, attr=a)(x)

def linear(m, k, n, fill=0):
    x, w = torch.zeros(m, k, dtype=torch.uint8), torch.full((n, k), fill, dtype=torch.int8)
    return TF.linear(x, w, attr=attr(), dst_dtype=torch.uint8)
"""
PROGRAM = """
x = torch.zeros(1, 8, 6, 6, dtype=torch.uint8)
with torchq.use_isa("reference"):
    TF.conv2d(x, torch.zeros(5, 8, 3, 3, dtype=torch.int8), attr=attr("eltwise_relu", dst=None))
    conv((1, 8, 6, 6), (8, 4, 1, 1), a=attr("sum:0.5", zero=3), srcs=[x], groups=2)
    conv((1, 8, 6, 6), (8, 8, 1, 1), torch.int32, Attr())
    TF.linear(x.flatten(1), torch.zeros(4, 288, dtype=torch.uint8), None,
              Attr().set_zero_points("weights", 0, 100))
    layer = torch.nn.Conv2d(8, 8, 1)
    src, dst = torchq.QParams.per_tensor(0.1, 3), torchq.QParams.per_tensor(0.1, 3, torch.int8)
    layer = torchq.nn.QConv2d.from_float(layer, src, src)
    layer.with_lookup(torchq.nn.QLookup(torch.tanh, src, dst))(x)
    TF.max_pool(x, 2)
    TF.add(x, x, Attr())
"""
LINES = (
    "conv,uint8[1, 8, 6, 6] -> float32[1, 5, 4, 4] geometry:[3, 3, 1, 1, 0, 0, 0, 0, 1, 1, 1, 8] "
    "scales:src:0+weights:1 post_ops:eltwise_relu,gemm:reference,",
    "conv,uint8[1, 8, 6, 6] uint8[1, 8, 6, 6] -> uint8[1, 8, 6, 6] geometry:[1, 1, 1, 1, 0, 0, 0, "
    "0, 1, 1, 2, 8] scales:src:0+weights:3+dst:0 zero_points:src:0 post_ops:sum:0.5,"
    "gemm:reference,",
    "conv,uint8[1, 8, 6, 6] -> int32[1, 8, 6, 6] geometry:[1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 8],"
    "gemm:reference,",
    "linear,uint8[1, 288] -> float32[1, 4] scales:src:0+weights:1 zero_points:weights:1,"
    "gemm:reference,",
    "quantize,float32[1, 8, 8, 1, 1] -> int8[1, 8, 8, 1, 1],convert:reference,",
    "quantize,float32[256] -> int8[256],convert:reference,",
    "conv,uint8[1, 8, 6, 6] -> uint8[1, 8, 6, 6] geometry:[1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 8] "
    "table:int8 scales:src:0+weights:1+dst:0 zero_points:src:0,gemm:reference,",
    "max_pool,uint8[1, 8, 6, 6] -> uint8[1, 8, 3, 3],max_pool:reference,",
    "add,uint8[1, 8, 6, 6] uint8[1, 8, 6, 6] -> uint8[1, 8, 6, 6],add:reference,",
)


def run(verbose: str, program: str = PROGRAM, cpu: str = "") -> list[str]:
    result = python(HEAD + program, TORCHQ_VERBOSE=verbose, TORCHQ_CPU=cpu)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_one_line_per_op() -> None:
    lines = run("1")
    assert len(lines) == len(LINES)
    for line, expected in zip(lines, LINES, strict=True):
        assert line.startswith(f"torchq,exec,{expected}")
        assert re.fullmatch(r"[0-9.e+-]+", line.rsplit(",", 1)[1])


def test_silent_by_default() -> None:
    assert run("0") == run("") == []


def test_other_values_are_errors() -> None:
    program = "try: TF.quantize(torch.zeros(3), 0.1, 0)\nexcept ValueError as error: print(error)\n"
    for value in ("3", "true", "1x"):
        [line] = run(value, program)
        assert line.startswith(f"torchq: TORCHQ_VERBOSE must be 0, 1 or 2, got {value}. 1 prints")


NO_UNIT = "gemm_matrix,the tier has none"
DEPTHWISE = "depthwise,a group does not have one input and one output"
CHAIN = (
    "folded epilogue,the post-ops are more than sums, linears, adds and muls and one relu or clip"
)
PADDED = "in place,"
SLIDE = "depthwise slide,"
# call -> what avx2 says about it
REASONS = {
    "conv((1, 8, 9, 9), (8, 8, 1, 1))": [NO_UNIT],
    "conv((1, 8, 9, 9), (8, 8, 1, 1), fill=127)": [
        NO_UNIT,
        "gemm_narrow,adjacent weights of one sign add up to more than 128",
        "gemm_clipped,too many quads hold such weights",
    ],
    "conv((1, 8, 4, 4), (8, 8, 1, 1), fill=127)": [
        NO_UNIT,
        "gemm_narrow,adjacent weights of one sign add up to more than 128",
        "gemm_clipped,there are few rows",
    ],
    "conv((1, 8, 9, 9), (8, 8, 1, 1), a=attr('eltwise_tanh'))": [NO_UNIT, CHAIN],
    "conv((1, 16, 9, 9), (16, 4, 3, 3), groups=4)": [DEPTHWISE, NO_UNIT],
    "conv((1, 8, 9, 9), (8, 4, 1, 1), groups=2)": [
        DEPTHWISE,
        "small_groups,there are fewer than 16 channels, or an odd number of groups of 2",
        NO_UNIT,
    ],
    "conv((1, 48, 9, 9), (48, 3, 1, 1), groups=16)": [
        DEPTHWISE,
        "small_groups,groups do not have 2, 4 or 8 channels",
        NO_UNIT,
    ],
    "conv((1, 16, 9, 9), (32, 4, 1, 1), groups=4)": [
        DEPTHWISE,
        "small_groups,groups have more outputs than inputs, or fewer",
        NO_UNIT,
    ],
    "conv((1, 3, 9, 9), (8, 3, 3, 3))": [PADDED + "a row of the kernel is read in one go", NO_UNIT],
    "conv((1, 4, 5, 5), (8, 4, 5, 5), padding=2)": [
        PADDED + "too few pixels meet the same valid taps",
        NO_UNIT,
    ],
    "conv((1, 4, 12, 12), (8, 4, 3, 3), padding=1)": [
        PADDED + "so few products with padding take less time",
        NO_UNIT,
    ],
    "conv((1, 16, 30, 30), (32, 16, 3, 3), padding=1)": [NO_UNIT],
    "conv_transpose((1, 8, 3, 3), (8, 8, 4, 4), stride=2, padding=1)": [
        PADDED + "too few pixels meet the same valid taps",
        NO_UNIT,
    ],
    "conv_transpose((1, 8, 30, 30), (8, 8, 2, 2), stride=2)": [NO_UNIT],
    "matmul(9, 8, 16)": [
        NO_UNIT,
        "gemm_narrow,adjacent weights of one sign add up to more than 128",
        "gemm_clipped,there are few rows",
    ],
    "conv((1, 4, 30, 30), (8, 4, 9, 9), padding=4)": [
        PADDED + "pixels meet too many sets of valid taps",
        NO_UNIT,
    ],
    "conv((1, 16, 9, 9), (16, 1, 3, 3), groups=16)": [],
    "conv((1, 16, 9, 9), (16, 1, 2, 3), stride=2, groups=16)": [],
    "conv((1, 16, 9, 9), (16, 1, 5, 5), groups=16)": [SLIDE + "the kernel is not 3x3 or 2x3"],
    "conv((1, 16, 9, 9), (16, 1, 3, 3), stride=3, groups=16)": [
        SLIDE + "the stride along a row is more than 2"
    ],
    "conv((1, 16, 9, 9), (16, 1, 3, 3), dilation=2, groups=16)": [
        SLIDE + "taps of a row are not neighbors"
    ],
    "conv((1, 16, 9, 9), (16, 1, 3, 3), torch.int32, Attr(), groups=16)": [
        SLIDE + "dst has more than 8 bits"
    ],
    "conv((1, 16, 9, 9), (16, 1, 3, 3), groups=16, a=weights_from(-100), fill=27)": [],
    "conv((1, 16, 9, 9), (16, 1, 3, 3), groups=16, a=weights_from(-100), fill=28)": [
        SLIDE + "weights have more than 8 bits without their zero points"
    ],
    "rnn('LSTM', 64, 96, 9, 1)": ["rnn_matrix,the tier has none", "rnn_streamed,the tier has none"],
}
# call -> what amx says more
UNIT_REASONS = {
    "conv((1, 64, 9, 9), (64, 64, 1, 1))": [],
    "conv((1, 64, 2, 2), (64, 64, 1, 1))": [
        "gemm_matrix,so few rows wait for the weights' way through memory"
    ],
    "conv((1, 32, 9, 9), (32, 32, 1, 1), src_dtype=torch.int8)": [
        "gemm_matrix,a row would be gathered for few quads of weights"
    ],
    "conv((1, 16, 9, 9), (16, 4, 3, 3), groups=4)": [
        DEPTHWISE,
        "gemm_matrix,groups of 4 or 8 channels have a kernel of their own",
    ],
    "conv((1, 64, 9, 9), (64, 64, 3, 3), padding=1)": [PADDED + "a matrix unit wants whole tiles"],
    "conv((1, 64, 9, 9), (64, 32, 3, 3), groups=2)": [
        DEPTHWISE,
        "small_groups,groups do not have 2, 4 or 8 channels",
        PADDED + "a matrix unit wants groups with few channels apart",
    ],
    "conv((1, 0, 9, 9), (64, 0, 1, 1))": ["gemm_matrix,there is nothing to sum"],
    "conv((1, 16, 9, 9), (16, 1, 5, 5), stride=2, groups=16)": [],
    "conv((1, 16, 9, 9), (16, 1, 5, 5), groups=16)": [
        SLIDE + "the kernel is not 3x3 or 2x3, nor 5x5 with stride 2"
    ],
}


# call -> what avx2 chooses with one thread
CHOICES = {
    "linear(128, 768, 40)": ["gemm_narrow,weights:narrow block:3 outermost:rows shares:1x1"],
    "linear(128, 1024, 1024)": ["gemm_narrow,weights:narrow block:4 outermost:blocks shares:1x1"],
    "linear(8, 1024, 1024)": ["gemm_narrow,weights:narrow block:64 outermost:rows shares:1x1"],
    "linear(16, 64, 64, 127)": ["gemm_split,weights:split block:4 outermost:rows shares:1x1"],
    "linear(65, 64, 80, 127)": ["gemm,weights:widened block:4 outermost:blocks shares:1x1"],
    "conv((1, 16, 9, 9), (16, 4, 3, 3), groups=4)": [
        "small_groups_narrow,weights:narrow block:1 outermost:rows shares:1x1"
    ],
    "conv((1, 16, 9, 9), (16, 1, 3, 3), groups=16)": ["depthwise,windows:slide shares:1x1"],
    "conv((1, 16, 9, 9), (16, 1, 5, 5), groups=16)": ["depthwise,windows:stash shares:1x1"],
    "rnn('GRU', 64, 96, 9, 1)": ["rnn,inputs:ahead states:tiles shares:1x1"],
    "rnn('RNN', 64, 96, 9, 32)": ["rnn,inputs:in_steps states:tiles shares:1x1"],
    "matmul(65, 8, 16)": ["gemm_clipped,weights:clipped block:1 outermost:blocks shares:1x1"],
}
# The same with two: large weights are split, else rows are.
SHARED_CHOICES = {
    "linear(128, 1024, 1024)": ["gemm_narrow,weights:narrow block:4 outermost:blocks shares:2x1"],
    "linear(8, 1024, 1024)": ["gemm_narrow,weights:narrow block:32 outermost:rows shares:2x1"],
    "linear(512, 256, 256)": ["gemm_narrow,weights:narrow block:16 outermost:rows shares:1x2"],
    "linear(16, 64, 64)": ["gemm_narrow,weights:narrow block:4 outermost:rows shares:1x1"],
}
# What amx chooses with one thread.
UNIT_CHOICES = {
    "linear(128, 1024, 1024)": ["gemm_matrix,weights:bytes shares:1x1"],
    "linear(4, 1024, 1024)": ["gemm,weights:bytes block:64 outermost:rows shares:1x1"],
    "conv((1, 64, 14, 14), (64, 16, 3, 3), groups=4)": ["gemm_matrix,weights:bytes shares:1x1"],
    "rnn('LSTM', 64, 64, 3, 32)": ["rnn,inputs:in_steps states:matrix_unit shares:1x1"],
    "rnn('LSTM', 64, 64, 3, 4)": ["rnn,inputs:ahead states:tiles shares:1x1"],
}
# What avx512_vnni chooses with one thread: tiles and streams, by core.
TILES = {
    "zen4": {
        "linear(1, 1024, 1024)": "tiles:streamed prefetch:own",
        "linear(2, 64, 64)": "tiles:wide prefetch:own",
        "linear(8, 1024, 1024)": "tiles:tall prefetch:own",
        "linear(12, 1024, 1024)": "tiles:plain prefetch:own",
        "linear(128, 128, 64)": "tiles:pipelined prefetch:none",
        "linear(128, 24, 64)": "tiles:short prefetch:none",
        "linear(128, 512, 1024)": "tiles:pipelined prefetch:next_l2",
        "conv((1, 16, 30, 30), (32, 16, 3, 3), torch.int32, Attr())": "tiles:plain prefetch:none",
        "conv((1, 16, 9, 9), (16, 4, 3, 3), groups=4)": None,
        "rnn('LSTM', 256, 256, 9, 1)": "inputs:lookahead states:two_streams",
        "rnn('LSTM', 8, 1024, 9, 1)": "inputs:ahead states:one_stream",
        "rnn('LSTM', 64, 64, 9, 4)": "inputs:ahead states:tiles",
    },
    "zen5": {
        "linear(1, 1024, 1024)": "tiles:streamed prefetch:own",
        "linear(1, 1024, 2048)": "tiles:few_streams prefetch:own",
    },
    "emeraldrapids": {
        "linear(1, 1024, 1024)": "tiles:wide prefetch:own",
        "linear(128, 64, 1024)": "tiles:short prefetch:next_l1",
        "rnn('LSTM', 256, 256, 9, 1)": "inputs:ahead states:tiles",
    },
}


def log(tier: str, calls: Iterable[str], tag: str, threads: int, cpu: str) -> dict[str, list[str]]:
    """The lines of the log with this tag, by call."""
    if tier not in torchq.supported_isas():
        pytest.skip(f"this CPU has no {tier}")
    code = "".join(f'    print("case", {call!r}, flush=True); {call}\n' for call in calls)
    found: dict[str, list[str]] = {}
    program = f"torch.set_num_threads({threads})\nwith torchq.use_isa({tier!r}):\n{code}"
    for line in run("2", program, cpu):
        if line.startswith("case "):
            lines = found.setdefault(line.removeprefix("case "), [])
        elif line.startswith(f"torchq,{tag},"):
            lines.append(line.removeprefix(f"torchq,{tag},"))
    return found


@pytest.mark.parametrize(("tier", "cases"), [("avx2", REASONS), ("amx", UNIT_REASONS)])
def test_reasons(tier: str, cases: dict[str, list[str]]) -> None:
    assert log(tier, cases, "dispatch", 1, "") == cases


@pytest.mark.parametrize(
    ("tier", "cases", "threads"),
    [("avx2", CHOICES, 1), ("avx2", SHARED_CHOICES, 2), ("amx", UNIT_CHOICES, 1)],
)
def test_choices(tier: str, cases: dict[str, list[str]], threads: int) -> None:
    assert log(tier, cases, "choice", threads, "") == cases


@pytest.mark.parametrize(("cpu", "cases"), TILES.items())
def test_tiles(cpu: str, cases: dict[str, str | None]) -> None:
    for call, lines in log("avx512_vnni", cases, "choice", 1, cpu).items():
        expected = cases[call]
        assert len(lines) == 1 and (expected or "small_groups") in lines[0], (call, lines)
        assert ("tiles:" in lines[0]) == (expected or "").startswith("tiles:"), (call, lines)


def test_reasons_take_level_two() -> None:
    assert not [line for line in run("1") if not line.startswith("torchq,exec,")]
