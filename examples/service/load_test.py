# SPDX-License-Identifier: Apache-2.0
"""Puts load on the service: torchq in turns with float and the int8 of ONNX Runtime.

    pip install locust onnx onnxruntime
    python examples/service/load_test.py --width 256 --users 16 --seconds 10 --rounds 3

Each round starts the service anew for each runtime, sends one request, and lets locust's users send
requests of one to eight images without a pause. Printed are medians of the rounds.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
RUNTIMES = "torchq", "float", "onnxruntime"


@contextmanager
def service(folder: Path, runtime: str, args: argparse.Namespace) -> Iterator[str]:
    """Starts the service, and gives its address."""
    options = [f"--runtime={runtime}", f"--model={folder / runtime}", "--port=0"]
    options += [f"--width={args.width}", f"--workers={args.workers}", "--waiting=1000"]
    command = [sys.executable, str(HERE / "app.py"), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


def first_answer(address: str) -> None:
    body = json.dumps([[0] * 64]).encode()
    with urllib.request.urlopen(urllib.request.Request(address, body)) as answer:
        assert len(json.load(answer)["classes"]) == 1


def load(address: str, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Runs locust; returns requests per second, p50 and p99 in ms, and failures."""
    command = [sys.executable, "-m", "locust", "-f", str(HERE / "locustfile.py"), "--headless"]
    command += [f"--users={args.users}", f"--spawn-rate={args.users}", f"--host={address}"]
    command += [f"--run-time={args.seconds}s", f"--csv={folder / 'load'}", "--stop-timeout=9"]
    subprocess.run(command, check=True, capture_output=True)
    with (folder / "load_stats.csv").open() as file:
        row = next(row for row in csv.DictReader(file) if row["Name"] == "Aggregated")
    names = {"requests/s": "Requests/s", "p50": "50%", "p99": "99%", "failures": "Failure Count"}
    return {name: float(row[column]) for name, column in names.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=256, help="channels of the first layer")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--seconds", type=int, default=10, help="of a round; 0: first answers only")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    missing = [name for name in ("locust", "onnx", "onnxruntime") if find_spec(name) is None]
    if missing:
        sys.exit(f"No {', '.join(missing)}: run `pip install locust onnx onnxruntime`.")
    found: dict[str, list[dict[str, float]]] = {runtime: [] for runtime in RUNTIMES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(args.rounds + 1):
            for runtime in RUNTIMES:
                start = time.monotonic()
                with service(folder, runtime, args) as address:
                    first_answer(address)
                    row = {"first answer": time.monotonic() - start}
                    if number == 0:  # it wrote the model's files
                        continue
                    if args.seconds:
                        row |= load(address, folder, args)
                found[runtime].append(row)
    columns = list(found["torchq"][0])
    print("| runtime |", " | ".join(columns), "|")
    print("|---" * (len(columns) + 1) + "|")
    for runtime, rows in found.items():
        medians = [statistics.median(row[column] for row in rows) for column in columns]
        print(f"| {runtime} |", " | ".join(f"{value:.4g}" for value in medians), "|")


if __name__ == "__main__":
    main()
