# SPDX-License-Identifier: Apache-2.0
"""Quantized LSTM, GRU and RNN: drop-in for torch's, static or dynamic."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from typing_extensions import Self

from torchq.nn.module import QModule, dtype_name
from torchq.nn.rnn_layer import GATES, UNIT_STATE, QRecurrentLayer, RecurrentWeight
from torchq.nn.rnn_weights import FloatParameters
from torchq.qparams import QParams

MERGES = ("concat", "sum")
"""What becomes of two directions; a sum is taken in float32, so that it cannot clip."""


def cell_of(module: nn.Module) -> str:
    """The name of the cell of a float module: ``lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu``."""
    if isinstance(module, nn.LSTM | nn.LSTMCell):
        return "lstm"
    if isinstance(module, nn.GRU | nn.GRUCell):
        return "gru"
    return f"rnn_{module.nonlinearity}"


def _stacked(module: nn.Module, name: str, layer: int, gates: int) -> Tensor | None:
    """A parameter of one layer, ``[directions, gates, ...]``; None if the module has none."""
    suffixes = ("", "_reverse") if getattr(module, "bidirectional", False) else ("",)
    names = [f"{name}_l{layer}{suffix}" for suffix in suffixes]
    if isinstance(module, nn.RNNCellBase):
        names = [name]
    values = [getattr(module, each, None) for each in names]
    if any(value is None for value in values):
        return None
    both = torch.stack([value.detach() for value in values if value is not None])
    return both.reshape(len(values), gates, -1, *both.shape[2:])


def layer_from_float(
    module: nn.Module,
    layer: int,
    src: QParams | None,
    state: QParams | None,
    granularity: str,
    bits: int,
    **options: Any,
) -> QRecurrentLayer:
    """Quantizes one layer of a float module."""
    cell = cell_of(module)
    gates = GATES[cell]

    def quantized(name: str, count: int) -> RecurrentWeight | None:
        value = _stacked(module, name, layer, count)
        return None if value is None else RecurrentWeight.quantize(value, granularity, bits)

    weight_src, weight_state = quantized("weight_ih", gates), quantized("weight_hh", gates)
    assert weight_src is not None and weight_state is not None
    return QRecurrentLayer(
        cell,
        weight_src,
        weight_state,
        _stacked(module, "bias_ih", layer, gates),
        _stacked(module, "bias_hh", layer, gates),
        projection=quantized("weight_hr", 1),
        src=src,
        state=UNIT_STATE if state is None else state,
        **options,
    )


def check_bound(op: str, name: str, module: nn.Module, src: QParams | None, state: object) -> None:
    """Raises ValueError where [-1, 1] would not hold the states of a static network."""
    relu, projection = cell_of(module) == "rnn_relu", bool(getattr(module, "proj_size", 0))
    if src is not None and state is None and (relu or projection):
        kind = "relu" if relu else "a projection"
        raise ValueError(
            f"torchq.nn.{op}: {name} must be given for {kind}, whose hidden state has no bound, "
            "got None. Observe it (torchq.nn.ObservedRNN), or use a dynamic network (src=None)."
        )


class _QRecurrent(FloatParameters, QModule):
    """What networks of all cells share.

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
    """

    def __init__(
        self, layers: Sequence[QRecurrentLayer], batch_first: bool = False, merge: str = "concat"
    ) -> None:
        """Stacks layers, each of which reads what the one before emits."""
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
        self._set_spec(
            layers=[layer.read_spec() for layer in layers], batch_first=batch_first, merge=merge
        )

    @classmethod
    def from_float(
        cls,
        module: nn.Module,
        src: QParams | None = None,
        states: Sequence[QParams] | QParams | None = None,
        *,
        granularity: str = "per_channel",
        bits: int = 8,
        dst_dtype: torch.dtype = torch.float32,
        hidden: QParams | None = None,
        h_n_dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Quantizes and packs a float network; see the class for the arguments.

        Raises:
            TypeError: ``module`` is not the float network of this class.
            ValueError: a weight has NaN or inf, ``states`` has another number of layers, or is None
                where a static network's states have no bound: with relu or a projection.
        """
        if not isinstance(module, cls._float):  # type: ignore[attr-defined]
            raise TypeError(
                f"torchq.nn.{cls.__name__}: module must be a torch.nn.{cls.__name__[1:]}, got "
                f"{type(module).__name__}."
            )
        check_bound(cls.__name__, "states", module, src, states)
        count: int = getattr(module, "num_layers", 1)
        given = [states] * count if states is None or isinstance(states, QParams) else list(states)
        if len(given) != count:
            raise ValueError(
                f"torchq.nn.{cls.__name__}: states must have one entry per layer, {count}, got "
                f"{len(given)}."
            )
        given = [UNIT_STATE if state is None else state for state in given]
        layers = []
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
                    dst_dtype=inner if i < count - 1 else dst_dtype,
                    hidden=hidden,
                    h_n_dtype=h_n_dtype,
                )
            )
        return cls(layers, bool(getattr(module, "batch_first", False)))

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> Self:
        """See the base class."""
        layers = [QRecurrentLayer.from_spec(layer) for layer in spec["layers"]]
        return cls(layers, spec["batch_first"], spec["merge"])

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
        """All layers on [T, N, inputs], or on packed rows."""
        h_n: list[Tensor] = []
        c_n: list[Tensor] = []
        start = 0
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
        return src, torch.cat(h_n), torch.cat(c_n)

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
        """Sizes and dtypes on one line."""
        spec = self.read_spec()["layers"][0]
        words = [f"{self.cell}, {self.input_size}, {self.hidden_size}"]
        words += [f"num_layers={self.num_layers}"] if self.num_layers > 1 else []
        words += [f"proj_size={self.proj_size}"] if self.proj_size else []
        words += ["bidirectional"] if self.bidirectional else []
        words += ["batch_first"] if self.batch_first else []
        words += ["merge=sum"] if self.sums else []
        state = "" if spec["src"] == "dynamic" else f", states {spec['state']}"
        return f"{', '.join(words)}, {spec['src']} -> {dtype_name(self.dst_dtype)}{state}"


class QLSTM(_QRecurrent):
    """Quantized :class:`torch.nn.LSTM`: the same arguments, results and shapes.

    ``real(q) = (q - zero_point) * scale`` for source and hidden state; the cell state is float32.
    With oneDNN's ``set_rnn_data_qparams(scale, shift)`` the parameters are
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

    _float = nn.LSTM

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Applies all layers."""
        h_0: Tensor | None = None
        c_0: Tensor | None = None
        if hx is not None:
            h_0, c_0 = hx
        if not torch.jit.is_scripting() and isinstance(input, PackedSequence):  # type: ignore[attr-defined]
            packed, h_n, c_n = self._packed(input, h_0, c_0)
            return packed, (h_n, c_n)
        dst, h_n, c_n = self._forward(input, h_0, c_0)
        return dst, (h_n, c_n)


class QGRU(_QRecurrent):
    """Quantized :class:`torch.nn.GRU`: the same arguments, results and shapes.

    The state stays float32 between steps; only what the recurrent weight multiplies is quantized.
    oneDNN's vanilla form, which resets before the matmul, is made of layers with the cell
    ``gru_vanilla``. See :class:`QLSTM` for the shapes; there is no cell state.
    """

    _float = nn.GRU

    def forward(self, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Applies all layers."""
        if not torch.jit.is_scripting() and isinstance(input, PackedSequence):  # type: ignore[attr-defined]
            packed, h_n, _ = self._packed(input, hx, None)
            return packed, h_n
        dst, h_n, _ = self._forward(input, hx, None)
        return dst, h_n


class QRNN(QGRU):
    """Quantized :class:`torch.nn.RNN`."""

    _float = nn.RNN  # type: ignore[assignment]
