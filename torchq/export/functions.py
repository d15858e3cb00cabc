# SPDX-License-Identifier: Apache-2.0
"""Writes functions of torch and methods of tensors in ONNX.

Each function here has the arguments of the one in torch. A source that is an 8-bit tensor comes as
its real values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from torchq.export.formulas import FORMULAS
from torchq.export.onnx_graph import OnnxGraph, UnsupportedError, Value
from torchq.functional.embeddings import PackedEmbedding

Number: TypeAlias = int | float | Value
Size: TypeAlias = int | Value
Sizes: TypeAlias = Size | Sequence[Size]
Dims: TypeAlias = int | Sequence[int]
Part = TypeVar("Part", int, Size)


def _list(values: tuple[Part | Sequence[Part], ...]) -> list[Part]:
    """Return sizes or dims that are given one by one, or as one sequence."""
    return [part for v in values for part in (v if isinstance(v, Sequence) else (v,))]


def _same(g: OnnxGraph, src: Value, *args: object, **kwargs: object) -> Value:
    return src


def _to(g: OnnxGraph, src: Value, *args: object, **kwargs: object) -> Value | str:
    dtypes = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)]
    if src.params is not None or not dtypes or dtypes[0] == src.example.dtype:
        return src
    return _cast(g, src.name, dtypes[0])


def _cast(g: OnnxGraph, name: str, dtype: torch.dtype) -> str:
    array = torch.empty(0, dtype=dtype, device="cpu").numpy()
    return g.add("Cast", name, to=int(g.onnx.helper.np_dtype_to_tensor_dtype(array.dtype)))


# Of elements and numbers


def _operand(g: OnnxGraph, value: Number, dtype: torch.dtype, is_number: bool) -> str:
    if not isinstance(value, Value):
        made = torch.tensor(value, dtype=dtype, device="cpu")
        return g.constant(made.reshape(1) if is_number else made)
    own = torch.as_tensor(value.example, device="cpu").dtype
    own = torch.float32 if own == torch.float64 else own
    return value.name if own == dtype else _cast(g, value.name, dtype)


def _promoted(values: Sequence[Tensor | float]) -> torch.dtype:
    if any(isinstance(v, Tensor) for v in values):
        return reduce(torch.promote_types, [torch.result_type(values[0], v) for v in values[1:]])
    return torch.float32 if any(isinstance(v, float) for v in values) else torch.int64


def _binary(op: str) -> Callable[..., str]:
    def write(g: OnnxGraph, input: Number, other: Number) -> str:
        values = [v.example if isinstance(v, Value) else v for v in (input, other)]
        dtype = torch.float32 if op == "Div" else _promoted(values)
        number = not any(isinstance(v, Tensor) for v in values)
        operands = [_operand(g, v, dtype, number) for v in (input, other)]
        return g.add("Div" if op == "FloorDiv" else op, *operands)

    return write


def _floordiv(g: OnnxGraph, input: Number, other: Number) -> str:
    if any(isinstance(v, Value) and isinstance(v.example, Tensor) for v in (input, other)):
        raise UnsupportedError("a floor division of tensors has none")
    return _binary("FloorDiv")(g, input, other)


def _unary(op: str) -> Callable[..., str]:
    return lambda g, input: g.add(op, input.name)


def _formula(alg: str, alpha: float = 0, beta: float = 0) -> Callable[..., str]:
    return lambda g, input, inplace=False: FORMULAS[alg](g, input.name, alpha, beta)


def _leaky_relu(
    g: OnnxGraph, input: Value, negative_slope: float = 0.01, inplace: bool = False
) -> str:
    return FORMULAS["relu"](g, input.name, negative_slope, 0)


def _gelu(g: OnnxGraph, input: Value, approximate: str = "none") -> str:
    return FORMULAS["gelu_tanh" if approximate == "tanh" else "gelu_erf"](g, input.name, 0, 0)


def _clamp(g: OnnxGraph, input: Value, min: float | None = None, max: float | None = None) -> str:
    low, high = (-torch.inf if min is None else min), (torch.inf if max is None else max)
    return FORMULAS["clip"](g, input.name, low, high)


def _where(g: OnnxGraph, condition: Value, input: Number, other: Number) -> str:
    dtype = _promoted([v.example if isinstance(v, Value) else v for v in (input, other)])
    return g.add("Where", condition.name, *(_operand(g, v, dtype, False) for v in (input, other)))


# Products and normalizations


def _linear(g: OnnxGraph, input: Value, weight: Value, bias: Value | None = None) -> str:
    x = g.add("MatMul", input.name, g.add("Transpose", weight.name, perm=[1, 0]))
    return x if bias is None else g.add("Add", x, bias.name)


def _conv(
    g: OnnxGraph, input: Value, weight: Value, bias: Value | None = None, stride: object = 1,
    padding: object = 0, dilation: object = 1, groups: int = 1,
) -> str:  # fmt: skip
    dims, given = input.rank - 2, [stride, padding, dilation]
    if isinstance(padding, str):
        raise UnsupportedError(f"its padding is '{padding}'")
    strides, pads, gaps = (
        (list(v) * dims)[:dims] if isinstance(v, Sequence) else [v] * dims for v in given
    )
    srcs = [input.name, weight.name] + ([] if bias is None else [bias.name])
    return g.add("Conv", *srcs, strides=strides, pads=pads * 2, dilations=gaps, group=groups)


def _softmax(g: OnnxGraph, input: Value, dim: int, dtype: object = None) -> str:
    return g.add("Softmax", input.name, axis=dim)


def _layer_norm(
    g: OnnxGraph, input: Value, normalized_shape: Sequence[int], weight: Value | None = None,
    bias: Value | None = None, eps: float = 1e-5, cudnn_enable: bool = False,
) -> str:  # fmt: skip
    """Write a layer norm."""
    factor = (
        g.constant(torch.ones(list(normalized_shape), dtype=torch.float32, device="cpu"))
        if weight is None
        else weight.name
    )
    srcs = [input.name, factor] + ([] if bias is None else [bias.name])
    return g.add("LayerNormalization", *srcs, axis=-len(normalized_shape), epsilon=eps)


def _mean(g: OnnxGraph, input: Value, dim: Dims | None = None, keepdim: bool = False) -> str:
    dims = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
    axes = [g.constant([d % input.rank for d in dims])] if dims else []
    return g.add("ReduceMean", input.name, *axes, keepdims=int(keepdim))


def _adaptive_avg_pool(g: OnnxGraph, input: Value, output_size: Dims) -> str:
    sizes = [output_size] if isinstance(output_size, int) else output_size
    if set(sizes) != {1}:
        raise UnsupportedError(f"an adaptive pool must give size 1, got {output_size}")
    return g.add("GlobalAveragePool", input.name)


def _upsample_nearest(
    g: OnnxGraph,
    input: Value,
    output_size: Sequence[Size] | None = None,
    scale_factors: Sequence[float] = (),
) -> str:
    options = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric"}
    options["nearest_mode"] = "floor"
    if output_size is None:
        scales = g.constant(
            torch.tensor([1.0, 1.0, *scale_factors], dtype=torch.float32, device="cpu")
        )
        return g.add("Resize", input.name, "", scales, **options)
    sizes = g.sizes([g.size(input, 0), g.size(input, 1), *output_size])
    return g.add("Resize", input.name, "", "", sizes, **options)


# What moves elements


def _size(g: OnnxGraph, src: Value, dim: int | None = None) -> Value | tuple[Value, ...]:
    return tuple(g.size(src, d) for d in range(src.rank)) if dim is None else g.size(src, dim)


def _reshape(g: OnnxGraph, src: Value, *shape: Sizes) -> str:
    sizes = _list(shape)
    varying = [i for i, s in enumerate(sizes) if isinstance(s, Value)]
    if len(varying) == 1 and -1 not in sizes:
        sizes[varying[0]] = -1
    return g.add("Reshape", src.name, g.sizes(sizes))


def _flatten(g: OnnxGraph, src: Value, start_dim: int = 0, end_dim: int = -1) -> str:
    start, end = start_dim % src.rank, end_dim % src.rank
    behind = [g.size(src, d) for d in range(end + 1, src.rank)]
    return g.add("Reshape", src.name, g.sizes([*[0] * start, -1, *behind]))  # 0 keeps a size


def _unflatten(g: OnnxGraph, src: Value, dim: int, sizes: Sequence[Size]) -> str:
    at = dim % src.rank
    behind = [g.size(src, d) for d in range(at + 1, src.rank)]
    return g.add("Reshape", src.name, g.sizes([*[0] * at, *sizes, *behind]))


def _permute(g: OnnxGraph, src: Value, *dims: Dims) -> str:
    return g.add("Transpose", src.name, perm=[d % src.rank for d in _list(dims)])


def _transpose(g: OnnxGraph, src: Value, dim0: int = 0, dim1: int = 1) -> str:
    order = list(range(src.rank))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return g.add("Transpose", src.name, perm=order)


def _unsqueeze(g: OnnxGraph, src: Value, dim: int) -> str:
    return g.add("Unsqueeze", src.name, g.constant([dim]))


def _squeeze(g: OnnxGraph, src: Value, *dim: Dims) -> str:
    dims = _list(dim) or list(range(src.rank))
    return g.add("Squeeze", src.name, g.constant([d for d in dims if src.example.shape[d] == 1]))


def _select(g: OnnxGraph, src: Value, dim: int, index: int) -> str:
    return g.add("Gather", src.name, g.constant(index), axis=dim)


def _getitem(g: OnnxGraph, src: Value | Sequence[object], index: Any) -> object:
    if not isinstance(src, Value):
        return src[index]
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(part, Value | list) for part in parts):
        raise UnsupportedError("its index is computed at run time")
    if ... in parts:
        at = parts.index(...)
        others = sum(part is not None and part is not ... for part in parts)
        parts[at : at + 1] = [slice(None)] * (src.rank - others)
    name, dim = src.name, 0
    for part in parts:
        if part is None:
            name = g.add("Unsqueeze", name, g.constant([dim]))
        elif isinstance(part, int):
            name = g.add("Gather", name, g.constant(part), axis=dim)
            continue
        elif part != slice(None):
            end = 2**62 if part.stop is None else part.stop
            bounds = [[part.start or 0], [end]]
            name = g.add(
                "Slice", name, *map(g.sizes, bounds), g.constant([dim]),
                g.constant([part.step or 1]),
            )  # fmt: skip
        dim += 1
    return name


def _chunk(g: OnnxGraph, src: Value, chunks: int, dim: int = 0) -> list[str]:
    return _split(g, src, -(-src.example.shape[dim] // chunks), dim)


def _split(g: OnnxGraph, src: Value, split_size: int | Sequence[Size], dim: int = 0) -> list[str]:
    if isinstance(split_size, int):
        whole = src.example.shape[dim]
        split_size = [min(split_size, whole - i) for i in range(0, whole, split_size)]
    return g.add_many("Split", len(split_size), src.name, g.sizes(split_size), axis=dim)


def _unbind(g: OnnxGraph, src: Value, dim: int = 0) -> list[str]:
    parts = _split(g, src, 1, dim)
    return [g.add("Squeeze", part, g.constant([dim])) for part in parts]


def _cat(g: OnnxGraph, tensors: Sequence[Value], dim: int = 0) -> str:
    return g.add("Concat", *(t.name for t in tensors), axis=dim)


def _expand(g: OnnxGraph, src: Value, *sizes: Sizes) -> str:
    return g.add("Expand", src.name, g.sizes([1 if s == -1 else s for s in _list(sizes)]))


def _embedding(g: OnnxGraph, weight: Value, indices: Value, *options: Any, **more: object) -> str:
    if weight.example.dtype == torch.uint8:
        return _quantized_rows(g, indices, PackedEmbedding(weight.example, *options))
    return g.add("Gather", weight.name, indices.name, axis=0)


def _embedding_bag(
    g: OnnxGraph,
    weight: Value,
    indices: Value,
    offsets: object = None,
    factors: Value | None = None,
    *more: Any,
) -> str:
    """Write bags of one size."""
    if weight.example.dtype != torch.uint8:
        raise UnsupportedError("float bags have none: quantize with QConfig(embedding_bits=8)")
    dim, bits, mode, _, padding = more
    if offsets is not None or padding is not None:
        given = "offsets" if offsets is not None else "padding_idx"
        raise UnsupportedError(f"bags with {given} have none: pass indices of shape (bags, n)")
    x = _quantized_rows(g, indices, PackedEmbedding(weight.example, dim, bits))
    if factors is not None:
        x = g.add("Mul", x, g.add("Unsqueeze", factors.name, g.constant([2])))
    return g.add(f"Reduce{mode.capitalize()}", x, g.constant([1]), keepdims=0)


def _rotary(g: OnnxGraph, src: Value, cos: Value, sin: Value) -> str:
    last, half = g.constant([-1]), g.constant([src.example.shape[-1] // 2])
    low = g.add("Slice", src.name, g.constant([0]), half, last)
    high = g.add("Slice", src.name, half, g.constant([2**62]), last)
    turned = g.add("Concat", g.add("Neg", high), low, axis=-1)
    return g.add("Add", g.add("Mul", src.name, cos.name), g.add("Mul", turned, sin.name))


def _quantized_rows(g: OnnxGraph, indices: Value, table: PackedEmbedding) -> str:
    """Write code * scale + offset of the rows that are looked up; codes have a byte each."""
    codes, *params = table.unpack()
    parts = [codes, *(p.float().unsqueeze(1) for p in params)]
    q, scale, offset = (g.add("Gather", g.constant(p), indices.name, axis=0) for p in parts)
    return g.add("Add", g.add("Mul", _cast(g, q, torch.float32), scale), offset)


def _gather(g: OnnxGraph, src: Value, dim: int, index: Value) -> str:
    return g.add("GatherElements", src.name, index.name, axis=dim)


def _arange(
    g: OnnxGraph,
    start: Number,
    end: Number | None = None,
    step: Number = 1,
    *,
    dtype: torch.dtype | None = None,
    **options: object,
) -> str:
    start, end = (0, start) if end is None else (start, end)
    numbers = [_operand(g, v, torch.int64, False) for v in (start, end, step)]
    empty = g.constant(torch.empty(0, dtype=torch.int64, device="cpu"))
    made = g.add("Range", *(g.add("Reshape", number, empty) for number in numbers))
    return made if dtype is None or dtype == torch.int64 else _cast(g, made, dtype)


FUNCTIONS: dict[str, Callable[..., object]] = {
    **dict.fromkeys(
        ("contiguous", "clone", "detach", "alias", "dropout", "lift_fresh_copy"), _same
    ),
    **dict.fromkeys(("reshape", "view"), _reshape),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _conv),
    **{f"adaptive_avg_pool{d}d": _adaptive_avg_pool for d in (1, 2, 3)},
    **{f"upsample_nearest{d}d": _upsample_nearest for d in (1, 2, 3)},
    **{"add": _binary("Add"), "sub": _binary("Sub"), "mul": _binary("Mul"), "div": _binary("Div")},
    **{"truediv": _binary("Div"), "pow": _binary("Pow"), "matmul": _binary("MatMul")},
    **{"ge": _binary("GreaterOrEqual"), "gt": _binary("Greater"), "eq": _binary("Equal")},
    **{"le": _binary("LessOrEqual"), "lt": _binary("Less"), "floordiv": _floordiv},
    **{"sqrt": _unary("Sqrt"), "exp": _unary("Exp"), "neg": _unary("Neg"), "abs": _unary("Abs")},
    **{"relu": _formula("relu"), "sigmoid": _formula("logistic"), "tanh": _formula("tanh")},
    **{"silu": _formula("swish", 1), "mish": _formula("mish")},
    **{"hardswish": _formula("hardswish", 1 / 6, 0.5), "relu6": _formula("clip", 0, 6)},
    **{"hardsigmoid": _formula("hardsigmoid", 1 / 6, 0.5)},
    **{
        "leaky_relu": _leaky_relu,
        "gelu": _gelu,
        "clamp": _clamp,
        "hardtanh": _clamp,
        "where": _where,
    },
    **{"linear": _linear, "softmax": _softmax, "layer_norm": _layer_norm, "mean": _mean},
    **{"size": _size, "flatten": _flatten, "unflatten": _unflatten, "permute": _permute, "to": _to},
    **{"transpose": _transpose, "unsqueeze": _unsqueeze, "squeeze": _squeeze, "select": _select},
    **{"getitem": _getitem, "chunk": _chunk, "split": _split, "unbind": _unbind, "cat": _cat},
    **{"expand": _expand, "gather": _gather, "arange": _arange},
    **{"embedding": _embedding, "embedding_bag": _embedding_bag, "rotary": _rotary},
}
"""Name of a function of torch or of operator, or of a method, -> its nodes."""
