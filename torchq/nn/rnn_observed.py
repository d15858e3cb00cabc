# SPDX-License-Identifier: Apache-2.0
"""Calibration of recurrent networks: observers on the source and on each layer's hidden state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from torchq.config import QConfig
from torchq.nn.rnn import QGRU, QLSTM, QRNN
from torchq.observer_base import Observer
from torchq.qparams import QParams

_QUANTIZED: dict[type[nn.Module], Any] = {nn.LSTM: QLSTM, nn.GRU: QGRU, nn.RNN: QRNN}


def single_layers(module: nn.RNNBase) -> list[nn.RNNBase]:
    """One network per layer, on the parameters of ``module``; the batch is never first."""
    layers = []
    width = module.proj_size or module.hidden_size
    for i in range(module.num_layers):
        options: dict[str, Any] = {"bias": module.bias, "bidirectional": module.bidirectional}
        if isinstance(module, nn.LSTM):
            options["proj_size"] = module.proj_size
        if isinstance(module, nn.RNN):
            options["nonlinearity"] = module.nonlinearity
        inputs = module.input_size if i == 0 else width * (2 if module.bidirectional else 1)
        make: Any = type(module)
        layer: nn.RNNBase = make(inputs, module.hidden_size, **options)
        for name, _ in list(layer.named_parameters()):
            setattr(layer, name, getattr(module, name.replace("_l0", f"_l{i}")))
        layers.append(layer.eval())
    return layers


class ObservedRNN(nn.Module):
    """A float LSTM, GRU or RNN that records what its quantized form needs to know.

    Run it on representative data in place of the float network, then :meth:`convert` it.

    Args:
        module: ``torch.nn.LSTM``, ``GRU`` or ``RNN``, float32.
        config: how to quantize; ``dynamic`` needs no data.
        name: of the module, for messages.

    Raises:
        TypeError: ``module`` is another module, or not float32.
    """

    def __init__(self, module: nn.RNNBase, config: QConfig | None = None, name: str = "") -> None:
        """Starts without data."""
        super().__init__()
        if type(module) not in _QUANTIZED or module.weight_ih_l0.dtype != torch.float32:
            raise TypeError(
                "torchq.nn.ObservedRNN: module must be a float32 torch.nn.LSTM, GRU or RNN, got "
                f"{type(module).__name__}."
            )
        self.module = module
        self.config = config or QConfig()
        self.src_observer = self.config.make_observer(name)
        names = [f"{name}.layer{i}" for i in range(module.num_layers)]
        self.state_observers = nn.ModuleList(self.config.make_observer(each) for each in names)

    def forward(self, src: Any, hx: Any = None) -> Any:
        """The float network's result; records the source and each layer's states."""
        rows = src.data if isinstance(src, PackedSequence) else src
        self.src_observer(rows)
        self._observe_layers(src, hx)
        return self.module(src, hx)

    def _observe_layers(self, src: Any, hx: Any) -> None:
        """Layer by layer, which gives each layer's states; initial states are states too."""
        if isinstance(src, Tensor):
            if src.dim() == 2:
                src = src.unsqueeze(1)
            elif self.module.batch_first:
                src = src.transpose(0, 1)
        directions = 2 if self.module.bidirectional else 1
        for i, layer in enumerate(single_layers(self.module)):
            observer = self.state_observers[i]
            states = self._initial(hx, slice(i * directions, (i + 1) * directions), src)
            src, _ = layer(src, states)
            observer(src.data if isinstance(src, PackedSequence) else src)
            if states is not None:
                observer(states[0] if isinstance(states, tuple) else states)

    @staticmethod
    def _initial(hx: Any, part: slice, src: Any) -> Any:
        if hx is None:
            return None
        several = hx if isinstance(hx, tuple) else (hx,)
        states = [each[part] if each.dim() == 3 else each[part].unsqueeze(1) for each in several]
        return tuple(states) if isinstance(hx, tuple) else states[0]

    def convert(self, dst_dtype: torch.dtype = torch.float32) -> QLSTM | QGRU | QRNN:
        """The quantized network.

        Raises:
            RuntimeError: it was never run (static configurations).
        """
        cls, config = _QUANTIZED[type(self.module)], self.config
        options = {"granularity": config.weight_granularity, "bits": config.weight_bits}
        result: QLSTM | QGRU | QRNN
        if config.dynamic:
            result = cls.from_float(self.module, **options)
            return result
        states = [self._qparams(observer) for observer in self.state_observers]
        src = self._qparams(self.src_observer)
        result = cls.from_float(self.module, src, states, dst_dtype=dst_dtype, **options)
        return result

    def _qparams(self, observer: nn.Module) -> QParams:
        assert isinstance(observer, Observer)
        config = self.config
        return observer.qparams(config.activation_dtype, config.activation_bits, config.symmetric)
