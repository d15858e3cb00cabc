# SPDX-License-Identifier: Apache-2.0
"""The results as a page of the site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.generation.contenders import FLOAT
from benchmarks.generation.shapes import SHAPES, Speech
from benchmarks.inference.markdown import table

__all__ = ["page"]

Rows = Sequence[Mapping[str, Any]]

_HEAD = """# Generation of text

Tokens per second of models that stay in PyTorch, beside the runtimes that users leave it for.
`python -m benchmarks generate --render {files} --markdown docs/generate_benchmark.md`
writes this page; each machine below has the command that measured it.

Weights and prompts are random: neither changes the work. Each contender generates {count} tokens
greedily, in turns, in a process of its own. Times are medians; the spread is from the slowest round
to the fastest. *Prompt* is the time to the first token, with the speed beside PyTorch's float32 in
parentheses; *tokens/s* counts the later ones. *Memory* is what the process has grown by at most,
from before loading.

- *torchq* is `torchq.quantize` with `QConfig(dynamic=True, embedding_bits=8)`, run by `generate` of
  transformers; int4 has `weight_bits=4`.
- *CTranslate2* has converted the same folder with `quantization="int8"`.
- *OpenVINO GenAI* reads what optimum-intel wrote: `--weight-format int8`, and int4 with groups of
  32.
- *llama.cpp* reads a GGUF file of the same weights. With Q4_0, the table of embeddings, which is
  also the last layer, keeps 8 bits.
- *torch.compile* has `generate`'s static cache.
"""


_SPEECH = """{about}: an encoder of 30 seconds of audio, and a decoder that begins with four tokens
and goes on with {count}. *30 s of audio* is the time to the first of these. *A minute of audio* is
two such windows with all their tokens.

- *CTranslate2* is the runtime under faster-whisper. It tells nothing between the tokens: the time
  of decoding one is taken off that of decoding all, behind the same encoded audio.
- *torchq* captures both parts: its example has `input_features` and `decoder_input_ids`.
"""
_MACHINE = """## {cpu}, {isa}

Measured by `python -m benchmarks generate{options} --json {file}`
on {threads} of one {cpu}, tier `{isa}`, with {versions}.
"""
_NUMBERS = {1: "one", 2: "two"}


def page(*results: Mapping[str, Any]) -> str:
    """Return the page of what the command wrote as JSON, a section for each machine."""
    counts = dict.fromkeys(n for found in results for n in _values(found["rows"], "count"))
    files = " ".join(map(_file, results))
    parts = [_HEAD.format(files=files, count=" or ".join(map(str, counts)))]
    for found in results:
        parts += _machine(found)
    return "\n".join(parts)


def _file(results: Mapping[str, Any]) -> str:
    return f"docs/data/generate_{results['isa']}.json"


def _machine(results: Mapping[str, Any]) -> list[str]:
    """Return the paragraphs of a machine."""
    rows = results["rows"]
    parts = [
        _MACHINE.format(
            options=results["options"],
            file=_file(results),
            threads=_threads(*_values(rows, "threads")),
            cpu=results["cpu"],
            isa=results["isa"],
            versions=", ".join(f"{name} {text}" for name, text in results["versions"].items()),
        )
    ]
    for shape in _values(rows, "shape"):
        own, memory = (
            [r for r in results[key] if r["shape"] == shape] for key in ("rows", "memory")
        )
        parts += _section(shape, own, memory)
    left = [
        f"- {shape}, {contender}: {reason}"
        for shape, reasons in results["failures"].items()
        for contender, reason in reasons.items()
    ]
    return [*parts, *(["Not in the tables:\n", *left, ""] if left else [])]


def _values(rows: Rows, key: str) -> list[Any]:
    """Return the different values of a column."""
    return [*dict.fromkeys(row[key] for row in rows)]


def _threads(*counts: int) -> str:
    text = " and ".join(_NUMBERS.get(count, str(count)) for count in counts)
    return f"{text} thread" if counts == (1,) else f"{text} threads"


def _section(shape: str, rows: Rows, memory: Rows) -> list[str]:
    """Return the paragraphs of a shape: a table for each number of threads."""
    about = SHAPES[shape].about
    if isinstance(SHAPES[shape], Speech):
        about = _SPEECH.format(about=about, count=rows[0]["count"])
    else:
        about = f"{about}.\n"
    parts = [f"### {shape}\n", about]
    counts = _values(rows, "threads")
    for threads in counts:
        if len(counts) > 1:
            parts.append(f"On {_threads(threads)}:\n")
        own, kept = ([r for r in part if r["threads"] == threads] for part in (rows, memory))
        parts.append(_times(own, {row["contender"]: row for row in kept}))
    return parts


def _times(rows: Rows, memory: Mapping[str, Mapping[str, Any]]) -> str:
    found = {(row["contender"], row["prompt"]): row for row in rows}
    lengths = sorted(_values(rows, "prompt"))
    speech = isinstance(SHAPES[rows[0]["shape"]], Speech)
    heads = [""]
    for length in lengths:
        given = "30 s of audio" if speech else f"prompt of {length}"
        heads += [f"{given}, ms", "then tokens/s", *["a minute of audio, s"] * speech]
    lines = []
    for name in _values(rows, "contender"):
        line = [name]
        for length in lengths:
            row, beside = found[name, length], found[FLOAT, length]
            line.append(f"{row['prompt_ms']:.0f} ({beside['prompt_ms'] / row['prompt_ms']:.2f}x)")
            rates = [1e3 / row[key] for key in ("token_ms", "token_high_ms", "token_low_ms")]
            line.append("{:.1f} ({:.1f} to {:.1f})".format(*rates))
            if speech:
                own, other = _minute(row), _minute(beside)
                line.append(f"{own:.1f} ({other / own:.2f}x)")
        kept = memory[name]
        lines.append([*line, f"{kept['peak_mb']:.0f}", f"{kept['load_s']:.1f}"])
    return table([*heads, "memory, MB", "load, s"], lines)


def _minute(row: Mapping[str, Any]) -> float:
    """Return the seconds of two windows of 30 seconds."""
    window = row["prompt_ms"] + (row["count"] - 1) * row["token_ms"]
    return float(2 * window / 1e3)
