# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers, step by step, with exact sums or with pairs that saturate, in float64.

The kernels do the same in float32, so at rounding ties the two may differ by one step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchq.attributes.arguments import check_type
from torchq.models.attached import computing_modules
from torchq.nn.rnn import QGRU, QLSTM
from torchq.nn.rnn_cell import QGRUCell, QLSTMCell
from torchq.nn.rnn_layer import QRecurrentLayer
from torchq.onednn.saturation.pairs import Sums, emulate_linear
from torchq.runtime.library import DTYPES

_SMALLEST = torch.finfo(torch.float32).tiny


class Result(NamedTuple):
    """Results of a layer; a named tuple as its forward's."""

    dst: Tensor
    h_n: Tensor
    c_n: Tensor


@dataclass
class Tally:
    """Pairs that were summed, and how many of them saturated."""

    pairs: int = 0
    saturating: int = 0

    def add(self, sums: Sums) -> None:
        """Count one product."""
        self.pairs += sums.pairs
        self.saturating += int(sums.saturating.sum())


def recurrent_layers(model: nn.Module) -> dict[str, QRecurrentLayer]:
    """Return the layers by the names of their networks and cells; several of one have numbers."""
    found: dict[str, QRecurrentLayer] = {}
    for name, module in computing_modules(model).items():
        own: list[nn.Module] = []
        if isinstance(module, (QLSTM, QGRU)):
            own = list(module.layers)
        elif isinstance(module, (QLSTMCell, QGRUCell)):
            own = [module.layer]
        elif isinstance(module, QRecurrentLayer) and module not in found.values():
            own = [module]
        for i, layer in enumerate(own):
            assert isinstance(layer, QRecurrentLayer)
            found[name if len(own) == 1 else f"{name}.layers.{i}".lstrip(".")] = layer
    return found


def emulate_recurrent(
    layer: QRecurrentLayer,
    src: Tensor,
    batch_sizes: Tensor | None = None,
    h_0: Tensor | None = None,
    c_0: Tensor | None = None,
    saturates: bool = True,
    tally: Tally | None = None,
) -> Result:
    """Return what a recurrent layer would have returned, errors of its states carried on.

    Args:
        layer: static or dynamic.
        src: as the layer's forward takes it; so are the others.
        batch_sizes: see there.
        h_0: see there.
        c_0: see there.
        saturates: whether pairs saturate, or are summed exactly.
        tally: counts pairs, if given.

    Raises:
        TypeError: ``layer`` is another module, or ``src`` has another dtype.
    """
    check_type(
        "torchq.saturation.emulate_recurrent: layer",
        layer,
        QRecurrentLayer,
        "Pass a layer of the network, such as qlstm.layers[0].",
    )
    src = src if layer.dynamic else layer._quantized_src(src)
    if batch_sizes is None:
        steps, batch = src.shape[:2]
        sizes = [batch] * steps
    else:
        sizes = batch_sizes.tolist()
        batch = sizes[0]
    rows = src.reshape(-1, src.shape[-1])
    runs = [
        _Direction(layer, d, saturates, tally or Tally()).run(
            rows, sizes, batch, *(None if state is None else state[d] for state in (h_0, c_0))
        )
        for d in range(layer.directions)
    ]
    dst, h_n, c_n = zip(*runs, strict=True)
    last = [part for part in c_n if part is not None]
    cells = torch.stack(last).float() if last else src.new_empty(0, dtype=torch.float32)
    joined = torch.cat(dst, -1)
    return Result(joined.reshape(*src.shape[:-1], -1), torch.stack(h_n), cells)


class _Direction:
    """One direction of a layer; ``h`` and ``c`` are real, ``q`` are the quantized states."""

    def __init__(self, layer: QRecurrentLayer, index: int, saturates: bool, tally: Tally) -> None:
        self.layer, self.index, self.saturates, self.tally = layer, index, saturates, tally
        names = ["src", "state"] + ["projection"] * (layer.projection_size > 0)
        self.weights = {name: layer.unpacked(name)[index] for name in names}
        low, high = layer.geometry[5:]
        self.integers = (low, high)
        self.dst_dtype, self.h_n_dtype = layer.dst_dtype, DTYPES[layer.h_n_code]
        self.state_dtype = DTYPES[layer.state_code]

    def run(
        self, src: Tensor, sizes: list[int], batch: int, h_0: Tensor | None, c_0: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the states of all steps, the last ones, and the last cell states of an LSTM."""
        layer = self.layer
        inputs = self._product("src", src, "src")
        units = layer.projection_size or layer.hidden_size
        h = src.new_zeros(batch, units, dtype=torch.float64)
        if h_0 is not None:
            h = h_0.double()
            if not h_0.is_floating_point():
                h = (h - layer.state_zero_point.double()) * layer.state_scale.double()
        q = None if layer.dynamic else self._quantized(h, "state")
        h = self._kept(h, q)
        is_lstm = layer.cell == "lstm"
        c = src.new_zeros(batch, layer.hidden_size, dtype=torch.float64) if is_lstm else None
        c = c_0.double().clone() if c is not None and c_0 is not None else c
        starts = [sum(sizes[:t]) for t in range(len(sizes))]
        emitted = src.new_empty(len(src), units, dtype=self.dst_dtype)
        order = range(len(sizes))
        for t in reversed(order) if self.index == 1 else order:
            n = sizes[t]
            part = slice(starts[t], starts[t] + n)
            real, cell = self._step(
                inputs[part], h[:n] if q is None else q[:n], h[:n], None if c is None else c[:n]
            )
            if c is not None and cell is not None:
                c[:n] = cell
            now = None if q is None else self._quantized(real, "state")
            if q is not None and now is not None:
                q[:n] = now
            h[:n] = real = self._kept(real, now)
            emitted[part] = real.float() if now is None or self.dst_dtype.is_floating_point else now
        last = h.float() if q is None or self.h_n_dtype.is_floating_point else q
        return emitted, last, c

    def _kept(self, h: Tensor, q: Tensor | None) -> Tensor:
        """Return the real state that the next step reads: oneDNN's GRU reads the rounded one."""
        if q is None or self.layer.cell != "gru_vanilla":
            return h
        return (q.double() - self.layer.state_zero_point) * self.layer.state_scale.double()

    def _step(
        self, x: Tensor, state: Tensor, h: Tensor, c: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the real h and c; ``state`` is quantized, or float of a dynamic layer."""
        layer, d = self.layer, self.index
        x, bias = x + layer.bias_src[d].double(), layer.bias_state[d].double()
        if layer.cell == "gru_vanilla":
            gates = x[:, :2] + self._product("state", state, "state", slice(2)) + bias[:2]
            r, z = torch.sigmoid(gates).unbind(1)
            middle = r * h if layer.dynamic else self._quantized(r * h, "hidden")
            new = self._product("state", middle, "hidden", slice(2, 3))[:, 0]
            return z * h + (1 - z) * torch.tanh(x[:, 2] + new + bias[2]), None
        y = self._product("state", state, "state") + bias
        if layer.cell == "gru":
            r, z = torch.sigmoid(x[:, :2] + y[:, :2]).unbind(1)
            return z * h + (1 - z) * torch.tanh(x[:, 2] + r * y[:, 2]), None
        if c is None:
            a = (x + y)[:, 0]
            return (torch.tanh(a) if layer.cell == "rnn_tanh" else a.clamp_min(0)), None
        i, f, g, o = (x + y).unbind(1)
        p = None if layer.peephole is None else layer.peephole[d].double()
        if p is not None:
            i, f = i + p[0] * c, f + p[1] * c
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        o = o if p is None else o + p[2] * c
        result = torch.sigmoid(o) * torch.tanh(c)
        if layer.projection_size:
            middle = result if layer.dynamic else self._quantized(result, "hidden")
            result = self._product("projection", middle, "hidden")[:, 0]
        return result, c

    def _quantized(self, x: Tensor, name: str) -> Tensor:
        """With the parameters of ``state`` or ``hidden``."""
        inverse = 1 / getattr(self.layer, f"{name}_scale")
        y = x * inverse.double() + getattr(self.layer, f"{name}_zero_point").double()
        return torch.round(y).clamp(*self.integers).to(self.state_dtype)

    def _product(self, weight: str, src: Tensor, params: str, gates: slice = slice(None)) -> Tensor:
        """Real ``[rows, gates, units]`` of quantized rows, or float ones of a dynamic layer.

        ``params`` names the rows' scale and zero point: src, state or hidden.
        """
        layer = self.layer
        w = self.weights[weight][gates]
        scale: Tensor = getattr(layer, f"scale_{weight}").double()
        scale = scale if scale.numel() == 1 else scale[self.index, gates]
        if not layer.dynamic:
            zero = int(getattr(layer, f"{params}_zero_point"))
            step: Tensor = getattr(layer, f"{params}_scale").double()
            return self._sums(src, w, zero) * scale * step
        q, rows, zeros = _quantized_rows(src.float(), symmetric=params != "src")
        sums = self._sums(q, w, 0)
        sums = sums - zeros[:, None, None] * w.double().sum(2)
        return sums * scale * rows[:, None, None]

    def _sums(self, src: Tensor, weight: Tensor, zero_point: int) -> Tensor:
        sums = emulate_linear(src, weight.flatten(0, 1), zero_point)
        self.tally.add(sums)
        chosen = sums.saturated if self.saturates else sums.exact
        return chosen.double().reshape(len(src), *weight.shape[:2])


def _quantized_rows(x: Tensor, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Float32 rows as u8, their scales and zero points: of the range, or around 128."""
    low, high = x.amin(-1).clamp_max(0), x.amax(-1).clamp_min(0)
    if symmetric:
        scale = (torch.maximum(-low, high) / 127).clamp_min(_SMALLEST)
        zero_point = torch.full_like(scale, 128)
    else:
        scale = ((high * 0.5 - low * 0.5) / 127.5).clamp_min(_SMALLEST)
        zero_point = torch.round(-low / scale).clamp_max(255)
    y = x.double() * (1 / scale).double()[:, None] + zero_point.double()[:, None]
    q = torch.round(y).clamp(0, 255).to(torch.uint8)
    return q, scale.double(), zero_point.double()
