# SPDX-License-Identifier: Apache-2.0
"""Writes docs/models.md, README's table and README's picture from docs/data/models.json.

python docs/_extensions/bars.py
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
DATA, PAGE = DOCS / "data" / "models.json", DOCS / "models.md"
PICTURE, README = DOCS / "_static" / "speed.svg", DOCS.parent / "README.md"
TABLE = re.compile(r"(?<=\n)\| network \| torchq \|.*?\n\n", re.DOTALL)
NETWORKS = {
    "resnet50": "ResNet-50",
    "mobilenet_v2": "MobileNet-V2",
    "efficientnet_b0": "EfficientNet-B0",
    "vit_b_16": "ViT-B/16",
    "bert_base": "BERT base",
    "lstm_tagger": "LSTM tagger",
}
CONTENDERS = {
    "torchq": "torchq_script_ms",
    "torch.ao": "torch_ao_jit",
    "ONNX Runtime": "onnxruntime",
    "OpenVINO": "openvino",
}
"""Contender -> its times in the data."""
QUALITY = ("torchq", "torch_ao", "onnxruntime", "openvino")
COLORS = ("#1a73e8", "#e8710a", "#9aa0a6", "#12a36f")
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#202124}"
    "@media(prefers-color-scheme:dark){text{fill:#e8eaed}}"
)


def rows() -> dict[str, dict[str, Any]]:
    """Return what was measured on one thread, by network."""
    found = json.loads(DATA.read_text(encoding="utf-8"))
    return {row["model"]: row for row in found if row["threads"] == 1}


def times(row: dict[str, Any]) -> list[float]:
    """Return the milliseconds of the contenders."""
    return [row[key] if key in row else row["peers"][key] for key in CONTENDERS.values()]


def table() -> str:
    """Return README's table."""
    names = ", ".join(CONTENDERS)
    titles = ["network", *CONTENDERS, "float", f"SQNR: {names}"]
    lines = [titles, ["---"] * len(titles)]
    for network, title in NETWORKS.items():
        row = rows()[network]
        best, *others = map(_short, times(row))
        quality = [row["sqnr_db"][name] for name in QUALITY]
        told = [f"**{db:.1f}**" if db == max(quality) else f"{db:.1f}" for db in quality]
        long = "BERT base, 128 tokens" if network == "bert_base" else title
        lines.append(
            [long, f"**{best}**", *others, _short(row["float_ms"]), f"{', '.join(told)} dB"]
        )
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return text.replace(" --- ", "---") + "\n\n"


def _short(milliseconds: float) -> str:
    digits = 0 if milliseconds >= 100 else 1 if milliseconds >= 1 else 2
    return f"{milliseconds:.{digits}f}"


def page() -> str:
    """Return docs/models.md."""
    sys.path.insert(0, str(DOCS.parent))
    from benchmarks.inference.markdown import page

    return page(json.loads(DATA.read_text(encoding="utf-8")))


def draw() -> str:
    """Return an SVG: for each network a bar per contender, as long as its time by torchq's."""
    measured, parts = rows(), [f"<style>{STYLE}</style>"]
    left, bar, unit, y = 130, 9, 84, 34
    for i, name in enumerate(CONTENDERS):
        x = left + 130 * i
        parts.append(f'<rect x="{x}" y="8" width="11" height="11" fill="{COLORS[i]}"/>')
        parts.append(f'<text x="{x + 16}" y="18">{name}</text>')
    for network, title in NETWORKS.items():
        row = times(measured[network])
        parts.append(f'<text x="{left - 10}" y="{y + 23}" text-anchor="end">{title}</text>')
        for i, value in enumerate(row):
            width, top = value / row[0] * unit, y + i * bar
            parts.append(
                f'<rect x="{left}" y="{top}" width="{width:.1f}" height="{bar - 1}" '
                f'fill="{COLORS[i]}"/>'
            )
        y += 4 * bar + 14
    title = "Times of six networks divided by those of torchq: shorter is faster"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 690 {y}" width="690" role="img">'
        f"<title>{title}</title>{''.join(parts)}</svg>\n"
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    README.write_text(TABLE.sub(table(), README.read_text(encoding="utf-8")), encoding="utf-8")
