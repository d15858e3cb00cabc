# SPDX-License-Identifier: Apache-2.0
"""Trains a small network on scanned digits, quantizes it with torchq, and compares the two.

python examples/digits/run.py [--quick] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path

import torch
from model import DigitNet
from torch import Tensor, nn

import torchq

try:
    from picture import draw
    from train import Digits, load_data, load_or_train
except ImportError as error:
    sys.exit(f"{error}: run `pip install 'torchq-cpu[examples]'`.")

# torch.jit still works, but says at every call that torch.export is to be preferred.
warnings.filterwarnings("ignore", message=".*torch.jit.*")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="train less, do not judge speed")
    parser.add_argument("--output", type=Path, default=Path("build/digits"), help="folder")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    problems = demo(options.output, options.quick)
    print(f"\n{time.perf_counter() - start:.0f} s in total")
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


def demo(output: Path, quick: bool) -> list[str]:
    """Everything in order; returns what is not as it should be."""
    info = torchq.cpu_info()
    print(f"torch {info['torch']}, {info['threads']} threads, torchq on {info['isa']}")
    data = load_data()
    print(f"{len(data.train_labels)} training and {len(data.test_labels)} test images of 16x16")
    model, origin = load_or_train(data, output, epochs=3 if quick else 10)
    print(f"float model: {origin}")

    start = time.perf_counter()
    prepared = torchq.prepare(model, data.train_images[:1])
    torchq.calibrate(prepared, data.train_images.split(64))  # never sees a test image
    qmodel = torchq.convert(prepared, strict=True)  # strict: everything in int8, or an error
    print(f"int8 model: calibrated and converted in {time.perf_counter() - start:.1f} s\n")
    print(torchq.explain(qmodel))

    problems, title = compare_accuracy(model, qmodel, data)
    sqnr = compare_layers(prepared, qmodel, data.test_images)
    title += compare_size(model, qmodel, output)
    problems += check_loaded(qmodel, data.test_images, output)
    times, slow = compare_times(model, qmodel, data.test_images, quick)
    with torch.inference_mode():
        scores = model(data.test_images), qmodel(data.test_images)
    path = output / "digits.png"
    draw(path, title, (data.test_images, data.test_labels, *scores), sqnr, times)
    print(f"\npicture: {path}")
    return problems + ([] if quick else slow)


@torch.inference_mode()
def predictions(model: nn.Module, images: Tensor) -> Tensor:
    return torch.cat([model(batch).argmax(1) for batch in images.split(256)])


def compare_accuracy(model: nn.Module, qmodel: nn.Module, data: Digits) -> tuple[list[str], str]:
    f, q = predictions(model, data.test_images), predictions(qmodel, data.test_images)
    right, qright = (int((p == data.test_labels).sum()) for p in (f, q))
    n = len(data.test_labels)
    accuracy, qaccuracy = 100 * right / n, 100 * qright / n
    print(f"\naccuracy on the {n} test images")
    print(f"  float  {right} right = {accuracy:.2f} %")
    print(f"  int8   {qright} right = {qaccuracy:.2f} %")
    print(f"  accuracy difference: {qaccuracy - accuracy:+.2f} points")
    print(f"  same prediction on {int((f == q).sum())} of {n}")
    limit = 0.5
    drop = accuracy - qaccuracy
    problems = [f"int8 loses {drop:.2f} points, more than {limit}"] if drop > limit else []
    return problems, f"test accuracy: float {accuracy:.1f} %, int8 {qaccuracy:.1f} %"


def compare_layers(prepared: nn.Module, qmodel: nn.Module, images: Tensor) -> dict[str, float]:
    """Tables the signal-to-quantization-noise ratio of every layer."""
    layers = torchq.compare(prepared, qmodel, [images[:256]]).layers
    sqnr = {layer.name: layer.sqnr for layer in layers}
    width = max(map(len, sqnr))
    print("\nsignal to quantization noise after each layer, earlier errors included (6 dB = 1 bit)")
    for name, value in sqnr.items():
        print(f"  {name:{width}}  {value:5.1f} dB  {'#' * round(value)}")
    return sqnr


def compare_size(model: nn.Module, qmodel: nn.Module, output: Path) -> str:
    paths = output / "float.pt", output / "int8.torchq"
    torch.save(model.state_dict(), paths[0])
    torchq.save(qmodel, paths[1])
    size, qsize = (path.stat().st_size / 1024 for path in paths)
    ratio = f"{size / qsize:.1f} times smaller"
    print(f"\nsize on disk   float {size:.0f} KiB   int8 {qsize:.0f} KiB, {ratio}")
    return f"    on disk: float {size:.0f} KiB, int8 {qsize:.0f} KiB"


@torch.inference_mode()
def check_loaded(qmodel: nn.Module, images: Tensor, output: Path) -> list[str]:
    """The int8 model, saved and loaded both ways, must return the same bits."""
    scripted = output / "int8.torchscript.pt"
    torch.jit.freeze(torch.jit.script(qmodel)).save(str(scripted))
    loaded = {
        "torchq.load": torchq.load(output / "int8.torchq", DigitNet()),
        "frozen TorchScript": torch.jit.load(str(scripted)),
    }
    expected = qmodel(images)
    same = {name: torch.equal(model(images), expected) for name, model in loaded.items()}
    for name, equal in same.items():
        print(f"saved and loaded with {name}: {'identical bits' if equal else 'DIFFERENT'}")
    return [f"{name} changes the result" for name, equal in same.items() if not equal]


def compare_times(
    model: nn.Module, qmodel: nn.Module, images: Tensor, quick: bool
) -> tuple[dict[int, dict[str, float]], list[str]]:
    """Milliseconds per batch, and where int8 is not faster."""
    models = {
        "float eager": model,
        "int8 eager": qmodel,
        "float TorchScript": torch.jit.freeze(torch.jit.script(model)),
        "int8 TorchScript": torch.jit.freeze(torch.jit.script(qmodel)),
    }
    times: dict[int, dict[str, float]] = {}
    for batch, rounds, calls in ((1, 31, 20), (256, 15, 1)):
        source = images[:batch].to(memory_format=torch.channels_last)
        times[batch] = torchq.milliseconds(models, source, 3 if quick else rounds, calls)
    print("\nms per batch, median; the models take turns. float: channels_last, inference mode;")
    print("eager runs batch norm as a layer, frozen TorchScript folds it into the convolutions")
    slow = []
    for kind in ("eager", "TorchScript"):
        for batch, row in times.items():
            f, q = row[f"float {kind}"], row[f"int8 {kind}"]
            print(f"  {kind:11}  {batch:3} images   float {f:7.3f}   int8 {q:7.3f}   {f / q:.2f}x")
            if q >= f:
                slow.append(f"int8 {kind} is not faster with {batch} images")
    return times, slow


if __name__ == "__main__":
    sys.exit(main())
