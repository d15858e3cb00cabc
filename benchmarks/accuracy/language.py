# SPDX-License-Identifier: Apache-2.0
"""A small Llama, trained here on the sources of Python's standard library, and its perplexity."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchq
from benchmarks.accuracy.task import Task, seeded

_SHAPE = {
    "vocab_size": 1024, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 3, "num_key_value_heads": 3,
}  # fmt: skip
_LENGTH = 256  # of sequences, in tokens
_STEPS, _BATCH, _RATE = 500, 8, 4e-3
_CALIBRATION, _TEST = 32, 64  # sequences
_CACHE = Path(__file__).resolve().parents[2] / "build" / "accuracy"
_LEFT_OUT = ("test", "site-packages", "encodings", "pydoc_data", "idlelib", "lib2to3")
_GROUP_SIZES = (32, 64, 128)


class Language(nn.Module):
    """Tokens to the logits of the next ones."""

    def __init__(self, llama: nn.Module) -> None:
        super().__init__()
        self.llama = llama

    def forward(self, tokens: Tensor) -> Tensor:
        return self.llama(tokens, use_cache=False).logits


def load() -> Task:
    try:
        import tokenizers  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise RuntimeError(f"the package {error.name} is not installed") from error
    folder = _CACHE / f"llama-{_fingerprint()}"
    train, calibration, test = _tokens(folder)
    model = Language(_llama(folder / "llama.pt", train)).eval().requires_grad_(False)
    targets = test[:, 1:].flatten()

    def perplexity(logits: Tensor) -> float:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets).exp().item()

    def score(expected: Tensor, found: Tensor) -> str:
        own = perplexity(found)
        return f"{own:.3f} ({100 * (own / perplexity(expected) - 1):+.2f} %)"

    with torch.inference_mode():
        own = perplexity(model(test))
    count = sum(parameter.numel() for parameter in model.parameters())
    return Task(
        name="a small Llama",
        about=f"{count / 1e6:.1f} million parameters, trained for {_STEPS} steps on the sources of "
        f"Python {sys.version_info.major}.{sys.version_info.minor}'s standard library. Other files "
        f"of it calibrate ({calibration.numel():,} tokens) and measure ({test.numel():,}). Its "
        f"perplexity is {own:.3f} in float. SQNR is that of the logits. All linear layers are "
        "quantized, the output layer too.",
        metric="perplexity (beside float's)",
        model=model,
        calibration=list(calibration.split(4)),
        test=list(test.split(4)),
        score=score,
        timed=test[:1],
        variable={0: (0, 1)},
        remedies={**_four_bits(model, calibration), **_torchao(model)},
        is_transformer=True,
    )


def _four_bits(model: nn.Module, calibration: Tensor) -> dict[str, Callable[[], nn.Module]]:
    def make(**options: Any) -> Callable[[], nn.Module]:
        config = torchq.QConfig(weight_bits=4, **options)
        return lambda: torchq.quantize(model, list(calibration.split(4)), config=config)

    found = {}
    for size in _GROUP_SIZES:
        found[f"torchq, 4 bits in {size}, dynamic=True"] = make(dynamic=True, group_size=size)
        found[f"torchq, 4 bits in {size}, best"] = make(recipe="best", group_size=size)
    return found


def _torchao(model: nn.Module) -> dict[str, Callable[[], nn.Module]]:
    """Return torchao's model with 4-bit weights in groups, and sources of int8 rows."""

    def make() -> nn.Module:
        import copy

        from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
        from torchao.quantization.granularity import PerGroup

        small = copy.deepcopy(model)
        granularity = PerGroup(_GROUP_SIZES[0])
        quantize_(small, Int8DynamicActivationIntxWeightConfig(torch.int4, granularity))
        return small

    return {f"torchao, 4 bits in {_GROUP_SIZES[0]}": make}


def _fingerprint() -> str:
    """Return what changes where the model, its training or Python's library does."""
    settings = _SHAPE, _LENGTH, _STEPS, _BATCH, _RATE, sys.version
    return hashlib.sha256(repr(settings).encode()).hexdigest()[:12]


def _tokens(folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens to train with, flat, and sequences that calibrate and measure."""
    texts = _texts()
    first = [text for i, text in enumerate(texts) if i % 10]
    encode = _tokenizer(folder / "tokenizer.json", first)
    second, third = (encode("\n".join(texts[begin::20])) for begin in (0, 10))
    sequences = (
        tokens[: count * _LENGTH].view(count, _LENGTH)
        for tokens, count in ((second, _CALIBRATION), (third, _TEST))
    )
    return (encode("\n".join(first)), *sequences)


@cache
def _texts() -> list[str]:
    """Return files in an order of their own."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in root.rglob("*.py") if not set(p.relative_to(root).parts) & set(_LEFT_OUT)]
    files.sort(key=lambda p: hashlib.sha256(str(p.relative_to(root)).encode()).digest())
    return [path.read_text("utf-8", "replace") for path in files]


def _tokenizer(file: Path, texts: list[str]) -> Callable[[str], Tensor]:
    from tokenizers import ByteLevelBPETokenizer, Tokenizer

    if not file.exists():
        made = ByteLevelBPETokenizer()
        made.train_from_iterator(texts, _SHAPE["vocab_size"], show_progress=False)
        file.parent.mkdir(parents=True, exist_ok=True)
        made.save(str(file))
    tokenizer = Tokenizer.from_file(str(file))
    return lambda text: torch.tensor(tokenizer.encode(text).ids)


def _llama(file: Path, tokens: Tensor) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_SHAPE, max_position_embeddings=_LENGTH, attn_implementation="sdpa")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    if file.exists():
        model.load_state_dict(torch.load(file, weights_only=True))
        return model
    _train(model, tokens)
    torch.save(model.state_dict(), file)
    return model


def _train(model: nn.Module, tokens: Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), _RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, _STEPS, pct_start=0.1)
    generator, model = seeded(0), model.train()
    for step in range(_STEPS):
        begin = torch.randint(len(tokens) - _LENGTH, (_BATCH,), generator=generator)
        batch = torch.stack([tokens[i : i + _LENGTH] for i in begin.tolist()])
        loss = model(batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 49:
            print(f"  training: step {step + 1} of {_STEPS}, loss {loss:.3f}", file=sys.stderr)
