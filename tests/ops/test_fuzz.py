# SPDX-License-Identifier: Apache-2.0
"""Malformed calls raise Python exceptions: no signal, no hang, no internal assertion.

Run as a script this file is the fuzzer, in a process of its own that forks for each batch of calls:
`python tests/ops/test_fuzz.py SEED CALLS`. A call is a line of Python that is written to a file
before it runs; what it prints on failure can be pasted into `python -i tests/ops/test_fuzz.py`.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torchq

ops = torch.ops.torchq
CALLS, BATCH = 5000, 250
SECONDS = 20  # for one call, on a crowded machine too: a hang is a crash
# Bytes of address space beyond what the process starts with: little, so that what is merely large
# fails early; much, so that a loop without end is no MemoryError.
LITTLE, MUCH = 256 << 20, 6 << 30


# The vocabulary of calls


def tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, fill: Any = 1) -> Tensor:
    if fill == "random":
        return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return torch.full(shape, fill).to(dtype)


def spread(x: Tensor) -> Tensor:
    """Every second value of a larger tensor."""
    return torch.stack([x, x], -1)[..., 0] if x.layout == torch.strided else x


DTYPES = ["uint8", "int8", "int32", "float32"]  # and what no op takes:
OTHER_DTYPES = ["float64", "int64", "int16", "bool", "bfloat16", "float16", "complex64", "uint16"]
SHAPES = [
    *((), (0,), (1,), (2,), (3,), (16,), (256,), (1, 1), (2, 3), (3, 0), (0, 4), (1, 16)),
    *((2, 3, 4), (2, 0, 4), (0, 3, 4), (2, 3, 0), (1, 2, 3, 4), (2, 4, 5, 5), (1, 1, 1, 1)),
    *((1, 2, 3, 4, 5), (1, 1, 1, 16, 4), (2, 1, 0, 16, 4), (1, 9, 1, 16, 4), (1, 1, 1, 1, 1, 1)),
]
LAYOUTS = [
    *("{}",) * 8,
    *("{}.transpose(0, -1)", "spread({})", "{}[None].expand(3, *{}.shape)"),
    *("{}.to('meta')", "{}.to_sparse()", "{}.flatten()[1:]", "{}.requires_grad_()", "{}.flatten()"),
    *("{}.flip(0)", "{}.contiguous(memory_format=torch.channels_last)", "{}[..., :0]", "{}[:1]"),
    *("torch.nn.Parameter({}, False)", "torch._efficientzerotensor({}.shape)", "torch.neg({})"),
]
INTS = [0, 1, -1, 2, 3, 4, 6, 7, 16, 17, 100, 255, 256, 2**16, 2**21, 2**22, 2**24 - 1, 2**24]
INTS += [2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, -(2**31), -(2**63), 2**64]
TEXTS = [
    "",
    "sum",
    "sum:nan",
    "sum:0.5:300",
    "eltwise_relu",
    "eltwise_relu:0.1",
    "+",
    "sum+sum+sum",
]
TEXTS += [
    "eltwise_clip:1:0",
    "eltwise_clip:nan:nan",
    "binary_add:2",
    "binary_mul:0",
    "binary_add:7",
]
TEXTS += ["eltwise_tanh", "\\x00", "sum" * 50, "sum+" * 40, "eltwise_linear:1e39", "é:2", ":::::"]
OTHERS = ["None", "1.5", "'text'", "[]", "{}", "object()", "float('nan')", "True", "1j", "(1, 2)"]

U8_4D, F1 = "tensor((2, 4, 5, 5), torch.uint8, 'random')", "tensor((1,))"
F_4D = "tensor((2, 4, 5, 5))"
I1 = "tensor((1,), torch.int32, 0)"
S3, Z3 = "tensor((3,))", "tensor((3,), torch.int32, 0)"
S4, Z4 = "tensor((4,))", "tensor((4,), torch.int32, 0)"
F4 = "tensor((4,))"
S2, Z2 = "tensor((2,))", "tensor((2,), torch.int32, 0)"
WINDOW = "[3, 3, 2, 2, 1, 1, 1, 1, 1, 1]"
LINEAR = "*ops.pack_linear(tensor((20, 10), torch.int8, 'random'))"
CONV = "*ops.pack_conv(tensor((8, 4, 3, 3), torch.int8, 'random'), 1, [1, 1])"
DEPTHWISE = "*ops.pack_conv(tensor((4, 1, 3, 3), torch.int8, 'random'), 4, [1, 1])"
CONV_TRANSPOSE = (
    "*ops.pack_conv_transpose(tensor((4, 8, 3, 3), torch.int8, 'random'), 1, [2, 2], [1, 1])"
)
TRANSPOSED = "[3, 3, 2, 2, 1, 1, 1, 1, 1, 1, 0, 1, 1, 4]"
Z25 = "tensor((2, 5), torch.int32, 0)"
Z8, Z20 = (f"tensor(({n},), torch.int32, 'random')" for n in (8, 20))
SUMS = "tensor((3, 1), torch.int32, 'random')"
ROWS = "tensor((6, 16), torch.uint8, 'random')"
BAGS = ("tensor((5,), torch.int64)", "tensor((2,), torch.int64, 0)")
FOLDED = ["tensor(({0},))", "tensor(({0},))", "None", I1]
TAIL = ["0", "''", "tensor((0,))", "[]"]
SUM = ["'sum:0.5'", "tensor((21,))", "[tensor((3, 20), torch.uint8, 'random')]"]


def folded(channels: int) -> list[str]:
    return [text.format(channels) for text in FOLDED]


def unstar(packed: str) -> list[str]:
    """The three tensors of `*pack(...)` as separate arguments."""
    return [f"{packed[1:]}[{i}]" for i in range(3)]


SRC = "tensor((3, 10), torch.uint8, 'random')"
VALID: list[tuple[str, list[str]]] = [
    ("pack_linear", ["tensor((20, 10), torch.int8)"]),
    ("unpack_linear", [unstar(LINEAR)[0], "20", "10"]),
    ("pack_conv", ["tensor((8, 2, 3, 3), torch.int8)", "2", "[1, 1]"]),
    ("pack_conv", ["tensor((4, 1, 3), torch.int8)", "4", "[1]"]),
    ("unpack_conv", [unstar(CONV)[0], "[8, 4, 3, 3]", "1", "[1, 1]"]),
    ("unpack_conv", [unstar(DEPTHWISE)[0], "[4, 1, 3, 3]", "4", "[1, 1]"]),
    ("fold", [F1, "tensor((20,))", "tensor((20,))", F1, I1, "20", "0", "'sum'", "[]"]),
    ("fold", [F1, F1, "None", "None", "None", "4", "6", "'binary_add:2'", "[tensor((4,))]"]),
    ("fold_output_scales", [F1, "None", "4", "1", "'eltwise_clip:0:6'", "[]"]),
    ("linear", [SRC, *unstar(LINEAR), *folded(20), "10", *TAIL]),
    ("linear", [SRC, *unstar(LINEAR), *folded(20), "10", "0", *SUM]),
    (
        "linear",
        [SRC, *unstar(LINEAR), "tensor((0,))", "tensor((0,))", "None", I1, "10", "3", *TAIL[1:]],
    ),
    ("conv", [U8_4D, *unstar(CONV), *folded(8), WINDOW[:-1] + ", 1, 4]", *TAIL]),
    ("conv", [U8_4D, *unstar(DEPTHWISE), *folded(4), WINDOW[:-1] + ", 4, 4]", *TAIL]),
    ("linear", [SRC, *unstar(LINEAR), *folded(20), "10", *TAIL, Z20]),
    ("linear", [SRC, *unstar(LINEAR), *folded(20), "10", *TAIL, Z20, SUMS]),
    ("conv", [U8_4D, *unstar(CONV), *folded(8), WINDOW[:-1] + ", 1, 4]", *TAIL, Z8]),
    ("conv_transpose", [U8_4D, *unstar(CONV_TRANSPOSE), *folded(8), TRANSPOSED, *TAIL, Z8]),
    ("quantize", ["tensor((2, 4, 5, 5))", "tensor((4, 1, 1))", I1, "0"]),
    ("dequantize", [U8_4D, F1, "tensor((4, 1, 1), torch.int32, 0)"]),
    ("requantize", [U8_4D, F1, I1, "tensor((5,))", I1, "1"]),
    ("reorder", [U8_4D, F1, "3"]),
    ("lookup", [U8_4D, "tensor((256,), torch.int8)"]),
    ("add", [U8_4D, U8_4D, S3, Z3, "0", "True"]),
    ("mul", [U8_4D, "tensor((4, 1, 1), torch.int8)", S3, Z3, "1", "False"]),
    ("concat", [f"[{U8_4D}, {U8_4D}]", S3, Z3, "1", "0"]),
    ("max_pool", [U8_4D, WINDOW, "True"]),
    ("avg_pool", [U8_4D, I1, WINDOW, "False", "True", "None"]),
    ("adaptive_avg_pool", [U8_4D, "[2, 3]"]),
    ("eltwise", [U8_4D, S2, Z2, "0", "'eltwise_tanh'"]),
    ("eltwise", ["tensor((2, 4, 5, 5))", S2, Z2, "1", "'eltwise_pow:2:3'"]),
    ("binary", [U8_4D, U8_4D, "None", "'div'", S3, Z3, "0", "'eltwise_relu'"]),
    ("binary", [U8_4D, U8_4D, U8_4D, "'select'", S3, Z3, "3", "''"]),
    ("sum", [f"[{U8_4D}, {U8_4D}]", S3, Z3, "1"]),
    ("reorder_rounded", [U8_4D, S2, Z2, "0", "'stochastic'", "3"]),
    ("reorder_rounded", [U8_4D, "tensor((2, 4, 1, 1))", Z25, "1", "'environment'", "3"]),
    ("softmax", [U8_4D, "1", "False", S2, Z2, "6", "''"]),
    ("attention", [U8_4D, U8_4D, U8_4D, "tensor((5, 5))", "False", "0.5", S4, Z4, "0"]),
    ("attention", [U8_4D, U8_4D, U8_4D, "None", "True", "0.5", S4, Z4, "6"]),
    ("dynamic_attention", [F_4D, F_4D, F_4D, "tensor((5, 5))", "False", "0.5"]),
    ("layer_norm", [U8_4D, "1", "tensor((5,))", "None", "1e-5", S2, Z2, "0", "''"]),
    ("group_norm", [U8_4D, "2", "tensor((4,))", "None", "1e-5", S2, Z2, "0", "''"]),
    ("batch_norm", [U8_4D, F4, F4, F4, F4, "1e-5", S2, Z2, "0", "'eltwise_relu'"]),
    ("reduction", [U8_4D, "'sum'", "[1, 3]", "True", S2, Z2, "3", "''"]),
    ("resampling", [U8_4D, "'linear'", "[3, 7]", S2, Z2, "6", "''"]),
    ("embedding", [ROWS, "tensor((3, 4), torch.int64, 0)", "8", "8"]),
    ("embedding_bag", [ROWS, *BAGS, "None", "8", "8", "'mean'", "False", "1"]),
    ("embedding_bag", [ROWS, *BAGS, "tensor((5,))", "16", "4", "'sum'", "True", "None"]),
    ("resampling", [U8_4D, "'linear'", "[5, 5]", S2, Z2, "6", "'binary_add:15'", f"[{F_4D}]"]),
    ("eltwise", [U8_4D, S2, Z2, "0", "'eltwise_abs+prelu:2'", "[tensor((1, 4, 1, 1))]"]),
    ("softmax", [U8_4D, "1", "False", S2, Z2, "6", "'binary_select:15'", f"[{F_4D}, {U8_4D}]"]),
    ("layer_norm", [U8_4D, "1", "None", "None", "1e-5", S2, Z2, "0", "'sum'", f"[{U8_4D}]"]),
    ("max_pool", [U8_4D, WINDOW, "True", S2, Z2, "6", "'eltwise_tanh'", "None"]),
    (
        "avg_pool",
        [
            U8_4D,
            I1,
            WINDOW,
            "False",
            "True",
            "None",
            S2,
            Z2,
            "0",
            "'binary_mul:0'",
            "[tensor((1, 1, 1, 1))]",
        ],
    ),
]


def random_tensor(rng: random.Random) -> str:
    fill = rng.choice(["0", "1", "'random'", "-1", "float('nan')", "float('inf')", "1e-45", "3e38"])
    dtype = rng.choice(DTYPES if rng.random() < 0.85 else OTHER_DTYPES)
    text = f"tensor({rng.choice(SHAPES)}, torch.{dtype}, {fill})"
    layout = rng.choice(LAYOUTS)
    return layout.format(text, text) if layout.count("{}") == 2 else layout.format(text)


def random_list(rng: random.Random, text: str) -> str:
    values: list[Any] = list(eval(text))
    for _ in range(rng.randint(1, 3)):
        kind = rng.random()
        if values and kind < 0.7:
            values[rng.randrange(len(values))] = rng.choice(INTS)
        elif values and kind < 0.8:
            values.pop(rng.randrange(len(values)))
        elif kind < 0.9:
            values.insert(rng.randint(0, len(values)), rng.choice(INTS))
        else:
            values = [rng.choice(INTS)] * rng.randint(0, 17)
    return repr(values)


def mutated(rng: random.Random, text: str) -> str:
    """Another argument of the same kind, or of none that fits."""
    if rng.random() < 0.1:
        return rng.choice(OTHERS)
    if text.startswith("[") and "tensor" not in text and text != "[]":
        return random_list(rng, text)
    if text.startswith("["):
        return "[" + ", ".join(random_tensor(rng) for _ in range(rng.randint(0, 3))) + "]"
    if text.startswith("'"):
        return f"'{'+'.join(rng.choices(TEXTS, k=rng.randint(1, 2)))}'"
    if text.lstrip("-").isdigit() or (text == "None" and rng.random() < 0.5):
        return str(rng.choice(INTS))
    if rng.random() < 0.4:  # right values in the wrong place
        layout = rng.choice(LAYOUTS)
        return layout.format(text, text) if layout.count("{}") == 2 else layout.format(text)
    return random_tensor(rng)


def random_call(rng: random.Random) -> str:
    name, args = rng.choice(VALID)
    args = list(args)
    for _ in range(rng.choice([1, 1, 1, 2, 3, 6])):
        i = rng.randrange(len(args))
        args[i] = mutated(rng, args[i])
    if rng.random() < 0.02:
        args.pop()
    return f"ops.{name}({', '.join(args)})"


# Running them


def check(call: str) -> None:
    """Runs one call in this process."""
    try:
        result = eval(call)
    except Exception as error:
        assert "INTERNAL ASSERT" not in str(error), error
        return
    for x in [result] if isinstance(result, Tensor) else result:
        assert isinstance(x, Tensor) and min(x.shape, default=0) >= 0 and x.numel() < 2**62
        if not x.is_meta and x.numel() > 0:  # its memory exists
            x.sum() if x.numel() < 2**20 else x[(-1,) * x.ndim].item()


def run_forked(calls: Iterable[str]) -> str:
    """Runs calls in a child; "" or what happened and at which call."""
    with tempfile.NamedTemporaryFile("r+") as log:
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                for call in calls:
                    log.seek(0)
                    log.truncate()
                    log.write(call)
                    log.flush()
                    signal.alarm(SECONDS)  # the default action ends a hanging call, too
                    check(call)
                    signal.alarm(0)
                code = 0
            os._exit(code)
        _, status = os.waitpid(child, 0)
        if status == 0:
            return ""
        what = f"signal {signal.Signals(status & 127).name}" if status & 127 else "a wrong result"
        log.seek(0)
        return f"{what}: {log.read()}"


def prepare(memory: int) -> None:
    torch.set_num_threads(1)  # a forked child has no worker threads
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name, args in VALID:  # the calls that are mutated work
        eval(f"ops.{name}({', '.join(args)})")


def main(seed: int, count: int) -> None:
    prepare(LITTLE)
    rng = random.Random(seed)
    failures = []
    for first in range(0, count, BATCH):
        tier = rng.choice(torchq.supported_isas())
        calls = [random_call(rng) for _ in range(min(BATCH, count - first))]
        with torchq.use_isa(tier):
            failure = run_forked(calls)
        if failure:
            failures.append(f"seed {seed}, calls {first}.., {tier}: {failure}")
    print(*failures, sep="\n")
    sys.exit(bool(failures))


# Tests


def run_script(*args: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-W", "ignore", __file__, *args],
        env=os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_malformed_calls_raise_python_exceptions():
    run = run_script("0", str(CALLS))
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]


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
}


def test_regressions():
    run = run_script("regressions")
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]


def regressions() -> None:
    prepare(MUCH)
    found = {name: run_forked([call]) for name, call in REGRESSIONS.items()}
    print(*(f"{name}: {failure}" for name, failure in found.items() if failure), sep="\n")
    sys.exit(any(found.values()))


if __name__ == "__main__" and len(sys.argv) > 1:
    if sys.argv[1] == "regressions":
        regressions()
    else:
        main(int(sys.argv[1]), int(sys.argv[2]))
