# SPDX-License-Identifier: Apache-2.0
"""Checks packed weights while ``torch.jit.load`` reads them."""

from typing import Any

import torch
from torch import Tensor, nn

from torchq.functional.proofs import derived


class PackedProof(nn.Module):
    """A part of scripts that holds the tensors of a packed weight.

    ``torch.jit.load`` calls its ``__setstate__``, in programs without Python as well.
    """

    geometry: list[list[int]]

    def __init__(
        self, weight: Tensor, compensation: Tensor, pair_bound: Tensor, geometry: list[list[int]]
    ) -> None:
        """Take the tensors as attributes: buffers would be part of the module's state.

        Args:
            weight: packed.
            compensation: its sums.
            pair_bound: its bounds.
            geometry: shape, groups, stride and dilation.
        """
        super().__init__()
        self.weight, self.compensation, self.pair_bound = weight, compensation, pair_bound
        self.geometry = geometry

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without the two methods below, which are of TorchScript."""
        tensors = self.weight, self.compensation, self.pair_bound
        return PackedProof, (*tensors, self.geometry)

    @torch.jit.export
    def __getstate__(self) -> tuple[Tensor, Tensor, Tensor, list[list[int]], bool]:
        """Return what an archive holds."""
        return self.weight, self.compensation, self.pair_bound, self.geometry, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[Tensor, Tensor, Tensor, list[list[int]], bool]) -> None:
        """Take what an archive holds.

        Raises:
            ValueError: sums and bounds do not follow from the weight.
        """
        self.weight, self.compensation, self.pair_bound, self.geometry, self.training = state
        shape, groups, stride, dilation = self.geometry
        if not self.weight.is_meta:
            weight, sums, bounds = derived(self.weight, shape, groups[0], stride, dilation)
            if not (
                torch.equal(weight, self.weight)
                and torch.equal(sums, self.compensation)
                and torch.equal(bounds, self.pair_bound)
            ):
                raise ValueError(
                    "torchq.nn: sums and bounds of an archive must follow from its weights, got "
                    "other values. It was damaged or changed: copy it again, or script the model "
                    "again."
                )
