# SPDX-License-Identifier: Apache-2.0
"""Recognises RMS norms that a model spells out, as Llama, T5 and most decoders do."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from torchq.capture.graph import aten_name, parameters_of, remove_unused
from torchq.capture.patterns import arguments_of


def join_rms_norms(graph: fx.Graph) -> None:
    """Write ``x * rsqrt(mean(x^2, -1) + eps) * weight`` as one call of ``torch.rms_norm``.

    It is one operation then, in reports and after the conversion. A factor that is no float32
    constant of one dim stays behind it. A norm of rows whose size varies stays as it is.
    """
    for node in list(graph.nodes):
        norm = _norm(node)
        product = _reader(node, "mul")
        if norm is None or product is None or norm[0] not in product.args:
            continue
        src, eps = norm
        size = src.meta["value"].shape[-1]
        scaled = _reader(product, "mul")
        weight = None if scaled is None else _weight(scaled, product, size)
        last = product if weight is None or scaled is None else scaled
        with graph.inserting_before(last):
            made = graph.call_function(torch.rms_norm, (src, [size], weight, eps))
        made.meta.update(last.meta, aten="aten::rms_norm", parameters=parameters_of(made))
        last.replace_all_uses_with(made)
    remove_unused(graph)


def _norm(node: fx.Node) -> tuple[fx.Node, float] | None:
    """Return x and eps where a node is ``rsqrt(mean(x^2, -1, keepdim=True) + eps)``."""
    if aten_name(node) != "rsqrt":
        return None
    add = arguments_of(node).input
    if not _is_alone(add, "add") or not isinstance(eps := arguments_of(add).other, float | int):
        return None
    mean = arguments_of(add).input
    if arguments_of(add).alpha != 1 or not _is_alone(mean, "mean"):
        return None
    means = arguments_of(mean)
    square, rank = means.input, len(mean.meta["value"].shape)
    if means.dim not in ([-1], [rank - 1]) or not means.keepdim or means.dtype is not None:
        return None
    if not _is_alone(square, "pow", "mul"):
        return None
    a = arguments_of(square)
    is_square = a.other == 2 if aten_name(square) == "pow" else a.other is a.input
    if not is_square or not isinstance(a.input, fx.Node):
        return None
    src: fx.Node = a.input
    is_float32, sizes = src.meta["value"].dtype == torch.float32, src.meta["sizes"]
    return (src, float(eps)) if is_float32 and sizes and sizes[-1].isdecimal() else None


def _is_alone(value: object, *names: str) -> bool:
    """Return whether a value is a call of one of these, which one node reads."""
    return isinstance(value, fx.Node) and aten_name(value) in names and len(value.users) == 1


def _reader(node: fx.Node, name: str) -> fx.Node | None:
    """Return what alone reads a node, if it is this call."""
    user = next(iter(node.users), None)
    return user if len(node.users) == 1 and user and aten_name(user) == name else None


def _weight(scaled: fx.Node, product: fx.Node, size: int) -> fx.Node | None:
    """Return the constant vector that ``scaled`` multiplies a product by."""
    weight = scaled.args[0] if scaled.args[1] is product else scaled.args[1]
    value = weight.meta.get("constant") if isinstance(weight, fx.Node) else None
    if not isinstance(weight, fx.Node) or not isinstance(value, Tensor):
        return None
    return weight if list(value.shape) == [size] and value.dtype == torch.float32 else None
