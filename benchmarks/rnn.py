# SPDX-License-Identifier: Apache-2.0
"""LSTM and GRU layers beside native oneDNN int8, torch.ao's dynamic LSTM and float torch.

Sequences of 32 steps, as many inputs as units, random data. Both cells of a size take turns with
their peers. The static layers take and emit uint8 with oneDNN's scale 127 and shift 128; the GRU is
torch's, beside oneDNN's vanilla one. Results must have the bits of torchq's reference tier. oneDNN
is compared with torchq's time inside C++, what is called from Python with torchq's calls of the
dynamic layer.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from benchmarks.onednn import Peer
from benchmarks.peak import measure
from benchmarks.timing import FULL, QUICK, Blocks, Samples, call_blocks, interleave, op_blocks
from torchq.nn import QGRU, QLSTM
from torchq.qparams import QParams

__all__ = ["add_arguments", "run"]

STEPS = 32
CELLS = ("lstm", "gru")
SHAPES = [(256, 1), (512, 1), (1024, 1), (512, 16), (512, 64)]
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


def measured(
    hidden: int, batch: int, peer: Peer, args: argparse.Namespace
) -> dict[str, dict[str, Samples]]:
    """Times of both cells, which take turns like their peers: they are compared, too."""
    cells = {cell: competitors(cell, hidden, batch, peer) for cell in CELLS}
    turns = {f"{cell} {name}": cells[cell][name] for name in cells["lstm"] for cell in CELLS}
    times = interleave(turns, QUICK if args.quick else FULL)
    return {cell: {name: times[f"{cell} {name}"] for name in cells[cell]} for cell in CELLS}


def run(args: argparse.Namespace) -> int:
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    peak = measure(args.threads, args.isa)
    if not args.quick:
        peak.check_quiet()
    print(f"sequence {STEPS}, {args.threads} thread(s), {args.isa}; peak {peak.tier_gops:.0f} GOPS")
    print(
        "us: medians; x: torchq's time by the peer's, static beside onednn, dynamic beside others; "
        "/lstm: by that of the LSTM"
    )
    columns = f"{'static':>9}{'/lstm':>6}{'% peak':>8}{'onednn':>9}{'x':>6}{'dynamic':>9}"
    print(f"{'layer':<18}{columns}{'torch.ao':>10}{'x':>6}{'float':>9}{'x':>6}")
    rows = []
    with Peer(args.threads) as peer, torch.inference_mode(), torchq.use_isa(args.isa):
        for hidden, batch in [(64, 2)] if args.quick else SHAPES:
            times = measured(hidden, batch, peer, args)
            lstm_us = times["lstm"]["kernel"].median
            for cell in CELLS:
                rows.append(_row(cell, hidden, batch, times[cell], lstm_us, args, peak.tier_gops))
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def _row(
    cell: str,
    hidden: int,
    batch: int,
    times: dict[str, Samples],
    lstm_us: float,
    args: argparse.Namespace,
    peak: float,
) -> dict[str, Any]:
    us = {name: samples.median for name, samples in times.items()}
    ops = 2 * STEPS * batch * (4 if cell == "lstm" else 3) * hidden * 2 * hidden
    share = ops / us["kernel"] / 1e3 / peak
    name = f"{cell} H={hidden} N={batch}"
    own = f"{us['kernel']:>9.1f}{us['kernel'] / lstm_us:>6.2f}{share:>8.1%}"
    own += f"{us['onednn']:>9.1f}{us['kernel'] / us['onednn']:>6.2f}"
    ao = f"{us['torch.ao']:>10.1f}{us['dynamic'] / us['torch.ao']:>6.2f}"
    real = f"{us['float']:>9.1f}{us['dynamic'] / us['float']:>6.2f}"
    print(f"{name:<18}{own}{us['dynamic']:>9.1f}{ao}{real}", flush=True)
    return {
        "layer": name,
        "threads": args.threads,
        "isa": args.isa,
        "ops": ops,
        "kernel_us": us.pop("kernel"),
        "dynamic_call_us": us.pop("dynamic"),
        "peers": us,
        "peak_gops": peak,
    }
