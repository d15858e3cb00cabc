# SPDX-License-Identifier: Apache-2.0
"""Task: a model with trained weights, data, and the metric that its users count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Task", "changed", "package", "results", "seeded"]

Run = Callable[[nn.Module, Iterable[Any]], Tensor]


@torch.inference_mode()
def results(model: nn.Module, inputs: Iterable[Any]) -> Tensor:
    """Return the results of all inputs, joined along the batch."""
    return torch.cat([model(src) for src in inputs])


@dataclass(frozen=True)
class Task:
    """One section of the page.

    Attributes:
        name: of the model.
        about: of its data and metric, for the page.
        metric: head of the metric's column.
        model: float, in eval mode.
        calibration: inputs, each a tensor or a tuple of them.
        test: other inputs.
        score: of the float results and others, as the page shows it.
        run: gives the results for the test inputs.
        timed: the input whose time is taken.
        larger: inputs that models of PyTorch are timed on, too.
        variable: dimensions of the inputs that vary, for the export to ONNX.
        remedies: further rows of torchq, and what makes their models.
        is_transformer: for NNCF, which treats transformers in its own way.
        knows_answers: whether the score counts right answers, so that the float model has one, too.
    """

    name: str
    about: str
    metric: str
    model: nn.Module
    calibration: list[Any]
    test: Iterable[Any]
    score: Callable[[Tensor, Tensor], str]
    timed: Any
    run: Run = results
    variable: Mapping[int, Sequence[int]] = field(default_factory=dict)
    remedies: Mapping[str, Callable[[], nn.Module]] = field(default_factory=dict)
    larger: Sequence[Tensor] = ()
    is_transformer: bool = False
    knows_answers: bool = False


def package(module: str, name: str) -> Path:
    """Return the folder of a package with weights, without an import of it.

    Raises:
        RuntimeError: it is missing.
    """
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"the package {name} is not installed: pip install --no-deps {name}")
    return Path(next(iter(spec.submodule_search_locations)))


def changed(expected: Tensor, found: Tensor) -> str:
    """Return how many decisions differ, of all."""
    return f"{int((expected != found).sum())} of {expected.numel()}"


def seeded(seed: int) -> torch.Generator:
    """Return a random generator of its own."""
    return torch.Generator("cpu").manual_seed(seed)
