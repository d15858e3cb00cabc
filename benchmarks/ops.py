# SPDX-License-Identifier: Apache-2.0
"""Single layers, verified and then timed in turn with native oneDNN and torch's own int8 ops.

Every layer has random full-range data, per-channel weight scales, a float32 bias, a ReLU and a
uint8 destination; zero points are 0. Its result must have the bits of torchq's reference tier and
be at most one step away from each peer's, where both compute the same. On a CPU without VNNI the
peers' sums saturate: their times are marked where their results are wrong. A residual sum is in
place for the peers; torchq reads the residual and writes a new tensor.

--line repeats linear layers and convolutions as TORCHQ_VERBOSE=1 printed them, with the post-ops,
dtypes and geometry that they had there.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

import torchq
from benchmarks import report
from benchmarks.attention import ATTENTION, CACHE, Attention, CachedAttention
from benchmarks.competitors import (
    Competitor,
    Operands,
    onednn_competitor,
    torch_competitor,
    torchq_call,
)
from benchmarks.dynamic import DYNAMIC, Dynamic
from benchmarks.embedding import EMBEDDING, Bags
from benchmarks.int4 import INT4, Int4
from benchmarks.lines import LoggedCall, LoggedLayer, read_lines
from benchmarks.onednn import Peer, RefusedError, WheelsUnavailableError, sums_are_exact
from benchmarks.peak import PATIENT, BusyMachineError, Peak, measure
from benchmarks.primitives import ELEMENTWISE, Primitive
from benchmarks.suites import SUITES, Layer
from benchmarks.timing import FULL, QUICK, Plan, call_blocks, interleave, op_blocks, use_threads

__all__ = ["add_arguments", "run"]

PEERS = ("onednn", "torch", "torchao")
_SRC_DTYPES = {"u8": torch.uint8, "s8": torch.int8}

AnyLayer: TypeAlias = (
    Layer | LoggedLayer | Primitive | Attention | CachedAttention | Bags | Dynamic | Int4
)
LAYERS: dict[str, Mapping[Any, int]] = {
    **SUITES,
    "elementwise": ELEMENTWISE,
    "attention": ATTENTION,
    "cache": CACHE,
    "embedding": EMBEDDING,
    "dynamic": DYNAMIC,
    "int4": INT4,
}


def verify(
    name: str, dst: Tensor, expected: Tensor, peers: dict[str, Competitor], *, saturate: bool
) -> set[str]:
    """The peers whose sums saturated: with ``saturate`` their results may be anywhere.

    Raises RuntimeError unless dst has the reference's bits and no other peer is too far away. A
    float32 dst may be 2^-18 of its largest value away from a peer's: they round in between.
    """
    saturated = set()
    if not torch.equal(dst, expected):
        wrong = int((dst != expected).sum())
        raise RuntimeError(
            f"{name}: torchq's result differs from its reference tier in {wrong} of "
            f"{dst.numel()} values. Nothing was timed; run the tests."
        )
    for other, peer in peers.items():
        step = peer.tolerance
        if dst.is_floating_point():
            step = max(2**-18 * float(dst.abs().max()), peer.real_tolerance)
        distance = float((dst.double() - peer.dst.double()).abs().max())
        if distance > step and saturate:
            saturated.add(other)
        elif distance > step:
            raise RuntimeError(
                f"{name}: torchq's result is {distance:g} from that of {other}, which must be at "
                f"most {step:g}. Nothing was timed."
            )
    return saturated


@dataclass(frozen=True)
class Setup:
    """Settings of a run. ``peer`` is the oneDNN process if ``names`` has onednn."""

    names: list[str]
    peer: Peer | None
    plan: Plan
    isa: str
    refusals: set[str] = field(default_factory=set)

    def competitors(
        self, label: str, makers: dict[str, Callable[[], Competitor]]
    ) -> dict[str, Competitor]:
        """The peers that can compute the layer; says why another cannot, each reason once."""
        found = {}
        for name in [name for name in self.names if name in makers]:
            try:
                found[name] = makers[name]()
            except RuntimeError as error:
                if name == "onednn" and not isinstance(error, RefusedError):
                    raise
                reason = f"{name} refuses: {str(error).splitlines()[0]}"
                if reason not in self.refusals:
                    print(f"benchmarks: {label}: {reason}", file=sys.stderr)
                self.refusals.add(reason)
        return found

    def contenders(
        self, layer: AnyLayer, src: str
    ) -> tuple[Callable[..., Tensor], Sequence[Any], dict[str, Callable[[], Competitor]]]:
        """torchq's op and its arguments, and what makes each peer's competitor."""
        if isinstance(layer, LoggedLayer):
            call = LoggedCall(layer)
            return *call.torchq, {"onednn": lambda: call.onednn(self._onednn)}
        if isinstance(layer, Primitive):
            srcs = layer.sources(_SRC_DTYPES[src])
            return *layer.ours(srcs), {"onednn": lambda: layer.competitor(srcs, self._onednn)}
        if isinstance(layer, Attention):
            srcs = layer.sources(_SRC_DTYPES[src])
            makers = {
                "onednn": lambda: layer.onednn(srcs, self._onednn),
                "torch": lambda: layer.torch(srcs),
            }
            return *layer.ours(srcs), makers
        if isinstance(layer, Bags | Dynamic):
            srcs = layer.sources()
            makers = {"torch": lambda: layer.torch(srcs), "torchao": lambda: layer.torchao(srcs)}
            return *layer.ours(srcs), makers
        if isinstance(layer, Int4 | CachedAttention):
            srcs = layer.sources()
            return *layer.ours(srcs), {"torch": lambda: layer.torch(srcs)}
        data = Operands.random(layer, _SRC_DTYPES[src])
        return *torchq_call(layer, data), {
            "onednn": lambda: onednn_competitor(layer, data, self._onednn),
            "torch": lambda: torch_competitor(layer, data),
        }

    def time(self, layer: AnyLayer, src: str) -> report.Times:
        """Verifies one layer, then times it; ``src`` is the dtype where the layer has none."""
        op, args, makers = self.contenders(layer, src)
        with torchq.use_isa("reference"):
            expected = op(*args)
        peers = self.competitors(layer.name, makers)
        with torchq.use_isa(self.isa):
            exact = Primitive | CachedAttention | Bags | Int4
            saturate = not (sums_are_exact() or isinstance(layer, exact))
            saturated = verify(layer.name, op(*args), expected, peers, saturate=saturate)
            kernel = torchq.last_kernel()
            blocks = {"kernel": op_blocks(op, args), "call": call_blocks(op, args)}
            blocks |= {name: peer.blocks for name, peer in peers.items()}
            samples = interleave(blocks, self.plan)
        return report.Times(kernel, samples.pop("kernel"), samples.pop("call"), samples, saturated)

    @property
    def _onednn(self) -> Peer:
        assert self.peer is not None
        return self.peer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--suite", choices=LAYERS)
    which.add_argument("--line", help="a line of TORCHQ_VERBOSE=1, or a file of them")
    parser.add_argument("--threads", type=int, default=1, help="of torchq and each peer")
    parser.add_argument("--isa", choices=torchq.supported_isas(), default=torchq.isa())
    parser.add_argument("--peers", default=",".join(PEERS), help="of these; '' for none")
    parser.add_argument(
        "--onednn", choices=("3.2", "3.13"), default="3.2", help="version; 3.2 has no group norm"
    )
    parser.add_argument("--src", choices=_SRC_DTYPES, default="u8", help="dtype of the source")
    parser.add_argument("--json", help="file for the medians, one row a layer")
    parser.add_argument("--plot", help="file for a bar chart of the ratios")
    parser.add_argument(
        "--quick", action="store_true", help="few short samples on any machine; only to try it"
    )


@contextlib.contextmanager
def _started(names: list[str], threads: int, version: str) -> Iterator[Peer | None]:
    """The oneDNN process if it is asked for; without its wheels a note, and no such peer."""
    if "onednn" not in names:
        yield None
        return
    try:
        peer = Peer(threads, version)
    except WheelsUnavailableError as error:
        print(f"benchmarks: no onednn: {error}", file=sys.stderr)
        names.remove("onednn")
        yield None
        return
    with peer:
        yield peer


def run(args: argparse.Namespace) -> int:
    names = [name for name in args.peers.split(",") if name]
    if unknown := sorted(set(names) - set(PEERS)):
        raise RuntimeError(f"--peers must be of {', '.join(PEERS)}, got {', '.join(unknown)}.")
    if args.plot:
        report.require_matplotlib()
    # Peers without such ops.
    absent = {"onednn"} if args.suite in ("cache", "embedding", "dynamic", "int4") else set()
    absent |= {"torchao"} if args.suite not in ("embedding", "dynamic") else set()
    absent |= {"torch"} if args.line or args.suite == "elementwise" else set()
    names = [name for name in names if name not in absent]
    layers = read_lines(args.line) if args.line else LAYERS[args.suite]
    use_threads(args.threads)
    torch.manual_seed(0)
    peak = measure(args.threads, args.isa, 1 if args.quick else PATIENT)
    if not args.quick:
        peak.check_quiet()
    with _started(names, args.threads, args.onednn) as peer, torch.inference_mode():
        setup = Setup(names, peer, QUICK if args.quick else FULL, args.isa)
        rows = _measure(args, setup, peak, layers)
    report.print_summary(rows)
    if not args.quick:
        _warn_if_busy(args)
    if args.json:
        report.write_json(rows, args.json)
    if args.plot:
        report.plot(rows, args.plot)
    return 0


def _warn_if_busy(args: argparse.Namespace) -> None:
    """A job that began during the run spoils it too; its table shows where."""
    try:
        measure(args.threads, args.isa).check_quiet()
    except BusyMachineError as error:
        print(f"benchmarks: at the end of the run {error}", file=sys.stderr)


def _measure(
    args: argparse.Namespace, setup: Setup, peak: Peak, layers: Mapping[Any, int]
) -> list[report.Row]:
    suite = args.suite or "line"
    report.print_header(suite, args.threads, args.isa, args.src, peak, setup.names)
    rows = []
    for layer, count in layers.items():
        times = setup.time(layer, args.src)
        row = report.Row(
            suite=suite,
            layer=layer.name,
            count=count,
            src_dtype=getattr(layer, "src_dtype", args.src),
            threads=args.threads,
            isa=args.isa,
            ops=2 * layer.macs,
            peak_gops=peak.tier_gops,
            times=times,
        )
        report.print_row(row, setup.names)
        rows.append(row)
    return rows
