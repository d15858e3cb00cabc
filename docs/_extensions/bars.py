# SPDX-License-Identifier: Apache-2.0
"""Draws README's picture, times of whole networks as bars, from the tables in docs/models.md.

python docs/_extensions/bars.py
"""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parents[1]
PICTURE = DOCS / "_static" / "speed.svg"
NETWORKS = {
    "resnet50": "ResNet-50",
    "mobilenet_v2": "MobileNet-V2",
    "efficientnet_b0": "EfficientNet-B0",
    "vit_b_16": "ViT-B/16",
    "bert_base": "BERT base",
    "lstm_tagger": "LSTM tagger",
}
CONTENDERS = {
    "torchq": "torchq script",
    "torch.ao": "torch.ao jit",
    "ONNX Runtime": "ORT",
    "OpenVINO": "OpenVINO",
}
COLORS = ("#1a73e8", "#e8710a", "#9aa0a6", "#12a36f")
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#202124}"
    "@media(prefers-color-scheme:dark){text{fill:#e8eaed}}"
)


def times() -> dict[str, dict[str, float]]:
    """Return the milliseconds of each column of docs/models.md, by network."""
    text = (DOCS / "models.md").read_text(encoding="utf-8")
    table = text.split("## Time on 1 thread, ms\n", 1)[1].split("\n## ", 1)[0]
    lines = [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in table.split("\n")]
    header, *rows = (line for line in lines if line)
    return {row[0]: dict(zip(header[1:-1], map(float, row[1:-1]), strict=True)) for row in rows[1:]}


def draw() -> str:
    """Return an SVG: for each network a bar per contender, as long as its time by torchq's."""
    measured, parts = times(), [f"<style>{STYLE}</style>"]
    left, bar, unit, y = 130, 9, 84, 34
    for i, name in enumerate(CONTENDERS):
        x = left + 130 * i
        parts.append(f'<rect x="{x}" y="8" width="11" height="11" fill="{COLORS[i]}"/>')
        parts.append(f'<text x="{x + 16}" y="18">{name}</text>')
    for network, title in NETWORKS.items():
        row = [measured[network][column] for column in CONTENDERS.values()]
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
