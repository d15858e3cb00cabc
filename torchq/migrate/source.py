# SPDX-License-Identifier: Apache-2.0
"""``torchq migrate``: uses of torch.ao and torchao's PT2E in source files, and what to write."""

from __future__ import annotations

import ast
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PACKAGES = (
    *("torch.ao.quantization", "torch.quantization", "torch.ao.nn", "torch.nn.quantized"),
    *("torch.nn.quantizable", "torch.nn.intrinsic", "torch.nn.qat", "torch.ao.ns"),
    "torchao.quantization.pt2e",
)
_FUSES = "nothing: torchq fuses by itself"
_PLACES = "nothing: torchq finds by itself where values become int8"
_CONFIG = "torchq.QConfig(...), and overrides={name pattern: QConfig or None} for single layers"
_MODULES = "nothing: torchq.convert makes the modules of torchq.nn"
_TRAINING = (
    "torchq.prepare_qat(model, example_inputs) of the float model; or keep it for training, and "
    "then torchq.quantize(model, None, example_inputs), which takes the trained scales"
)
_ADVICE = {
    "quantize_dynamic": "torchq.quantize_dynamic, with the same arguments",
    "quantize": "torchq.quantize(model, batches)",
    **dict.fromkeys(
        ("prepare", "prepare_fx", "prepare_pt2e"), "torchq.prepare(model, example_inputs)"
    ),
    **dict.fromkeys(
        ("convert", "convert_fx", "convert_to_reference_fx"),
        "torchq.convert(prepared), or torchq.from_torch_ao(model) on what it returned before",
    ),
    "convert_pt2e": "torchq.convert(prepared), or torchq.from_pt2e(model) on what it returns",
    **dict.fromkeys(
        ("prepare_qat", "prepare_qat_fx", "prepare_qat_pt2e", "quantize_qat", "disable_observer",
         "enable_observer"),
        _TRAINING,
    ),
    **dict.fromkeys(
        ("QuantStub", "DeQuantStub", "QuantWrapper", "add_quant_dequant"), _PLACES
    ),
    **dict.fromkeys(
        ("FloatFunctional", "FXFloatFunctional", "QFunctional"),
        "+, *, torch.cat and torch.matmul: torchq finds them",
    ),
    "MinMaxObserver": 'torchq.QConfig(activation_observer="minmax")',
    "MovingAverageMinMaxObserver": 'torchq.QConfig(activation_observer="moving_average")',
    "HistogramObserver": 'torchq.QConfig(activation_observer="histogram"), the default',
    **dict.fromkeys(
        ("PerChannelMinMaxObserver", "default_per_channel_weight_observer"),
        'torchq.QConfig(weight_granularity="per_channel"), the default',
    ),
    "default_weight_observer": 'torchq.QConfig(weight_granularity="per_tensor")',
    "default_dynamic_qconfig": 'torchq.QConfig(dynamic=True, weight_granularity="per_tensor")',
    "per_channel_dynamic_qconfig": "torchq.QConfig(dynamic=True)",
    "float16_dynamic_qconfig": "torchq.QConfig(dynamic=True): int8 is half of float16's size",
    "*": "the names one by one: those behind a star are not followed",
    "move_exported_model_to_eval": "nothing: call model.eval() before torchq.prepare",
    "allow_exported_model_train_eval": "nothing: call model.eval() before torchq.prepare",
}  # fmt: skip
_PARTS = (
    ("_jit", "torchq.quantize on the Python model, and then torch.jit.script"),
    ("observer_state_dict", "torchq.save_calibration and torchq.load_calibration"),
    ("fakequant", _TRAINING),
    ("qat_", _TRAINING),
    ("fuse", _FUSES),
    ("module_mappings", _MODULES),
    ("module_class", _MODULES),
    ("swap_module", _MODULES),
    ("config", _CONFIG),
    ("quantizer", _CONFIG),
    ("granularity", 'torchq.QConfig(weight_granularity="per_channel" or "per_tensor")'),
    ("observer", "torchq.QConfig(activation_observer=...), or an Observer of your own"),
)
"""What is in a name, in small letters, to advice; the first one counts."""
_FOLDERS = (
    ("torch.ao.ns", "torchq.compare(prepared, quantized, batches)"),
    ("torch.ao.nn", _MODULES),
    ("torch.nn.", _MODULES),
)
_OTHER = "nothing of this name: torchq.quantize, torchq.prepare and torchq.QConfig do this work"


@dataclass(frozen=True)
class Use:
    """A use of another tool in a source file.

    Attributes:
        file: where it is.
        line: where it begins, from 1.
        name: full name of what is used.
        advice: what to write instead.
    """

    file: str
    line: int
    name: str
    advice: str

    def __str__(self) -> str:
        """One line, which editors can jump from."""
        return f"{self.file}:{self.line}: {self.name}: {self.advice}"


def find_uses(path: Path) -> list[Use]:
    """Return every use of torch.ao's quantization and of torchao's PT2E.

    Files are read, not run. Names are followed through imports and plain assignments.

    Args:
        path: a Python file, or a folder; hidden folders in it are left out.

    Raises:
        ValueError: there is no such file or folder.
    """
    if not path.exists():
        raise ValueError(
            f"torchq migrate: PATH must be a file or folder that exists, got '{path}'."
        )
    found: list[Use] = []
    for file in _files(path):
        try:
            with tokenize.open(file) as source:  # in the encoding that it declares
                tree = ast.parse(source.read())
        except (SyntaxError, UnicodeDecodeError, ValueError) as error:
            line = getattr(error, "lineno", None) or 1
            found.append(Use(str(file), line, "not read", f"no Python of this version: {error}"))
            continue
        uses = {Use(str(file), line, name, _advice(name)) for line, name in _Names(tree).uses()}
        found += sorted(uses, key=lambda use: (use.line, use.name))
    return found


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for file in sorted(path.rglob("*.py")):
        if not any(part.startswith(".") for part in file.relative_to(path).parts):
            yield file


class _Names(ast.NodeVisitor):
    """The full names behind the names of a file."""

    def __init__(self, tree: ast.Module) -> None:
        self.full: dict[str, str] = {}
        self.imported: dict[str, int] = {}  # line by full name
        self.found: list[tuple[int, str]] = []
        self.visit(tree)  # names, wherever they are bound
        self.found.clear()
        self.visit(tree)

    def uses(self) -> list[tuple[int, str]]:
        """Return lines and full names; of an import only what nothing else uses."""
        used = [name for _, name in self.found]
        more = [
            (line, name)
            for name, line in self.imported.items()
            if not any(f"{other}.".startswith(f"{name}.") for other in used)
        ]
        return [use for use in (*self.found, *more) if _concerns(use[1])]

    def visit_Import(self, node: ast.Import) -> None:
        """Bind ``torch`` of ``import torch.ao.quantization``, or the name behind ``as``."""
        for alias in node.names:
            first = alias.name.partition(".")[0]
            self.full[alias.asname or first] = alias.name if alias.asname else first
            self.imported[alias.name] = node.lineno

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Bind the names behind ``import``."""
        if node.level or node.module is None:
            return
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            self.full[alias.asname or alias.name] = name
            self.imported[name] = node.lineno

    def visit_Assign(self, node: ast.Assign) -> None:
        """Follow ``q = torch.ao.quantization``."""
        name, names = (
            self._name(node.value),
            [t.id for t in node.targets if isinstance(t, ast.Name)],
        )
        if _concerns(name) and len(names) == len(node.targets):
            self.full.update(dict.fromkeys(names, name))
            self.imported[name] = node.lineno
        else:
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Note a whole dotted name."""
        if not self._note(node):
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        """Note an imported name."""
        self._note(node)

    def _note(self, node: ast.expr) -> bool:
        name = self._name(node)
        if _concerns(name):
            self.found.append((node.lineno, name))
        return bool(name)

    def _name(self, node: ast.expr) -> str:
        """Return the full name that an expression is, or ""."""
        if isinstance(node, ast.Name):
            return self.full.get(node.id, "")
        base = self._name(node.value) if isinstance(node, ast.Attribute) else ""
        return f"{base}.{node.attr}" if base and isinstance(node, ast.Attribute) else ""


def _concerns(name: str) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in _PACKAGES)


def _advice(name: str) -> str:
    """Return what to write instead of a name; methods of a class have its advice."""
    for part in reversed(name.split(".")):
        if part in _ADVICE:
            return _ADVICE[part]
        letters = part.lower().replace("fake_quant", "fakequant")
        for word, advice in _PARTS:
            if word in letters:
                return advice
    return next((advice for folder, advice in _FOLDERS if name.startswith(folder)), _OTHER)
