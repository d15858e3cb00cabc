# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page about a quantized model: it needs no network and no other file."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import torch
from torch import Tensor, nn

from torchq.analysis.accuracy import compare, covered, float_layers, without_observers
from torchq.analysis.speed import profile
from torchq.explain import Row, explain
from torchq.isa import cpu_info, isa
from torchq.nn.module import QModule
from torchq.running import Inputs, call

__all__ = ["write_report"]

_BINS = 48


def write_report(
    path: str | os.PathLike[str],
    model: nn.Module,
    prepared: nn.Module,
    qmodel: nn.Module,
    data: Sequence[Inputs],
    title: str | None = None,
) -> None:
    """Writes an HTML page: every layer with its reason, accuracy, range, time and size.

    Args:
        path: of the file.
        model: the float model.
        prepared: from :func:`torchq.prepare`, calibrated.
        qmodel: what :func:`torchq.convert` made of it.
        data: batches for accuracy; the first one is also timed and shown as histograms.
        title: heading; the class of the model by default.

    Raises:
        ValueError: ``data`` is empty, or the models do not belong together.
    """
    data = list(data)
    accuracy = compare(prepared, qmodel, data)
    times = profile(model, qmodel, data[0])
    noise = {layer.name: layer for layer in accuracy.layers}
    timed = {layer.name: layer for layer in times.layers}
    shapes = _histograms(prepared, qmodel, data[0])
    rows = explain(qmodel).rows
    details = explain(qmodel).details
    body = []
    first: dict[str, str] = {}  # where the figures of a fused group stand
    for row in sorted(rows, key=lambda row: not row.is_matmul):
        if row.quantized:
            first.setdefault(row.site, row.name)
    for row in rows:
        own = first.get(row.site) == row.name
        layer, spent = (noise.get(row.site), timed.get(row.site)) if own else (None, None)
        cells = [
            _text(row.name or "(the model)", "name"),
            _text(row.kind),
            _badge(row),
            _number(layer.sqnr if layer else None, "{:.1f}"),
            _number(layer.worst if layer else None, "{:.3g}"),
            _number(100 * layer.clipped if layer else None, "{:.2f}"),
            _number(spent.float_ms if spent else None, "{:.3f}"),
            _number(spent.int8_ms if spent else None, "{:.3f}", bad=bool(spent and spent.loses)),
            _number(spent.float_ms / spent.int8_ms if spent else None, "{:.1f}"),
            f'<td class="plot">{shapes.get(row.site, "") if own else ""}</td>',
            _text(row.reason or details.get(row.site, ""), "why"),
        ]
        body.append(f"<tr>{''.join(cells)}</tr>")
    matmuls = [row for row in rows if row.is_matmul]
    quantized = sum(row.quantized for row in matmuls)
    before, after = _bytes(model), _bytes(qmodel)
    facts = [
        ("convolutions and linears in int8", f"{quantized} of {len(matmuls)}"),
        ("SQNR of the output", f"{accuracy.output:.1f} dB"),
        ("float", f"{times.float_ms:.2f} ms"),
        ("int8", f"{times.int8_ms:.2f} ms"),
        ("faster", f"{times.float_ms / times.int8_ms:.1f}x"),
        ("size", f"{before / 1e6:.2f} to {after / 1e6:.2f} MB"),
    ]
    page = Template(resources.files("torchq.analysis").joinpath("report.html").read_text("utf-8"))
    Path(path).write_text(
        page.substitute(
            title=escape(title or type(model).__name__),
            facts="".join(f"<div><b>{escape(v)}</b>{escape(k)}</div>" for k, v in facts),
            rows="\n".join(body),
            losing=escape(", ".join(layer.name for layer in times.losing)) or "none",
            machine=escape(_machine()),
        ),
        encoding="utf-8",
    )


def _machine() -> str:
    return (
        f"{cpu_info().get('model', 'CPU')}, kernels {isa()}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}"
    )


def _bytes(model: nn.Module) -> int:
    """Of everything the model stores."""
    return sum(x.numel() * x.element_size() for x in model.state_dict().values() if x is not None)


def _text(text: str, kind: str = "") -> str:
    return f'<td class="{kind}">{escape(text)}</td>'


def _badge(row: Row) -> str:
    kind = "int8" if row.quantized else "asked" if row.requested else "float"
    return f'<td><span class="badge {kind}">{"int8" if row.quantized else "float"}</span></td>'


def _number(value: float | None, form: str, bad: bool = False) -> str:
    if value is None or math.isnan(value):
        return '<td class="num" data-v="">&nbsp;</td>'
    kind = "num bad" if bad else "num"
    return f'<td class="{kind}" data-v="{value!r}">{form.format(value)}</td>'


@dataclass(frozen=True)
class _Histogram:
    """Counts of a layer's float destination, and the part of its range that int8 represents."""

    low: float
    high: float
    counts: list[float]
    covered: tuple[float, float] | None

    def svg(self, width: int = 150, height: int = 34) -> str:
        top, step = max(self.counts) or 1.0, width / len(self.counts)
        bars = "".join(
            f'<rect x="{i * step:.1f}" y="{height * (1 - (n / top) ** 0.5):.1f}" '
            f'width="{step:.1f}" height="{height * (n / top) ** 0.5:.1f}"/>'
            for i, n in enumerate(self.counts)
            if n
        )
        span = self.high - self.low or 1.0
        marks = ""
        if self.covered is not None:
            ends = [min(max((v - self.low) / span, 0.0), 1.0) * width for v in self.covered]
            marks = "".join(f'<path d="M{x:.1f} 0V{height}"/>' for x in ends)
        label = f"{self.low:.4g} to {self.high:.4g}"
        if self.covered is not None:
            label += f"; int8 covers {self.covered[0]:.4g} to {self.covered[1]:.4g}"
        return (
            f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">'
            f"<title>{escape(label)}</title>{bars}{marks}</svg>"
        )


def _histograms(prepared: nn.Module, qmodel: nn.Module, batch: Inputs) -> dict[str, str]:
    """An SVG of every quantized layer's float destination on one batch."""
    floats = without_observers(prepared)
    quantized = {n: m for n, m in qmodel.named_modules() if isinstance(m, QModule)}
    found: dict[str, str] = {}

    def look(name: str, module: nn.Module, args: object, dst: Any) -> None:
        if isinstance(dst, Tensor) and dst.numel() and bool(dst.isfinite().all()):
            low, high = (float(v) for v in dst.aminmax())
            counts = torch.histc(dst.float(), _BINS, low, high).tolist()
            found[name] = _Histogram(low, high, counts, covered(quantized[name])).svg()

    handles = [
        module.register_forward_hook(partial(look, name))
        for name, module in float_layers(floats).items()
        if name in quantized
    ]
    with torch.inference_mode():
        call(floats, batch)
    for handle in handles:
        handle.remove()
    return found
