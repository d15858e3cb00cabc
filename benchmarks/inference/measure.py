# SPDX-License-Identifier: Apache-2.0
"""One network: converted by everyone on the same data, compared, and timed in turn."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import importlib.util
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from benchmarks import models
from benchmarks.inference import quality, runtimes, torch_ao
from benchmarks.inference.runtimes import Runtime, int8_onnx, int8_openvino
from benchmarks.models import NETWORKS
from benchmarks.timing import Plan, call_blocks, interleave

__all__ = ["PEERS", "WAYS", "Measured", "measure"]

PEERS = {
    "torch_ao": ("torch.ao",),
    "torch_ao_jit": ("torch.ao",),
    "onnxruntime": ("onnx", "onnxruntime"),
    "openvino": ("openvino", "nncf"),
}
"""Name -> what must be installed."""

_CACHE = Path(__file__).resolve().parents[2] / "build" / "zoo"
_EVALUATED = 8  # inputs

Model = Callable[..., Any]


class WrongBitsError(RuntimeError):
    """TorchScript computes something else than the model; nothing is timed then."""


@dataclass
class Measured:
    """The results of one network.

    Attributes:
        model: name.
        macs: multiply-adds of one input.
        float_layers: what torchq left in float.
        sqnr_db: output SQNR of torchq and each peer.
        float_bytes, torchq_bytes: sizes on disk.
        seconds: contender -> what it took to quantize the model, calibration included; absent
            where it was found in the cache.
        times: threads -> contender -> milliseconds.
        failures: contender -> why it has no figures.
    """

    model: str
    macs: int
    float_layers: list[quality.FloatLayer] = field(default_factory=list)
    sqnr_db: dict[str, float] = field(default_factory=dict)
    float_bytes: int = 0
    torchq_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    times: dict[int, dict[str, float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def int8_share(self) -> float:
        """Share of multiply-adds in int8; 0 if torchq failed."""
        return (
            0.0
            if "torchq" in self.failures
            else 1 - sum(r[2] for r in self.float_layers) / self.macs
        )

    def rows(self) -> list[dict[str, Any]]:
        """One per number of threads, for JSON."""
        names = ("model", "threads", "torchq_ms", "torchq_script_ms", "float_ms", "peers")
        rows = []
        for threads, times in self.times.items():
            own = (times.get(name) for name in ("torchq", "torchq_script", "float"))
            peers = {name: times[name] for name in PEERS if name in times}
            row = dict(zip(names, (self.model, threads, *own, peers), strict=True))
            row["ways"] = {name: times[name] for name in WAYS if name in times}
            row |= {"macs": self.macs, "int8_mac_share": self.int8_share, "sqnr_db": self.sqnr_db}
            row |= {"float_bytes": self.float_bytes, "torchq_bytes": self.torchq_bytes}
            row |= {"quantize_seconds": self.seconds, "failures": self.failures}
            row["float_layers"] = [
                dict(zip(("name", "class", "macs", "reason"), layer, strict=True))
                for layer in self.float_layers
            ]
            rows.append(row)
        return rows


WAYS = ("torchq_export", "torchq_compile")
"""Ways to run torchq's model beside eager and TorchScript: a program's module, and Inductor."""


def measure(
    name: str,
    peers: list[str],
    threads: list[int],
    plan: Plan,
    small: bool,
    ways: tuple[str, ...] = (),
) -> Measured:
    """Converts, compares and times one network of the zoo; ``ways`` are of WAYS.

    Raises:
        WrongBitsError: the frozen TorchScript of torchq's model, or one of the ways to run it, has
            other bits than the model.
    """
    return _Run(name, peers, small, ways).measure(threads, plan)


class _Run:
    def __init__(self, name: str, peers: list[str], small: bool, ways: tuple[str, ...]) -> None:
        network = NETWORKS[name]
        self.peers, self.network, self.ways = peers, network, ways
        self.batch = network.batch
        self.float, self.batches = network.build(small), network.calibration(small)
        self.inputs = network.inputs(_EVALUATED, small=small)
        self.src = self.inputs[: self.batch].clone()
        self.expected = self._outputs(self.float)
        self.folder = _CACHE / f"{name}{'-small' if small else ''}-{_fingerprint()}"
        self.counts = quality.macs(self.float, self.inputs[:1])
        self.result = Measured(name, sum(self.counts.values()))
        self.result.float_bytes = quality.float_bytes(self.float)

    def measure(self, threads: list[int], plan: Plan) -> Measured:
        found: dict[str, Model] = {}
        for make in (self._torchq, self._torch_ao):
            found |= make()
        files = self._files()
        for count in threads:
            self.result.times[count] = self._time(found, files, count, plan)
        return self.result

    def _outputs(self, model: Model) -> list[Tensor]:
        return quality.run(model, self.inputs, self.batch)

    def _torchq(self) -> dict[str, Model]:
        with self._failing("torchq"):
            start = time.perf_counter()
            converted = torchq.quantize(self.float, self.batches, self.batches[0][: self.batch])
            self.result.seconds["torchq"] = time.perf_counter() - start
            self.result.float_layers = quality.float_layers(converted, self.counts)
            self.result.torchq_bytes = quality.int8_bytes(converted)
            outputs = self._outputs(converted)
            self.result.sqnr_db["torchq"] = torchq.sqnr(self.expected, outputs)
            found: dict[str, Model] = {"torchq": converted}
            for name in ("torchq_script", *self.ways):
                found |= self._other_way(name, converted, outputs)
            return found
        return {}

    def _other_way(self, name: str, model: nn.Module, outputs: list[Tensor]) -> dict[str, Model]:
        """The model frozen, exported or compiled, if it computes the same bits."""
        with self._failing(name):
            if name == "torchq_script":
                other = frozen(model, self.src)
            elif name == "torchq_export":
                with torch.no_grad():
                    other = torch.export.export(model, (self.src,)).module()
            else:
                other = torch.compile(model, fullgraph=True)
            results = self._outputs(other)
            same = all(map(torch.equal, results, outputs))
            if name == "torchq_compile" and self.result.float_layers:
                # Inductor adds up what stays float in an order of its own.
                same = torchq.sqnr(outputs, results) > 120
            if not same:
                raise WrongBitsError(f"{name} has other bits than the model it was made from.")
            return {name: other}
        return {}

    def _torch_ao(self) -> dict[str, Model]:
        if not {"torch_ao", "torch_ao_jit"}.intersection(self.peers):
            return {}
        with self._failing("torch_ao"):
            start = time.perf_counter()
            model = torch_ao.quantized(self.float, self.batches, self.network.dynamic)
            self.result.seconds["torch_ao"] = time.perf_counter() - start
            outputs = self._outputs(model)
            self.result.sqnr_db["torch_ao"] = torchq.sqnr(self.expected, outputs)
            found: dict[str, Model] = {"torch_ao": model} if "torch_ao" in self.peers else {}
            if "torch_ao_jit" in self.peers:
                with self._failing("torch_ao_jit"):
                    found["torch_ao_jit"] = frozen(model, self.src)
            return found
        return {}

    def _files(self) -> dict[str, Path]:
        """The models of the runtimes, each quantized by its own tool."""
        common = (self.float, self.batches, self.folder)
        is_transformer = self.network.requires == "transformers"
        makers = {
            "onnxruntime": lambda: int8_onnx(*common, self.batch),
            "openvino": lambda: int8_openvino(*common, is_transformer, self.batch),
        }
        found = {}
        for name in filter(self.peers.__contains__, makers):
            with self._failing(name):
                start = time.time()
                found[name] = makers[name]()
                if found[name].stat().st_mtime > start:
                    self.result.seconds[name] = time.time() - start
        return found

    def _time(
        self, found: dict[str, Model], files: dict[str, Path], threads: int, plan: Plan
    ) -> dict[str, float]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            with torch.inference_mode(), contextlib.ExitStack() as stack:
                blocks = {name: call_blocks(model, (self.src,)) for name, model in found.items()}
                blocks["float"] = call_blocks(self._faster_float(), (self.src,))
                for name, path in files.items():
                    with self._failing(name):
                        runtime = Runtime(name, path, self.inputs, threads, self.batch)
                        stack.enter_context(runtime)
                        self.result.sqnr_db[name] = torchq.sqnr(self.expected, runtime.outputs)
                        blocks[name] = runtime.blocks
                samples = interleave(blocks, plan)
        finally:
            torch.set_num_threads(before)
        return {name: 1e-3 * sample.median for name, sample in samples.items()}

    def _faster_float(self) -> nn.Module:
        """The model in the layout that suits it: contiguous or channels-last."""
        layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
        if self.src.dim() not in layouts:
            return self.float
        other: Any = layouts[self.src.dim()]
        models = [self.float, copy.deepcopy(self.float).to(memory_format=other)]
        return min(models, key=lambda model: min(call_blocks(model, (self.src,))(1, 3)))

    @contextlib.contextmanager
    def _failing(self, *names: str) -> Any:
        """Notes why a contender cannot take part, and goes on without it."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except WrongBitsError:
            raise
        except Exception as error:
            lines = str(error).strip().splitlines() or ["no message"]
            for name in names:
                self.result.failures[name] = f"{type(error).__name__}: {lines[0]}"
                print(f"benchmarks: {name}: {self.result.failures[name]}", file=sys.stderr)


def frozen(model: nn.Module, src: Tensor) -> Model:
    """TorchScript by a trace, its constants folded, warmed up."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated; shapes become constants
        traced = torch.jit.trace(model, (src,), check_trace=False, strict=False)
        result: Model = torch.jit.freeze(traced.eval())
        for _ in range(3):
            result(src)
    return result


@functools.cache
def _fingerprint() -> str:
    """Returns a hash of the definitions, the converters and torch's version."""
    definitions = sorted(Path(models.__file__).parent.glob("*.py"))
    text = torch.__version__
    for path in (*definitions, Path(torch_ao.__file__), Path(runtimes.__file__)):
        text += path.read_text()
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def installed(peer: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in PEERS[peer])
