# SPDX-License-Identifier: Apache-2.0
"""Quantized LSTMCell, GRUCell and RNNCell."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from torchq.attributes.attr import Attr
from torchq.attributes.options import Granularity
from torchq.nn.module import QModule, Spec, as_source
from torchq.nn.rnn_attr import read_attr
from torchq.nn.rnn_float import cell_of, check_bound, data_params, layer_from_float
from torchq.nn.rnn_layer import GATES, QRecurrentLayer
from torchq.nn.rnn_parameters import FloatParameters
from torchq.quantization.qparams import QParams


class _QCell(FloatParameters, QModule):
    """A cell: one layer, one step."""

    __jit_unused_properties__ = ("attr",)
    _float: ClassVar[type[nn.RNNCellBase]]

    def __init__(self, layer: QRecurrentLayer) -> None:
        super().__init__()
        self.layer = layer
        self.input_size, self.hidden_size = layer.input_size, layer.hidden_size
        self.op = type(self).__name__  # TorchScript has no type()
        self._set_spec(layer=layer.read_spec())

    @property
    def attr(self) -> Attr:
        """Those of the layer, as oneDNN has them."""
        return self.layer.attr

    def extra_repr(self) -> str:
        """Sizes, dtypes and attributes on one line."""
        return self.layer.extra_repr()

    @classmethod
    def from_float(
        cls,
        module: nn.Module,
        src: QParams | None = None,
        state: QParams | None = None,
        *,
        granularity: Granularity = "per_channel",
        bits: int = 8,
        attr: Attr | None = None,
        data_dtype: torch.dtype = torch.uint8,
    ) -> Self:
        """Quantize a float cell; ``src`` None makes it dynamic.

        ``attr`` and ``data_dtype`` are those of :meth:`QLSTM.from_float`.

        Raises:
            TypeError: ``module`` is not the float cell of this class.
            ValueError: ``state`` is None for a static cell with relu, whose state has no bound; or
                ``attr`` sets something else, or what other arguments tell too.
        """
        if not isinstance(module, cls._float):
            raise TypeError(
                f"torchq.nn.{cls.__name__}: module must be a torch.nn.{cls.__name__[1:]}, got "
                f"{type(module).__name__}."
            )
        op, gates = cls.__name__, GATES[cell_of(module)]
        params = read_attr(f"nn.{op}", attr, gates, module.hidden_size, 0, data_dtype)
        src = data_params(op, params, src, [state])
        state = params.data or state
        check_bound(op, "state", module, src, state)
        return cls(layer_from_float(module, 0, src, state, granularity, bits, params))

    @classmethod
    def from_spec(cls, spec: Spec) -> Self:
        """See the base class."""
        return cls(QRecurrentLayer.from_spec(spec["layer"]))

    def _check_state(self, state: Tensor | None, name: str, src: Tensor) -> None:
        if state is not None and (
            state.dim() != src.dim()
            or state.size(-1) != self.hidden_size
            or (src.dim() == 2 and state.size(0) != src.size(0))
        ):
            expected = list(src.shape)[:-1] + [self.hidden_size]  # noqa: RUF005 - scripted
            raise ValueError(
                f"torchq.nn.{self.op}: {name} must have shape {expected}, as src "
                f"{list(src.shape)}, got {list(state.shape)}. Pass a state of the source's batch, "
                "or none."
            )

    def _step(self, src: Tensor, h: Tensor | None, c: Tensor | None) -> tuple[Tensor, Tensor]:
        if src.dim() == 0 or src.dim() > 2 or src.size(-1) != self.input_size:
            raise ValueError(
                f"torchq.nn.{self.op}: src must have shape [batch, {self.input_size}] or "
                f"[{self.input_size}], got {list(src.shape)}. Give it one step."
            )
        self._check_state(h, "h", src)
        self._check_state(c, "c", src)
        unbatched = src.dim() == 1
        rows = src.reshape(1, 1, -1) if unbatched else src.unsqueeze(0)
        if h is not None:
            h = h.reshape(1, -1, h.size(-1))
        if c is not None:
            c = c.reshape(1, -1, c.size(-1))
        _, h_n, c_n = self.layer(rows, None, h, c)
        h_n, c_n = as_source(h_n.squeeze(0), src), as_source(c_n, src)
        c_n = c_n.squeeze(0) if c_n.dim() == 3 else c_n
        if unbatched:
            return h_n.squeeze(0), c_n.squeeze(0) if c_n.dim() == 2 else c_n
        return h_n, c_n


class QLSTMCell(_QCell):
    """Quantized :class:`torch.nn.LSTMCell`."""

    _float: ClassVar[type[nn.RNNCellBase]] = nn.LSTMCell

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """One step: (h, c)."""
        if hx is None:
            return self._step(input, None, None)
        return self._step(input, hx[0], hx[1])


class QGRUCell(_QCell):
    """Quantized :class:`torch.nn.GRUCell`."""

    _float: ClassVar[type[nn.RNNCellBase]] = nn.GRUCell

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """One step: h."""
        return self._step(input, hx, None)[0]


class QRNNCell(QGRUCell):
    """Quantized :class:`torch.nn.RNNCell`."""

    _float: ClassVar[type[nn.RNNCellBase]] = nn.RNNCell
