# SPDX-License-Identifier: Apache-2.0
"""A worker of the service: the model, its batches, and the HTTP server; app.py starts it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any

import torch
from app import parser
from torch import Tensor, nn

import torchq

SIDE = 8


def build(width: int = 16) -> nn.Module:
    """A classifier of gray images; a real service trains it, here its weights are random."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(SIDE // 2),
        nn.Flatten(),
        nn.Linear(8 * width, 10),
    ).eval()


def load(args: argparse.Namespace) -> Callable[[Tensor], Tensor]:
    """Loads the model; float and ONNX Runtime are there for comparison (load_test.py)."""
    if args.runtime == "float":
        return build(args.width)
    if args.runtime == "torchq":
        return torchq.load(args.model, mmap=True)  # the graph needs no float model
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = args.threads
    session = onnxruntime.InferenceSession(args.model.with_suffix(".onnx"), options)
    name = session.get_inputs()[0].name
    return lambda images: torch.from_numpy(session.run(None, {name: images.numpy()})[0])


def write(args: argparse.Namespace) -> None:
    """Writes the files that workers load."""
    batches = [torch.rand(16, 1, SIDE, SIDE) for _ in range(8)]
    if not args.model.exists():
        torchq.save(torchq.quantize(build(args.width), batches), args.model)
    if args.runtime == "onnxruntime":
        model = torchq.load(args.model)
        torchq.to_onnx(model, args.model.with_suffix(".onnx"), batches[0])


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

    def __init__(self, model: Callable[[Tensor], Tensor], waiting: int, rows: int) -> None:
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
    model = load(args)
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


if __name__ == "__main__":
    given = parser().parse_args()
    write(given) if given.listener is None else work(given)
