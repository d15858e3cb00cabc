# SPDX-License-Identifier: Apache-2.0
"""The cost of quantization for models with trained weights: their metric, dB, seconds, ms.

Some data calibrate and others measure. "s to quantize" is CPU time. "ms" is the median time of one
call, all models in turns, with its quartiles.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import torchq
from benchmarks.accuracy import (
    digits,
    imagenet,
    language,
    minilm,
    orientation,
    pitch,
    silero,
    voices,
)
from benchmarks.accuracy.contenders import contenders
from benchmarks.accuracy.task import Task
from torchq.analysis.timing import Times, measure

TASKS: dict[str, Callable[[], Task]] = {
    "minilm": minilm.load,
    "silero": silero.load,
    "voices": voices.load,
    "pitch": pitch.load,
    "orientation": orientation.load,
    "digits": digits.load,
    "language": language.load,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = f"of {', '.join(TASKS)}, or of ImageNet's networks; all of them if none"
    parser.add_argument("tasks", nargs="*", help=names)
    parser.add_argument(
        "--imagenet",
        type=Path,
        metavar="PATH",
        help="measure networks on ImageNet instead; its validation images are PATH/val/<class>/*",
    )
    parser.add_argument(
        "--weights",
        type=Path,
        metavar="FOLDER",
        help="state dicts of these networks, FOLDER/<network>.pth, instead of published weights",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=31, help="of timing")
    parser.add_argument("--only", default="", help="contenders whose names hold this")
    parser.add_argument("--markdown", type=Path, help="file for the page")


def run(args: argparse.Namespace) -> int:
    tasks = imagenet.loaders(args.imagenet, args.weights) if args.imagenet else TASKS
    if unknown := set(args.tasks) - set(tasks):
        raise RuntimeError(f"accuracy: no task {sorted(unknown)}; there are {list(tasks)}")
    torch.set_num_threads(args.threads)
    sections = []
    for name in args.tasks or tasks:
        try:
            task = tasks[name]()
        except RuntimeError as error:  # a package is missing: the page says so
            sections.append(f"## {name}\n\nLeft out: {error}.")
        else:
            sections.append(_section(task, args))
        print(f"{sections[-1]}\n", flush=True)
    if args.markdown is not None:
        args.markdown.write_text(_page(args, sections))
    return 0


def _section(task: Task, args: argparse.Namespace) -> str:
    expected = task.run(task.model, task.test)
    own = task.score(expected, expected) if task.knows_answers else ""
    models, rows = {"float": task.model}, {"float": [own, "", ""]}
    for name, make in contenders(task).items():
        if args.only not in name:
            continue
        try:
            models[name], rows[name] = _measured(task, make, expected)
        except Exception as error:  # of a peer: the table says so
            rows[name] = [_short(error), "", ""]
        print(task.name, name, *rows[name], sep=" | ", file=sys.stderr, flush=True)
    times = measure(models, task.timed, rounds=args.rounds)
    text = f"## {task.name}\n\n{task.about}\n\n{_table(task.metric, rows, times)}"
    if task.larger:
        text += f"\n\n{_larger(models, task.larger, args.rounds)}"
    return text


def _measured(
    task: Task, make: Callable[[], nn.Module], expected: Tensor
) -> tuple[nn.Module, list[str]]:
    begin = time.process_time()
    model = make()
    seconds, found = time.process_time() - begin, task.run(model, task.test)
    sqnr = torchq.sqnr(expected.float(), found.float())
    return model, [task.score(expected, found), f"{sqnr:.1f}", f"{seconds:.0f}"]


def _short(error: Exception) -> str:
    line = (str(error).strip().splitlines() or [""])[0].replace("|", "/")
    return f"{type(error).__name__}: {line}"[:80]


def _table(metric: str, rows: dict[str, list[str]], times: dict[str, Times]) -> str:
    heads = ["model", metric, "SQNR dB", "s to quantize", "ms (quartiles)"]
    lines = [heads, ["---"] * len(heads)]
    for name, cells in rows.items():
        shown = ""
        if name in times:
            low, high = times[name].quartiles
            shown = f"{times[name].median:.2f} ({low:.2f} to {high:.2f})"
        lines.append([name, *cells, shown])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _larger(models: dict[str, nn.Module], inputs: Sequence[Tensor], rounds: int) -> str:
    """Return medians of larger inputs, and their ratios to those of "fast"."""
    shown = {name: m for name, m in models.items() if name == "float" or "torchq" in name}
    heads = [f"{' x '.join(map(str, src.shape))}, ms" for src in inputs]
    lines = [f"| model | {' | '.join(heads)} |", "| --- " * (1 + len(heads)) + "|"]
    cells: dict[str, list[str]] = {name: [] for name in shown}
    for src in inputs:
        times = measure(shown, src, rounds=rounds)
        least = times.get("torchq, fast")
        for name, found in times.items():
            ratio = "" if least is None else f" ({found.median / least.median:.2f}x)"
            cells[name].append(f"{found.median:.1f}{ratio}")
    return "\n".join([*lines, *(f"| {name} | {' | '.join(c)} |" for name, c in cells.items())])


def _page(args: argparse.Namespace, sections: list[str]) -> str:
    if args.imagenet is not None:
        return "\n\n".join(["# Accuracy on ImageNet", *sections, ""])
    return f"""# Accuracy with trained weights

Generated by `python -m benchmarks accuracy --markdown docs/accuracy.md`, with torch
{torch.__version__} on one thread of {_cpu()}, tier `{torchq.isa()}`.

Each model is measured as its users would: on data that calibration never saw, by the decisions that
change from the float model's. All but the last two have weights that others trained. Times are
medians of {args.rounds} rounds in turns; a spread of more than a tenth tells of a busy machine,
where only large differences count.

- *torch.ao* quantizes linear and recurrent layers, with one scale for a layer's whole source.
- *ONNX Runtime* quantizes all operators that it can, as by default, with weights per channel.
- *NNCF* has its preset "mixed", and its model type for transformers; OpenVINO runs the result.
- *torchq, fast* is torchq's default. Rows below it are its remedies. `dynamic=True` leaves
  convolutions float.

ImageNet is not on this page, since its images may not be passed on. If you have the validation
images, three commands measure the image networks of NNCF's own table, in a checkout after
`make build`. The second one tries a single network:

```shell
.venv/bin/python -m pip install torchvision timm
.venv/bin/python -m benchmarks accuracy torchvision/resnet18 --imagenet PATH --only torchq
.venv/bin/python -m benchmarks accuracy --imagenet PATH --only torchq --markdown imagenet.md
```

Images are `PATH/val/<class>/*.JPEG`, in 1000 folders whose sorted names are the classes. 300 images
calibrate, and the others give top-1 and top-5. Networks and their published weights come from
torchvision and timm. `--weights FOLDER` reads state dicts such as `FOLDER/resnet18.pth` instead,
for as many classes as there are folders.

{(chr(10) * 2).join(sections)}
"""


def _cpu() -> str:
    """Return the CPU's name, as the operating system tells it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "a CPU")
