# SPDX-License-Identifier: Apache-2.0
"""``torchq inspect FILE``: what a saved model holds."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from torchq.attributes.arguments import float_text
from torchq.nn.module import Spec, read_spec
from torchq.report.rows import Row
from torchq.report.tables import text_table
from torchq.serialization import read_state
from torchq.serialization.graph_text import GRAPH_KEY
from torchq.serialization.report_text import REPORT_KEY, read_report

_OWN = ("torchq_aliases", "torchq_call")
"""Tensors that say how a model is called, and which tensors have several names."""
_HEADS = ("module", "class", "bytes", "what it holds")

Specs = Mapping[str, Spec]


def add_inspect(parser: argparse.ArgumentParser) -> None:
    """Add the file, and how to print."""
    parser.add_argument("file", metavar="FILE", help="written by torchq.save")
    parser.add_argument("--tensors", action="store_true", help="list every tensor, too")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def inspect(args: argparse.Namespace) -> int:
    """List the modules of a saved model: what they are, their sizes, and what is float."""
    path = Path(args.file)
    if not path.is_file():
        state = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(
            f"torchq inspect: FILE must be a file written by torchq.save, got '{path}', which "
            f"{state}."
        )
    state_dict = read_state(path)
    report = state_dict.pop(REPORT_KEY, None)
    rows: list[Row] = [] if report is None else read_report(report).get("torchq_report", [])
    holders: dict[str, dict[str, Tensor]] = {}
    for key, value in state_dict.items():
        holder, _, name = key.rpartition(".")
        if name != GRAPH_KEY:
            holders.setdefault(holder, {})[name] = value
    specs = {
        holder: read_spec(tensors.pop("spec")) if "spec" in tensors else {"class": "float"}
        for holder, tensors in holders.items()
    }
    if args.json:
        modules = {
            holder: {"spec": specs[holder], "tensors": {k: _form(v) for k, v in tensors.items()}}
            for holder, tensors in holders.items()
        }
        told, size = [asdict(row) for row in rows], sum(map(_bytes, state_dict.values()))
        print(json.dumps({"modules": modules, "explain": told, "bytes": size}, indent=1))
        return 0
    print(_table(specs, holders, rows))
    if args.tensors:
        _print_tensors(specs, holders)
    print(f"{path}: {path.stat().st_size / 1e6:.3g} MB")
    return 0


def _table(specs: Specs, holders: Mapping[str, dict[str, Tensor]], rows: Sequence[Row]) -> str:
    """Return one line per module of the float model, and which layers are float."""
    lines = []
    for name, parts in _by_module(specs, rows).items():
        tensors = {key: v for part in parts for key, v in holders[part].items() if key not in _OWN}
        if not tensors and all(specs[part]["class"] == "float" for part in parts):
            continue
        known = [p for p in parts if specs[p]["class"] not in ("float", "QuantizedLeaf")]
        main = name if name in known else next(iter(known), None)
        size = sum(_bytes(value) for part in parts for value in holders[part].values())
        kind = specs[main]["class"] if main is not None else "float"
        what = _described(specs[main]) if main is not None else _float_text(tensors)
        lines.append((name or "(the model)", kind, f"{size:,}", what))
    layers = [row for row in rows if row.is_matmul]
    notes = [f"float: {row.name}: {row.reason}" for row in layers if not row.quantized]
    if layers:
        quantized = sum(row.quantized for row in layers)
        notes.append(f"{quantized} of {len(layers)} layers run in int8")
    return text_table([_HEADS, *lines], notes)


def _by_module(specs: Specs, rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the names of what holds tensors, by the module of the float model; graphs first.

    Modules are in the order of the report.
    """
    found: dict[str, list[str]] = {row.name: [] for row in rows}
    for holder in sorted(specs, key=lambda name: "torchq_graph" not in name):
        name = re.sub(r"(^|\.)torchq_graph(\.|$)", r"\1", holder).strip(".")
        around = re.sub(r"(^|\.)layers?(\.\d+)?$", "", name)
        inside = specs.get(around, {"class": "float"})["class"] != "float"
        found.setdefault(around if inside else name, []).append(holder)
    return {name: parts for name, parts in found.items() if parts}


def _described(spec: Spec) -> str:
    """Return what a quantized module computes."""
    texts = [f"weight {spec['weight']}"] if spec.get("weight") else []
    if spec.get("bits", 8) != 8:
        texts.append(f"{spec['bits']} bits")
    if spec.get("src"):
        texts.append(f"{spec['src']} -> {spec.get('dst', spec['src'])}")
    if spec.get("cell"):
        texts.append(f"{spec['cell']}, sizes {spec['sizes']}")
    if spec.get("layers"):
        count = len(spec["layers"])
        texts += [f"{count} layer{'s' * (count != 1)}", _described(spec["layers"][0])]
    if spec.get("post_ops"):
        texts.append(str(spec["post_ops"]))
    return ", ".join(texts)


def _float_text(tensors: Mapping[str, Tensor]) -> str:
    found = [f"{name} {_form(v)['dtype']} {_form(v)['shape']}" for name, v in tensors.items()]
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def _print_tensors(specs: Specs, holders: Mapping[str, dict[str, Tensor]]) -> None:
    for holder, tensors in holders.items():
        print(f"\n{holder or '(the model)'}: {specs[holder]['class']}")
        fields = {k: v for k, v in specs[holder].items() if k not in ("class", "version")}
        for key, field in fields.items():
            if field not in ("", [], None):
                print(f"    {key} = {field}")
        width = max(map(len, tensors), default=0)
        for name, value in tensors.items():
            form = _form(value)
            print(f"    {name:{width}}  {form['dtype']:8}  {form['shape']}{_few(value)}")
    print()


def _bytes(value: Tensor) -> int:
    return value.numel() * value.element_size()


def _form(value: Tensor) -> dict[str, object]:
    return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}


def _few(value: Tensor) -> str:
    """Return the values, where they are few."""
    if not 0 < value.numel() <= 4:
        return ""
    number = float_text if value.is_floating_point() else str
    return f"  [{', '.join(number(v) for v in value.flatten().tolist())}]"
