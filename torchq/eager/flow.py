# SPDX-License-Identifier: Apache-2.0
"""The eager flow: prepare, calibrate and convert."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_map

from torchq.config import Overrides, QConfig
from torchq.eager.lowering import quantized_layer, quantized_pool
from torchq.eager.observed import ObservedLayer, ObservedPool
from torchq.eager.planning import Plan
from torchq.eager.recording import Recording, record
from torchq.eager.report import report_rows
from torchq.explain import Row, check_strict
from torchq.kinds import QUANTIZABLE
from torchq.nn.fused import Absorbed, FusedClip
from torchq.nn.module import QModule
from torchq.observers import Observer
from torchq.qparams import QParams
from torchq.running import (
    Inputs,
    batches,
    call,
    split_inputs,
    without_gradients,
    working_copy,
)
from torchq.standalone import RECURRENT, STANDALONE, converted
from torchq.state import as_before

__all__ = ["calibrate", "convert", "prepare", "quantize"]


def prepare(
    model: nn.Module,
    example_inputs: Inputs,
    config: QConfig | None = None,
    overrides: Overrides | None = None,
) -> nn.Module:
    """A copy of ``model`` with batch norms folded, layers fused and observers in place.

    Args:
        model: float32, in eval mode.
        example_inputs: one input, a tuple of them, or a dict of keyword arguments; a copy of the
            model is run on them twice. They must take the way through the model that later inputs
            take.
        config: how to quantize; the default is QConfig().
        overrides: ``fnmatch`` patterns on qualified module names -> a QConfig, or None to keep
            float. With ``.dst`` appended, a pattern means only the module's destination. Later
            patterns win.

    Raises:
        ValueError: the model is in training mode or prepared already, or a pattern matches nothing.
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
    keeps_state: bool = False,
) -> nn.Module:
    """:func:`prepare` for ``model(*args, **kwargs)``.

    With a ``prefix``, the model is a submodule of another one: names in overrides, messages and
    the report begin with it, and patterns are not checked. Where what it keeps decides what its
    later calls do (``keeps_state``), no layer relies on who reads its destination: it is float.
    """
    model = working_copy(model)
    _settle_weights(model)
    recordings = _recordings(copy.deepcopy(model), args, kwargs)
    plan, *later = (Plan(run, config, overrides, prefix) for run in recordings)
    if not prefix:
        plan.check_patterns(model)
    if keeps_state or not later or plan.differing(*later):
        overrides = {**(overrides or {}), "*.dst": None}
        plan, *later = (Plan(run, config, overrides, prefix) for run in recordings)
        for other in later:
            plan.leave_float(plan.differing(other))
    prepared = _with_modules(model, plan.replacements()).eval()
    _leave_fast_paths(prepared)
    prepared.torchq_report = report_rows(model, plan)  # type: ignore[assignment]
    return prepared


def _recordings(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Recording]:
    """Of two calls, for a model may keep something that leads the second another way."""

    def copied(leaf: Any) -> Any:
        return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf

    again = tree_map(copied, (tuple(args), dict(kwargs)))
    first = record(model, args, kwargs)
    try:
        return [first, record(model, *again)]
    except Exception:  # of the model's own code
        return [first]


def _settle_weights(model: nn.Module) -> None:
    """Computes the weights of parametrized layers once: they are then modules of torch.nn again.

    Not with ``remove_parametrizations``: that changes the class, which the original has, too.
    """
    for module in list(model.modules()):
        if isinstance(module, QUANTIZABLE) and parametrize.is_parametrized(module):
            names = list(module.parametrizations)  # type: ignore[arg-type]
            values = {name: getattr(module, name).detach().clone() for name in names}
            del module.parametrizations
            module.__class__ = type(module).__mro__[1]
            for name, value in values.items():
                module.register_parameter(name, nn.Parameter(value, False))


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
        ValueError: ``data`` has no batches, a batch contains NaN or inf (the message names the
            module), or ``prepared`` is in training mode or no prepared model.
    """
    check_prepared("calibrate", prepared)
    check_mode("calibrate", prepared)
    with as_before(prepared), torch.inference_mode(), torch.autocast("cpu", enabled=False):
        for batch in batches("calibrate", data, progress):
            call(prepared, batch)
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
    layers = {n: m for n, m in prepared.named_modules() if isinstance(m, ObservedLayer)}
    pools = {n: m for n, m in prepared.named_modules() if isinstance(m, ObservedPool)}
    rows: list[Row] = list(prepared.torchq_report)  # type: ignore[arg-type]
    if strict:
        check_strict(rows)
    dst = {site: layer.dst_qparams() for site, layer in layers.items()}
    replacements: dict[str, nn.Module] = {
        site: quantized_layer(layer, _srcs(layer, dst), dst[site]) for site, layer in layers.items()
    }
    for name, pool in pools.items():
        qparams = dst[pool.src_from]
        assert qparams is not None
        replacements[name] = quantized_pool(pool, qparams)
    for name, module in prepared.named_modules():
        if isinstance(module, STANDALONE):
            replacements[name] = converted(module, name)
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


def _srcs(layer: ObservedLayer, dst: dict[str, QParams | None]) -> list[QParams | None]:
    """Parameters of what a layer reads; None for a float residual."""
    return [
        layer.src_qparams(i) if site is None else dst[site] for i, site in enumerate(layer.src_from)
    ]


def _leave_fast_paths(model: nn.Module) -> None:
    """Makes transformer encoders call their linears instead of reading their weights."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def check_prepared(op: str, prepared: nn.Module) -> None:
    """Raises ValueError unless a model comes from :func:`prepare`, and was not converted since."""
    parts = [type(module) for module in prepared.modules()]
    converted = any(issubclass(cls, QModule) and cls not in (Absorbed, FusedClip) for cls in parts)
    if converted or not hasattr(prepared, "torchq_report"):
        state = ", which is converted" if converted else " without observers"
        raise ValueError(
            f"torchq.{op}: prepared must come from torchq.prepare, got {type(prepared).__name__}"
            f"{state}. Call torchq.prepare on the float model first, and keep what it returns."
        )


def check_mode(op: str, model: nn.Module) -> None:
    """Raises ValueError if a module is in training mode."""
    training = [name or "the model" for name, m in model.named_modules() if m.training]
    if training:
        raise ValueError(
            f"torchq.{op}: model must be in eval mode, got training mode in {training[0]} "
            f"({len(training)} modules). Call model.eval() first."
        )


def check_model(model: nn.Module) -> None:
    """Raises what :func:`prepare` promises."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"torchq.prepare: model must be an nn.Module, got {type(model).__name__}. A function "
            "can be called in the forward of one."
        )
    if isinstance(model, torch.jit.ScriptModule) or hasattr(model, "_orig_mod"):
        raise TypeError(
            f"torchq.prepare: model must be the Python module, got a {type(model).__name__}, which "
            "is compiled. Prepare the module that it was made from, and compile the converted one."
        )
    check_mode("prepare", model)
    for name, module in model.named_modules():
        if isinstance(module, (Observer, ObservedLayer, ObservedPool, QModule, *STANDALONE)):
            raise ValueError(
                f"torchq.prepare: model must be a float model, got a {type(module).__name__} in "
                f"'{name}'. Prepare the model that it was made from."
            )
        own, place = list(module.parameters(recurse=False)), repr(name) if name else "the model"
        if any(map(is_lazy, own)):
            raise ValueError(
                f"torchq.prepare: model must have its parameters, got none yet in {place}, a "
                f"{type(module).__name__}. Run the model on one input first."
            )
        dtypes = {p.dtype for p in own} - {torch.float32}
        if isinstance(module, (*QUANTIZABLE, *RECURRENT)) and dtypes:
            raise TypeError(
                f"torchq.prepare: model must be float32, got {dtypes.pop()} in {place}. Call "
                "model.float() first."
            )
        if devices := {p.device.type for p in own} - {"cpu"}:
            raise ValueError(
                f"torchq.prepare: model must be on the CPU, got {devices.pop()} in {place}. Call "
                "model.cpu() first, and give it tensors on the CPU."
            )
