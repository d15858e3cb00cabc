# SPDX-License-Identifier: Apache-2.0
"""Rows of results as a table, as JSON and as a chart.

A ratio is the peer's time by torchq's: above 1 torchq is faster. Native oneDNN is compared with
torchq's time inside C++, torch's ops with its time from Python, which theirs is too.
"""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peak import Peak
from benchmarks.timing import Samples, write_text

__all__ = [
    "Row",
    "Times",
    "plot",
    "print_header",
    "print_row",
    "print_summary",
    "require_matplotlib",
    "write_json",
]

_KERNEL_PEERS = {"onednn"}


@dataclass(frozen=True)
class Times:
    """Microseconds of one layer.

    ``kernel_name`` is the kernel and tier that ran, ``saturated`` the peers whose results
    are wrong for want of 32-bit sums.
    """

    kernel_name: str
    kernel: Samples
    call: Samples
    peers: dict[str, Samples]
    saturated: set[str]


@dataclass(frozen=True)
class Row:
    """One layer of a run."""

    suite: str
    layer: str
    count: int
    src_dtype: str
    threads: int
    isa: str
    ops: int
    peak_gops: float
    times: Times

    @property
    def gops(self) -> float:
        return self.ops / self.times.kernel.median / 1e3

    def own_us(self, peer: str) -> float:
        """torchq's time that compares with the peer's."""
        times = self.times
        return times.kernel.median if peer in _KERNEL_PEERS else times.call.median

    def ratio(self, peer: str) -> float:
        return self.times.peers[peer].median / self.own_us(peer)

    def json(self) -> dict[str, Any]:
        return {
            "suite": self.suite,
            "layer": self.layer,
            "count": self.count,
            "src_dtype": self.src_dtype,
            "threads": self.threads,
            "isa": self.isa,
            "ops": self.ops,
            "kernel_us": self.times.kernel.median,
            "call_us": self.times.call.median,
            "peers": {name: samples.median for name, samples in self.times.peers.items()},
            "peak_gops": self.peak_gops,
        }


def print_header(
    suite: str, threads: int, isa: str, src: str, peak: Peak, peers: Sequence[str]
) -> None:
    print(
        f"{suite}, {src} source, {threads} thread(s), {isa}; clock {peak.clock_ghz:.2f} GHz, "
        f"peak {peak.tier_gops:.0f} GOPS"
    )
    if peak.vnni_gops and peak.measured_vnni_gops:
        share = peak.measured_vnni_gops / peak.vnni_gops
        print(f"vpdpbusd loop: {peak.measured_vnni_gops:.0f} GOPS, {share:.1%} of its limit")
    print("us: medians and (distance between quartiles); x: the peer's time by torchq's\n")
    head = f"{'layer':<26}{'count':>5}{'GOPS':>7}{'% peak':>8}{'kernel us':>18}{'call us':>18}"
    print(head + "".join(f"{name + ' us':>18}{'x':>7}" for name in peers) + "  kernel")


def print_row(row: Row, peers: Sequence[str]) -> None:
    share = row.gops / row.peak_gops
    own = f"{row.layer:<26}{row.count:>5}{row.gops:>7.1f}{share:>8.1%}"
    figures = _figure(row.times.kernel) + _figure(row.times.call)
    for name in peers:
        if name in row.times.peers:
            ratio = f"{row.ratio(name):.2f}{'*' if name in row.times.saturated else ''}"
            figures += _figure(row.times.peers[name]) + f"{ratio:>7}"
        else:
            figures += f"{'-':>18}{'-':>7}"
    print(f"{own}{figures}  {row.times.kernel_name}", flush=True)


def _figure(samples: Samples) -> str:
    digits = 2 if samples.median < 100 else 1
    return f" {f'{samples.median:.{digits}f} ({samples.iqr:.{digits}f})':>17}"


def print_summary(rows: Sequence[Row]) -> None:
    """The suite as a whole: times weighted by the layers' counts, and the mean of the ratios."""
    kernel = _total(rows, [row.times.kernel.median for row in rows])
    call = _total(rows, [row.times.call.median for row in rows])
    gops = sum(row.count * row.ops for row in rows) / kernel / 1e3
    print(f"\ntotal weighted by count: kernel {kernel / 1e3:.3f} ms, call {call / 1e3:.3f} ms")
    print(f"  {gops:.1f} GOPS, {gops / rows[0].peak_gops:.1%} of the peak")
    for peer in sorted({name for row in rows for name in row.times.peers}):
        both = [row for row in rows if peer in row.times.peers]
        theirs = _total(both, [row.times.peers[peer].median for row in both])
        ours = _total(both, [row.own_us(peer) for row in both])
        mean = math.exp(statistics.fmean(math.log(row.ratio(peer)) for row in both))
        layers = "" if len(both) == len(rows) else f" ({len(both)} of {len(rows)} layers)"
        print(
            f"  {peer}{layers}: {theirs / 1e3:.3f} ms, {theirs / ours:.2f}x; geometric mean of the "
            f"layers {mean:.2f}x"
        )
    if any(row.times.saturated for row in rows):
        print("  * a wrong result: without VNNI the peer adds pairs of products in 16 bits")


def _total(rows: Sequence[Row], microseconds: Sequence[float]) -> float:
    return sum(row.count * us for row, us in zip(rows, microseconds, strict=True))


def write_json(rows: Sequence[Row], path: str) -> None:
    write_text(path, json.dumps([row.json() for row in rows], indent=1) + "\n")


def require_matplotlib() -> None:
    """Raises RuntimeError where it is missing, before anything is timed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise RuntimeError("--plot needs matplotlib: pip install 'torchq[bench]', or leave it out.")


def plot(rows: Sequence[Row], path: str) -> None:
    """One group of bars a layer: the ratio to each peer, 1 marked."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    peers = sorted({name for row in rows for name in row.times.peers})
    if not peers:
        raise RuntimeError("--plot needs at least one peer to draw ratios to.")
    height = 0.8 / len(peers)
    figure, axes = plt.subplots(figsize=(8, 1.5 + 0.22 * len(rows) * (1 + len(peers))))
    for index, peer in enumerate(peers):
        places = [y + index * height for y, row in enumerate(rows) if peer in row.times.peers]
        ratios = [row.ratio(peer) for row in rows if peer in row.times.peers]
        kind = "inside the op" if peer in _KERNEL_PEERS else "from Python"
        bars = axes.barh(places, ratios, height, label=f"{peer}, {kind}")
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=7)
    middle = (len(peers) - 1) * height / 2
    axes.set_yticks([y + middle for y in range(len(rows))], [row.layer for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.margins(x=0.1, y=0.01)
    first = rows[0]
    axes.set_xlabel("the peer's time by torchq's: beyond 1 torchq is faster")
    axes.set_title(
        f"{first.suite}, {first.src_dtype} source, {first.threads} thread(s), {first.isa}"
    )
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
