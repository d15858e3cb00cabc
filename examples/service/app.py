# SPDX-License-Identifier: Apache-2.0
"""Serves an int8 model over HTTP: POST a JSON list of images, get a class for each.

python examples/service/app.py --port 8080
curl -d "[[$(seq -s, 64)]]" localhost:8080
"""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

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


def load(path: Path) -> nn.Module:
    """Loads the int8 model from its file, which the first start writes."""
    if not path.exists():
        batches = [torch.rand(16, 1, SIDE, SIDE) for _ in range(8)]
        torchq.save(torchq.quantize(build(), batches), path)
    return torchq.load(path, build())


def read_images(body: bytes) -> Tensor:
    """Reads a JSON list of images, each a list of SIDE * SIDE numbers from 0 to 255."""
    images = torch.tensor(json.loads(body), dtype=torch.float32)
    if images.dim() != 2 or images.shape[1] != SIDE * SIDE or not len(images):
        raise ValueError(f"expected [[{SIDE * SIDE} numbers], ...], got {tuple(images.shape)}")
    return images.view(-1, 1, SIDE, SIDE) / 255


def handler(model: nn.Module) -> type[BaseHTTPRequestHandler]:
    """Returns the class that answers requests with this model."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, {"torchq": torchq.__version__, "isa": torchq.isa()})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            try:
                images = read_images(body)
            except (ValueError, TypeError) as error:
                return self.answer(400, {"error": str(error)})
            with torch.inference_mode():
                self.answer(200, {"classes": model(images).argmax(1).tolist()})

        def answer(self, status: int, value: object) -> None:
            text = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    return Handler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--model", type=Path, default=Path("model.tq"))
    parser.add_argument("--threads", type=int, default=1, help="for each request; default 1")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    server = ThreadingHTTPServer((args.host, args.port), handler(load(args.model)))
    print(f"http://{args.host}:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
