# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page about a quantized model: it needs no network and no other file."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from importlib import resources
from string import Template

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torchq.analysis.accuracy import (
    Accuracy,
    LayerAccuracy,
    compare,
    covered,
    float_layers,
    without_observers,
)
from torchq.analysis.advice import next_steps
from torchq.analysis.explanation import Explanation, explain
from torchq.analysis.speed import LayerTime, Profile, profile
from torchq.analysis.timeline import timeline
from torchq.analysis.timing import UNSTEADY
from torchq.models.attached import computing_modules
from torchq.models.hooks import watching
from torchq.models.inputs import Inputs, batches, call
from torchq.nn.module import QModule
from torchq.report import reasons
from torchq.report.rows import Row
from torchq.runtime.isa import cpu_info, isa
from torchq.serialization.files import write_file

_BINS, _MOST = 48, 6


def write_report(
    path: str | os.PathLike[str],
    model: nn.Module,
    prepared: nn.Module,
    qmodel: nn.Module,
    data: Sequence[Inputs],
    title: str | None = None,
) -> None:
    """Write an HTML page of accuracy, times, and every layer with its reason and figures.

    Args:
        path: of the file.
        model: the float model.
        prepared: from :func:`torchq.prepare`, calibrated.
        qmodel: what :func:`torchq.convert` made of it.
        data: batches for accuracy; the first one is also timed and shown as histograms.
        title: heading; the class of the model by default.

    Raises:
        OSError: the file cannot be written.
        ValueError: ``data`` is empty, or the models do not belong together.
    """
    data = list(batches("write_report", data, progress=False))
    accuracy = compare(prepared, qmodel, data)
    times = profile(model, qmodel, data[0])
    shapes = _histograms(prepared, qmodel, data[0])
    explained = explain(qmodel)
    rows = explained.rows
    worst = sorted(accuracy.layers, key=lambda layer: layer.sqnr)[:_MOST]
    losing = sorted(times.losing, key=lambda layer: layer.float_ms - layer.int8_ms)
    slowest = sorted(times.layers, key=lambda layer: -layer.int8_ms)[:_MOST]
    page = Template(resources.files("torchq.analysis").joinpath("report.html").read_text("utf-8"))
    text = page.substitute(
        title=escape(title or type(model).__name__),
        **_headline(rows, accuracy, times, _bytes(model), _bytes(qmodel)),
        machine=escape(f"{_machine()}; times of {_batch(data[0])}"),
        steps="".join(f"<li>{escape(step)}</li>" for step in next_steps(rows, accuracy, times)),
        timeline=timeline(times),
        floats=_floats(rows),
        losing=_table(
            ("layer", "float ms", "int8 ms"),
            [(x.name, _ms(x.float_ms), _ms(x.int8_ms)) for x in losing[:_MOST]],
            len(losing[_MOST:]),
        ),
        worst=_table(
            ("layer", "SQNR dB", "clipped %"),
            [(x.name, f"{x.sqnr:.1f}", f"{100 * x.clipped:.2f}") for x in worst],
        ),
        slowest=_table(
            ("layer", "int8 ms", "% of all"),
            [(x.name, _ms(x.int8_ms), f"{100 * x.share:.0f}") for x in slowest],
        ),
        fused=_switch(sum(_is_fused(row) for row in rows)),
        rows="\n".join(_lines(explained, accuracy, times, shapes)),
    )
    write_file("torchq.write_report", path, [text.encode()])


def _lines(
    explained: Explanation, accuracy: Accuracy, times: Profile, shapes: Mapping[str, str]
) -> Iterator[str]:
    """Yield a line for each row; those of a fused group have its figures once."""
    noise = {layer.name: layer for layer in accuracy.layers}
    timed = {layer.name: layer for layer in times.layers}
    first: dict[str, str] = {}  # where the figures of a group stand
    for row in sorted(explained.rows, key=lambda row: not row.is_matmul):
        if row.quantized:
            first.setdefault(row.site, row.name)
    for row in explained.rows:
        own = first.get(row.site) == row.name
        layer, spent = (noise.get(row.site), timed.get(row.site)) if own else (None, None)
        plot = shapes.get(row.site, "") if own else ""
        yield _line(row, explained.details.get(row.site, ""), layer, spent, plot)


def _headline(
    rows: Sequence[Row], accuracy: Accuracy, times: Profile, before: int, after: int
) -> dict[str, str]:
    """Return the sentence on top, and the figures below it."""
    matmuls = [row for row in rows if row.is_matmul and row.reason != reasons.NOT_CALLED]
    quantized = sum(row.quantized for row in matmuls)
    smaller = before / max(after, 1)
    share = 100 * 10 ** (-accuracy.output / 20)
    lead = (
        f"{_faster(times)}{_ratio(smaller, 'smaller', 'larger')} than float; the results differ by "
        f"{share:.2g} % of their size. "
        f"{quantized} of {len(matmuls)} convolutions, linear and recurrent layers run in int8."
    )
    facts = [
        _speed_fact(times),
        (f"{smaller:.1f}x", f"smaller: {before / 1e6:.2f} to {after / 1e6:.2f} MB"),
        (f"{accuracy.output:.1f} dB", "SQNR of the output"),
        (f"{quantized} of {len(matmuls)}", "convolutions and linears in int8"),
    ]
    boxes = "".join(f"<div><b>{escape(v)}</b>{escape(k)}</div>" for v, k in facts)
    return {"lead": escape(lead[0].upper() + lead[1:]), "facts": boxes}


def _speed_fact(times: Profile) -> tuple[str, str]:
    """Return the speed, and the times behind it with what speaks against them."""
    text = f"faster: {_ms(times.float_ms)} to {_ms(times.int8_ms)} ms"
    return str(times.speedup), text if times.is_steady else f"{text}; {times.note or UNSTEADY}"


def _faster(times: Profile) -> str:
    """Return the speed as the beginning of a sentence, as far as the times bear it out."""
    speedup, (low, high) = times.speedup, times.speedup.bounds
    if times.is_steady:
        return f"{_ratio(speedup.median, 'faster', 'slower')} and "
    if times.note or low < 1 < high:
        return ""
    return f"at least {_ratio(low if low >= 1 else high, 'faster', 'slower')} and "


def _ratio(value: float, more: str, less: str) -> str:
    return f"{value:.1f} times {more}" if value >= 1 else f"{1 / value:.1f} times {less}"


def _floats(rows: Sequence[Row]) -> str:
    """Rows that stay float, by reason; convolutions and linears first."""
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: not row.is_matmul):
        if not row.quantized:
            found.setdefault(row.reason or reasons.UNKNOWN, []).append(row)
    if not found:
        return "<p>Nothing: everything runs in int8.</p>"
    items = []
    for reason, alike in sorted(
        found.items(), key=lambda item: (not item[1][0].is_matmul, -len(item[1]))
    ):
        names = ", ".join(row.name or "(the model)" for row in alike[:3])
        more = f" and {len(alike) - 3} more" if len(alike) > 3 else ""
        kinds = ", ".join(dict.fromkeys(row.kind for row in alike))
        mark = '<span class="badge float">float</span> ' if alike[0].is_matmul else ""
        text = reason if reason.startswith(kinds) else f"{kinds}: {reason}"
        items.append(f"<li>{mark}{escape(text)}<br>{_name(names)}{more}</li>")
    return f"<ul>{''.join(items)}</ul>"


def _name(name: str) -> str:
    """Return a name that breaks behind its dots."""
    return f"<code>{escape(name).replace('.', '.<wbr>')}</code>"


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]], more: int = 0) -> str:
    """Return a table of layers' names and numbers; ``more`` are left out."""
    if not lines:
        return "<p>Nowhere.</p>"
    numbers = "".join(f'<th class="num">{escape(head)}</th>' for head in heads[1:])
    body = "".join(
        f'<tr><td class="name">{_name(name)}</td>'
        + "".join(f'<td class="num">{escape(value)}</td>' for value in values)
        + "</tr>"
        for name, *values in lines
    )
    rest = f"<p>and {more} more</p>" if more else ""
    return f"<table><tr><th>{escape(heads[0])}</th>{numbers}</tr>{body}</table>{rest}"


def _line(
    row: Row, details: str, layer: LayerAccuracy | None, spent: LayerTime | None, plot: str
) -> str:
    """Return a row of the table of all layers."""
    kind = f"{row.kind} x{row.calls}" if row.calls > 1 else row.kind
    about = row.reason or details
    if not about.startswith(kind):  # a table of values says what it is
        about = f"{kind} · {about}" if about else kind
    name = f"{_name(row.name or '(the model)')}<small>{escape(about)}</small>"
    speedup = spent.speedup if spent else None
    faster = speedup.median if speedup and speedup.is_steady else None
    cells = [
        f'<td class="name">{name}</td>',
        _badge(row),
        _number("SQNR", layer.sqnr if layer else None, "{:.1f}"),
        _number("error", layer.worst if layer else None, "{:.3g}"),
        _number("clipped", 100 * layer.clipped if layer else None, "{:.2f}"),
        _number("float", spent.float_ms if spent else None),
        _number("int8", spent.int8_ms if spent else None, bad=bool(spent and spent.loses)),
        _number("faster", faster, "{:.1f}"),
        f"<td>{plot}</td>",
    ]
    kind = ' class="fused"' if _is_fused(row) else ""
    return f"<tr{kind}>{''.join(cells)}</tr>"


def _switch(fused: int) -> str:
    """Show rows that are part of other layers."""
    label = f"also {fused} row{'s' * (fused != 1)} of what is part of other layers"
    switch = f'<input type="checkbox" id="fused"> <label for="fused">{label}</label>'
    return switch if fused else ""


def _is_fused(row: Row) -> bool:
    return row.quantized and not row.is_matmul and row.reason.startswith("fused into ")


def _batch(inputs: Inputs) -> str:
    """Shapes of a call's inputs."""
    shapes = [list(x.shape) for x in tree_leaves(inputs) if isinstance(x, Tensor)]
    return f"one call with {', '.join(map(str, shapes))}"


def _machine() -> str:
    threads = torch.get_num_threads()
    return (
        f"{cpu_info().get('model', 'CPU')}, kernels {isa()}, "
        f"{threads} thread{'s' * (threads > 1)}, torch {torch.__version__}"
    )


def _bytes(model: nn.Module) -> int:
    """Return the bytes of all that the model stores; its graphs share weights with its layers."""
    storages = [value.untyped_storage() for value in model.state_dict().values()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _badge(row: Row) -> str:
    kind = "int8" if row.quantized else "asked" if row.requested else "float"
    return f'<td><span class="badge {kind}">{"int8" if row.quantized else "float"}</span></td>'


def _number(key: str, value: float | None, form: str = "", bad: bool = False) -> str:
    """Return a cell; ``form`` is for milliseconds where it is empty."""
    if value is None or math.isnan(value):
        return '<td class="num" data-v=""></td>'
    kind = "num bad" if bad else "num"
    text = form.format(value) if form else _ms(value)
    return f'<td class="{kind}" data-k="{key}" data-v="{value!r}">{text}</td>'


def _ms(value: float) -> str:
    """With three digits or so."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


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
    """Return an SVG of every quantized layer's float destination on one batch."""
    floats = without_observers(prepared)
    quantized = {n: m for n, m in computing_modules(qmodel).items() if isinstance(m, QModule)}
    found: dict[str, str] = {}

    def look(name: str, module: nn.Module, args: object, dst: object) -> None:
        if isinstance(dst, Tensor) and dst.numel() and bool(dst.isfinite().all()):
            low, high = (float(v) for v in dst.aminmax())
            counts = torch.histc(dst.float(), _BINS, low, high).tolist()
            found[name] = _Histogram(low, high, counts, covered(quantized[name])).svg()

    handles = [
        module.register_forward_hook(partial(look, name))
        for name, module in float_layers(floats).items()
        if name in quantized
    ]
    with watching(handles), torch.inference_mode():
        call(floats, batch)
    return found
