# SPDX-License-Identifier: Apache-2.0
"""Serves an int8 model over HTTP: POST a JSON list of images, get a class for each.

    python examples/service/app.py --port 8080 --workers 2
    curl -d "[[$(seq -s, 64)]]" localhost:8080

A supervisor starts workers that map one file of weights to memory, and accept from one socket. It
replaces a worker that dies; connections that the worker had not accepted go to the others.
"""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

WORKER = Path(__file__).with_name("worker.py")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of this command, and of the workers, which get the same options."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--host", default="127.0.0.1")
    made.add_argument("--port", type=int, default=8080)
    made.add_argument("--model", type=Path, default=Path("model.tq"))
    made.add_argument("--runtime", default="torchq", help="torchq, float or onnxruntime")
    made.add_argument("--width", type=int, default=16, help="channels of the first layer")
    made.add_argument("--workers", type=int, default=2, help="processes; default 2")
    made.add_argument("--threads", type=int, default=1, help="of each worker; default 1")
    made.add_argument("--waiting", type=int, default=64, help="requests of a worker, then 503")
    made.add_argument("--rows", type=int, default=256, help="of a batch; default 256")
    made.add_argument("--drain", type=float, default=0, help="seconds from SIGTERM to the stop")
    made.add_argument("--listener", type=int, help=argparse.SUPPRESS)
    return made


def command(args: argparse.Namespace) -> list[str]:
    options = [f"--{key}={value}" for key, value in vars(args).items() if key != "listener"]
    return [sys.executable, str(WORKER), *options]


def start(args: argparse.Namespace, listener: socket.socket) -> subprocess.Popen[str]:
    """Starts a worker."""
    number, pipe = listener.fileno(), subprocess.PIPE
    return subprocess.Popen(
        [*command(args), f"--listener={number}"],
        stdin=pipe, stdout=pipe, text=True, pass_fds=[number],
    )  # fmt: skip


def wait_until_ready(worker: subprocess.Popen[str]) -> None:
    assert worker.stdout is not None
    if worker.stdout.readline() != "ready\n":
        sys.exit("a worker does not start")


def supervise(args: argparse.Namespace) -> None:
    """Keeps the workers running until SIGTERM or Ctrl-C, then lets them finish what they have."""
    if not args.model.exists():
        subprocess.run(command(args), check=True)  # this process needs no torch: it starts at once
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((args.host, args.port))
    workers: list[subprocess.Popen[str]] = []
    try:
        workers = [start(args, listener) for _ in range(args.workers)]
        for worker in workers:
            wait_until_ready(worker)
        print(f"http://{args.host}:{listener.getsockname()[1]}", flush=True)
        while True:
            time.sleep(0.1)
            for i, worker in enumerate(workers):
                if worker.poll() is not None:
                    workers[i] = start(args, listener)
                    wait_until_ready(workers[i])
    except KeyboardInterrupt:
        pass
    finally:
        listener.close()
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.close()
        for worker in workers:
            worker.wait()


if __name__ == "__main__":
    supervise(parser().parse_args())
