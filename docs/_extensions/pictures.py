# SPDX-License-Identifier: Apache-2.0
"""The directive ``picture``: SVG within the page, so that it has the theme's colours.

``flow`` is drawn by hand in docs/_static; the others are computed from docs/data/models.json and
from seeded models when the site is built.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path

import bars
import decisions
import torch
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import torchq

_DOCS = Path(__file__).parents[1]
_SHOWN = ("resnet50", "mobilenet_v2", "vit_b_16", "bert_base")


@dataclass(frozen=True)
class Point:
    """One contender on one model."""

    label: str
    milliseconds: float
    decibels: float


def contenders(model: str) -> list[Point]:
    """Return time and precision of each contender on a model."""
    row = bars.rows()[model]
    decibels = [row["sqnr_db"][name] for name in bars.QUALITY]
    return [Point(*told) for told in zip(bars.CONTENDERS, bars.times(row), decibels, strict=True)]


def _text(x: float, y: float, text: str, css: str = "", anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'style="max-width:{width}px"><title>{escape(title)}</title>{"".join(parts)}</svg>'
    )


def _ticks(largest: float) -> list[float]:
    """Return three to five round numbers from 0 on that cover a value."""
    step = 10.0 ** math.floor(math.log10(largest / 2))
    step *= next(factor for factor in (1, 2, 5, 10) if step * factor * 4 >= largest)
    return [i * step for i in range(math.ceil(largest / step) + 1)]


def _chart(model: str, points: Sequence[Point]) -> str:
    """Return one panel: further left is faster, higher is more precise."""
    width, height, left, top, right, base = 350, 240, 34, 40, 24, 196
    across = _ticks(max(point.milliseconds for point in points))
    up = _ticks(max(point.decibels for point in points))

    def x_of(milliseconds: float) -> float:
        return left + milliseconds / across[-1] * (width - left - right)

    def y_of(decibels: float) -> float:
        return base - decibels / up[-1] * (base - top)

    parts = [
        _text(left, 20, model, "head"),
        f'<path class="axis" d="M{left} {top}V{base}H{width - right}"/>',
        _text(width - right, height - 8, "ms", "soft", "end"),
    ]
    for value in across:
        parts.append(_text(x_of(value), base + 18, f"{value:g}", "soft", "middle"))
    for value in up:
        parts.append(_text(left - 7, y_of(value) + 4, f"{value:g}", "soft", "end"))
        parts.append(f'<path class="grid" d="M{left} {y_of(value):.1f}H{width - right}"/>')
    for i, point in reversed(list(enumerate(points))):
        x, y = x_of(point.milliseconds), y_of(point.decibels)
        told = f"{point.label}: {point.milliseconds:g} ms, {point.decibels:g} dB"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" class="peer{i}">'
            f"<title>{escape(told)}</title></circle>"
        )
    return _svg(width, height, f"{model}: precision against time", parts)


def accuracy_and_time() -> str:
    """Draw precision against time of four networks, one panel each."""
    found = {model: contenders(model) for model in _SHOWN}
    legend = "".join(
        f'<span><i class="peer{i}"></i>{escape(point.label)}</span>'
        for i, point in enumerate(found[_SHOWN[0]])
    )
    panels = "".join(_chart(model, points) for model, points in found.items())
    return f'<div class="legend">{legend}</div><div class="panels">{panels}</div>'


def histogram() -> str:
    """Draw what an observer has seen of a GELU, with the ranges that two observers choose."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1 << 19, generator=generator)
    values = torch.nn.functional.gelu(values)
    values[:4] = torch.tensor([6.0, 7.0, 8.0, 12.0])  # outliers, as transformers have them
    searched, widest = torchq.observers.HistogramObserver(), torchq.observers.MinMaxObserver()
    searched(values)
    widest(values)
    seen = searched.histogram()
    low, high = seen.min_value, seen.max_value
    bins = 90
    counts = torch.histc(values, bins, low, high).tolist()
    width, height, left, base = 640, 250, 12, 196
    step = (width - 2 * left) / (high - low)
    tallest = torch.tensor(counts).add(1).log10().max().item()
    parts = []
    for i, count in enumerate(counts):
        tall = float(torch.tensor(count + 1.0).log10()) / tallest * 150
        x = left + i * (width - 2 * left) / bins
        parts.append(
            f'<rect class="bar" x="{x:.1f}" y="{base - tall:.1f}" '
            f'width="{(width - 2 * left) / bins - 1:.1f}" height="{tall:.1f}"/>'
        )
    parts.append(f'<path class="axis" d="M{left} {base}H{width - left}"/>')
    for name, observer, css in (("histogram", searched, "ours"), ("minmax", widest, "soft")):
        qparams = observer.qparams()
        scale, zero = float(qparams.scale), int(qparams.zero_point)
        ends = [left + (scale * (q - zero) - low) * step for q in qparams.integers]
        top = 26 if name == "histogram" else 50
        parts.append(
            f'<path class="mark {css}" d="M{ends[0]:.1f} {top}V{base}M{ends[1]:.1f} {top}V{base}"/>'
        )
        parts.append(_text(ends[1] - 6, top + 6, f"{name}: scale {scale:.4f}", css, "end"))
    for value in range(int(low), int(high) + 1):
        parts.append(_text(left + (value - low) * step, base + 18, str(value), "soft", "middle"))
    parts.append(_text(width / 2, base + 42, "value of the activation", "soft", "middle"))
    return _svg(width, height, "Histogram of a layer's activations, with the ranges chosen", parts)


def flow() -> str:
    """Return the drawing of the flow."""
    text = (_DOCS / "_static" / "flow.svg").read_text(encoding="utf-8")
    return re.sub(r"<\?xml.*?\?>|<!--.*?-->", "", text, flags=re.DOTALL)


PICTURES = {"accuracy_and_time": accuracy_and_time, "histogram": histogram, "flow": flow}
PICTURES |= {name: partial(decisions.draw, name) for name in decisions.EXAMPLES}


class Picture(SphinxDirective):
    """``{picture} name``, with the caption as its content."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the drawing and its caption."""
        if self.arguments[0] not in PICTURES:
            raise self.error(f"picture must be one of {', '.join(PICTURES)}")
        figure = nodes.container(classes=["picture"])
        figure += nodes.raw("", PICTURES[self.arguments[0]](), format="html")
        caption = nodes.container(classes=["picture-caption"])
        self.state.nested_parse(self.content, self.content_offset, caption)
        figure += caption
        return [figure]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("picture", Picture)
    return {"parallel_read_safe": True}
