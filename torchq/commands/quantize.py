# SPDX-License-Identifier: Apache-2.0
"""``torchq quantize MODEL -o OUT``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from torch import nn

import torchq
from torchq.commands.model import model_and_batches, unpickled
from torchq.commands.pretrained import Folder
from torchq.commands.report import (
    batches_text,
    outputs,
    print_accuracy,
    state_bytes,
    static,
    summarize,
)
from torchq.migrate.ao_modules import kind
from torchq.migrate.torchao import is_torchao
from torchq.models.inputs import Inputs, call

_MODEL_HELP = (
    "file.py:function or package:function that returns a model or (model, batches); a folder of "
    "transformers or sentence-transformers; or a model of torch.ao that torch.save wrote"
)


def add_quantize(parser: argparse.ArgumentParser) -> None:
    """Add what to quantize, how, and where to write it."""
    parser.add_argument("model", metavar="MODEL", help=_MODEL_HELP)
    parser.add_argument("-o", "--output", metavar="OUT", type=Path, required=True)
    parser.add_argument(
        "--dynamic", action="store_true", help="quantize sources at run time: needs no data"
    )
    if has_recipes():
        parser.add_argument("--recipe", metavar="NAME", help="recipe of torchq.QConfig")
    parser.add_argument(
        "--data",
        metavar="PATH",
        type=Path,
        help="for a folder: a text file, one sample per line, or a folder of images; to calibrate "
        "and to compare with the float model",
    )
    parser.add_argument(
        "--samples", metavar="N", type=int, default=64, help="of --data (default: %(default)s)"
    )
    parser.add_argument(
        "--trust-pickle", action="store_true", help="load a pickled MODEL, which runs its code"
    )
    parser.add_argument("--threads", type=int, help="torch.set_num_threads")


def has_recipes() -> bool:
    """Return whether QConfig takes a recipe."""
    return any(field.name == "recipe" for field in fields(torchq.QConfig))


def quantize(args: argparse.Namespace) -> int:
    """Quantize a model, write it, and say its size, its int8 layers and its accuracy."""
    for name in ("samples", "threads"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(
                f"torchq quantize: --{name} must be positive, got {value}. Leave it out for the "
                "default."
            )
    if args.dynamic and getattr(args, "recipe", None):
        raise ValueError(
            "torchq quantize: --recipe must be left out with --dynamic, got both. A recipe says "
            "how to calibrate."
        )
    if not args.output.absolute().parent.is_dir():
        raise ValueError(
            f"torchq quantize: OUT must be in a folder that exists, got '{args.output}'. Make the "
            "folder first."
        )
    path = Path(args.model)
    if path.is_dir():
        return Folder(path, args, _config(args)).run()
    if args.data is not None:
        raise ValueError(
            f"torchq quantize: --data must be left out where MODEL is no folder, got "
            f"'{args.data}'. Let the function return (model, batches)."
        )
    if args.output.is_dir():
        raise ValueError(
            f"torchq quantize: OUT must be a file, got the folder '{args.output}'. Name a file in "
            "it, such as model.safetensors."
        )
    batches: Sequence[Inputs] = ()
    if path.is_file() and path.suffix != ".py":
        model = unpickled(path, args.trust_pickle)
    else:
        model, batches = model_and_batches(args.model)
    before = state_bytes(model)
    qmodel = _quantized(model, batches, args)
    expected = outputs("given model", model, partial(call, model), batches)
    torchq.save(qmodel, args.output)
    summarize(qmodel, args.output, before)
    got = outputs("int8 model", qmodel, partial(call, qmodel), batches)
    print_accuracy(expected, got, batches_text(batches))
    print(f"load it: torchq.load({str(args.output)!r}, model), with the model before quantization")
    return 0


def _config(args: argparse.Namespace) -> torchq.QConfig:
    recipe = getattr(args, "recipe", None)
    return torchq.QConfig() if recipe is None else torchq.QConfig(recipe=recipe)


def _quantized(model: nn.Module, batches: Sequence[Inputs], args: argparse.Namespace) -> nn.Module:
    if any(kind(module) for module in model.modules()):  # of torch.ao
        return torchq.from_torch_ao(model, batches[0] if batches else None)
    if is_torchao(model):
        return torchq.from_torchao(model)
    if args.dynamic:
        return _dynamic(model)
    if not batches:
        raise ValueError(
            f"torchq quantize: MODEL must give batches to calibrate with, got none from "
            f"'{args.model}'. Return (model, batches), or add --dynamic."
        )
    return static(model, batches, _config(args))


def _dynamic(model: nn.Module) -> nn.Module:
    """Return the model with dynamic layers; its report says what to do for convolutions.

    Raises:
        ValueError: nothing of it has a dynamic form.
    """
    qmodel = torchq.quantize_dynamic(model)
    rows = torchq.explain(qmodel).rows
    layers = [row for row in rows if row.is_matmul]
    if not any(row.quantized for row in layers):
        kinds = ", ".join(dict.fromkeys(row.kind for row in layers)) or "no layers"
        raise ValueError(
            f"torchq quantize: --dynamic must meet linear or recurrent layers, got a model with "
            f"{kinds}. Leave --dynamic out, and let the function return (model, batches) to "
            "calibrate convolutions with."
        )
    told = "calibrated only: return (model, batches), and leave --dynamic out"
    vars(qmodel)["torchq_report"] = [
        replace(row, reason=told) if row.kind.startswith("Conv") and row.requested else row
        for row in rows
    ]
    return qmodel
