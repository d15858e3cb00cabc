# SPDX-License-Identifier: Apache-2.0
"""Serves an int8 model over HTTP: POST a JSON list of images, get a class for each.

    python examples/service/app.py --port 8080 --workers 2
    curl -d "[[$(seq -s, 64)]]" localhost:8080

A supervisor starts workers that map one file of weights to memory, and accept from one socket. It
replaces a worker that dies; connections that the worker had not accepted go to the others.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor, nn

import torchq

SIDE = 8


def build() -> nn.Module:
    """A small classifier of gray images; a real service trains it, here its weights are random."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    ).eval()


def read_images(body: bytes) -> Tensor:
    """Reads a JSON list of images, each a list of SIDE * SIDE numbers from 0 to 255."""
    images = torch.tensor(json.loads(body), dtype=torch.float32)
    if images.dim() != 2 or images.shape[1] != SIDE * SIDE or not len(images):
        raise ValueError(f"expected [[{SIDE * SIDE} numbers], ...], got {tuple(images.shape)}")
    return images.view(-1, 1, SIDE, SIDE) / 255


class Batcher:
    """Runs the requests that wait as one batch; int8 layers give each the bits of a call alone.

    A batch takes what came while the one before ran, so a lone request never waits for others.
    """

    def __init__(self, model: nn.Module, waiting: int, rows: int) -> None:
        self.model, self.rows = model, rows
        self.queue: Queue[tuple[Tensor, Future[Tensor]]] = Queue(waiting)
        Thread(target=self.run, daemon=True).start()

    def submit(self, images: Tensor) -> Future[Tensor]:
        """Raises queue.Full where too many wait already."""
        future: Future[Tensor] = Future()
        self.queue.put_nowait((images, future))
        return future

    @torch.inference_mode()
    def run(self) -> None:
        while True:
            batch = [self.queue.get()]
            try:
                while sum(len(images) for images, _ in batch) < self.rows:
                    batch.append(self.queue.get_nowait())
            except Empty:
                pass
            images = [images for images, _ in batch]
            try:
                results = self.model(torch.cat(images)).split([len(each) for each in images])
            except Exception as error:
                for _, future in batch:
                    future.set_exception(error)
                continue
            for (_, future), result in zip(batch, results, strict=True):
                future.set_result(result)


def handler(batcher: Batcher, draining: Event) -> type[BaseHTTPRequestHandler]:
    """Returns the class that answers requests."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # seconds; a client that sends nothing must not hold a stop

        def do_GET(self) -> None:
            if self.path == "/ready":  # a balancer asks: send no more once a stop began
                ready = not draining.is_set()
                return self.answer(200 if ready else 503, {"ready": ready, "worker": os.getpid()})
            self.answer(200, {"torchq": torchq.__version__, "isa": torchq.isa()})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            try:
                scores = batcher.submit(read_images(body)).result()
            except (ValueError, TypeError) as error:
                return self.answer(400, {"error": str(error)})
            except Full:
                return self.answer(503, {"error": "too many requests wait; try again"})
            self.answer(200, {"classes": scores.argmax(1).tolist(), "scores": scores.tolist()})

        def answer(self, status: int, value: object) -> None:
            text = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            if status == 503:
                self.send_header("Retry-After", "1")
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args: Any) -> None:
            """Prints nothing for each request."""

    return Handler


class Server(ThreadingHTTPServer):
    daemon_threads = False  # server_close waits for requests that were accepted


def work(args: argparse.Namespace) -> None:
    """Serves until stdin ends: when the supervisor stops, or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the supervisor, too
    torch.set_num_threads(args.threads)
    model = torchq.load(args.model, build(), mmap=True)
    model(torch.zeros(1, 1, SIDE, SIDE))  # the first call of a process is slower
    draining = Event()
    batcher = Batcher(model, args.waiting, args.rows)
    listener = socket.socket(fileno=args.listener)
    listener.setblocking(False)  # several workers wake up, one of them accepts
    server = Server(listener.getsockname(), handler(batcher, draining), bind_and_activate=False)
    server.socket = listener
    listener.listen(1024)  # here: before a worker is ready, connections are refused
    Thread(target=server.serve_forever).start()
    print("ready", flush=True)
    sys.stdin.read()
    draining.set()
    time.sleep(args.drain)
    server.shutdown()
    server.server_close()


def start(args: argparse.Namespace, listener: socket.socket) -> subprocess.Popen[str]:
    """Starts a worker."""
    options = [f"--{key}={value}" for key, value in vars(args).items() if key != "listener"]
    command = [sys.executable, __file__, *options, f"--listener={listener.fileno()}"]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, pass_fds=[listener.fileno()]
    )


def wait_until_ready(worker: subprocess.Popen[str]) -> None:
    assert worker.stdout is not None
    if worker.stdout.readline() != "ready\n":
        sys.exit("a worker does not start")


def supervise(args: argparse.Namespace) -> None:
    """Keeps the workers running until SIGTERM or Ctrl-C, then lets them finish what they have."""
    if not args.model.exists():
        batches = [torch.rand(16, 1, SIDE, SIDE) for _ in range(8)]
        torchq.save(torchq.quantize(build(), batches), args.model)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--model", type=Path, default=Path("model.tq"))
    parser.add_argument("--workers", type=int, default=2, help="processes; default 2")
    parser.add_argument("--threads", type=int, default=1, help="of each worker; default 1")
    parser.add_argument("--waiting", type=int, default=64, help="requests of a worker, then 503")
    parser.add_argument("--rows", type=int, default=256, help="of a batch; default 256")
    parser.add_argument("--drain", type=float, default=0, help="seconds from SIGTERM to the stop")
    parser.add_argument("--listener", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    supervise(args) if args.listener is None else work(args)


if __name__ == "__main__":
    main()
