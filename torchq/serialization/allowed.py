# SPDX-License-Identifier: Apache-2.0
"""The one list of what the graph of a file may call.

Each function is pure, and safe for tensors and numbers of any values: torch checks sizes and
indices, or this file does. Not in the list: what reads memory that nobody wrote (``empty``), draws
random numbers, or takes strides, indices or offsets without a check.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable
from types import BuiltinFunctionType

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._C import FunctionSchema

from torchq.capture.patterns import BY_NAME
from torchq.capture.rewrites import NUMBERS

_MORE = {
    "functions of each element": (
        "acos acosh addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_not "
        "bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift "
        "complex copysign cosh deg2rad eq erfc exp2 floor_divide fmax fmin "
        "fmod frac ge greater greater_equal gt heaviside imag isclose isfinite isinf isnan le "
        "less less_equal lerp logaddexp logaddexp2 logical_and logical_not logical_or logical_xor "
        "logit lt masked_fill maximum minimum nan_to_num ne negative not_equal polar positive "
        "rad2deg real relu6 remainder sgn sinc sinh tan trunc view_as_complex view_as_real where "
        "xlogy "
    ),
    "reductions, and functions of a row": (
        "all amax amin aminmax any argmax argmin argsort count_nonzero cummax cummin cumprod "
        "cumsum diff histc linalg_norm linalg_vector_norm logcumsumexp logsumexp max median min "
        "norm prod sort std std_mean sum topk var var_mean "
    ),
    "products": (
        "addbmm addmv addr baddbmm cdist cosine_similarity cross dot ger kron linalg_cross mv "
        "outer "
    ),
    "views, and what moves elements": (
        "adjoint alias broadcast_tensors clone detach diag_embed diagonal dim dstack gather "
        "hstack index_add index_copy index_fill index_put is_floating_point isin item mH "
        "masked_scatter masked_select meshgrid nonzero one_hot ravel rot90 scatter scatter_add "
        "scatter_reduce searchsorted bucketize select_scatter slice_scatter stack take_along_dim "
        "to tril triu type_as vstack "
    ),
    "what makes tensors": (
        "arange eye full full_like linspace new_full new_ones new_zeros ones ones_like "
        "scalar_tensor tril_indices triu_indices zeros zeros_like "
    ),
    "layers": (
        "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d affine_grid_generator col2im "
        "glu grid_sampler grid_sampler_2d grid_sampler_3d max_pool1d_with_indices "
        "max_pool2d_with_indices max_pool3d_with_indices native_group_norm "
        "native_layer_norm reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d "
        "replication_pad2d replication_pad3d upsample_bicubic2d "
    ),
    "private names, which torch.export writes for operators and for antialiased interpolation": (
        "__and__ __or__ __xor__ __lshift__ __rshift__ "
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa "
    ),
}
"""Beside the table of capture/patterns.py: why they are here, and their names."""
_LESS = {
    "repeat_interleave.Tensor": "the sum of its repeats may overflow, and it writes by them",
    "repeat_interleave.self_Tensor": "the same",
    "to.prim_dtype": "it takes any number for a dtype",
    "to.prim_other": "with copy it takes what is in memory for a dtype",
    "median.dim": "it reads beyond a tensor that is expanded",
}
"""Overloads that are not safe, though their names are in the table, and why."""
_REPLACED = {"new_empty": "new_zeros", "empty": "zeros", "empty_like": "zeros_like"}
"""Names in files of earlier versions: these read memory that nobody wrote."""
OWN = ("embedding", "embedding_bag", "rotary")
"""Ops of torchq that a graph calls without a module of torchq."""

DTYPES = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16}
    | {torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e5m2}
)
_TYPES = {"Tensor", "number", "int", "float", "bool", "str", "ScalarType", "MemoryFormat"}
_UNSET = {"Layout", "Device", "Generator"}
"""Types of arguments that a file cannot give."""


def _plain(kind: str) -> str:
    """Return a type without ``Optional`` and ``List``."""
    return re.sub(r"Optional\[|List\[|\]", "", kind)


def _is_safe(overload: torch._ops.OpOverload[..., object]) -> bool:
    """Return whether a schema tells of a pure function of tensors, numbers and words."""
    schema = overload._schema
    for argument in schema.arguments:
        kind = _plain(str(argument.real_type))
        if kind not in _TYPES and not (kind in _UNSET and argument.has_default_value()):
            return False
    kinds = [_plain(str(r.real_type)) for r in schema.returns]
    results = {*kinds} == {"Tensor"} or (len(kinds) == 1 and kinds[0] in _TYPES)
    tensors = [*schema.arguments, *schema.returns]
    of_tensors = any(_plain(str(each.real_type)) == "Tensor" for each in tensors)
    return results and of_tensors and not schema.is_mutable


@functools.cache
def schemas(name: str) -> dict[str, FunctionSchema]:
    """Return the schemas of a function of ATen that a file may call, by overload."""
    packet = getattr(torch.ops.aten, name, None) if name in _NAMES else None
    found = {} if packet is None else {own: getattr(packet, own) for own in packet.overloads()}
    return {
        own: overload._schema
        for own, overload in found.items()
        if f"{name}.{own}" not in _LESS and _is_safe(overload)
    }


_NAMES = frozenset({*BY_NAME, *(name for names in _MORE.values() for name in names.split())})


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As torch.embedding_bag, with the checks that nn.functional makes, and more.

    TorchScript compiles it. torch reads beyond its tensors without them.

    Raises:
        ValueError: indices or offsets are beyond the weight or the indices.
    """
    count = indices.numel()
    known = weight.dim() == 2 and indices.dim() == 1 and offsets.dim() == 1 and offsets.numel() > 0
    known = known and indices.dtype == offsets.dtype and mode >= 0 and mode <= 2
    known = known and (indices.dtype == torch.int64 or indices.dtype == torch.int32)
    if known:
        ends = torch.cat([offsets, torch.full_like(offsets[:1], count)])
        known = int(offsets[0]) == 0 and bool((ends[1:] >= ends[:-1]).all())
        known = known and (not include_last_offset or int(offsets[-1]) == count)
    if known and count > 0:
        known = int(indices.min()) >= 0 and int(indices.max()) < weight.size(0)
    if known and per_sample_weights is not None:
        known = per_sample_weights.shape == indices.shape and mode == 0
        known = known and per_sample_weights.dtype == weight.dtype
    if not known:
        raise ValueError(
            "torchq.load: indices and offsets of the graph's embedding_bag must be within its "
            "weight, got others. Check the source."
        )
    if padding_idx is None:
        return torch.embedding_bag(
            weight, indices, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights,
            include_last_offset,
        )  # fmt: skip
    return torch.embedding_bag(
        weight, indices, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights,
        include_last_offset, padding_idx,
    )  # fmt: skip


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As of nn.functional; torch reads as many keys as there are values, and divides by heads.

    TorchScript compiles it.

    Raises:
        ValueError: there are more values than keys, or less; or no heads that are to be repeated.
    """
    known = key.dim() >= 2 and value.dim() >= 2 and key.size(-2) == value.size(-2)
    if not known or (enable_gqa and (key.dim() < 3 or key.size(-3) == 0)):
        raise ValueError(
            "torchq.load: attention of the graph must have a value for each key, and heads with "
            "enable_gqa, got others. Check the source."
        )
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _grouped_mm(
    input: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """As torch._grouped_mm, which leaves memory that nobody wrote where no group is.

    Raises:
        ValueError: the groups do not follow each other from 0 to the end.
    """
    if offs is not None:
        count = mat2.size(-1) if mat2.dim() == 2 and input.dim() == 3 else input.size(-1)
        count = input.size(0) if mat2.dim() == 3 else count
        known = offs.dim() == 1 and offs.numel() > 0 and int(offs[-1]) == count
        if not known or int(offs[0]) < 0 or bool((offs[1:] < offs[:-1]).any()):
            raise ValueError(
                "torchq.load: groups of the graph's _grouped_mm must follow each other to the "
                "last row, got others. Check the source."
            )
    return torch._grouped_mm(input, mat2, offs=offs, bias=bias, out_dtype=out_dtype)


def histc(input: Tensor, bins: int = 100, min: int = 0, max: int = 0) -> Tensor:
    """As torch.histc, which computes a bin by arithmetic that may overflow, and writes there.

    Mixtures of experts count their rows with it. TorchScript compiles it.

    Raises:
        ValueError: the source is not float32, or the numbers are no integers up to 65,536.
    """
    known = 0 < bins <= 65536 and -65536 <= min < max <= 65536
    # two numbers that are one in float32 are no range there
    known = known and min == int(min) and max == int(max)
    if not known or input.dtype != torch.float32:
        raise ValueError(
            "torchq.load: histc of the graph must count float32 in at most 65,536 bins between "
            "integers up to that, got others. Check the source."
        )
    return torch.histc(input, bins, min, max)


def native_group_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As torch.native_group_norm, which trusts a product of sizes that may overflow.

    TorchScript compiles it.

    Raises:
        ValueError: the sizes are not those of the source.
    """
    known = input.dim() >= 2 and input.size(0) == N and input.size(1) == C and N > 0 and C > 0
    if not known or input.numel() != N * C * HxW or input.numel() == 0:
        raise ValueError(
            "torchq.load: sizes of the graph's native_group_norm must be those of its source, got "
            "others. Check the source."
        )
    return torch.native_group_norm(input, weight, bias, N, C, HxW, group, eps)


LARGEST_SIZE = 1 << 31
"""Of a size, kernel, step or padding in a list: products and sums of a few fit 64 bits."""


def size(value: int) -> int:
    """Return a number that a graph computes for a function that does not check it itself.

    TorchScript compiles it.

    Raises:
        ValueError: it is beyond 2**31.
    """
    # LARGEST_SIZE, which TorchScript cannot read; abs of the least integer is negative there
    if not -2147483648 <= value <= 2147483648:
        raise ValueError(
            "torchq.load: sizes that the graph computes must be at most 2**31, got another one. "
            "Check the source."
        )
    return value


def divisor(value: int) -> int:
    """Return a number by which a graph divides others, without the ones that end a process.

    TorchScript compiles it: there ``n % 0`` and the least integer by -1 are not checked.

    Raises:
        ValueError: it is 0 or -1.
    """
    if value == 0 or value == -1:
        raise ValueError(
            "torchq.load: divisors that the graph computes must not be 0 or -1, got one of these. "
            "Check the source."
        )
    return value


_CHECKED: dict[str, Callable[..., object]] = {
    "native_group_norm": native_group_norm,
    "histc": histc,
    "embedding_bag": embedding_bag,
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "_grouped_mm": _grouped_mm,
}
"""Functions of ATen that trust indices and sizes, and those that take their places."""

# Names in files, and what they stand for

PYTHON: dict[str, Callable[..., object]] = {
    **{f"operator.{f.__name__}": f for f in (
        operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv,
        operator.mod, operator.pow, operator.neg, operator.pos, operator.abs, operator.eq,
        operator.ne, operator.lt, operator.le, operator.gt, operator.ge, operator.and_,
        operator.or_, operator.xor, operator.not_, operator.getitem,
    )},
    **{f"math.{f.__name__}": f for f in (
        math.floor, math.ceil, math.trunc, math.fabs, math.sqrt, math.exp, math.log, math.log2,
        math.log10, math.sin, math.cos, math.tan, math.asin, math.acos, math.atan, math.sinh,
        math.cosh, math.tanh, math.pow, math.isfinite, math.isnan,
    )},
    **{f.__name__: f for f in (int, float, max, min, abs, len)},
    "torch._assert": torch._assert,
    "torchq.size": size,
    "torchq.divisor": divisor,
}  # fmt: skip
"""Functions of numbers, and two that read tensors: an item, and a check."""
_PYTHON_NAMES = {function: name for name, function in PYTHON.items()}


def name_of(target: fx.node.Target, op: str = "call_function") -> str | None:
    """Return the name that a file has for what a node calls; None for what it may not call."""
    target = NUMBERS.get(target, target) if op == "call_function" else target
    own = str(getattr(target, "__name__", ""))
    if op == "call_method":
        name = f"Tensor.{target}"
    elif isinstance(target, torch._ops.OpOverload):
        schema = target._schema
        name = f"{schema.name}.{schema.overload_name or 'default'}"
    elif isinstance(target, torch._ops.OpOverloadPacket):
        name = str(target._qualified_op_name)
    elif target in _PYTHON_NAMES:
        name = _PYTHON_NAMES[target]
    elif target in _CHECKED.values():
        name = f"{'torch' if hasattr(torch, own) else 'nn'}.{own}"
    else:
        found = (p for p, owner in _OWNERS.items() if getattr(owner, own, None) is target)
        name = f"{next(found, '')}.{own}"
    return name if is_known(name) else None


_OWNERS: dict[str, object] = {"torch": torch, "nn": torch._C._nn, "Tensor": Tensor}


def is_known(name: str) -> bool:
    """Return whether a file may call a function of such a name."""
    return name in PYTHON or bool(schemas_of(name))


def schemas_of(name: str) -> tuple[FunctionSchema, ...]:
    """Return the schemas that a call by such a name may have; none for other names.

    Nothing is asked for an attribute of another name: torch imports modules when it is.
    """
    library, _, own = name.rpartition("::")
    if library == "aten":
        base, _, overload = own.partition(".")
        found = schemas(_REPLACED.get(base, base)) if _is_named(base) else {}
        if overload:
            return (found[overload],) if overload in found else ()
        return tuple(found.values())
    if library == "torchq":
        own = own.removesuffix(".default")
        return (getattr(torch.ops.torchq, own).default._schema,) if own in OWN else ()
    owner, _, own = name.rpartition(".")
    own = _REPLACED.get(own, own)
    known = owner in _OWNERS and _is_named(own)
    function = getattr(_OWNERS[owner], own, None) if known else None
    of_c = owner == "Tensor" or isinstance(function, BuiltinFunctionType)
    return tuple(schemas(own).values()) if function is not None and of_c else ()


def _is_named(own: str) -> bool:
    return _REPLACED.get(own, own) in _NAMES


def by_name(name: str, checked: str) -> tuple[str, fx.node.Target]:
    """Return kind and target of the nodes that call a function of this name, which is known.

    Names of ATen without an overload, in files of earlier versions, get the ``checked`` one.
    """
    if name in PYTHON:
        return "call_function", PYTHON[name]
    library, _, own = name.rpartition("::")
    base, _, overload = own.partition(".")
    if library == "aten" and base in _CHECKED:
        return "call_function", _CHECKED[base]
    if library:
        packet = getattr(getattr(torch.ops, library), _REPLACED.get(base, base))
        return "call_function", getattr(packet, overload or checked)
    owner, _, own = name.rpartition(".")
    own = _REPLACED.get(own, own)
    if own in _CHECKED:
        return "call_function", _CHECKED[own]
    if owner == "Tensor":
        return "call_method", own
    return "call_function", getattr(_OWNERS[owner], own)
