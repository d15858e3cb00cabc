# SPDX-License-Identifier: Apache-2.0
"""On meta, and so under torch.compile and torch.export, bad arguments raise as on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import S8, U8
from cases import random_q
from test_opcheck import elementwise, ops
from torch import Tensor

SRC = random_q((2, 5, 7, 6), U8, 1)
ONES, NONE = torch.ones(8), torch.empty(0)
KERNEL, FLIPPED = torch.ones(8, 5, 3, 3, dtype=S8), torch.ones(5, 8, 3, 3, dtype=S8)
FOLDED, LAST = (ONES, ONES, None, None), (0, "", NONE, None)
WINDOW, TRANSPOSED = [3, 3, 2, 2, *[1] * 7, 5], [3, 3, 2, 2, *[1] * 6, 0, 1, 1, 5]
ARGS: dict[str, tuple[Any, ...]] = {
    **elementwise(SRC, random_q((2, 5, 7, 6), U8, 2)),
    "conv": (SRC, *ops.pack_conv(KERNEL, 1, [1, 1]), *FOLDED, WINDOW, *LAST),
    "conv_transpose": (
        *(SRC, *ops.pack_conv_transpose(FLIPPED, 1, [2, 2], [1, 1])),
        *(*FOLDED, TRANSPOSED, *LAST),
    ),
    "linear": (SRC, *ops.pack_linear(torch.ones(8, 6, dtype=S8)), *FOLDED, 6, *LAST),
    "matmul": (SRC, torch.ones(6, 8, dtype=S8), *FOLDED, None, *LAST),
    "pack_conv": (KERNEL, 1, [1, 1]),
    "pack_conv_transpose": (FLIPPED, 1, [2, 2], [1, 1]),
}
PACKED = "conv", "conv_transpose", "linear"
NAMES = {n: [a.name for a in getattr(ops, n).default._schema.arguments] for n in ARGS}


def error(op: Any, args: list[Any]) -> tuple[type, str]:
    with pytest.raises(Exception) as caught:
        op(*args)
    return caught.type, str(caught.value).split("\n")[0]


def on_meta(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return [on_meta(part) for part in x]
    return x.to("meta") if isinstance(x, Tensor) else x


def check(name: str, argument: str, value: Any) -> None:
    args = [*ARGS[name], *[None] * (len(NAMES[name]) - len(ARGS[name]))]
    if "pool" in name and argument == "dst_dtype":
        at = NAMES[name].index("scales")
        args[at : at + 2] = torch.ones(2), torch.zeros(2, dtype=torch.int32)
        args[NAMES[name].index("post_ops")] = ""
    args[NAMES[name].index(argument)] = value
    args = args[: max(len(ARGS[name]), 1 + NAMES[name].index(argument))]
    op = getattr(ops, name)
    expected = error(op, args)
    assert "torchq." in expected[1]
    assert error(op, on_meta(args)) == expected


@pytest.mark.parametrize("name", [n for n in ARGS if "dst_dtype" in NAMES[n]])
@pytest.mark.parametrize("code", [99, 2, -1, 2**40])
def test_dtypes(name: str, code: int) -> None:
    check(name, "dst_dtype", code)


WINDOWS = [
    [],
    [3, 2, 2, 1, 1],
    [3, 2, 2, 1, 1, 1, 1, 0, 1, 1, 1],
    [3, 2, 2, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1],  # of three dimensions
    [0, 2, 2, 1, 1, 1, 1, 0, 1, 1],
    [3, 2, 0, 1, 1, 1, 1, 0, 1, 1],
    [3, 2, 2, -1, 1, 1, 1, 0, 1, 1],
    [3, 2, 2, 1, -1, 1, 1, 0, 1, 1],
    [3, 2, 2, 1, 1, 1, 1, 0, 1, 0],
    [3, 2, 2, 1, 1, 1, 1, 0, 1, 2**24],
    [3, 2, 2, 1, 2, 1, 1, 0, 1, 1],  # more than half of the kernel
    [30, 2, 2, 1, 1, 1, 1, 0, 1, 1],  # larger than src
    [2**12, 2**12, 1, 1, 0, 0, 0, 0, 1, 1],
]


@pytest.mark.parametrize("name", ["max_pool", "avg_pool"])
@pytest.mark.parametrize("geometry", WINDOWS, ids=str)
def test_windows(name: str, geometry: list[int]) -> None:
    check(name, "geometry", geometry)


OTHERS = [
    *((n, "src", SRC[0, 0, 0]) for n in ("max_pool", "avg_pool", "adaptive_avg_pool")),
    *((n, "src", SRC[0, 0, 0]) for n in ("resampling", "group_norm", "batch_norm", "softmax")),
    *(("adaptive_avg_pool", "output_size", size) for size in ([], [2], [0, 3], [2, -1], [1, 1, 1])),
    ("adaptive_avg_pool", "src", SRC[..., :0]),
    *(("resampling", "size", size) for size in ([], [2], [0, 4], [2, -1], [1, 2**25], [1, 1, 1])),
    *(("reduction", "dims", dims) for dims in ([4], [-5], [1, 1], [1, -3], [0, 2**40])),
    ("reduction", "src", SRC[:, :0]),
    ("softmax", "dim", 4),
    *(("group_norm", "groups", groups) for groups in (0, -1, 3)),
    *((name, "dims", dims) for name in ("layer_norm", "rms_norm") for dims in (0, -1, 5)),
    ("concat", "srcs", []),
    ("concat", "dim", -5),
    ("concat", "srcs", [SRC, SRC[0]]),
    ("sum", "srcs", []),
    *((n, "src1", SRC[..., :4]) for n in ("add", "mul", "binary")),
    ("attention", "query", SRC[0, 0, 0]),
    ("attention", "query", SRC[:0].transpose(1, 2)),
    ("matmul", "src", SRC[0, 0, 0]),
    ("matmul", "weight", torch.ones(4, 6, 8, dtype=S8)),
    ("conv", "geometry", [3, 3, 0, 2, 1, 1, 1, 1, 1, 1, 1, 5]),
    ("conv", "geometry", [3, 3, 2, 2, 1, 1, 1, 1, 30, 1, 1, 5]),
    ("conv", "geometry", [3, 3, 2, 2, 1, 1, 1, 1, 1, 1]),
    ("conv_transpose", "geometry", [3, 3, 0, 2, 1, 1, 1, 1, 1, 1, 0, 1, 1, 5]),
    ("conv_transpose", "geometry", [3, 3, 2, 2, 1, 1, 1, 1, 1, 1, 2, 1, 1, 5]),
    ("conv_transpose", "geometry", [3, 3, 2, 2, 9, 1, 9, 1, 1, 1, 0, 1, 1, 5]),
    ("conv_transpose", "geometry", [3, 3, 2, 2, 1, 1]),
    *((n, "groups", groups) for n in ("pack_conv", "pack_conv_transpose") for groups in (0, -1, 3)),
    *((n, "dilation", [1]) for n in ("pack_conv",)),
    *((n, "weight", KERNEL[0, 0]) for n in ("pack_conv", "pack_conv_transpose")),
]


@pytest.mark.parametrize(("name", "argument", "value"), OTHERS, ids=lambda x: str(x)[:20])
def test_shapes(name: str, argument: str, value: Any) -> None:
    check(name, argument, value)


BYTES, ONE = torch.ones(1, dtype=S8), torch.ones(1)
EVERY = [
    *((n, "compensation", torch.ones(8, dtype=torch.int32)) for n in PACKED),
    *((n, "weight", BYTES) for n in PACKED),
    *((n, "multiplier", torch.ones(3)) for n in PACKED),
    *((n, "offset", BYTES) for n in PACKED),
    *((n, "pair_bound", ONE) for n in PACKED),
    *((n, "acc_bias", torch.ones(3, dtype=torch.int32)) for n in PACKED),
    *((n, "post_ops", text) for n in PACKED for text in ("eltwise_none", "sum:", "sum")),
    *((n, "post_op_srcs", [SRC]) for n in PACKED),
    *((n, "scales", ONE) for n in ARGS if "scales" in NAMES[n] and "pool" not in n),
    *((n, "zero_points", ONE) for n in ARGS if "zero_points" in NAMES[n] and "pool" not in n),
    *((n, "src", SRC.double()) for n in ARGS if "src" in NAMES[n]),
    ("binary", "alg", "plus"),
    ("reduction", "alg", "norm"),
    ("resampling", "alg", "cubic"),
    ("reorder_rounded", "rounding", "up"),
    ("lookup", "table", BYTES),
    ("layer_norm", "eps", -1.0),
    ("rms_norm", "weight", torch.ones(3)),
    ("batch_norm", "mean", torch.ones(4)),
    ("quantize", "scale", torch.ones(4)),
    ("attention", "mask", torch.ones(3, 4)),
    ("attention", "scale", 0.0),
]


@pytest.mark.parametrize(("name", "argument", "value"), EVERY, ids=lambda x: str(x)[:20])
def test_dtypes_counts_and_words(name: str, argument: str, value: Any) -> None:
    check(name, argument, value)


def test_values_show_at_run_time() -> None:
    args = [SRC, torch.zeros(2), torch.zeros(2, dtype=torch.int32), 0, "eltwise_tanh"]
    assert "scales must be finite and greater than 0" in error(ops.eltwise, args)[1]
    assert ops.eltwise(*on_meta(args)).shape == SRC.shape


def test_sizes_beyond_memory() -> None:
    src = torch.empty(2**20, 2**30, dtype=U8, device="meta")
    scales, zeros = torch.ones(2, device="meta"), torch.zeros(2, dtype=torch.int32, device="meta")
    assert ops.softmax(src, -1, False, scales, zeros, 0, "").shape == src.shape


@pytest.mark.parametrize("unbacked", [False, True], ids=["with a hint", "unbacked"])
def test_symbolic_sizes(unbacked: bool) -> None:
    """A size's hint is checked; what only data tells is not."""
    packed = ops.pack_linear(torch.ones(8, 6, dtype=S8))

    def call(x: Tensor) -> Tensor:
        rows = x[x.sum(1) > 0] if unbacked else x  # how many: only known at run time
        return ops.linear(rows.to(U8), *packed, *FOLDED, 6, *LAST)

    rows = {0: torch.export.Dim("rows", min=2, max=64)}
    program = torch.export.export(Call(call), (torch.ones(4, 6),), dynamic_shapes=[rows])
    assert program.module()(torch.ones(9, 6)).shape == (9, 8)
    if not unbacked:
        with pytest.raises(Exception, match=r"torchq\.linear: src must have 6 feat"):
            torch.export.export(Call(call), (torch.ones(4, 7),), dynamic_shapes=[rows])


class Call(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)
