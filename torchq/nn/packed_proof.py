# SPDX-License-Identifier: Apache-2.0
"""Checks packed weights while ``torch.jit.load`` reads them."""

import torch
from torch import Tensor, nn

from torchq.functional.proofs import sums_and_bounds
from torchq.nn.module import QModule

Packed = tuple[Tensor, Tensor, Tensor, list[list[int]]]
"""Weight, sums, bounds; shape, groups, stride and dilation."""


class PackedProof(nn.Module):
    """A part of scripts that holds the packed weights of a graph.

    ``torch.jit.load`` calls its ``__setstate__``, in programs without Python as well. The tensors
    are attributes: buffers would be part of the script's state.
    """

    packed: list[Packed]

    def __init__(self, packed: list[Packed]) -> None:
        """Take the weights that :func:`with_proof` finds."""
        super().__init__()
        self.packed = packed

    @torch.jit.export
    def __getstate__(self) -> tuple[list[Packed], bool]:
        """Return what an archive holds."""
        return self.packed, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[list[Packed], bool]) -> None:
        """Take what an archive holds.

        Raises:
            ValueError: sums and bounds do not follow from a weight.
        """
        self.packed, self.training = state
        for weight, compensation, pair_bound, geometry in self.packed:
            shape, groups, stride, dilation = geometry
            if not weight.is_meta:
                padded, sums, bounds = sums_and_bounds(weight, shape, groups[0], stride, dilation)
                if not (
                    torch.equal(padded, weight)
                    and torch.equal(sums, compensation)
                    and torch.equal(bounds, pair_bound)
                ):
                    raise ValueError(
                        "torchq.nn: sums and bounds of an archive must follow from its weights, "
                        "got other values. It was damaged or changed: copy it again, or script "
                        "the model again."
                    )


def with_proof(graph: nn.Module) -> nn.Module:
    """Return what TorchScript compiles in place of a graph: the same, with a part that checks it.

    Args:
        graph: not changed; its modules are shared.
    """
    weights = [
        weight
        for module in graph.modules()
        if isinstance(module, QModule)
        for weight in module._packed_weights().values()
    ]
    scriptable = object.__new__(type(graph))  # GraphModule's own makes another class
    vars(scriptable).update(vars(graph), _modules=dict(graph._modules))
    if weights:
        packed = [(w.weight, w.compensation, w.pair_bound, w.geometry) for w in weights]
        scriptable._modules["torchq_proof"] = PackedProof(packed)
    return scriptable
