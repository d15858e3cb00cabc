# SPDX-License-Identifier: Apache-2.0
"""Draws the layers of a float model and of its int8 one on one axis of time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from torchq.analysis.speed import Profile

_WIDTH, _LEFT, _TALL, _TOP = 1000, 44, 30, 6


def timeline(times: Profile) -> str:
    """Return an SVG: a bar for each model, in which each layer is as wide as its time."""
    floats = [0.0 if math.isnan(layer.float_ms) else layer.float_ms for layer in times.layers]
    ints = [layer.int8_ms for layer in times.layers]
    names = [layer.name or "(the model)" for layer in times.layers]
    longest = max(times.float_ms, times.int8_ms, sum(floats), sum(ints)) or 1.0
    scale = (_WIDTH - _LEFT - 10) / longest
    parts = [
        *_bar("float", _TOP, names, floats, times.float_ms, scale),
        *_bar("int8", _TOP + _TALL + 8, names, ints, times.int8_ms, scale),
        *_axis(_TOP + 2 * _TALL + 14, longest, scale),
    ]
    told = f"float {times.float_ms:.3g} ms, int8 {times.int8_ms:.3g} ms, layer by layer"
    return (
        f'<svg class="timeline" viewBox="0 0 {_WIDTH} {_TOP + 2 * _TALL + 34}" role="img">'
        f"<title>{told}</title>{''.join(parts)}</svg>"
    )


def _bar(
    label: str, y: int, names: Sequence[str], ms: Sequence[float], whole: float, scale: float
) -> Iterator[str]:
    """Yield the layers of one model in order, and the rest of its time."""
    yield f'<text x="0" y="{y + 20}">{label}</text>'
    x = float(_LEFT)
    rest = max(0.0, whole - sum(ms))
    for i, (name, time) in enumerate([*zip(names, ms, strict=True), ("all else", rest)]):
        width = time * scale
        css = "rest" if i == len(names) else f"layer{i % 2}"
        if width > 0:
            yield (
                f'<rect class="{css}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_TALL}">'
                f"<title>{escape(name)}: {time:.3g} ms</title></rect>"
            )
        if width > 7 * len(name) + 8:  # it has room for its name
            yield f'<text class="in {css}" x="{x + 5:.1f}" y="{y + 20}">{escape(name)}</text>'
        x += width


def _axis(y: int, longest: float, scale: float) -> Iterator[str]:
    """Yield ticks at round times."""
    step = 10.0 ** math.floor(math.log10(longest))
    step *= next(factor for factor in (0.1, 0.2, 0.5, 1) if longest / (step * factor) <= 10)
    yield f'<path d="M{_LEFT} {y}h{longest * scale:.1f}"/>'
    for i in range(math.floor(longest / step) + 1):
        x = _LEFT + i * step * scale
        text = f"{i * step:.3g}{' ms' if i == 0 else ''}"
        yield f'<path d="M{x:.1f} {y}v5"/><text x="{x:.1f}" y="{y + 19}">{text}</text>'
