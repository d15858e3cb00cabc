# SPDX-License-Identifier: Apache-2.0
"""One quantized recurrent layer, all directions: the part that networks and cells are made of."""

import torch
from torch import Tensor

from torchq.attributes.attr import Attr
from torchq.attributes.options import Cell
from torchq.functional.packing import PackedWeight, pack_linear
from torchq.functional.placeholders import are_limited, count_modules, placeholder
from torchq.nn.module import (
    QModule,
    Spec,
    dtype_from_name,
    dtype_name,
    is_real,
    placeholder_qparams,
)
from torchq.nn.rnn_attr import attr_of
from torchq.nn.rnn_packing import RecurrentWeight, grouped, ungrouped
from torchq.quantization.qparams import QParams
from torchq.quantization.ranges import check_choice
from torchq.runtime.library import DTYPES, dtype_code

CELLS = {"lstm": 0, "gru": 1, "gru_vanilla": 2, "rnn_tanh": 3, "rnn_relu": 4}
"""Name of a cell -> its number in the op."""
GATES = {"lstm": 4, "gru": 3, "gru_vanilla": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""Gates of a cell, in PyTorch's order: i f g o, or r z n."""

UNIT_STATE = QParams.per_tensor(1 / 127, 128, torch.uint8)
"""Of values within [-1, 1]: oneDNN's data scale 127 and shift 128."""
UNIT_STATE_S8 = QParams.per_tensor(1 / 127, 0, torch.int8)
"""The same for int8, shift 0."""


class QRecurrentLayer(QModule):
    """One layer of an LSTM, GRU or RNN on a sequence, forward or in both directions.

    With a static source (uint8 or int8) the state has the fixed parameters ``state``. Without
    (``src`` None) the layer is dynamic: it takes float32, and every row of the source and of the
    state gets a scale from its own values, so that results do not depend on the rest of the batch.

    Shapes:
        src: ``[T, N, inputs]``, or ``[rows, inputs]`` with ``batch_sizes`` int64 ``[T]``.
        h_0, h_n: ``[directions, N, units]``; float32, or for static layers the state's dtype.
        c_0, c_n: float32 ``[directions, N, hidden]`` of an LSTM.
        dst: ``[T, N, directions * units]``; ``units`` is ``projection`` if there is one.

    Buffers:
        weight_src, weight_state, weight_projection: int8, packed as csrc/ops/rnn/rnn.h says, with
            ``compensation_*``, ``pair_bound_*`` and ``scale_*`` (float32, see RecurrentWeight).
        bias_src, bias_state: float32 ``[directions, gates, hidden]``.
        peephole: float32 ``[directions, 3, hidden]`` (i, f, o), or absent.
        src_*, state_*, hidden_*: scales and zero points; ``hidden`` is what a projection reads.
        multiplier_*, bias, extra, scales, zero_points: folded from these, not saved.
    """

    weight_src: Tensor
    compensation_src: Tensor
    pair_bound_src: Tensor
    scale_src: Tensor
    weight_state: Tensor
    compensation_state: Tensor
    pair_bound_state: Tensor
    scale_state: Tensor
    weight_projection: Tensor | None
    compensation_projection: Tensor | None
    pair_bound_projection: Tensor | None
    scale_projection: Tensor | None
    bias_src: Tensor
    bias_state: Tensor
    peephole: Tensor | None
    state_scale: Tensor
    state_zero_point: Tensor
    hidden_scale: Tensor
    hidden_zero_point: Tensor
    multiplier_src: Tensor
    multiplier_state: Tensor
    multiplier_projection: Tensor | None
    bias: Tensor
    extra: Tensor | None
    scales: Tensor
    zero_points: Tensor

    __jit_unused_properties__ = ("attr",)

    def __init__(
        self,
        cell: Cell,
        weight_src: RecurrentWeight,
        weight_state: RecurrentWeight,
        bias_src: Tensor | None = None,
        bias_state: Tensor | None = None,
        *,
        projection: RecurrentWeight | None = None,
        peephole: Tensor | None = None,
        src: QParams | None = None,
        state: QParams = UNIT_STATE,
        hidden: QParams | None = None,
        dst_dtype: torch.dtype = torch.float32,
        h_n_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Pack the weights; ``hidden`` defaults to [-1, 1], which holds what an LSTM emits."""
        super().__init__()
        check_choice("nn.QRecurrentLayer", "cell", cell, tuple(CELLS))
        directions, gates, self.hidden_size, self.input_size = weight_src.weight.shape
        self.cell, self.directions, self.dynamic = cell, directions, src is None
        self.projection_size = 0 if projection is None else projection.weight.shape[2]
        expected = directions, GATES[cell], self.hidden_size, self.input_size
        units = self.projection_size or self.hidden_size
        _check_shapes(expected, units, weight_src, weight_state, projection)
        if projection is not None or peephole is not None:
            _check_is_lstm(cell)
        hidden = hidden or (UNIT_STATE if state.dtype == torch.uint8 else UNIT_STATE_S8)
        if self.dynamic:
            state, hidden = UNIT_STATE, UNIT_STATE
        self._add_src(src or UNIT_STATE)
        self._add_qparams("state", state)
        self._add_qparams("hidden", hidden)
        weights = {"src": weight_src, "state": weight_state, "projection": projection}
        for name, weight in weights.items():
            self._add_weight(name, weight)
        shape = [directions, gates, self.hidden_size]
        self._add_bias("bias_src", shape, bias_src)
        self._add_bias("bias_state", shape, bias_state)
        self.register_buffer("peephole", None if peephole is None else peephole.detach().clone())
        self._add_folded("multiplier_src", "multiplier_state", "bias", "scales", "zero_points")
        for name in ("multiplier_projection", "extra"):  # which refold fills where there are some
            self.register_buffer(name, None, persistent=False)
        self.dst_dtype, self.dst_code = dst_dtype, dtype_code(dst_dtype)
        self.state_code, self.h_n_code = dtype_code(state.dtype), dtype_code(h_n_dtype)
        sizes = directions, self.input_size, self.hidden_size, self.projection_size
        self.geometry = [CELLS[cell], *sizes, *state.integers]
        scales = [0 if weight is None else weight.scale.numel() for weight in weights.values()]
        self._set_own_spec(scales, src, state)
        if not are_limited():
            self.refold()

    def _set_own_spec(self, weight_scales: list[int], src: QParams | None, state: QParams) -> None:
        """Write the spec; ``weight_scales`` are the numbers of scales of the three weights."""
        self._set_spec(
            cell=self.cell,
            directions=self.directions,
            sizes=[self.input_size, self.hidden_size, self.projection_size],
            weight_scales=weight_scales,
            peephole=self._buffers["peephole"] is not None,
            src="dynamic" if src is None else dtype_name(src.dtype),
            src_bits=8 if src is None else src.bits,
            state=dtype_name(state.dtype),
            state_bits=state.bits,
            dst=dtype_name(self.dst_dtype),
            h_n=dtype_name(DTYPES[self.h_n_code]),
        )

    def _add_bias(self, name: str, shape: list[int], value: Tensor | None) -> None:
        """Add a buffer of its own memory; None is a bias of zeros."""
        device = self.get_buffer("weight_src").device
        own = torch.zeros(shape, dtype=torch.float32, device=device)
        self.register_buffer(
            name, own if value is None else own.copy_(value.detach().reshape(shape))
        )

    def _add_weight(self, name: str, weight: RecurrentWeight | None) -> None:
        """Pack one weight into buffers; None registers that there is none."""
        if weight is None:
            for part in ("weight", "compensation", "pair_bound", "scale"):
                self.register_buffer(f"{part}_{name}", None)
            return
        packed = pack_linear(grouped(weight.weight).flatten(0, 3))
        for key, value in packed.tensors(f"_{name}").items():
            self.register_buffer(key, value)
        self.register_buffer(f"scale_{name}", weight.scale.clone())

    def _sizes(self, name: str) -> tuple[int, int, int]:
        """Gates, units and inputs of a weight."""
        units = self.projection_size or self.hidden_size
        return {
            "src": (GATES[self.cell], self.hidden_size, self.input_size),
            "state": (GATES[self.cell], self.hidden_size, units),
            "projection": (1, self.projection_size, self.hidden_size),
        }[name]

    def unpacked(self, name: str) -> Tensor:
        """Return int8 ``src``, ``state`` or ``projection``: ``[D, gates, units, inputs]``."""
        gates, rows, columns = self._sizes(name)
        groups = -(-rows // 16)
        count = self.directions * groups * gates * 16
        packed = self._buffers[f"weight_{name}"]
        flat: Tensor = torch.ops.torchq.unpack_linear(packed, count, columns)
        return ungrouped(flat.reshape(self.directions, groups, gates, 16, columns), rows)

    def _packed_weights(self) -> dict[str, PackedWeight]:
        found = {}
        for name in ("src", "state", "projection"):
            kinds = ("weight", "compensation", "pair_bound")
            weight, sums, bound = (self._buffers[f"{kind}_{name}"] for kind in kinds)
            if weight is not None and sums is not None and bound is not None:
                shape = sums.shape[-1], self._sizes(name)[2]
                found[f"_{name}"] = PackedWeight(weight, sums, bound, shape, 1, ())
        return found

    @property
    def attr(self) -> Attr:
        """The attributes, as oneDNN has them; see :func:`torchq.nn.rnn_attr.attr_of`."""
        names = ["src", "state"]
        if self.projection_size or self.cell == "gru_vanilla":
            names.append("hidden")
        data = [
            (float(getattr(self, f"{name}_scale")), int(getattr(self, f"{name}_zero_point")))
            for name in ([] if self.dynamic else names)
        ]
        return attr_of(data, self.scale_src, self.scale_state, self.scale_projection)

    def refold(self) -> None:
        """Fold scales, zero points and biases anew, in double, rounded to float32 once."""
        shape = [self.directions, GATES[self.cell], self.hidden_size]
        src = 1.0 if self.dynamic else self.src_scale.double()
        state, hidden = self.state_scale.double(), self.hidden_scale.double()
        if self.dynamic:
            state = hidden = torch.ones(1, dtype=torch.float64, device="cpu")
        self.multiplier_src = _folded(self.scale_src.double() * src, shape)
        self.multiplier_state = _folded(self.scale_state.double() * state, shape)
        if self.scale_projection is not None:
            projection = [self.directions, 1, self.projection_size]
            self.multiplier_projection = _folded(
                self.scale_projection.double() * hidden, projection
            )
        bias = self.bias_src.double() + self.bias_state.double()
        if self.cell == "gru":  # the new gate multiplies its state's bias with the reset gate
            bias[:, 2] = self.bias_src[:, 2].double()
            self.extra = grouped(self.bias_state[:, 2:]).flatten()
        elif self.peephole is not None:
            padded = self.peephole.new_zeros([self.directions, 3, -(-self.hidden_size // 16) * 16])
            padded[:, :, : self.hidden_size] = self.peephole
            self.extra = padded.flatten()
        self.bias = grouped(bias.float()).flatten()
        self.scales = torch.cat([self.state_scale, self.hidden_scale])
        zero_points = (self.src_zero_point, self.state_zero_point, self.hidden_zero_point)
        self.zero_points = torch.cat(zero_points)
        if self.dynamic:
            self.zero_points = torch.tensor([0, 128, 128], dtype=torch.int32, device="cpu")

    @classmethod
    def from_spec(cls, spec: Spec) -> "QRecurrentLayer":
        """See the base class."""
        count_modules(2)  # it takes 2 ms, and 4 KB of its file
        inputs, hidden, projection = spec["sizes"]
        directions, gates = spec["directions"], GATES[spec["cell"]]

        def weight(index: int, *shape: int) -> "RecurrentWeight":
            scales = (1,) if spec["weight_scales"][index] == 1 else shape[:-1]
            return RecurrentWeight(placeholder(*shape, dtype=torch.int8), placeholder(*scales))

        dynamic = spec["src"] == "dynamic"
        return cls(
            spec["cell"],
            weight(0, directions, gates, hidden, inputs),
            weight(1, directions, gates, hidden, projection or hidden),
            projection=weight(2, directions, 1, projection, hidden) if projection else None,
            peephole=placeholder(directions, 3, hidden) if spec["peephole"] else None,
            src=None if dynamic else placeholder_qparams(spec["src"], spec["src_bits"]),
            state=placeholder_qparams(spec["state"], spec["state_bits"]),
            hidden=placeholder_qparams(spec["state"]),
            dst_dtype=dtype_from_name(spec["dst"]),
            h_n_dtype=dtype_from_name(spec["h_n"]),
        )

    def forward(
        self,
        src: Tensor,
        batch_sizes: Tensor | None = None,
        h_0: Tensor | None = None,
        c_0: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the layer: dst, h_n and c_n (empty unless an LSTM)."""
        if self.dynamic:
            if not is_real(src):
                raise TypeError(
                    "torchq.nn: src of a dynamic recurrent layer must be float32, bfloat16 or "
                    f"float16, got {src.dtype}. Convert it with .float(), or use a static layer."
                )
        elif src.dtype != self.src_dtype:
            src = self._quantized_src(src)
        pair_bounds = [self.pair_bound_src, self.pair_bound_state]
        projection = self.pair_bound_projection
        if projection is not None:
            pair_bounds.append(projection)
        result: tuple[Tensor, Tensor, Tensor] = torch.ops.torchq.rnn(
            src,
            batch_sizes,
            h_0,
            c_0,
            self.weight_src,
            self.compensation_src,
            self.multiplier_src,
            self.weight_state,
            self.compensation_state,
            self.multiplier_state,
            self.bias,
            self.extra,
            self.weight_projection,
            self.compensation_projection,
            self.multiplier_projection,
            pair_bounds,
            self.scales,
            self.zero_points,
            self.geometry,
            self.dst_code,
            self.state_code,
            self.h_n_code,
        )
        return result

    def extra_repr(self) -> str:
        """Sizes, dtypes and attributes on one line."""
        spec = self.read_spec()
        inputs, hidden, projection = spec["sizes"]
        sizes = f"{inputs}, {hidden}" + (f", projection={projection}" if projection else "")
        both = ", bidirectional" if self.directions == 2 else ""
        dtypes = f"{spec['src']} -> {spec['dst']}, state {spec['state']}"
        attr = "?" if self.spec.is_meta else self.attr
        return f"{self.cell}, {sizes}{both}, {dtypes}, {attr}"


def _folded(scale: Tensor, shape: list[int]) -> Tensor:
    """Float32 multipliers in the packed order, from scales ``[1]`` or ``shape``."""
    return grouped(scale.float().expand(shape) if scale.numel() == 1 else scale.float()).flatten()


def _check_is_lstm(cell: Cell) -> None:
    if cell != "lstm":
        raise NotImplementedError(
            f"torchq.nn.QRecurrentLayer: projection and peephole must be None for {cell}. "
            "Only an LSTM has them."
        )


def _check_shapes(
    src_shape: tuple[int, int, int, int],
    units: int,
    weight_src: RecurrentWeight,
    weight_state: RecurrentWeight,
    projection: RecurrentWeight | None,
) -> None:
    directions, gates, hidden, _ = src_shape
    expected = {"weight_src": (weight_src, src_shape)}
    expected["weight_state"] = (weight_state, (directions, gates, hidden, units))
    if projection is not None:
        expected["projection"] = (projection, (directions, 1, units, hidden))
    for name, (weight, shape) in expected.items():
        if tuple(weight.weight.shape) != shape or weight.weight.dtype != torch.int8:
            raise ValueError(
                f"torchq.nn.QRecurrentLayer: {name} must be int8 {list(shape)}, got "
                f"{weight.weight.dtype} {list(weight.weight.shape)}. The dimensions are "
                "directions, gates, units, inputs."
            )
        if weight.scale.numel() != 1 and tuple(weight.scale.shape) != shape[:3]:
            raise ValueError(
                f"torchq.nn.QRecurrentLayer: the scale of {name} must have one value or shape "
                f"{list(shape[:3])}, got {list(weight.scale.shape)}."
            )
