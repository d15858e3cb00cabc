# SPDX-License-Identifier: Apache-2.0
"""Chats with an int8 language model, word by word.

pip install -r examples/chat/requirements.txt
python examples/chat/run.py --model Qwen/Qwen2.5-0.5B-Instruct

Each line of input is a message. --bits 4 takes 4-bit weights.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from threading import Thread
from typing import Any

import torchq

try:
    import jinja2  # noqa: F401 - chat templates are written in it
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer
except ImportError as error:
    sys.exit(f"{error}: run `pip install -r examples/chat/requirements.txt`.")

Messages = list[dict[str, str]]


def load(name: str, bits: Any = 8) -> tuple[Any, Any]:
    """Loads tokenizer and model, whose linear layers are quantized as their weights are read."""
    config = torchq.TorchqConfig(weight_bits=bits)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, quantization_config=config)
    except OSError as error:
        sys.exit(f"No model {name}: give --model a folder, or a name that the Hub has.\n{error}")
    if tokenizer.chat_template is None:
        sys.exit(f"{name} has no chat template: take a model that was trained to chat.")
    return tokenizer, model.eval()


def answer(tokenizer: Any, model: Any, messages: Messages, most: int) -> Iterator[str]:
    """Yields pieces of the answer, while another thread generates it."""
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)

    def generate() -> None:
        try:
            model.generate(**inputs, streamer=streamer, max_new_tokens=most, do_sample=False)
        finally:
            streamer.end()  # an error, too, ends the answer

    Thread(target=generate).start()
    yield from streamer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
    parser.add_argument("--bits", type=int, default=8, choices=[8, 4])
    parser.add_argument("--most", type=int, default=200, help="tokens of an answer; default 200")
    args = parser.parse_args()
    tokenizer, model = load(args.model, args.bits)
    messages: Messages = []
    for line in map(str.strip, sys.stdin):
        messages.append({"role": "user", "content": line})
        text = ""
        for piece in answer(tokenizer, model, messages, args.most):
            print(piece, end="", flush=True)
            text += piece
        print(flush=True)
        messages.append({"role": "assistant", "content": text})


if __name__ == "__main__":
    main()
