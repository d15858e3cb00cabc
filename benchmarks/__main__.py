# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks <command>``."""

from __future__ import annotations

import argparse
import sys

from benchmarks import load, memory, ops, peak, rnn, workers
from benchmarks.accuracy import command as accuracy
from benchmarks.encoders import command as embeddings
from benchmarks.generation import command as generate
from benchmarks.inference import command as models
from benchmarks.migrate import command as migrate

COMMANDS = {
    "ops": (ops, "single layers beside native oneDNN and torch's own int8 ops"),
    "models": (models, "whole networks beside float, torch.ao, ONNX Runtime and OpenVINO"),
    "accuracy": (
        accuracy,
        "models with trained weights: their metric, beside others' quantization",
    ),
    "migrate": (migrate, "models of torch.ao's users, by each way to int8 on CPUs"),
    "embeddings": (
        embeddings,
        "sentences per second of text encoders, beside ONNX Runtime and OpenVINO",
    ),
    "generate": (
        generate,
        "tokens per second of language models, beside CTranslate2, OpenVINO GenAI and llama.cpp",
    ),
    "memory": (memory, "peak memory of quantizing and loading, beside torch.ao and torchao"),
    "load": (load, "a service's start: imports, load, first answers"),
    "workers": (workers, "memory that one more worker takes, by how it was started"),
    "rnn": (rnn, "recurrent layers beside native oneDNN, torch.ao's dynamic ones and float"),
    "peak": (peak, "this machine's multiply-add rates, cache bandwidths and op-call floors"),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, summary) in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=summary, description=module.__doc__))
    args = parser.parse_args()
    try:
        status: int = COMMANDS[args.command][0].run(args)
        return status
    except RuntimeError as error:  # a busy machine, a wrong result, no compiler: said in one line
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
