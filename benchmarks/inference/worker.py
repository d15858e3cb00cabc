# SPDX-License-Identifier: Apache-2.0
"""A runtime in a process of its own, so that its threads are its own.

``python -m benchmarks.inference.worker RUNTIME MODEL INPUTS OUTPUTS THREADS BATCH`` loads the
model, writes its results for all batches of inputs (``.npz`` files), says ``ready``, and then
answers each line "iterations count" with seconds per execution of ``count`` blocks on the first.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Infer = Callable[[np.ndarray], list[np.ndarray]]


def onnxruntime(path: str, threads: int) -> Infer:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda src: session.run(None, {name: src})


def openvino(path: str, threads: int) -> Infer:
    import openvino as ov

    core = ov.Core()
    settings: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32",  # what is not int8 shall not become bf16
    }
    request = core.compile_model(core.read_model(path), "CPU", settings).create_infer_request()

    def infer(src: np.ndarray) -> list[np.ndarray]:
        request.infer([src], share_inputs=True)
        return [tensor.data for tensor in request.output_tensors]

    return infer


RUNTIMES = {"onnxruntime": onnxruntime, "openvino": openvino}


def _seconds(infer: Infer, src: np.ndarray, iterations: int) -> float:
    start = time.perf_counter()
    for _ in range(iterations):
        infer(src)
    return (time.perf_counter() - start) / iterations


def main() -> None:
    runtime, path, inputs, outputs, threads, size = sys.argv[1:]
    infer = RUNTIMES[runtime](path, int(threads))
    sources = np.load(inputs)["inputs"]
    batches = np.split(sources, len(sources) // int(size))
    results = [[np.array(dst) for dst in infer(src)] for src in batches]
    flat = [np.concatenate([dst.ravel() for dst in result]) for result in results]
    np.savez(outputs, outputs=np.stack(flat))
    print("ready", flush=True)
    for line in sys.stdin:
        iterations, count = map(int, line.split())
        blocks = [_seconds(infer, batches[0], iterations) for _ in range(count)]
        print(*blocks, flush=True)


if __name__ == "__main__":
    main()
