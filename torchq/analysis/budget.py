# SPDX-License-Identifier: Apache-2.0
"""Quantizes a model within a budget of accuracy, by the user's own metric."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from glob import escape
from typing import Generic

from torch import nn

from torchq.analysis.explanation import explain
from torchq.analysis.sensitivities import NothingInt8, sensitivity
from torchq.attributes.options import RECIPES, RecipeName
from torchq.convert.api import quantize
from torchq.models.inputs import Inputs, Model, batches
from torchq.quantization.config import Overrides, QConfig


@dataclass(frozen=True)
class Trial:
    """A quantized model that was tried.

    Attributes:
        recipe: of its configuration.
        in_float: names of layers and functions that were kept float beside those of ``overrides``.
        score: what ``evaluate`` returned.
    """

    recipe: str
    in_float: tuple[str, ...]
    score: float


@dataclass(frozen=True)
class Tuned(Generic[Model]):
    """The first quantized model within the budget.

    Attributes:
        model: quantized.
        baseline: score of the float model.
        trials: in order; the last one is ``model``.
    """

    model: Model
    baseline: float
    trials: tuple[Trial, ...]

    def __str__(self) -> str:
        """One line for the float model and for each trial."""
        lines = [f"{self.baseline:.6g}  float"]
        for trial in self.trials:
            kept = f", in float: {', '.join(trial.in_float)}" if trial.in_float else ""
            lines.append(f"{trial.score:.6g}  {trial.recipe}{kept}")
        return "\n".join(lines)


def tune(
    model: Model,
    data: Sequence[Inputs],
    evaluate: Callable[[Model], float],
    max_drop: float,
    example_inputs: Inputs | None = None,
    config: QConfig | None = None,
    overrides: Overrides | None = None,
) -> Tuned[Model]:
    """Return the first quantized model that ``evaluate`` scores at most ``max_drop`` lower.

    The recipes "fast", "accurate" and "best" come first. Where none is good enough, "best" keeps
    one more layer or function float at a time, in the order of :func:`torchq.sensitivity`.

    Args:
        model: float32, bfloat16 or float16, in eval mode.
        data: batches to calibrate with. Evaluate on others.
        evaluate: returns a score of a model; higher is better.
        max_drop: how much lower than the float model's score is good enough.
        example_inputs: one call's inputs; the default is the first batch.
        config: how to quantize; its recipe is where the search begins.
        overrides: exceptions, by name, in each trial.

    Raises:
        ValueError: ``max_drop`` is negative, the float model's score is not finite, or more is lost
            with everything in float.

    Example:
        >>> model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
        >>> x, data = torch.randn(64, 16), [torch.randn(32, 16) for _ in range(4)]
        >>> expected = model(x).argmax(1)
        >>> def evaluate(model):
        ...     return float((model(x).argmax(1) == expected).float().mean())
        >>> tuned = torchq.tune(model, data, evaluate, max_drop=0.1)
        >>> tuned.trials[-1].score >= tuned.baseline - 0.1
        True
    """
    if not max_drop >= 0:
        raise ValueError(
            f"torchq.tune: max_drop must be >= 0, got {max_drop}. It is the part of the score that "
            "may be lost, such as 0.005."
        )
    config, overrides = QConfig() if config is None else config, dict(overrides or {})
    data = list(batches("tune", data, progress=False))
    example = data[0] if example_inputs is None else example_inputs
    baseline, trials, last = evaluate(model), list[Trial](), list[Model]()
    if not math.isfinite(baseline):
        raise ValueError(
            f"torchq.tune: evaluate must give the float model a finite score, got {baseline}. "
            "Score by labels, say: the SQNR of the float model beside itself is infinite."
        )

    def tried(recipe: RecipeName, in_float: tuple[str, ...]) -> Tuned[Model] | None:
        chosen = replace(config, recipe=recipe)
        kept = overrides | dict.fromkeys(map(escape, in_float))
        quantized = quantize(model, data, example, chosen, kept)
        last[:] = [quantized]
        trials.append(Trial(recipe, in_float, evaluate(quantized)))
        enough = trials[-1].score >= baseline - max_drop
        return Tuned(quantized, baseline, tuple(trials)) if enough else None

    for recipe in RECIPES[RECIPES.index(config.recipe) :]:
        if found := tried(recipe, ()):
            return found
    names = _ranked(model, data, example, config, overrides)
    for count in range(1, len(names) + 1):
        if found := tried("best", names[:count]):
            return found
    while left := tuple(row.name for row in explain(last[0]).rows if row.quantized):
        names += left  # what only now became int8
        if found := tried("best", names):
            return found
    raise ValueError(
        f"torchq.tune: max_drop must be reached with everything in float, got {trials[-1].score} "
        f"beside {baseline} of the float model. Check that evaluate returns the same for the same "
        "model, or allow more."
    )


def _ranked(
    model: nn.Module, data: Sequence[Inputs], example: Inputs, config: QConfig, overrides: Overrides
) -> tuple[str, ...]:
    """Return names of the layers and functions in int8, the most harmful first.

    GPTQ changes the order little and takes long, so that layers are measured without.
    """
    accurate = replace(config, recipe="accurate")
    try:
        found = sensitivity(model, data, example, accurate, overrides, progress=False)
    except NothingInt8:
        return ()
    return tuple(entry.name for entry in found)
