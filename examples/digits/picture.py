# SPDX-License-Identifier: Apache-2.0
"""The results on one page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib
from torch import Tensor

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure

FLOAT, INT8, GOOD, BAD = "#9aa5b1", "#1f6fb2", "#2e7d32", "#c62828"


def draw(
    path: Path,
    title: str,
    digits: tuple[Tensor, Tensor, Tensor, Tensor],
    sqnr: Mapping[str, float],
    times: Mapping[int, Mapping[str, float]],
) -> None:
    """Writes a PNG.

    Args:
        path: of the file.
        title: one line.
        digits: images, labels, and the scores of the float and the int8 model.
        sqnr: layer -> decibels.
        times: batch size -> model -> milliseconds.
    """
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure = plt.figure(figsize=(13, 8.6), layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    figure.suptitle(title, fontsize=14, fontweight="bold")
    left, right = figure.subfigures(1, 2, width_ratios=[1, 1.15])
    _digits(left, *digits)
    upper, lower = right.subfigures(2, 1, height_ratios=[1.25, 1])
    _sqnr(upper.subplots(), sqnr)
    for axes, (batch, values) in zip(lower.subplots(1, len(times)), times.items(), strict=True):
        _times(axes, batch, values)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _digits(
    figure: SubFigure, images: Tensor, labels: Tensor, scores: Tensor, qscores: Tensor
) -> None:
    """The test images the int8 model is least sure about, hardest first."""
    best = qscores.softmax(1).topk(2).values
    hardest = (best[:, 0] - best[:, 1]).argsort()[:20].tolist()
    figure.suptitle("What both say about the 20 test images int8 is least sure of", fontsize=11)
    for axes, i in zip(figure.subplots(5, 4).flat, hardest, strict=True):
        label, f, q = int(labels[i]), int(scores[i].argmax()), int(qscores[i].argmax())
        axes.imshow(images[i, 0], cmap="gray_r", vmin=0, vmax=1)
        axes.set(xticks=[], yticks=[])
        right = f == q == label
        note = "" if right else f" (is {label})"
        axes.set_xlabel(f"float {f}, int8 {q}{note}", color=GOOD if right else BAD, fontsize=9)
        for spine in axes.spines.values():
            spine.set(visible=True, color=GOOD if right else BAD, linewidth=1.2)


def _sqnr(axes: Axes, sqnr: Mapping[str, float]) -> None:
    bars = axes.barh(list(sqnr), list(sqnr.values()), color=INT8, height=0.7)
    axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, max(sqnr.values()) * 1.1)
    axes.set_xlabel("dB, all earlier layers' errors included (6 dB = 1 bit)")
    axes.set_title("Signal to quantization noise, layer by layer", fontsize=11)


def _times(axes: Axes, batch: int, values: Mapping[str, float]) -> None:
    kinds = list(dict.fromkeys(name.split(" ")[1] for name in values))
    for offset, dtype, color in ((-0.2, "float", FLOAT), (0.2, "int8", INT8)):
        heights = [values[f"{dtype} {kind}"] for kind in kinds]
        places = [i + offset for i in range(len(kinds))]
        bars = axes.bar(places, heights, color=color, width=0.38, label=dtype)
        axes.bar_label(bars, [f"{height:.3g}" for height in heights], padding=2, fontsize=9)
    ratios = [values[f"float {kind}"] / values[f"int8 {kind}"] for kind in kinds]
    labels = [
        f"{kind}\nint8 {ratio:.1f}x as fast" for kind, ratio in zip(kinds, ratios, strict=True)
    ]
    axes.set_xticks(range(len(kinds)), labels)
    axes.set_ylabel("ms per batch, median")
    axes.set_ylim(0, max(values.values()) * 1.3)
    axes.set_title(f"{batch} image{'s' if batch > 1 else ''} per batch", fontsize=11)
    axes.legend(frameon=False, loc="upper right")
