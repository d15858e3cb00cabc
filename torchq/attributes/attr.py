# SPDX-License-Identifier: Apache-2.0
"""`Attr`: the attributes of an op, as oneDNN defines them; ``__init__.py`` has the formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, get_args

import torch
from torch import Tensor

from torchq.attributes.arguments import (
    MaskedValues,
    Values,
    at_position,
    check_arg,
    check_choice,
    check_count,
    check_groups,
    check_single,
    check_type,
    content,
    expected_values,
    float_text,
    float_values,
    int_values,
    missing,
    read_fields,
    sort_args,
    split_at,
    to_float32,
    to_mask,
)
from torchq.attributes.options import Rounding
from torchq.attributes.post_op import read_post_ops
from torchq.attributes.post_ops import PostOps
from torchq.attributes.refused import missing_attribute

KINDS = ("output_scales", "scales", "zero_points", "rnn_weights", "rnn_weights_projection")
# Kinds that belong to one argument: the text leaves it out.
_ARG_OF = {
    "output_scales": "dst",
    "rnn_weights": "weights",
    "rnn_weights_projection": "weights_projection",
}
# The sections of the text, in order: the setter, and its fields after <arg> (if it has one).
_GRAMMAR = {
    "output_scales": ("set_output_scales", ("mask",)),
    "scales": ("set_scales", ("mask", "groups")),
    "zero_points": ("set_zero_points", ("mask", "groups")),
    "rounding": ("set_rounding", ("mode",)),
    "rnn_data": ("set_rnn_data_qparams", ("scale", "shift")),
    "rnn_weights": ("set_rnn_weights_qparams", ("mask",)),
    "rnn_weights_projection": ("set_rnn_weights_projection_qparams", ("mask",)),
}
_WITH_ARG = ("scales", "zero_points", "rounding")


class Attr:
    """Scales, zero points, post-ops and rounding of one op; setters return self for chaining.

    ``str(attr)`` is one line without values and ``Attr.parse`` its inverse. Equality and hash go by
    content (text and values), so do not change an Attr while it is a dict key.

    Values are a number, list, array or tensor, copied to float32 (zero points: int32); None means
    supplied at execution, see `with_values`.

    Example:
        >>> attr = torchq.Attr().set_scales("src", 0, 0.5).set_zero_points("src", 0, 128)
        >>> attr.set_scales("weights", 1, torch.rand(8) + 0.1).post_ops.append_eltwise("relu")
        PostOps('eltwise_relu')
        >>> print(attr)
        scales:src:0+weights:1 zero_points:src:0 post_ops:eltwise_relu
    """

    def __init__(self) -> None:
        """Nothing set: prints as the empty string."""
        self._params: dict[tuple[str, str], MaskedValues] = {}  # by (kind, arg)
        self._rounding: dict[str, str] = {}
        self._rnn_data: tuple[float, float] | None = None
        self._post_ops = PostOps()

    def set_scales(
        self, arg: str, mask: int, values: Values | None = None, groups: Sequence[int] | None = None
    ) -> Attr:
        """Set the scales of ``src``, ``weights``, ``dst`` or ``src<i>``; finite and > 0.

        ``groups`` (two sizes, mask > 0) share one value over blocks of the last two dims.
        """
        self._refuse_mixing("set_scales", "output_scales")
        return self._set("set_scales", "scales", arg, mask, values, groups)

    def set_zero_points(
        self, arg: str, mask: int, values: Values | None = None, groups: Sequence[int] | None = None
    ) -> Attr:
        """Set the int32 zero points of ``src``, ``weights``, ``dst`` or ``src<i>``.

        ``groups`` as in `set_scales`.
        """
        return self._set("set_zero_points", "zero_points", arg, mask, values, groups)

    def set_output_scales(self, mask: int, values: Values | None = None) -> Attr:
        """Set the output scales of oneDNN v1, in place of all other scales.

        ``x = output_scales[n] * float(acc + bias)``, then the post-ops, then
        ``dst = clamp(rne(x + dst_zero_point))`` to integers, ``x`` to float32. ``acc`` is the int32
        sum of products, and a bias, int32 or float32, has its unit. Neither src, weights nor dst
        have scales of their own. A reorder multiplies its source:
        ``x = output_scales[n] * float(src - src_zero_point)``.

        Args:
            mask: 0 for one value, 2 for one per channel of dst, in matmul the bit of its last dim;
                others raise in the op, but for reorder.
            values: finite float32 numbers of any sign, as many as the mask selects; None where
                they are supplied at execution.

        Raises:
            ValueError: scales are set already, a value is no finite float32, or several come with
                mask 0; the op raises where their number does not fit its channels.
        """
        self._refuse_mixing("set_output_scales", "scales")
        return self._set("set_output_scales", "output_scales", "dst", mask, values)

    def set_rounding(self, arg: str, mode: Rounding) -> Attr:
        """Set how ``arg`` is rounded: ``nearest`` even (default), ``environment``, ``stochastic``.

        ``environment`` is the mode of the calling thread (MXCSR), as oneDNN does. Only
        :func:`torchq.functional.reorder` takes another mode than ``nearest``, for ``dst``. Other
        ops refuse it with NotImplementedError: give these a float32 dst, and reorder that.
        """
        check_arg("torchq.Attr.set_rounding", arg)
        check_choice("torchq.Attr.set_rounding: mode", mode, get_args(Rounding))
        self._rounding.pop(arg, None)
        if mode != "nearest":
            self._rounding[arg] = mode
        return self

    def set_rnn_data_qparams(self, scale: float, shift: float) -> Attr:
        """Set ``q = rne(x * scale + shift)`` for all RNN data: a multiplier, not a divisor."""
        where = "torchq.Attr.set_rnn_data_qparams: "
        scale, shift = to_float32(f"{where}scale", scale), to_float32(f"{where}shift", shift)
        if scale <= 0:
            raise ValueError(f"{where}scale must be > 0, got {scale}. Use 255 / (max - min).")
        self._rnn_data = (scale, shift)
        return self

    def set_rnn_weights_qparams(self, mask: int, scales: Values | None = None) -> Attr:
        """Set ``q = rne(w * scale)`` for both RNN weights (ldigo; 0 or 24): multipliers."""
        return self._set("set_rnn_weights_qparams", "rnn_weights", "weights", mask, scales)

    def set_rnn_weights_projection_qparams(self, mask: int, scales: Values | None = None) -> Attr:
        """Set ``q = rne(w * scale)`` for projection weights (ldio; mask 0 or 8): multipliers."""
        op, kind = "set_rnn_weights_projection_qparams", "rnn_weights_projection"
        return self._set(op, kind, _ARG_OF[kind], mask, scales)

    def set_post_ops(self, post_ops: PostOps) -> Attr:
        """Set the chain applied to the result; the same as assigning ``attr.post_ops``."""
        if not isinstance(post_ops, PostOps):
            raise TypeError(
                f"torchq.Attr.set_post_ops: post_ops must be a PostOps, got {post_ops!r}. "
                "Read text with PostOps.parse."
            )
        self._post_ops = post_ops
        return self

    @property
    def post_ops(self) -> PostOps:
        """The chain, for reading and appending: ``attr.post_ops.append_eltwise("relu")``."""
        return self._post_ops

    @post_ops.setter
    def post_ops(self, post_ops: PostOps) -> None:
        self.set_post_ops(post_ops)

    @property
    def rnn_data_qparams(self) -> tuple[float, float] | None:
        """(scale, shift), or None if not set."""
        return self._rnn_data

    def rounding(self, arg: str) -> str:
        """Return the rounding mode of ``arg``."""
        return self._rounding.get(check_arg("torchq.Attr.rounding", arg), "nearest")

    def mask(self, arg: str, kind: str = "scales") -> int | None:
        """Return the mask, None if not set. ``kind`` is one of KINDS here and below."""
        param = self._get("mask", arg, kind)
        return None if param is None else param.mask

    def values(self, arg: str, kind: str = "scales") -> Tensor | None:
        """Return the 1-D values, None if not set; raise ValueError if declared but not supplied."""
        param = self._get("values", arg, kind)
        if param is not None and param.values is None:
            raise missing(f"torchq.Attr.values: {kind} of {arg}")
        return None if param is None else param.values

    def resolve(self, arg: str, dims: Sequence[int], kind: str = "scales") -> Tensor:
        """Return the values in a shape that broadcasts to ``dims``: 1 for the dims not in the mask.

        What is not set is 1 (zero points: 0). Raises ValueError if the values are missing or their
        number is not the product of the selected dims.
        """
        param = self._get("resolve", arg, kind)
        if param is not None:
            return param.resolve(f"torchq.Attr.resolve: {kind} of {arg}", dims)
        if kind == "zero_points":
            return torch.zeros([1] * len(dims), dtype=torch.int32, device="cpu")
        return torch.ones([1] * len(dims), dtype=torch.float32, device="cpu")

    @staticmethod
    def expected_values(mask: int, dims: Sequence[int]) -> int:
        """Return the number of values a mask asks for: the product of the selected dims."""
        return expected_values(mask, dims)

    def check(self, arg: str, dims: Sequence[int]) -> None:
        """Raise ValueError unless all that is set for ``arg`` fits its logical ``dims``.

        Masks must select existing dims and the number of values (where supplied) be the product of
        the selected dims. With ``dst`` it also checks output scales and the post-ops' values.
        """
        if arg not in _ARG_OF.values():
            check_arg("torchq.Attr.check", arg)
        self._check_params(arg, dims)
        if arg == "dst":
            self._post_ops.check(dims)

    def _check_params(self, arg: str, dims: Sequence[int]) -> None:
        for (kind, owner), param in self._params.items():
            if owner == arg:
                where = f"torchq.Attr.check: {kind} of {arg}"
                check_count(where, param.mask, param.values, param.shape(where, dims), dims)

    def with_values(
        self,
        *,
        scales: Mapping[str, Values] | None = None,
        zero_points: Mapping[str, Values] | None = None,
        output_scales: Values | None = None,
        rnn_weights: Values | None = None,
        rnn_weights_projection: Values | None = None,
        post_ops: Sequence[Values] | None = None,
    ) -> Attr:
        """Return a copy with values supplied (or replaced) for masks that are declared.

        Args:
            scales: ``src``, ``weights``, ``dst`` or ``src<i>`` -> float32 values, in row-major
                order of the dims that the mask selects: 1-D, or of any shape with as many.
            zero_points: the same, int32.
            output_scales: of :meth:`set_output_scales`.
            rnn_weights: of :meth:`set_rnn_weights_qparams`.
            rnn_weights_projection: of :meth:`set_rnn_weights_projection_qparams`.
            post_ops: one tensor per binary and prelu, weight and bias of dw_conv, in the order of
                the chain; as in ``PostOps.with_values``.

        Raises:
            ValueError: a mask is not declared, or values or their number do not fit it.
            TypeError: they are no numbers, or of another dtype.
        """
        given = {("scales", arg): values for arg, values in (scales or {}).items()}
        given |= {("zero_points", arg): values for arg, values in (zero_points or {}).items()}
        singles = (output_scales, rnn_weights, rnn_weights_projection)
        for (kind, arg), values in zip(_ARG_OF.items(), singles, strict=True):
            if values is not None:
                given[kind, arg] = values
        result = deepcopy(self)
        for (kind, arg), values in given.items():
            param = self._params.get((kind, arg))
            if param is None:
                raise ValueError(
                    f"torchq.Attr.with_values: {kind} of {arg} must be declared with a mask first, "
                    f"got only values. Call {_GRAMMAR[kind][0]}."
                )
            result._set("with_values", kind, arg, param.mask, values, param.groups)
        if post_ops is not None:
            result._post_ops = self._post_ops.with_values(post_ops)
        return result

    @classmethod
    def parse(cls, text: str, **values: Any) -> Attr:
        """Read what ``str(attr)`` gives; ``values`` are the keywords of `with_values`."""
        attr = cls()
        _read(attr, text)
        return attr.with_values(**values) if values else attr

    def _set(
        self,
        op: str,
        kind: str,
        arg: str,
        mask: int,
        values: Values | None,
        groups: Sequence[int] | None = None,
    ) -> Attr:
        where = f"torchq.Attr.{op}"
        if kind in _WITH_ARG:
            check_arg(where, arg)
        mask, label = to_mask(where, mask), f"{where}: {kind} of {arg}"
        checked = None
        if values is not None:
            is_zero_point, positive = kind == "zero_points", kind != "output_scales"
            convert = int_values if is_zero_point else partial(float_values, positive=positive)
            checked = convert(label, values)
            check_single(label, mask, checked)
        self._params[kind, arg] = MaskedValues(mask, checked, check_groups(label, mask, groups))
        return self

    def _get(self, op: str, arg: str, kind: str) -> MaskedValues | None:
        check_choice(f"torchq.Attr.{op}: kind", kind, KINDS)
        check_choice(f"torchq.Attr.{op}: arg of {kind}", arg, [_ARG_OF.get(kind, arg)])
        if kind in _WITH_ARG:
            check_arg(f"torchq.Attr.{op}", arg)
        return self._params.get((kind, arg))

    def _refuse_mixing(self, op: str, other: str) -> None:
        if any(kind == other for kind, _ in self._params):
            raise ValueError(
                f"torchq.Attr.{op}: scales must be either scales (v3) or output_scales (v1), got "
                f"both: {other} are set already. With output_scales, fold src_scale * weight_scale "
                "/ dst_scale into them."
            )

    def _section(self, name: str) -> str:
        if name == "rounding":
            return "+".join(f"{arg}:{self._rounding[arg]}" for arg in sort_args(self._rounding))
        if name == "rnn_data":
            return ":".join(map(float_text, self._rnn_data or ()))
        params = {arg: param for (kind, arg), param in self._params.items() if kind == name}
        if name not in _WITH_ARG:
            return "".join(param.text() for param in params.values())
        return "+".join(f"{arg}:{params[arg].text()}" for arg in sort_args(params))

    def _key(self) -> tuple[object, ...]:
        params = sorted(self._params.items(), key=lambda item: item[0])
        return str(self), self._post_ops, *(content(param.values) for _, param in params)

    if not TYPE_CHECKING:  # type checkers shall find a misspelt name themselves

        def __getattr__(self, name: str) -> NoReturn:
            """Name the reason where oneDNN has the setter."""
            raise missing_attribute(name)

    def __str__(self) -> str:
        """Return the one-line text, without values."""
        sections = {name: self._section(name) for name in _GRAMMAR}
        sections["post_ops"] = str(self._post_ops)
        return " ".join(f"{name}:{text}" for name, text in sections.items() if text)

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        """Compare text and bits of values."""
        return self._key() == other._key() if isinstance(other, Attr) else NotImplemented

    def __hash__(self) -> int:
        """Hash text and values."""
        return hash(self._key())


def check_attr_type(op: str, attr: object) -> None:
    """Raise TypeError for anything but an Attr, before it is asked for what only an Attr has."""
    remedy = "Read text with torchq.Attr.parse, or start with torchq.Attr()."
    check_type(f"torchq.{op}: attr", attr, Attr, remedy)


def _read(attr: Attr, text: str) -> None:
    """Call the setters, and the append methods of the chain, that ``text`` asks for."""
    op, seen = "Attr.parse", set[str]()
    check_type("torchq.Attr.parse: text", text, str, "Pass what str(attr) gave.")
    for position, token in split_at(text, " ") if text else ():
        name, _, body = token.partition(":")
        with at_position(op, position, token):
            check_choice("section", name, [*_GRAMMAR, "post_ops"])
            if name in seen or not body:
                raise ValueError(f"must have {name}:<text> once")
        seen.add(name)
        if name == "post_ops":
            read_post_ops(attr.post_ops, body, position + len("post_ops:"), op)
        else:
            _read_section(attr, name, position, token)


def _read_section(attr: Attr, name: str, position: int, token: str) -> None:
    op, seen = "Attr.parse", set[str]()
    setter, names = _GRAMMAR[name]
    head = len(name) + 1
    with_arg = name in _WITH_ARG
    items = split_at(token[head:], "+", position + head) if with_arg else [(position, token)]
    for start, item in items:
        args = [item.partition(":")[0]] if with_arg else []
        fields = read_fields(op, start, item, names, len(names) - ("groups" in names))
        with at_position(op, start, item):
            if not seen.isdisjoint(args):
                raise ValueError(f"{name} must have {args[0]} once")
            getattr(attr, setter)(*args, **fields)
        seen.update(args)
