# SPDX-License-Identifier: Apache-2.0
"""Quantized LSTM, GRU and RNN: drop-in for torch's, static or dynamic."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._jit_internal import is_scripting
from torch.nn.utils.rnn import PackedSequence
from typing_extensions import Self

from torchq.attributes.attr import Attr
from torchq.attributes.options import Cell, Granularity, Merge
from torchq.functional.placeholders import placeholder_device
from torchq.nn.module import QModule, Spec, as_source, dtype_name
from torchq.nn.rnn_attr import read_attr
from torchq.nn.rnn_float import cell_of, check_bound, data_params, layer_from_float
from torchq.nn.rnn_layer import GATES, UNIT_STATE, QRecurrentLayer
from torchq.nn.rnn_onednn import layers_from_onednn, read_weights
from torchq.nn.rnn_parameters import FloatParameters
from torchq.quantization.qparams import QParams
from torchq.quantization.ranges import check_choice

MERGES = ("concat", "sum")
"""What becomes of two directions; a sum is taken in float32, so that it cannot clip."""
_FIRST = ("input_size", "hidden_size", "bias", "proj_size", "bidirectional")


class _QRecurrent(FloatParameters, QModule):
    """Base of the networks of all cells.

    Args of :meth:`from_float`:
        module: the float network.
        src: parameters of the source; None for a dynamic network, which takes float32.
        states: parameters of each layer's hidden state; None means [-1, 1] (scale 1/127, zero point
            128), which holds every state of LSTM, GRU and tanh, but not of relu and projections.
        granularity, bits: of the weights, "per_channel" (per gate and unit) or "per_tensor", 8 or
            7.
        dst_dtype: float32, or the dtype of the last layer's state, whose parameters it then has.
        hidden: parameters of what a projection reads; None means [-1, 1].
        h_n_dtype: float32, or the dtype of the states, whose parameters h_n then has. Initial
            states may have either.
        attr: oneDNN's ``set_rnn_data_qparams`` for source and all states, in place of ``src``,
            ``states`` and ``hidden``, and ``set_rnn_weights_qparams`` and
            ``set_rnn_weights_projection_qparams`` for the weights, in place of ``granularity`` and
            ``bits``. Its scales multiply, and its gates are in oneDNN's order: i f c o, or u r o.
        data_dtype: uint8 or int8, of what ``set_rnn_data_qparams`` describes.
    """

    __jit_unused_properties__ = ("attr",)
    _cells: ClassVar[tuple[Cell, ...]]
    _float: ClassVar[type[nn.RNNBase]]

    def __init__(
        self, layers: Sequence[QRecurrentLayer], batch_first: bool = False, merge: Merge = "concat"
    ) -> None:
        """Stack layers, each of which reads what the one before emits."""
        super().__init__()
        if merge not in MERGES or not layers:
            raise ValueError(
                f"torchq.nn.{type(self).__name__}: merge must be one of {', '.join(MERGES)} and "
                f"layers must not be empty, got {merge!r} and {len(layers)} layers."
            )
        first = layers[0]
        self.sums = merge == "sum" and first.directions == 2
        for layer in layers[1:]:
            before = first.projection_size or first.hidden_size
            width = before * (1 if self.sums else first.directions)
            if (layer.cell, layer.directions, layer.input_size) != (
                first.cell,
                first.directions,
                width,
            ):
                raise ValueError(
                    f"torchq.nn.{type(self).__name__}: layers must have the same cell and "
                    f"directions and read {width} features, got {layer}."
                )
        self.layers = nn.ModuleList(layers)
        self.input_size, self.hidden_size = first.input_size, first.hidden_size
        self.proj_size, self.num_layers = first.projection_size, len(layers)
        self.bidirectional, self.directions = first.directions == 2, first.directions
        self.batch_first, self.cell = batch_first, first.cell
        self.op = type(self).__name__  # TorchScript has no type()
        self.units = first.projection_size or first.hidden_size
        self.dst_dtype = torch.float32 if self.sums else layers[-1].dst_dtype
        self.first: Any = None
        self._set_spec(
            layers=[layer.read_spec() for layer in layers], batch_first=batch_first, merge=merge
        )

    def with_float_first(self, first: nn.LSTM) -> Self:
        """Put a float layer in front, for a source that 8 bits do not suit; return the module."""
        self.first, self.input_size = first.float().requires_grad_(False).eval(), first.input_size
        self.num_layers += 1
        sizes = {name: getattr(first, name) for name in _FIRST}
        self._set_spec(**self.read_spec() | {"first": sizes})
        return self

    @classmethod
    def from_float(
        cls,
        module: nn.Module,
        src: QParams | None = None,
        states: Sequence[QParams] | QParams | None = None,
        *,
        granularity: Granularity = "per_channel",
        bits: int = 8,
        dst_dtype: torch.dtype = torch.float32,
        hidden: QParams | None = None,
        h_n_dtype: torch.dtype = torch.float32,
        attr: Attr | None = None,
        data_dtype: torch.dtype = torch.uint8,
    ) -> Self:
        """Quantize and pack a float network; see the class for the arguments.

        Raises:
            TypeError: ``module`` is not the float network of this class.
            ValueError: a weight has NaN or inf, ``states`` has another number of layers, or is None
                where a static network's states have no bound: with relu or a projection; ``attr``
                sets something else, or what other arguments tell too.
            NotImplementedError: another mask in ``attr`` than 0 or 24, of projections 0 or 8.
        """
        if not isinstance(module, cls._float):
            raise TypeError(
                f"torchq.nn.{cls.__name__}: module must be a torch.nn.{cls.__name__[1:]}, got "
                f"{type(module).__name__}."
            )
        op, gates = cls.__name__, GATES[cell_of(module)]
        width = getattr(module, "proj_size", 0)
        params = read_attr(f"nn.{op}", attr, gates, module.hidden_size, width, data_dtype)
        src = data_params(op, params, src, (states, hidden))
        if params.data is not None:
            states = hidden = params.data
        check_bound(op, "states", module, src, states)
        given = _by_layer(op, states, getattr(module, "num_layers", 1))
        count, layers = len(given), []
        for i, state in enumerate(given):
            inner = torch.float32 if src is None else state.dtype
            layers.append(
                layer_from_float(
                    module,
                    i,
                    src if i == 0 or src is None else given[i - 1],
                    state,
                    granularity,
                    bits,
                    params,
                    dst_dtype=inner if i < count - 1 else dst_dtype,
                    hidden=hidden,
                    h_n_dtype=h_n_dtype,
                )
            )
        return cls(layers, bool(getattr(module, "batch_first", False)))

    @classmethod
    def from_onednn(
        cls,
        weights_layer: Tensor,
        weights_iter: Tensor,
        bias: Tensor | None = None,
        attr: Attr | None = None,
        *,
        weights_projection: Tensor | None = None,
        cell: Cell | None = None,
        data_dtype: torch.dtype = torch.uint8,
        dst_dtype: torch.dtype = torch.float32,
        h_n_dtype: torch.dtype = torch.float32,
        merge: Merge = "concat",
    ) -> Self:
        """From the tensors of a oneDNN primitive, gates in its order; results are torch's.

        Args:
            weights_layer: ldigo, of floats, or int8 with the scales of ``attr``.
            weights_iter: the same, of the hidden state.
            bias: float32, ldgo.
            attr: see the class. Without data parameters the network is dynamic.
            weights_projection: ldio, of an LSTM.
            cell: None is oneDNN's int8 one: ``lstm``, ``gru_vanilla``, ``rnn_tanh``. The others are
                ``gru`` (oneDNN's lbr_gru, with four biases) and ``rnn_relu``.
            data_dtype: uint8 or int8, of what ``set_rnn_data_qparams`` describes.
            dst_dtype: float32, or ``data_dtype``.
            h_n_dtype: float32, or ``data_dtype``.
            merge: of two directions, "concat" or "sum".

        Raises:
            TypeError: a weight is no tensor.
            ValueError: shapes do not fit, int8 weights come without scales, or ``attr`` sets
                something else.
            NotImplementedError: several layers with two directions, or another mask.
        """
        cell = cls._cells[0] if cell is None else cell
        check_choice(f"nn.{cls.__name__}", "cell", cell, cls._cells)
        op = f"nn.{cls.__name__}.from_onednn"
        w = read_weights(
            op, cell, GATES[cell], weights_layer, weights_iter, bias, weights_projection
        )
        dtypes = data_dtype, dst_dtype, h_n_dtype
        return cls(layers_from_onednn(op, cell, w, attr, *dtypes), merge=merge)

    @classmethod
    def from_spec(cls, spec: Spec) -> Self:
        """See the base class."""
        layers = [QRecurrentLayer.from_spec(layer) for layer in spec["layers"]]
        made = cls(layers, spec["batch_first"], spec["merge"])
        if first := spec.get("first"):
            sizes = {name: first[name] for name in _FIRST}
            made.with_float_first(nn.LSTM(**sizes, device=placeholder_device()))
        return made

    @property
    def attr(self) -> Attr:
        """Those of the first int8 layer, as oneDNN has them; the others' are ``layers[i].attr``."""
        return self._layers()[0].attr

    def flatten_parameters(self) -> None:
        """Nothing, for code that calls it in its forward: the weights are packed."""

    def _check_states(self, h_0: Tensor | None, c_0: Tensor | None, batch: list[int]) -> None:
        """``batch``: none of an unbatched source, whose states have none."""
        if h_0 is not None:
            self._check_state(h_0, "h_0", batch, self.units)
        if c_0 is not None:
            self._check_state(c_0, "c_0", batch, self.hidden_size)

    def _check_state(self, state: Tensor, name: str, batch: list[int], units: int) -> None:
        expected = [self.num_layers * self.directions] + batch + [units]  # noqa: RUF005 - scripted
        if list(state.shape) != expected:
            dims = "batch, units" if len(batch) > 0 else "units: an unbatched source"
            raise ValueError(
                f"torchq.nn.{self.op}: {name} must have shape {expected} (layers * directions, "
                f"{dims}), got {list(state.shape)}. Pass states of the source's batch, or none."
            )

    def _run(
        self, src: Tensor, batch_sizes: Tensor | None, h_0: Tensor | None, c_0: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All layers on [T, N, inputs], or on packed rows; rounded to a half dtype at the end."""
        given = src
        h_n: list[Tensor] = []
        c_n: list[Tensor] = []
        start = 0
        if self.first is not None:
            src, h_last, c_last = self._run_first(src, batch_sizes, h_0, c_0)
            h_n, c_n = [h_last], [c_last]
            start = self.directions
        for layer in self.layers:
            stop = start + self.directions
            h = None if h_0 is None else h_0[start:stop]
            c = None if c_0 is None else c_0[start:stop]
            src, h_last, c_last = layer(src, batch_sizes, h, c)
            if self.sums:
                forward, backward = torch.chunk(src, 2, -1)
                src = forward + backward
            h_n.append(h_last)
            c_n.append(c_last)
            start = stop
        h, c = torch.cat(h_n), torch.cat(c_n)
        return as_source(src, given), as_source(h, given), as_source(c, given)

    def _run_first(
        self, src: Tensor, batch_sizes: Tensor | None, h_0: Tensor | None, c_0: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the float layer."""
        states: tuple[Tensor, Tensor] | None = None
        if h_0 is not None and c_0 is not None:
            states = (h_0[: self.directions].float(), c_0[: self.directions].float())
        if not is_scripting() and batch_sizes is not None:
            packed, (h, c) = self.first(PackedSequence(src.float(), batch_sizes), states)
            return packed.data, h, c
        dst, (h, c) = self.first(src.float(), states)
        return dst, h, c

    def _forward(
        self, src: Tensor, h_0: Tensor | None, c_0: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Batched and unbatched tensors."""
        if src.dim() != 2 and src.dim() != 3:
            raise ValueError(
                f"torchq.nn.{self.op}: src must have 2 dimensions (unbatched) or 3, got "
                f"{list(src.shape)}. Reshape it."
            )
        unbatched = src.dim() == 2
        sizes = list(src.shape)
        batch = sizes[:1] if self.batch_first and not unbatched else sizes[1:-1]
        self._check_states(h_0, c_0, batch)
        if unbatched:
            src = src.unsqueeze(1)
            h_0 = None if h_0 is None else h_0.unsqueeze(1)
            c_0 = None if c_0 is None else c_0.unsqueeze(1)
        elif self.batch_first:
            src = src.transpose(0, 1)
        dst, h_n, c_n = self._run(src, None, h_0, c_0)
        if unbatched:
            c_n = c_n.squeeze(1) if c_n.dim() == 3 else c_n
            return dst.squeeze(1), h_n.squeeze(1), c_n
        return (dst.transpose(0, 1) if self.batch_first else dst), h_n, c_n

    @torch.jit.unused
    def _packed(
        self, src: PackedSequence, h_0: Tensor | None, c_0: Tensor | None
    ) -> tuple[PackedSequence, Tensor, Tensor]:
        """Sequences of different lengths, as torch packs them."""

        def permuted(state: Tensor | None, order: Tensor | None) -> Tensor | None:
            return state if state is None or order is None else state.index_select(1, order)

        self._check_states(h_0, c_0, [int(src.batch_sizes[0])])
        h, c = permuted(h_0, src.sorted_indices), permuted(c_0, src.sorted_indices)
        dst, h_n, c_n = self._run(src.data, src.batch_sizes, h, c)
        result = PackedSequence(dst, src.batch_sizes, src.sorted_indices, src.unsorted_indices)
        h_last = permuted(h_n, src.unsorted_indices)
        c_last = permuted(c_n, src.unsorted_indices) if c_n.dim() == 3 else c_n
        assert h_last is not None and c_last is not None
        return result, h_last, c_last

    def extra_repr(self) -> str:
        """Sizes, dtypes and the attributes of the layers on one line."""
        spec = self.read_spec()["layers"][0]
        words = [f"{self.cell}, {self.input_size}, {self.hidden_size}"]
        words += [f"num_layers={self.num_layers}"] if self.num_layers > 1 else []
        words += [f"proj_size={self.proj_size}"] if self.proj_size else []
        words += ["bidirectional"] if self.bidirectional else []
        words += ["batch_first"] if self.batch_first else []
        words += ["merge=sum"] if self.sums else []
        words += ["first layer float32"] if self.first is not None else []
        words.append(f"{spec['src']} -> {dtype_name(self.dst_dtype)}")
        words += [] if spec["src"] == "dynamic" else [f"states {spec['state']}"]
        words += dict.fromkeys(str(layer.attr) for layer in self.layers if not layer.spec.is_meta)
        return ", ".join(words)


class QLSTM(_QRecurrent):
    """Quantized :class:`torch.nn.LSTM`: the same arguments, results and shapes.

    ``real(q) = (q - zero_point) * scale`` for source and hidden state; the cell state is float32.
    With oneDNN's ``set_rnn_data_qparams(scale, shift)``, which ``attr`` takes, the parameters are
    ``QParams.per_tensor(1 / scale, shift)``, one for source and states.

    Shapes:
        src: ``[T, N, inputs]`` (``[N, T, inputs]`` with batch_first, ``[T, inputs]`` unbatched), of
            the source's dtype or float32; or a PackedSequence.
        hx: (h_0, c_0), each ``[layers * directions, N, units]``; zeros if absent.
        returns: dst and (h_n, c_n).

    Raises:
        TypeError: ``src`` has another dtype.
        ValueError: a shape does not fit.
    """

    _float: ClassVar[type[nn.RNNBase]] = nn.LSTM
    _cells = ("lstm",)

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Apply all layers."""
        h_0: Tensor | None = None
        c_0: Tensor | None = None
        if hx is not None:
            h_0, c_0 = hx
        if not is_scripting() and isinstance(input, PackedSequence):
            packed, h_n, c_n = self._packed(input, h_0, c_0)
            return packed, (h_n, c_n)
        dst, h_n, c_n = self._forward(input, h_0, c_0)
        return dst, (h_n, c_n)


class QGRU(_QRecurrent):
    """Quantized :class:`torch.nn.GRU`: the same arguments, results and shapes.

    The state stays float32 between steps; only what the recurrent weight multiplies is quantized.
    oneDNN's vanilla form, which resets before the matmul, is made of layers with the cell
    ``gru_vanilla``, as :meth:`from_onednn` makes them. As in oneDNN, its state is quantized again
    in each step: the next one goes on with the rounded values. See :class:`QLSTM` for the shapes;
    there is no cell state.
    """

    _float: ClassVar[type[nn.RNNBase]] = nn.GRU
    _cells: ClassVar[tuple[Cell, ...]] = ("gru_vanilla", "gru")

    def forward(self, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Apply all layers."""
        if not is_scripting() and isinstance(input, PackedSequence):
            packed, h_n, _ = self._packed(input, hx, None)
            return packed, h_n
        dst, h_n, _ = self._forward(input, hx, None)
        return dst, h_n


class QRNN(QGRU):
    """Quantized :class:`torch.nn.RNN`."""

    _float: ClassVar[type[nn.RNNBase]] = nn.RNN
    _cells = ("rnn_tanh", "rnn_relu")


def _by_layer(
    op: str, states: Sequence[QParams | None] | QParams | None, count: int
) -> list[QParams]:
    """Return the parameters of each layer's states.

    Raises:
        ValueError: there are those of another number of layers.
    """
    given = [states] * count if states is None or isinstance(states, QParams) else list(states)
    if len(given) != count:
        raise ValueError(
            f"torchq.nn.{op}: states must have one entry per layer, {count}, got {len(given)}."
        )
    return [UNIT_STATE if state is None else state for state in given]
