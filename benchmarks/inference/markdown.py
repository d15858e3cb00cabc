# SPDX-License-Identifier: Apache-2.0
"""The results of all networks as one page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.inference.measure import WAYS
from benchmarks.models import NETWORKS
from benchmarks.peak import REQUIRED_FRACTION

__all__ = ["page", "table"]

_HEAD = """# Models

Measured by `python -m benchmarks models {which} --threads {threads} --json docs/data/models.json`,
written by `python docs/_extensions/bars.py`, with torch {torch} on the tier
`{isa}` of one {cpu}. A busy machine is one on which a loop of VPDPBUSD misses 98 % of
its speed.

Known architectures as plain modules (`benchmarks/models/`) with random weights: batch norms have
the statistics of data, activations keep a sane size. Everyone gets the same weights, the same 16
calibration inputs and the same 8 others to be compared on, one at a time. Inputs are synthetic:

{inputs}

Output SQNR is the power of the float outputs by that of the difference. Times are medians, all
contenders in turns in one run; **bold** is the best of its row. float is eager PyTorch in the
faster memory layout. torch.ao is its FX flow with the x86 engine; LSTMs, and what it cannot trace,
it quantizes dynamically: {dynamic}.
ONNX Runtime runs a QDQ model of its own quantizer, an LSTM only dynamically. OpenVINO runs what
NNCF quantized, with its type for transformers where the model is one.
torch.ao has its transposed convolutions (unet) and the functions sigmoid and tanh (audio) in float:
in torch 2.13 its integer kernels of the former compute something else, and the sources of the
latter, behind a chunk, get the range of their results. With them it had 3 dB and 7 dB.
"""

_TOOLS = {"torchq": "torchq", "torch_ao": "torch.ao", "onnxruntime": "ORT", "openvino": "OpenVINO"}
_TIMES = ("float", "torchq", "torchq_script", "torch_ao", "torch_ao_jit", "onnxruntime", "openvino")
_TITLES = ("float", "torchq", "torchq script", "torch.ao", "torch.ao jit", "ORT", "OpenVINO")

_CONVERSION = """\
From the float model and 16 inputs to the int8 model or its file, with imports, export and
calibration. torchq and torch.ao run on one thread, the other tools on all cores, as they do unless
told otherwise. Models that torch.ao makes dynamic, without data, are left out.
"""


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as :meth:`Measured.rows` makes them."""
    threads = sorted({row["threads"] for row in rows})
    once = list({row["model"]: row for row in rows}.values())
    names = [row["model"] for row in once]
    head = _HEAD.format(
        which="--all" if len(once) == len(NETWORKS) else f"--model {' '.join(names)}",
        threads=" ".join(map(str, threads)),
        torch=rows[0]["torch"],
        isa=rows[0]["isa"],
        cpu=rows[0]["cpu"],
        inputs=_inputs(names),
        dynamic=", ".join(name for name in names if NETWORKS[name].dynamic),
    )
    parts = [head, "## Precision and size\n", _quality(once)]
    parts += ["## Time to quantize, s\n", _CONVERSION, _seconds(once)]
    for count in threads:
        some = [row for row in rows if row["threads"] == count]
        parts += [f"## Time on {count} thread{'s' if count > 1 else ''}, ms\n", _times(some)]
        parts += _ways(some)
    parts += ["## What stays float\n", _left(once), "## What failed\n", _failures(once)]
    return "\n".join(parts)


def _inputs(models: Iterable[str]) -> str:
    """The documentation of their sources."""
    kinds = {type(NETWORKS[name].source): None for name in models}
    texts = (f"`{kind.__name__}` {' '.join((kind.__doc__ or '').split())}" for kind in kinds)
    return "- " + "\n- ".join(texts)


def table(titles: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [titles, ["---"] * len(titles), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _quality(rows: Sequence[dict[str, Any]]) -> str:
    titles = ["model", "input", "GMAC", "in int8", "float MB", "int8 MB"]
    titles += [f"SQNR dB {name}" for name in _TOOLS.values()]
    lines = []
    for row in rows:
        sizes = [f"{row[key] / 1e6:.1f}" for key in ("float_bytes", "torchq_bytes")]
        shares = [f"{row['macs'] / 1e9:.3f}", f"{row['int8_mac_share']:.1%}"]
        found = [row["sqnr_db"].get(name) for name in _TOOLS]
        network = NETWORKS[row["model"]]
        source = f"{network.batch} x {network.source}" if network.batch > 1 else str(network.source)
        lines.append([row["model"], f"`{source}`", *shares, *sizes, *_figures(found, 1, max)])
    return table(titles, lines)


def _seconds(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        seconds = dict(row["quantize_seconds"])
        if NETWORKS[row["model"]].dynamic:
            seconds.pop("torch_ao", None)
        lines.append([row["model"], *_figures([seconds.get(name) for name in _TOOLS], 1, min)])
    return table(["model", *_TOOLS.values()], lines)


def _times(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        own = {name: row[f"{name}_ms"] for name in _TIMES[:3]}
        found = [{**own, **row["peers"]}.get(name) for name in _TIMES]
        noisy = "" if (row["share_of_peak"] or 1) >= REQUIRED_FRACTION else " (busy machine)"
        lines.append([row["model"] + noisy, *_figures(found, 2, min), _ratio(row)])
    return table(["model", *_TITLES, "best peer / best torchq"], lines)


def _ways(rows: Sequence[dict[str, Any]]) -> list[str]:
    """torchq's own model in other hands, where that was measured."""
    lines = []
    for row in (row for row in rows if row["ways"]):
        ways = [row["ways"].get(name) for name in WAYS]
        values = [row["torchq_ms"], row["torchq_script_ms"], *ways]
        lines.append([row["model"], *_figures(values, 2, min)])
    text = (
        "torchq, the same bits in all of them, but for what stays float and torch.compile adds up\n"
        "in another order: torch.export as `.module()`, torch.compile warm.\n"
    )
    titles = ["model", "eager", "frozen TorchScript", "torch.export", "torch.compile"]
    return [text, table(titles, lines)] if lines else []


def _ratio(row: dict[str, Any]) -> str:
    own = [ms for ms in (row["torchq_ms"], row["torchq_script_ms"]) if ms]
    peers = [*row["peers"].values(), row["float_ms"]]
    return f"{min(peers) / min(own):.2f}x" if own and peers else ""


def _figures(values: Sequence[float | None], digits: int, best: Any) -> list[str]:
    known = [value for value in values if value is not None]
    mark = best(known) if known else None
    texts = ["-" if value is None else f"{value:.{digits}f}" for value in values]
    pairs = zip(values, texts, strict=True)
    return [f"**{text}**" if value == mark and value is not None else text for value, text in pairs]


def _left(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        groups: Counter[tuple[str, str]] = Counter()
        shares: Counter[tuple[str, str]] = Counter()
        for layer in row["float_layers"]:
            group = layer["class"], layer["reason"]
            groups[group] += 1
            shares[group] += layer["macs"]
        for (kind, reason), count in groups.items():
            share = f"{shares[kind, reason] / row['macs']:.1%}"
            lines.append([row["model"], str(count), kind, share, reason])
    return table(["model", "count", "class", "of MACs", "reason"], lines)


def _failures(rows: Sequence[dict[str, Any]]) -> str:
    lines = [[row["model"], *failure] for row in rows for failure in row["failures"].items()]
    return table(["model", "contender", "reason"], lines) if lines else "Nothing.\n"
