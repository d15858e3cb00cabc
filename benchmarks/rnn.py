# SPDX-License-Identifier: Apache-2.0
"""LSTM and GRU layers beside native oneDNN int8, torch.ao's dynamic LSTM and float torch.

Sequences of 32 steps, as many inputs as units, random data. Both cells of a size take turns with
their peers. The static layers take and emit uint8 with oneDNN's scale 127 and shift 128; the GRU is
torch's, beside oneDNN's vanilla one. Results must have the bits of torchq's reference tier. oneDNN
is compared with torchq's time inside C++, what is called from Python with torchq's calls of the
dynamic layer. The machine's peak is measured before and after each size; where it was busy, times
are taken again, and where it stays busy the row says so.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from benchmarks.onednn import Peer
from benchmarks.peak import PATIENT, REQUIRED_FRACTION, Peak, measure
from benchmarks.timing import (
    FULL,
    QUICK,
    Blocks,
    Plan,
    Samples,
    call_blocks,
    interleave,
    op_blocks,
    use_threads,
    write_text,
)
from torchq.nn import QGRU, QLSTM
from torchq.quantization.qparams import QParams

__all__ = ["add_arguments", "run"]

STEPS = 32
CELLS = ("lstm", "gru")
SHAPES = [(256, 1), (512, 1), (1024, 1), (512, 16), (512, 64)]
TRIES = 4  # of a size and of a peak, until the machine is quiet
DATA = QParams.per_tensor(1 / 127, 128)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=1, help="of torchq and each peer")
    parser.add_argument("--isa", choices=torchq.supported_isas(), default=torchq.isa())
    parser.add_argument("--json", help="file for the medians, one row a layer")
    parser.add_argument("--quick", action="store_true", help="few short samples, small shapes")


def onednn_blocks(cell: str, float_layer: nn.RNNBase, src: Tensor, peer: Peer) -> Blocks:
    """The native primitive on the same weights; its states begin at zero."""
    hidden, batch = float_layer.hidden_size, src.shape[1]
    gates = 4 if cell == "lstm" else 3

    def weight(name: str) -> Tensor:
        value: Tensor = getattr(float_layer, name).detach()
        return value.reshape(gates, hidden, hidden).permute(2, 0, 1)[None, None].contiguous()

    layer, recurrent = weight("weight_ih_l0"), weight("weight_hh_l0")
    largest = torch.maximum(layer.abs().amax((0, 1, 2)), recurrent.abs().amax((0, 1, 2)))
    state = torch.full((1, 1, batch, hidden), 128, dtype=torch.uint8)
    tensors = {"src_layer": src, "src_iter": state}
    if cell == "lstm":
        tensors["src_iter_c"] = torch.zeros(1, 1, batch, hidden)
    tensors |= {"weights_layer": layer, "weights_iter": recurrent}
    tensors["bias"] = float_layer.bias_ih_l0.detach().reshape(1, 1, gates, hidden)
    tensors |= {"dst_layer": torch.zeros_like(src), "dst_iter": state}
    if cell == "lstm":
        tensors["dst_iter_c"] = torch.zeros(1, 1, batch, hidden)

    def blocks(iterations: int, count: int) -> list[float]:
        factors = {"weights": 127 / largest}
        timing = peer.recurrent(cell, tensors, factors, samples=count, iterations=iterations)
        seconds: list[float] = timing.seconds
        return seconds

    return blocks


def torch_ao(layer: nn.RNNBase) -> Callable[[Tensor], Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        holder = nn.ModuleDict({"layer": layer})
        quantized = torch.ao.quantization.quantize_dynamic(holder, {type(layer)})
    module: Callable[[Tensor], Any] = quantized["layer"]
    return module


def competitors(cell: str, hidden: int, batch: int, peer: Peer) -> dict[str, Blocks]:
    """torchq's layer, verified, and its peers."""
    layer = (nn.LSTM if cell == "lstm" else nn.GRU)(hidden, hidden).eval()
    cls: Any = QLSTM if cell == "lstm" else QGRU
    static = cls.from_float(layer, DATA, DATA, dst_dtype=torch.uint8)
    dynamic = cls.from_float(layer)
    src = torch.randint(0, 256, (STEPS, batch, hidden), dtype=torch.uint8)
    real = (src.float() - 128) / 127
    with torchq.use_isa("reference"):
        expected = static(src[:2])[0], dynamic(real[:2])[0]
    got = static(src[:2])[0], dynamic(real[:2])[0]
    if not all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)):
        raise RuntimeError(f"{cell} {hidden}: torchq differs from its reference tier.")
    return {
        "kernel": op_blocks(static, (src,)),
        "onednn": onednn_blocks(cell, layer, src, peer),
        "dynamic": call_blocks(dynamic, (real,)),
        "torch.ao": call_blocks(torch_ao(layer), (real,)),
        "float": call_blocks(layer, (real,)),
    }


@dataclass(frozen=True)
class Measured:
    """A size's times, by cell and competitor, and the worse of the peaks before and after them."""

    times: dict[str, dict[str, Samples]]
    peak: Peak


def measured(
    cells: dict[str, dict[str, Blocks]], plan: Plan, peak: Callable[[], Peak], tries: int
) -> Measured:
    """Times of both cells, which take turns like their peers: they are compared, too.

    They are taken again, up to ``tries`` times, until the machine is quiet before and after.
    Otherwise they are those of the try with the best peak.
    """
    turns = {f"{cell} {name}": cells[cell][name] for name in cells["lstm"] for cell in cells}
    best: Measured | None = None
    for _ in range(tries):
        before, times = peak(), interleave(turns, plan)
        worse = min(before, peak(), key=lambda found: found.fraction)
        if best is None or worse.fraction > best.peak.fraction:
            of_cells = {c: {name: times[f"{c} {name}"] for name in own} for c, own in cells.items()}
            best = Measured(of_cells, worse)
        if best.peak.quiet:
            break
    assert best is not None
    return best


def run(args: argparse.Namespace) -> int:
    use_threads(args.threads)
    torch.manual_seed(0)
    if not args.quick:
        measure(args.threads, args.isa, PATIENT).check_quiet()
    print(f"sequence {STEPS}, {args.threads} thread(s), {args.isa}")
    print(
        "us: medians; x: torchq's time by the peer's, static beside onednn, dynamic beside others; "
        "/lstm: by that of the LSTM; peak: at that time"
    )
    columns = f"{'static':>9}{'/lstm':>6}{'% peak':>8}{'onednn':>9}{'x':>6}{'dynamic':>9}"
    print(f"{'layer':<18}{columns}{'torch.ao':>10}{'x':>6}{'float':>9}{'x':>6}")
    rows: list[dict[str, Any]] = []
    plan, tries = (QUICK, 1) if args.quick else (FULL, TRIES)

    def peak() -> Peak:
        return measure(args.threads, args.isa, tries)

    with Peer(args.threads) as peer, torch.inference_mode(), torchq.use_isa(args.isa):
        for hidden, batch in [(64, 2)] if args.quick else SHAPES:
            cells = {cell: competitors(cell, hidden, batch, peer) for cell in CELLS}
            found = measured(cells, plan, peak, tries)
            for cell in CELLS:
                rows.append(_row(cell, hidden, batch, found, args))
    busy = [row["layer"] for row in rows if row["share_of_peak"] < REQUIRED_FRACTION]
    if busy and not args.quick:
        print(f"benchmarks: the machine was busy during {', '.join(busy)}", file=sys.stderr)
    if args.json:
        write_text(args.json, json.dumps(rows, indent=1) + "\n")
    return 0


def _row(
    cell: str, hidden: int, batch: int, found: Measured, args: argparse.Namespace
) -> dict[str, Any]:
    us = {name: samples.median for name, samples in found.times[cell].items()}
    lstm_us, peak = found.times["lstm"]["kernel"].median, found.peak
    ops = 2 * STEPS * batch * (4 if cell == "lstm" else 3) * hidden * 2 * hidden
    share = ops / us["kernel"] / 1e3 / peak.tier_gops
    name = f"{cell} H={hidden} N={batch}"
    own = f"{us['kernel']:>9.1f}{us['kernel'] / lstm_us:>6.2f}{share:>8.1%}"
    own += f"{us['onednn']:>9.1f}{us['kernel'] / us['onednn']:>6.2f}"
    ao = f"{us['torch.ao']:>10.1f}{us['dynamic'] / us['torch.ao']:>6.2f}"
    real = f"{us['float']:>9.1f}{us['dynamic'] / us['float']:>6.2f}"
    busy = "" if peak.quiet else f"  busy: {peak.fraction:.0%}"
    print(f"{name:<18}{own}{us['dynamic']:>9.1f}{ao}{real}{busy}", flush=True)
    return {
        "layer": name,
        "threads": args.threads,
        "isa": args.isa,
        "ops": ops,
        "kernel_us": us.pop("kernel"),
        "dynamic_call_us": us.pop("dynamic"),
        "peers": us,
        "peak_gops": peak.tier_gops,
        "share_of_peak": peak.fraction,
    }
