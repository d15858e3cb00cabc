# SPDX-License-Identifier: Apache-2.0
"""The eager flow: prepare, calibrate and convert."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torchq.config import Overrides, QConfig
from torchq.eager.checks import check_finite, check_mode, check_model, check_prepared
from torchq.eager.observed import ObservedLayer
from torchq.eager.planning import Plan, inside
from torchq.eager.recording import copied, record
from torchq.eager.report import report_rows
from torchq.eager.weights import leave_fast_paths, settle_weights
from torchq.explain import Row, check_strict
from torchq.nn.standing import NoAnswer, put
from torchq.nn.swapped import Swapped, described
from torchq.running import (
    Inputs,
    batches,
    call,
    float_tensors,
    split_inputs,
    without_gradients,
    working_copy,
)
from torchq.standalone import STANDALONE, DynamicLinear, converted
from torchq.state import as_before


class Graphs(Protocol):
    """What this flow needs of :mod:`torchq.fx`, which builds on it: sequences become graphs."""

    @property
    def Prepared(self) -> type[nn.Module]:
        """What prepare_sequence returns."""

    def prepare_sequence(
        self,
        module: nn.Module,
        source: Tensor | None,
        config: QConfig,
        overrides: Overrides | None,
        prefix: str,
        contiguous: bool,
    ) -> nn.Module | None:
        """The module with observers; None where it cannot be a graph, or not in int8."""

    def convert(self, prepared: Any) -> nn.Module:
        """The quantized graph."""


graphs: Graphs = None  # type: ignore[assignment]
"""``torchq.fx.flow``; ``torchq.flow``, which knows both flows, puts it here."""


def prepare(
    model: nn.Module,
    example_inputs: Inputs,
    config: QConfig | None = None,
    overrides: Overrides | None = None,
) -> nn.Module:
    """A copy of ``model`` with observers in place.

    Args:
        model: float32, in eval mode.
        example_inputs: one input, a tuple of them, or a dict of keyword arguments; a copy of the
            model is run on them twice. What they do not reach stays float.
        config: how to quantize; the default is QConfig().
        overrides: ``fnmatch`` patterns on qualified module names -> a QConfig, or None to keep
            float. One that matches a module holds for all that is in it. With ``.dst`` appended, a
            pattern means only destinations, in what becomes a graph. Later patterns win.

    Raises:
        ValueError: the model is in training mode or prepared already, a weight has NaN or inf, or a
            pattern matches nothing.
        TypeError: the model is no nn.Module in Python, or not float32.
    """
    config = QConfig() if config is None else config
    check_model(model)
    args, kwargs = split_inputs(example_inputs)
    with torch.autocast("cpu", enabled=False):
        return prepare_call(model, args, kwargs, config, overrides)


@torch.inference_mode(False)
def prepare_call(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    config: QConfig,
    overrides: Overrides | None,
    prefix: str = "",
) -> nn.Module:
    """:func:`prepare` for ``model(*args, **kwargs)``.

    With a ``prefix``, the model is a submodule of another one: names in overrides, messages and
    the report begin with it, and patterns are not checked.
    """
    model = working_copy(model)
    settle_weights(model)
    run = copy.deepcopy(model)  # its code may write to parameters
    plan = Plan(run, record(run, args, kwargs), config, overrides, prefix)
    if not prefix:
        plan.check_patterns()
    found = _graphs(model, plan, config, overrides)
    expected = [_result(model, args, kwargs) for _ in range(2)]
    for chosen in [found, {}] if found else [{}]:
        prepared = _assembled(model, plan, chosen)
        if _agrees(prepared, args, kwargs, expected):
            return prepared
    plan.leave_float("the model's code does something else with another kind of layer")
    return _assembled(model, plan, {})


def _assembled(model: nn.Module, plan: Plan, sequences: dict[str, nn.Module]) -> nn.Module:
    """The prepared model; ``sequences`` are those that became graphs."""
    replacements = {
        name: module
        for name, module in plan.replacements().items()
        if not name.startswith(tuple(map(inside, sequences)))
    }
    memo: dict[int, Any] = {}
    for name, module in (replacements | sequences).items():
        if name:  # or there is no code around it
            vars(module)["_stood"] = described(model.get_submodule(name), memo)
    prepared = _with_modules(model, {**replacements, **sequences}).eval()
    leave_fast_paths(prepared)
    rows = {name: list(graph.torchq_report) for name, graph in sequences.items()}  # type: ignore[arg-type]
    prepared.torchq_report = report_rows(model, plan, rows)  # type: ignore[assignment]
    return prepared


def _agrees(
    prepared: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    expected: list[list[torch.Tensor]],
) -> bool:
    """Whether the model's code does the same with what is in its layers' places.

    It may ask for their class, or for what they do not have. ``expected`` are the results of two
    runs of the float model: one that does not agree with itself is not compared.
    """
    try:
        result = _result(prepared, args, kwargs)
    except (AttributeError, TypeError, KeyError, NoAnswer):
        return False
    except Exception:  # of what the observers see, which calibrating will tell
        return True
    return _are_close(expected[0], result) or not _are_close(*expected)


def _result(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    model, (args, kwargs) = copy.deepcopy(model), copied(args, kwargs)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return float_tensors(model(*args, **kwargs))


def _are_close(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(
        a.shape == b.shape and torch.allclose(a, b, 1e-4, 1e-4 * _largest(a), equal_nan=True)
        for a, b in zip(first, second, strict=True)
    )


def _largest(values: torch.Tensor) -> float:
    finite = values[values.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def _graphs(
    model: nn.Module, plan: Plan, config: QConfig, overrides: Overrides | None
) -> dict[str, nn.Module]:
    """Sequences whose every operation is known, by name, prepared as graphs."""
    result: dict[str, nn.Module] = {}
    for name, calls in plan.sequences.items():
        if name.startswith(tuple(map(inside, result))):
            continue
        prepared = graphs.prepare_sequence(
            model.get_submodule(name), calls[0].source, config, overrides,
            inside(f"{plan.prefix}{name}".rstrip(".")), plan.is_strided(calls),
        )  # fmt: skip
        if prepared is not None:
            result[name] = prepared
    return result


def calibrate(prepared: nn.Module, data: Iterable[Any], progress: bool | None = None) -> nn.Module:
    """Runs the prepared model on data; its observers record. Calling it again adds data.

    Args:
        prepared: from :func:`prepare`; returned for chaining.
        data: batches; a tensor is the model's one input, a tuple or list its inputs, a dict its
            keywords.
        progress: show a progress bar (needs tqdm); None shows one where tqdm is installed and the
            output is a terminal.

    What the model itself keeps between calls, as a memory of earlier frames, is afterwards what it
    was: the converted model begins as the float one.

    Raises:
        TypeError: ``data`` is one tensor or dict instead of batches of them.
        ValueError: ``data`` has no batches, a batch or a parameter contains NaN or inf (the message
            names it), or ``prepared`` is in training mode or no prepared model.
    """
    check_prepared("calibrate", prepared)
    check_mode("calibrate", prepared)
    with as_before(prepared), torch.inference_mode(), torch.autocast("cpu", enabled=False):
        for batch in batches("calibrate", data, progress):
            try:
                call(prepared, batch)
            except ValueError:
                model = prepared.graph_module if isinstance(prepared, graphs.Prepared) else prepared
                check_finite("calibrate", model, recurse=True)  # type: ignore[arg-type]
                raise
    return prepared


@torch.inference_mode(False)
def convert(prepared: nn.Module, strict: bool = False) -> nn.Module:
    """The quantized model; the prepared one stays as it is.

    It has no gradients: its float parameters do not require grad any more, and inputs that require
    grad raise.

    Args:
        prepared: calibrated.
        strict: raise if a convolution, linear or recurrent module stays float without an override
            that says so.

    Raises:
        ValueError: ``prepared`` has no observers, or a weight cannot be quantized.
        RuntimeError: a module was never calibrated (the message names it), or ``strict`` and
            something stays float.
    """
    check_prepared("convert", prepared)
    rows: list[Row] = list(prepared.torchq_report)  # type: ignore[arg-type]
    if strict:
        check_strict(rows)
    replacements: dict[str, nn.Module] = {}
    for name, module in prepared.named_modules():
        if isinstance(module, graphs.Prepared):
            replacements[name] = graphs.convert(module)
        elif isinstance(module, ObservedLayer):
            replacements[name] = module.convert()
        elif isinstance(module, STANDALONE):
            layer = converted(module, name)
            alone = not name or not isinstance(module, DynamicLinear)
            replacements[name] = layer if alone else Swapped.of(module.module, layer)
        if name in replacements:
            put(replacements[name], vars(module).get("_stood"))
    result = _with_modules(prepared, replacements)
    result.torchq_report = rows  # type: ignore[assignment]
    return without_gradients(result.eval())


def quantize(
    model: nn.Module,
    data: Iterable[Any],
    example_inputs: Inputs,
    config: QConfig | None = None,
    overrides: Overrides | None = None,
    strict: bool = False,
) -> nn.Module:
    """:func:`prepare`, :func:`calibrate` and :func:`convert` in one call."""
    prepared = prepare(model, example_inputs, config, overrides)
    return convert(calibrate(prepared, data), strict)


def _with_modules(model: nn.Module, modules: dict[str, nn.Module]) -> nn.Module:
    """A copy of ``model`` with other modules in some places; what they replace is not copied.

    Works for the model itself, and for modules that are registered under several names.
    """
    memo: dict[int, Any] = {id(model.get_submodule(n)): new for n, new in modules.items()}
    return copy.deepcopy(model, memo)
