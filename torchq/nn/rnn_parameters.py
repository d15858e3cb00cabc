# SPDX-License-Identifier: Apache-2.0
"""The float parameters of a quantized recurrent module, under their names in torch.nn."""

import re
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchq.nn.float_weight import FloatWeight
from torchq.nn.rnn_layer import QRecurrentLayer

_NAME = re.compile(r"(weight|bias)_(ih|hh|hr)(?:_l(\d+)(_reverse)?)?")
_PARTS = {"ih": "src", "hh": "state", "hr": "projection"}


class FloatParameters(nn.Module):
    """Base of networks and cells: ``weight_ih_l0`` and the like are :class:`FloatWeight`."""

    def __getattr__(self, name: str) -> Any:
        """Return a float parameter where the module has no attribute of this name.

        Raises:
            AttributeError: there is no such parameter either.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = _NAME.fullmatch(name)
            layers = self._layers() if found else []
            index, reverse = (int(found[3] or 0), bool(found[4])) if found else (0, False)
            first = self._modules.get("first")
            if found and first is not None and index == 0:
                value = getattr(first, name)
                compiling = torch.compiler.is_compiling()
                return value if compiling else FloatWeight(value.detach, value.shape, name)
            index -= first is not None
            if found is None or index >= len(layers) or reverse >= layers[index].directions:
                raise
            read = partial(_values, layers[index], int(reverse), found[1], _PARTS[found[2]])
            value = read()
            if value is None:
                raise
            return value if torch.compiler.is_compiling() else FloatWeight(read, value.shape, name)

    def _layers(self) -> list[QRecurrentLayer]:
        single = "layer" in self._modules
        own = [self.get_submodule("layer")] if single else self.get_submodule("layers").children()
        return [layer for layer in own if isinstance(layer, QRecurrentLayer)]


def _values(layer: QRecurrentLayer, direction: int, kind: str, part: str) -> Tensor | None:
    """Return the values that the layer computes with; None where it has none."""
    if kind == "bias":
        bias = layer._buffers.get(f"bias_{part}")
        return None if bias is None else bias[direction].flatten()
    scale = layer._buffers[f"scale_{part}"]
    if scale is None:
        return None
    scale = scale[..., None] if scale.numel() > 1 else scale
    return (layer.unpacked(part) * scale)[direction].flatten(0, 1)
