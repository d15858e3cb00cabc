# SPDX-License-Identifier: Apache-2.0
"""Random and malformed calls of all ops on all tiers, in children that report.

    python tests/fuzz/fuzz_ops.py --calls 1000000 --seed 0

Every op with every code of a dtype comes first. Of the random calls, some have sizes that only
tensors without values can have.

A call gives a result or a Python exception: no signal, no hang, no internal assertion. On meta it
gives the same shapes, strides and dtypes, or raises the same text, unless values alone are wrong. A
call is a line of Python; what is printed on failure can be pasted into
`python -i tests/fuzz/op_calls.py`.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import random
import re
import sys
from typing import Any

import op_calls
import torch
from children import limit_memory, run_forked
from op_calls import VALID, dtype_calls, random_call
from torch import Tensor

import torchq

BATCH = 250
# Bytes of address space beyond what the process starts with: little, so that what is merely large
# fails early; much, so that a loop without end is no MemoryError.
LITTLE, MUCH = 256 << 20, 6 << 30


def on_meta(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return [on_meta(part) for part in x]
    if isinstance(x, Tensor) and x.layout == torch.strided:  # to("meta") has other strides
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return x


class OnMeta:
    """Ops whose tensors go to meta."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: getattr(torch.ops.torchq, name)(*on_meta(args))


def evaluated(call: str, ops: Any) -> list[Tensor] | Exception:
    names = vars(op_calls) | {"fuzzed": ops}
    try:
        result = eval(call.replace("ops.", "fuzzed.", 1), names)
    except Exception as error:
        assert "INTERNAL ASSERT" not in str(error), error
        return error
    return [result] if isinstance(result, Tensor) else list(result)


OF_VALUES = (
    *("must be finite", "must be normal", "a finite float32", "float32 cannot hold"),
    *("zero_point must lie", "zero_points must lie", "indices must lie", "offsets must ascend"),
    *(
        "requires grad",
        "must have scale 1",
        "needs a zero point of 0",
        "no scale and no zero point",
        "takes more than 2^40 bytes",
    ),
)
"""In errors that only values show, or what meta tensors lack: gradients, and memory."""


def is_of_values(call: str, error: str) -> bool:
    """Returns whether a fake need not raise; it knows nothing of packed sequences either."""
    packed = call.startswith("ops.rnn(") and not re.search(r", rnn_arguments\(.\)\[1\], ", call)
    return packed or not error.startswith("torchq.") or any(text in error for text in OF_VALUES)


OTHERS = "requires_grad", ".to('meta')", "sparse", "_efficientzerotensor"
"""Of tensors whose meta form is another one: torch gives an op an expanded zero for the last."""


def check(call: str) -> None:
    """Runs one call in this process."""
    found = evaluated(call, torch.ops.torchq)
    if isinstance(found, list):
        for x in found:
            assert isinstance(x, Tensor) and min(x.shape, default=0) >= 0 and x.numel() < 2**62
            if not x.is_meta and x.numel() > 0:  # its memory exists
                x.sum() if x.numel() < 2**20 else x[(-1,) * x.ndim].item()
    if any(text in call for text in OTHERS) or call.startswith("ops._"):  # private: no fake kernel
        return
    on_meta = evaluated(call, OnMeta())
    if "instead found type" in str(on_meta):
        return  # torch takes a tensor for a number only where it has a value
    if isinstance(found, Exception):
        same = str(on_meta) == str(found)
        assert same or is_of_values(call, str(found)), f"{found!r}; on meta {on_meta!r}"
        return
    assert not isinstance(on_meta, Exception), f"only on meta: {on_meta!r}"
    for x, y in zip(found, on_meta, strict=True):
        assert form(x) == form(y), f"{form(x)} is {form(y)} on meta"


def form(x: Tensor) -> tuple[Any, ...]:
    """Dtype, shape, and those strides that say where values are."""
    strides = [st for n, st in zip(x.shape, x.stride(), strict=True) if n > 1] if x.numel() else []
    return x.dtype, tuple(x.shape), strides


def prepare(memory: int) -> None:
    for name, args in VALID:  # the calls that are mutated work, on meta too
        for ops in (torch.ops.torchq, OnMeta()):
            found = evaluated(f"ops.{name}({', '.join(args)})", ops)
            if isinstance(found, Exception):
                raise found
    limit_memory(memory)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1_000_000, help="default 1000000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--regressions", action="store_true", help="only calls that crashed once")
    args = parser.parse_args()
    if args.regressions:
        prepare(MUCH)
        found = {name: run_forked([call], check) for name, call in REGRESSIONS.items()}
        print(*(f"{name}: {failure}" for name, failure in found.items() if failure), sep="\n")
        return int(any(found.values()))
    prepare(LITTLE)
    rng, failures = random.Random(args.seed), 0
    tiers: collections.Counter[str] = collections.Counter()
    every = itertools.chain(dtype_calls(), (random_call(rng) for _ in range(args.calls)))
    while calls := list(itertools.islice(every, BATCH)):
        tier = rng.choice(torchq.supported_isas())
        tiers[tier] += len(calls)
        with torchq.use_isa(tier):
            while calls:  # what a failure leaves of a batch
                failure = run_forked(calls, check)
                if not failure:
                    break
                failures += 1
                print(f"{tier}: {failure}", flush=True)
                calls = calls[calls.index(failure.split(": ", 1)[1].partition("\n")[0]) + 1 :]
        if sum(tiers.values()) % 10_000 < BATCH:
            print(f"{sum(tiers.values())} calls, {failures} failures so far", flush=True)
    print(f"{failures} failures of {dict(tiers)} calls")
    return int(failures > 0)


RAW = "tensor((0,)), tensor((0,)), None, None"
REGRESSIONS = {
    # An empty kernel width divided by zero.
    "unpack_conv_empty_width": "ops.unpack_conv(tensor((1, 0, 16, 4), torch.int8), [2, 1, 0], 2, "
    "[1])",
    # So did one that is a multiple of 2^32.
    "unpack_conv_width": "ops.unpack_conv(tensor((1, 1, 16, 4), torch.int8), [2, 1, 2**40], 2, "
    "[1])",
    # Without output channels any number of groups was tried.
    "pack_conv_groups": "ops.pack_conv(tensor((0, 4, 3), torch.int8), 2**40, [1])",
    "fake_groups": "ops.pack_conv(tensor((1, 1, 3), torch.int8).to('meta'), 2**40, [1])",
    "unpack_conv_groups": "ops.unpack_conv(tensor((0, 3, 1, 16, 4), torch.int8), [0, 4, 3], "
    "2**62, [1])",
    "conv_groups": "ops.conv(tensor((1, 0, 4), torch.uint8), tensor((0, 1, 0, 16, 4), torch.int8), "
    "tensor((1, 0), torch.int32), tensor((0,), torch.int32), " + RAW + ", [1, 1, 0, 0, 1, 2**40], "
    "3, '', tensor((0,)), [])",
    # The bytes of a padded copy wrapped around 2^64.
    "conv_padded_bytes": "ops.conv(tensor((1, 1, 2, 2, 2), torch.uint8), *ops.pack_conv(tensor((1, "
    "1, 1, 1, 2), torch.int8), 1, [1, 1, 1]), " + RAW + ", [1, 1, 2] + [2**22] * 3 + "
    "[2**21 - 1] * 6 + [1, 1, 1, 1, 1], 3, '', tensor((0,)), [])",
    # So did the number of taps, to 0: weights of no taps were accepted.
    "conv_taps": "ops.conv(tensor((1, 4, 1, 1, 1), torch.uint8), tensor((1, 0, 1, 16, 4), "
    "torch.int8), tensor((0, 1), torch.int32), tensor((1,), torch.int32), " + RAW + ", "
    "[2**22] * 6 + [2**21] * 6 + [1, 1, 1, 1, 4], 3, '', tensor((0,)), [])",
    # Windows were listed before anything was allocated: no end, or no memory left.
    "adaptive_output": "ops.adaptive_avg_pool(tensor((1, 1, 4), torch.uint8), [2**40])",
    "pool_of_nothing": "ops.max_pool(torch.empty(0, 1, 2**40, dtype=torch.uint8), "
    "[1, 1, 0, 0, 1], False)",
    # Sizes of tensors without values, whose product left 64 bits or was counted to.
    "embedding_bags": "ops.embedding_bag(tensor((9, 32), torch.uint8), tensor((2**61 - 1, 0), "
    "torch.int64), None, None, 24, 8, 'sum', False, None)",
    "rnn_steps": "ops.rnn(tensor((2**61 - 1, 0, 8), torch.uint8), *rnn_arguments(1)[1:])",
    "gemm_columns": "ops.gemm(tensor((0, 0), torch.uint8), tensor((0, 2**62), torch.int8), None, "
    "False, False, 1., 0., 0, 1, 'F', tensor((1,), torch.int32))",
    "matmul_columns": "ops.matmul(tensor((0, 0), torch.uint8), tensor((0, 2**62), torch.int8), "
    "tensor((0,)), tensor((0,)), None, None, tensor((1,), torch.int32), 3, '', tensor((0,)), None)",
    "matmul_groups": "ops.matmul(tensor((0, 0), torch.uint8), tensor((0, 0), torch.int8), "
    "tensor((2**62, 0)), tensor((0,)), None, None, None, 6, 'sum:1:0:f32', tensor((1,)), None)",
    "dynamic_conv_images": "ops.dynamic_conv(tensor((2**40, 4, 5, 0)), *ops.pack_conv(tensor((0, "
    "4, 3, 3), torch.int8), 1, [1, 1]), tensor((0,)), None, [3, 3, 1, 1, 2, 2, 2, 2, 1, 1, 1, 4])",
    "conv_sums": "ops.conv(tensor((1, 0, 2**31, 2**31), torch.uint8), *ops.pack_conv(tensor((8, 0, "
    "1, 1), torch.int8), 1, [1, 1]), tensor((8,)), tensor((8,)), None, None, [1, 1, 2**23, 2**23, "
    "0, 0, 0, 0, 1, 1, 1, 0], 0, '', tensor((0,)), None, tensor((8,), torch.int32))",
    "conv_rows": "ops.conv(tensor((1, 0, 2**40, 1), torch.uint8), *ops.pack_conv(tensor((8, 0, 3, "
    "3), torch.int8), 1, [1, 1]), tensor((8,)), tensor((8,)), None, None, [3, 3, 2**24 - 1, 1, 1, "
    "1, 1, 1, 1, 1, 1, 0], 0, '', tensor((0,)), None)",
    "unpack_panels": "ops.unpack_linear(tensor((2**58, 1, 0, 16, 4), torch.int8), 2**62, 0)",
    # A dtype that only ops with one result take called the op again and again.
    "rnn_dtype": "ops.rnn(*rnn_arguments(1)[:19], 15, *rnn_arguments(1)[20:])",
}


if __name__ == "__main__":
    sys.exit(main())
