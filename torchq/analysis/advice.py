# SPDX-License-Identifier: Apache-2.0
"""Says what to do next, by what a report found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchq.analysis.accuracy import Accuracy
from torchq.analysis.speed import Profile
from torchq.report import reasons
from torchq.report.rows import Row

_ENOUGH, _LITTLE, _CLIPPED = 30.0, 20.0, 0.01
"""dB with which decisions seldom change; dB that need a remedy; share of clipped values."""


def next_steps(rows: Sequence[Row], accuracy: Accuracy, times: Profile) -> Iterator[str]:
    """Yield what to do, the most important first."""
    if accuracy.output < _LITTLE:
        worst = min(accuracy.layers, key=lambda layer: layer.sqnr, default=None)
        first = f" {worst.name or 'the model'} has {worst.sqnr:.1f} dB." if worst else ""
        yield (
            f"Win back accuracy: {accuracy.output:.1f} dB is little.{first} torchq.sensitivity "
            "finds the layers that cost most, and torchq.tune keeps the fewest float that meet "
            "your budget."
        )
    clipped = [layer.name for layer in accuracy.layers if layer.clipped > _CLIPPED]
    if clipped:
        yield (
            f"Calibrate with more data of this kind: {_some(clipped)} give more than 1 % of their "
            "values beyond the calibrated range."
        )
    floats = [
        row.name
        for row in rows
        if row.is_matmul and not (row.quantized or row.requested)
        if row.reason != reasons.NOT_CALLED
    ]
    if floats:
        yield f"See below why {_some(floats)} stay float: most reasons have a remedy."
    if times.losing:
        names = [layer.name for layer in times.losing]
        keep = ", ".join(f'"{name}": None' for name in names[:3])
        yield f"Keep float what is faster so: {_some(names)}, by overrides={{{keep}}}."
    if not times.is_steady:
        yield "Measure again on an idle machine: the times of this page differ from round to round."
    if accuracy.output < _ENOUGH:
        yield "Compare your own metric on test data: less than 30 dB may change decisions."
    else:
        yield "Check your own metric on test data, then write the model: torchq.save(qmodel, path)."


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(name or "the model" for name in names[:3]) + more
