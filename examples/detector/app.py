# SPDX-License-Identifier: Apache-2.0
"""Serves an int8 detector with FastAPI: POST an image, get labels, scores and boxes.

pip install -r examples/detector/requirements.txt
python examples/detector/app.py --model hustvl/yolos-tiny --port 8080
curl --data-binary @photo.jpg -H "Content-Type: image/jpeg" localhost:8080/detect

A body that is no image is answered with 422.
"""

from __future__ import annotations

import argparse
import io
import sys
from typing import Annotated, Any

import torch

import torchq

try:
    import uvicorn
    from fastapi import Body, FastAPI, HTTPException
    from PIL import Image, UnidentifiedImageError
    from transformers import AutoImageProcessor, AutoModelForObjectDetection
except ImportError as error:
    sys.exit(f"{error}: run `pip install -r examples/detector/requirements.txt`.")


def load(name: str) -> tuple[Any, Any]:
    """Loads processor and model, whose linear layers become int8 as their weights are read."""
    config = torchq.TorchqConfig()
    try:
        processor = AutoImageProcessor.from_pretrained(name, backend="pil")
        model = AutoModelForObjectDetection.from_pretrained(name, quantization_config=config)
    except OSError as error:
        sys.exit(f"No model {name}: give --model a folder, or a name that the Hub has.\n{error}")
    return processor, model.eval()


def make_app(processor: Any, model: Any, threshold: float) -> FastAPI:
    app = FastAPI()

    @app.post("/detect")  # a plain function: FastAPI runs each request in a thread of its own
    def detect(body: Annotated[bytes, Body(media_type="image/*")]) -> list[dict[str, Any]]:
        try:
            image = Image.open(io.BytesIO(body)).convert("RGB")
        except (UnidentifiedImageError, Image.DecompressionBombError, OSError) as error:
            raise HTTPException(422, f"expected an image such as JPEG or PNG: {error}") from error
        with torch.inference_mode():
            results = model(**processor(images=image, return_tensors="pt"))
        sizes = [(image.height, image.width)]
        (found,) = processor.post_process_object_detection(results, threshold, sizes)
        parts = (found[key].tolist() for key in ("labels", "scores", "boxes"))
        return [
            {"label": model.config.id2label[label], "score": score, "box": box}
            for label, score, box in zip(*parts, strict=True)
        ]

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="hustvl/yolos-tiny")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--threshold", type=float, default=0.9, help="of scores; default 0.9")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    uvicorn.run(make_app(*load(args.model), args.threshold), port=args.port)


if __name__ == "__main__":
    main()
