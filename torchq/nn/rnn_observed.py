# SPDX-License-Identifier: Apache-2.0
"""Calibration of recurrent networks: observers on the source and on each layer's hidden state."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, unpack_sequence

from torchq.attributes.arguments import FLOATS
from torchq.nn.float_weight import FloatWeight
from torchq.nn.rnn import QGRU, QLSTM, QRNN
from torchq.nn.rnn_cell import QGRUCell, QLSTMCell, QRNNCell
from torchq.quantization.config import QConfig
from torchq.quantization.observers import Observer
from torchq.quantization.qparams import QParams
from torchq.quantization.recipes.rows import RowPowers

Source = Tensor | PackedSequence
States = Tensor | Sequence[Tensor] | None
"""The hidden state, or with the cell state, as torch.nn takes them; None for zeros."""

_SIZES = ["input_size", "hidden_size", "proj_size", "num_layers", "bidirectional", "batch_first"]
NETWORKS: dict[type, type[QLSTM | QGRU | QRNN]] = {nn.LSTM: QLSTM, nn.GRU: QGRU, nn.RNN: QRNN}
CELLS: dict[type, type[QLSTMCell | QGRUCell | QRNNCell]] = {
    nn.LSTMCell: QLSTMCell,
    nn.GRUCell: QGRUCell,
    nn.RNNCell: QRNNCell,
}


def torch_class(module: nn.Module, known: Iterable[type]) -> Any:
    """Return the class of torch.nn that a module is of or inherits from, or None."""
    return next((cls for cls in type(module).__mro__ if cls in known), None)


def single_layers(module: nn.RNNBase) -> list[nn.RNNBase]:
    """One network per layer, on the parameters of ``module``; the batch is never first."""
    layers = []
    width = module.proj_size or module.hidden_size
    for i in range(module.num_layers):
        options: dict[str, object] = {"bias": module.bias, "bidirectional": module.bidirectional}
        if isinstance(module, nn.LSTM):
            options["proj_size"] = module.proj_size
        if isinstance(module, nn.RNN):
            options["nonlinearity"] = module.nonlinearity
        inputs = module.input_size if i == 0 else width * (2 if module.bidirectional else 1)
        make = torch_class(module, NETWORKS)
        layer: nn.RNNBase = make(inputs, module.hidden_size, device="meta", **options)
        for name, _ in list(layer.named_parameters()):
            setattr(layer, name, getattr(module, name.replace("_l0", f"_l{i}")))
        layers.append(layer.eval())
    return layers


class _Observed(nn.Module):
    """A float module with observers; a dynamic configuration has none."""

    def __init__(
        self, module: nn.Module, config: QConfig | None, name: str, known: Iterable[type]
    ) -> None:
        super().__init__()
        if torch_class(module, known) is None or next(module.parameters()).dtype not in FLOATS:
            names = ", ".join(cls.__name__ for cls in known)
            raise TypeError(
                f"torchq.nn.{type(self).__name__}: module must be one of {names} of torch.nn in "
                f"float32, bfloat16 or float16, got {type(module).__name__}, "
                f"{next(module.parameters()).dtype}. Call module.float() first."
            )
        self.module = module
        self.config = config or QConfig()
        self.layer_name = name
        self.src_observer = self._observer()
        self.rows = None if self.config.dynamic else RowPowers()

    def __getattr__(self, name: str) -> Any:
        """Return what the quantized module has, too: sizes and float parameters.

        Raises:
            AttributeError: there is neither.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self._modules.get("module")
            if module is None or not (name in _SIZES or name in module._parameters):
                raise
            found = getattr(module, name)
        return FloatWeight(found.detach, found.shape, name) if isinstance(found, Tensor) else found

    def _observer(self) -> Observer | None:
        return None if self.config.dynamic else self.config.make_observer(self.layer_name)

    def why_coarse(self) -> str:
        """Return why one scale does not suit its source; "" where it does."""
        if self.rows is None or not self.rows.calibrated:
            return ""
        return self.rows.why_coarse(self._qparams(self.src_observer))

    def _qparams(self, observer: nn.Module | None) -> QParams:
        assert isinstance(observer, Observer)
        config = self.config
        return observer.qparams(config.activation_dtype, config.activation_bits, config.symmetric)

    def _weights(self) -> dict[str, Any]:
        return {"granularity": self.config.weight_granularity, "bits": self.config.int8_bits}


class ObservedRNN(_Observed):
    """A float LSTM, GRU or RNN that records what its quantized form needs to know.

    Run it on representative data in place of the float network, then :meth:`convert` it.

    Args:
        module: ``torch.nn.LSTM``, ``GRU`` or ``RNN``, of floats, or a class that only
            inherits.
        config: how to quantize; ``dynamic`` needs no data.
        name: of the module, for messages.

    Raises:
        TypeError: ``module`` is another module, or of another dtype.
    """

    module: nn.RNNBase

    def __init__(self, module: nn.RNNBase, config: QConfig | None = None, name: str = "") -> None:
        """Start without data."""
        super().__init__(module, config, name, NETWORKS)
        layers = 0 if self.config.dynamic else module.num_layers
        self.state_observers = nn.ModuleList(
            filter(None, (self._observer() for _ in range(layers)))
        )
        # What a projection reads is never seen outside of the network.
        self.hidden_observer = self._observer() if module.proj_size else None

    def forward(self, input: Source, hx: States = None) -> object:
        """Return the float network's result; record the source, initial and all later states."""
        if self.src_observer is not None:
            src = input.data if isinstance(input, PackedSequence) else input
            self.src_observer(src)
            if self.rows is not None:
                self.rows(src)
            self._observe_layers(input, hx)
        return self.module(input, hx)

    def flatten_parameters(self) -> None:
        """Nothing, for code that calls it in its forward: that is about CUDA."""

    def _observe_layers(self, src: Source, hx: States) -> None:
        """Layer by layer, which gives each layer's states; initial states are states too."""
        if isinstance(src, Tensor):
            if src.dim() == 2:
                src = src.unsqueeze(1)
            elif self.module.batch_first:
                src = src.transpose(0, 1)
        directions = 2 if self.module.bidirectional else 1
        for i, layer in enumerate(single_layers(self.module)):
            observer = self.state_observers[i]
            states = self._initial(hx, slice(i * directions, (i + 1) * directions))
            if self.hidden_observer is not None:
                for hidden in _before_projection(layer, src, states):
                    self.hidden_observer(hidden)
            src, _ = layer(src, states)
            observer(src.data if isinstance(src, PackedSequence) else src)
            if states is not None:
                observer(states[0] if isinstance(states, tuple) else states)

    @staticmethod
    def _initial(hx: States, part: slice) -> States:
        if hx is None:
            return None
        several = hx if isinstance(hx, tuple | list) else (hx,)
        states = [each[part] if each.dim() == 3 else each[part].unsqueeze(1) for each in several]
        return tuple(states) if isinstance(hx, tuple | list) else states[0]

    @property
    def has_float_first(self) -> bool:
        """Return whether a source that one scale does not suit has its first layer stay float."""
        return isinstance(self.module, nn.LSTM) and self.module.num_layers > 1

    def convert(self, dst_dtype: torch.dtype = torch.float32) -> QLSTM | QGRU | QRNN:
        """Return the quantized network.

        Where one scale does not suit its source, it is dynamic, and the first of several layers of
        an LSTM stays float.

        Raises:
            RuntimeError: it was never run (static configurations).
        """
        cls, options = NETWORKS[torch_class(self.module, NETWORKS)], self._weights()
        coarse = dst_dtype == torch.float32 and bool(self.why_coarse())
        if self.config.dynamic or coarse:
            result = cls.from_float(self.module, **options)
            if coarse and self.has_float_first:
                result = cls([*result.layers][1:], result.batch_first)
                result.with_float_first(copy.deepcopy(single_layers(self.module)[0]))  # type: ignore[arg-type]
            return result
        if self.hidden_observer is not None:
            options["hidden"] = self._qparams(self.hidden_observer)
        states = [self._qparams(observer) for observer in self.state_observers]
        src = self._qparams(self.src_observer)
        return cls.from_float(self.module, src, states, dst_dtype=dst_dtype, **options)


def _before_projection(layer: nn.RNNBase, src: Source, states: States) -> Iterator[Tensor]:
    """``o * tanh(c)`` of every step of one layer."""
    if isinstance(src, PackedSequence):
        for n, sequence in enumerate(unpack_sequence(src)):
            own = None if states is None else tuple(state[:, n : n + 1] for state in states)
            yield from _before_projection(layer, sequence.unsqueeze(1), own)
        return
    for direction, suffix in enumerate(("", "_reverse")[: 2 if layer.bidirectional else 1]):
        w: dict[str, Tensor] = {
            name: getattr(layer, f"{name}_l0{suffix}") for name in _WEIGHTS if "bias" not in name
        }
        bias_ih = getattr(layer, f"bias_ih_l0{suffix}", None)
        bias_hh = getattr(layer, f"bias_hh_l0{suffix}", None)
        batch = src.size(1)
        h = src.new_zeros(batch, layer.proj_size) if states is None else states[0][direction]
        c = src.new_zeros(batch, layer.hidden_size) if states is None else states[1][direction]
        for x in src.flip(0) if suffix else src:
            gates = F.linear(x, w["weight_ih"], bias_ih)
            gates = gates + F.linear(h, w["weight_hh"], bias_hh)
            i, f, g, o = gates.chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            hidden = torch.sigmoid(o) * torch.tanh(c)
            h = F.linear(hidden, w["weight_hr"])
            yield hidden


_WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")


class ObservedRNNCell(_Observed):
    """A float LSTMCell, GRUCell or RNNCell that records its source and its hidden state.

    Args and errors are those of :class:`ObservedRNN`. It may be called any number of times.
    """

    def __init__(self, module: nn.RNNCellBase, config: QConfig | None, name: str = "") -> None:
        """Start without data."""
        super().__init__(module, config, name, CELLS)
        self.state_observer = self._observer()

    def forward(self, input: Tensor, hx: States = None) -> object:
        """Return the float cell's result; record the source, and the state before and after."""
        result = self.module(input, hx)
        if self.src_observer is not None and self.state_observer is not None:
            self.src_observer(input)
            if self.rows is not None:
                self.rows(input)
            for state in (hx, result):
                if state is not None:
                    self.state_observer(state if isinstance(state, Tensor) else state[0])
        return result

    def convert(self) -> QLSTMCell | QGRUCell | QRNNCell:
        """Return the quantized cell; see :meth:`ObservedRNN.convert`."""
        cls, options = CELLS[torch_class(self.module, CELLS)], self._weights()
        if not self.config.dynamic and not self.why_coarse():
            options["src"] = self._qparams(self.src_observer)
            options["state"] = self._qparams(self.state_observer)
        return cls.from_float(self.module, **options)
