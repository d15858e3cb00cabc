# SPDX-License-Identifier: Apache-2.0
"""Calls of all ops that work, and random ones near them, as lines of Python."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchq

ops = torch.ops.torchq


def tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, fill: Any = 1) -> Tensor:
    """A new tensor; one of many values is expanded, so that it takes no memory."""
    own = [min(n, 1) for n in shape] if math.prod(max(n, 1) for n in shape) > 2**20 else shape
    if fill == "random":
        values = torch.randint(0, 100, own, generator=torch.Generator().manual_seed(0))
    else:
        values = torch.full(own, fill)
    return values.to(dtype).expand(shape)


def spread(x: Tensor) -> Tensor:
    """Every second value of a larger tensor."""
    return torch.stack([x, x], -1)[..., 0] if x.layout == torch.strided else x


DTYPES = ["uint8", "int8", "int32", "float32", "bfloat16", "float16"]  # and what no op takes:
OTHER_DTYPES = ["float64", "int64", "int16", "bool", "complex64", "uint16"]
SHAPES = [
    *((), (0,), (1,), (2,), (3,), (16,), (256,), (1, 1), (2, 3), (3, 0), (0, 4), (1, 16)),
    *((2, 3, 4), (2, 0, 4), (0, 3, 4), (2, 3, 0), (1, 2, 3, 4), (2, 4, 5, 5), (1, 1, 1, 1)),
    *((1, 2, 3, 4, 5), (1, 1, 1, 16, 4), (2, 1, 0, 16, 4), (1, 9, 1, 16, 4), (1, 1, 1, 1, 1, 1)),
]
SHAPES += [(2**61 - 1, 0), (0, 2**62), (2**31, 0, 5), (0, 2**40, 2**40), (2**40, 0, 1, 1)]
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
F_4D, S32_4D = "tensor((2, 4, 5, 5))", "tensor((2, 4, 5, 5), torch.int32, 7)"
ROWS_4D = "tensor((2, 2, 7, 9), torch.int8, 'random')"
I1 = "tensor((1,), torch.int32, 0)"
S3, Z3 = "tensor((3,))", "tensor((3,), torch.int32, 0)"
S4, Z4 = "tensor((4,))", "tensor((4,), torch.int32, 0)"
F4 = "tensor((4,))"
S2, Z2 = "tensor((2,))", "tensor((2,), torch.int32, 0)"
WINDOW = "[3, 3, 2, 2, 1, 1, 1, 1, 1, 1]"
LINEAR = "*ops.pack_linear(tensor((20, 10), torch.int8, 'random'))"
ENDS = "torch.tensor([1, 3], dtype=torch.int32)"
STACK = "*ops.pack_linear(tensor((64, 10), torch.int8, 'random'))"
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
GEMM = ["1.0", "0.0", "0", "1", "'F'", I1]
SUM = ["'sum:0.5'", "tensor((21,))", "[tensor((3, 20), torch.uint8, 'random')]"]


def folded(channels: int) -> list[str]:
    return [text.format(channels) for text in FOLDED]


def unstar(packed: str) -> list[str]:
    """The three tensors of `*pack(...)` as separate arguments."""
    return [f"{packed[1:]}[{i}]" for i in range(3)]


RECURRENT: list[Any] = [
    (nn.LSTM(8, 4, proj_size=3), False),
    (nn.GRU(8, 4, bidirectional=True), False),
    (nn.RNN(8, 4), True),
]


@cache
def rnn_arguments(which: int) -> list[Any]:
    """Returns the arguments that a recurrent layer gives to its op."""
    layer, dynamic = RECURRENT[which]
    x, given = torch.ones(5, 2, 8), []
    config = torchq.QConfig(dynamic=dynamic)
    model = torchq.quantize(nn.ModuleList([layer]).eval()[0], [x], config=config)

    class Record(TorchDispatchMode):
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if op is ops.rnn.default:
                given.append(args)
            return op(*args, **(kwargs or {}))

    with Record(), torch.no_grad():
        model(x)
    return list(given[0])


def rnn_texts(which: int) -> list[str]:
    """The same as text, with sizes of the source and numbers that can be replaced."""
    args = rnn_arguments(which)
    src = f"tensor({tuple(args[0].shape)}, {args[0].dtype}, 'random')"
    kept = [f"rnn_arguments({which})[{i}]" for i in range(1, 18)]
    return [src, *kept, *(repr(value) for value in args[18:])]


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
    ("max_pool", [S32_4D, WINDOW, "True"]),
    ("avg_pool", [S32_4D, I1, WINDOW, "True", "True", "3", S2, Z2, "6", "'eltwise_tanh'", "None"]),
    ("adaptive_avg_pool", [F_4D, "[2, 3]"]),
    ("eltwise", [U8_4D, S2, Z2, "0", "'eltwise_tanh'"]),
    ("eltwise", ["tensor((2, 4, 5, 5))", S2, Z2, "1", "'eltwise_pow:2:3'"]),
    ("binary", [U8_4D, U8_4D, "None", "'div'", S3, Z3, "0", "'eltwise_relu'"]),
    ("binary", [U8_4D, U8_4D, U8_4D, "'select'", S3, Z3, "3", "''"]),
    ("sum", [f"[{U8_4D}, {U8_4D}]", S3, Z3, "1"]),
    ("eltwise", ["tensor((2, 4, 5, 5), torch.float16)", S2, Z2, "5", "'eltwise_tanh'"]),
    ("linear", [SRC, *unstar(LINEAR), *folded(20), "10", "5", *TAIL[1:]]),
    ("reorder_rounded", [U8_4D, S2, Z2, "0", "'stochastic'", "3"]),
    ("reorder_rounded", [U8_4D, "tensor((2, 4, 1, 1))", Z25, "1", "'environment'", "3"]),
    ("softmax", [U8_4D, "1", "False", S2, Z2, "6", "''"]),
    ("attention", [U8_4D, U8_4D, U8_4D, "tensor((5, 5))", "False", "0.5", S4, Z4, "0"]),
    ("attention", [U8_4D, U8_4D, U8_4D, "None", "True", "0.5", S4, Z4, "6"]),
    ("dynamic_attention", [F_4D, F_4D, F_4D, "tensor((5, 5))", "False", "0.5"]),
    ("compress_rows", [F_4D]),
    ("compressed_attention", [F_4D, ROWS_4D, ROWS_4D, "None", "0.5"]),
    ("compressed_attention", [F_4D, ROWS_4D, ROWS_4D, "tensor((5, 7))", "0.5"]),
    ("layer_norm", [U8_4D, "1", "tensor((5,))", "None", "1e-5", S2, Z2, "0", "''"]),
    ("layer_norm", [F_4D, "2", "None", "None", "1e-5", S2, Z2, "0", "''"]),
    ("rms_norm", [U8_4D, "1", "tensor((5,))", "1e-5", S2, Z2, "0", "''"]),
    ("rotary", ["tensor((2, 4, 5, 6))", "tensor((2, 1, 5, 6))", "tensor((5, 6))"]),
    ("softmax", [F_4D, "1", "True", S2, Z2, "0", "''"]),
    ("group_norm", [F_4D, "2", "None", "tensor((4,))", "1e-5", S2, Z2, "6", "''"]),
    ("group_norm", [U8_4D, "2", "tensor((4,))", "None", "1e-5", S2, Z2, "0", "''"]),
    ("batch_norm", [U8_4D, F4, F4, F4, F4, "1e-5", S2, Z2, "0", "'eltwise_relu'"]),
    ("reduction", [U8_4D, "'sum'", "[1, 3]", "True", S2, Z2, "3", "''"]),
    ("reduction", [S32_4D, "'max'", "[1, 2]", "True", S2, Z2, "3", "''"]),
    ("reduction", [F_4D, "'mean'", "[1, 3]", "False", S2, Z2, "0", "'eltwise_relu'"]),
    ("reduction", [F_4D, "'norm_lp_sum'", "[1]", "True", S2, Z2, "0", "''", "None", "3.0", "0.5"]),
    ("resampling", [U8_4D, "'linear'", "[3, 7]", S2, Z2, "6", "''"]),
    ("matmul", [U8_4D, "tensor((2, 1, 5, 3), torch.int8, 'random')", *folded(3), "None", *TAIL]),
    (
        "matmul",
        [SRC, "tensor((10, 3), torch.int8)", *folded(3)[:2], "None", I1, I1, "6", *TAIL[1:]],
    ),
    (
        "matmul",
        [
            *(SRC, "tensor((10, 3), torch.int8)", "tensor((2, 3))", "tensor((3,))"),
            *("None", I1, I1, "6", "'binary_mul:1+sum:1:0:f32'", "tensor((1,))"),
            "[tensor((2, 3, 1))]",
        ],
    ),
    ("gemm", [SRC, "tensor((10, 4), torch.int8)", "None", "False", "False", *GEMM]),
    (
        "gemm",
        [SRC, "tensor((3, 10), torch.int8)", "tensor((3, 3), torch.int32)", "False", "True", *GEMM],
    ),
    ("dynamic_linear", ["tensor((3, 10))", *unstar(LINEAR), "tensor((20,))", "None", "10", "True"]),
    (
        "dynamic_linear",
        [
            *("tensor((3, 10))", *unstar(LINEAR), "tensor((20,))", "tensor((20,))"),
            *("10", "False", "'sum'", "[tensor((3, 20))]"),
        ],
    ),
    (
        "dynamic_conv",
        [F_4D, *unstar(CONV), "tensor((8,))", "tensor((8,))", WINDOW[:-1] + ", 1, 4]"],
    ),
    ("pack_conv_transpose", ["tensor((4, 2, 3, 3), torch.int8)", "2", "[2, 1]", "[1, 1]"]),
    (
        "unpack_conv_transpose",
        [unstar(CONV_TRANSPOSE)[0], "[4, 8, 3, 3]", "1", "[2, 2]", "[1, 1]"],
    ),
    *(("rnn", rnn_texts(n)) for n in range(3)),
    (
        "dynamic_linear_int4",
        [
            *("tensor((3, 40))", "tensor((2, 5, 16, 4), torch.uint8, 'random')"),
            *("tensor((2, 1, 16), torch.int32, 0)", "None", "40", "20", "32", "True"),
        ],
    ),
    (
        "grouped_linear",
        [
            *("tensor((3, 10))", ENDS, *unstar(STACK), "tensor((64,))", "tensor((64,))"),
            *("10", "20"),
        ],
    ),
    (
        "grouped_linear_int4",
        [
            *("tensor((3, 40))", ENDS, "tensor((4, 5, 16, 4), torch.uint8, 'random')"),
            *("tensor((4, 1, 16), torch.int32, 0)", "None", "40", "20", "32", "True"),
        ],
    ),
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


PLAIN = {
    **{"Tensor": "tensor((2, 3))", "List[Tensor]": "[tensor((2, 3))]", "int": "1", "float": "1.0"},
    **{"bool": "True", "str": "''", "List[int]": "[1, 1]"},
}
"""An argument of each type; an optional one is None."""


def op_names() -> list[str]:
    """The library's ops of tensors."""
    names = sorted(set(torch._C._dispatch_get_all_op_names()))
    own = [name.removeprefix("torchq::") for name in names if name.startswith("torchq::")]
    return [name for name in own if any("Tensor" in str(a.type) for a in arguments(name))]


def arguments(name: str) -> Any:
    return getattr(ops, name).default._schema.arguments


# An op without a valid call here, such as a new one, is called with what its schema asks for.
CALLS = VALID + [
    (name, [PLAIN.get(str(a.type), "None") for a in arguments(name)])
    for name in op_names()
    if name not in dict(VALID)
]


def dtype_calls() -> Iterator[str]:
    """Every op with every code of a dtype, and some that are none."""
    for name, args in CALLS:
        for i, argument in enumerate(arguments(name)[: len(args)]):
            if not argument.name.endswith("dtype"):
                continue
            for code in [*range(-1, 48), 2**31, 2**40, -(2**63)]:
                yield f"ops.{name}({', '.join([*args[:i], str(code), *args[i + 1 :]])})"


# Numbers but those that tell which of some tensors is meant; or those of vectors, too.
KEPT, NUMBERS = r"(rnn_arguments\(\d\)\[\d+\]|\)\[\d\]", r")|(?<![\w.-])\d+(?![\w.])"
ALL_NUMBERS, BUT_VECTORS = re.compile(KEPT + NUMBERS), re.compile(rf"{KEPT}|\(\d+,\){NUMBERS}")
SIZES = [0, 0, 0, 1, 2**31, 2**32, 2**40, 2**58, 2**61 - 1, 2**62, 2**63 - 1]


def resized_call(rng: random.Random) -> str:
    """A valid call where sizes became 0, or what only 0 in another place makes possible."""
    name, args = rng.choice(CALLS)
    text, number = ", ".join(args), rng.choice([ALL_NUMBERS, BUT_VECTORS])
    found = sorted({match[0] for match in number.finditer(text) if not match[1]})
    chosen = rng.sample(found, min(len(found), rng.choice([1, 2, 2, 2, 3])))
    sizes = {n: rng.choice(SIZES) for n in chosen} | dict.fromkeys(chosen[:1], 0)
    text = number.sub(lambda match: match[1] or str(sizes.get(match[0], match[0])), text)
    return f"ops.{name}({text})"


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
    if rng.random() < 0.3:
        return resized_call(rng)
    name, args = rng.choice(CALLS)
    args = list(args)
    for _ in range(rng.choice([1, 1, 1, 2, 3, 6])):
        i = rng.randrange(len(args))
        args[i] = mutated(rng, args[i])
    if rng.random() < 0.02:
        args.pop()
    return f"ops.{name}({', '.join(args)})"
