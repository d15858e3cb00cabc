# SPDX-License-Identifier: Apache-2.0
"""Prepares a model's leaves, and calibrates prepared models of either flow."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import cast

import torch
from torch import nn
from torch.distributed import ProcessGroup

from torchq.convert.ranks import calibrate_ranks
from torchq.convert.swap.calls import record
from torchq.convert.swap.checks import check_finite, check_mode, check_prepared
from torchq.convert.swap.compare import Comparison, fitting
from torchq.convert.swap.leaf_plans import Leaves, report_rows
from torchq.convert.swap.weights import (
    leave_fast_paths,
    settled,
    split_attention,
)
from torchq.convert.weights import first_names, with_names
from torchq.graphs.code import with_code
from torchq.models.hooks import without_capturing_hooks
from torchq.models.inputs import (
    Inputs,
    Model,
    batches,
    call,
    working_copy,
)
from torchq.models.state import as_before
from torchq.quantization.config import Overrides, QConfig, resolve
from torchq.report.rows import Weight


def plain_copy(model: Model, shared: Mapping[int, object] = MappingProxyType({})) -> Model:
    """Return a copy of a model whose layers call ``forward`` and have plain weights.

    What is ``shared``, by id, is not copied.
    """
    copied = settled(with_code(working_copy(model, shared)))
    leave_fast_paths(copied)
    without_capturing_hooks(copied)
    return cast(Model, copied)


def prepare_settled(
    model: nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    config: QConfig,
    overrides: Overrides | None,
    shared: bool,
) -> nn.Module:
    """Prepare a copy that :func:`plain_copy` made; the result shares its parameters.

    Raises:
        ParameterWritten: the parameters are ``shared`` with the user's model, and written to.
    """
    recording, first = record(model, args, kwargs, shared), first_names(model)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    weights = [
        Weight(name, sizes[name], count, resolve(overrides, name, config) is None)
        for name, count in recording.macs.items()
    ]
    comparison = Comparison(model, args, kwargs, recording.results)
    names = [name for name, _ in model.named_modules()]
    asked = [n for n in names if resolve(overrides, n, config) is not None]
    split = split_attention(model, asked)
    if split is not model:
        with contextlib.suppress(Exception):  # the float model raised nothing
            of_split = record(split, args, kwargs)
            if comparison.is_like(of_split.results):
                model, recording = split, of_split
    leaves = Leaves(model, recording, config, overrides)
    prepared = _assembled(model, leaves, comparison)
    vars(prepared)["torchq_report"] = with_names(report_rows(model, leaves), first)
    vars(prepared)["torchq_weights"] = weights
    return prepared


def _assembled(model: nn.Module, leaves: Leaves, comparison: Comparison) -> nn.Module:
    """Return the prepared model; leaves that its code would notice stay float."""
    shared = {id(p): p for p in model.parameters()}

    def assemble(names: list[str], contiguous: bool) -> nn.Module:
        observed = leaves.replacements(names, contiguous).items()
        memo: dict[int, object] = {id(model.get_submodule(name)): leaf for name, leaf in observed}
        return copy.deepcopy(model, memo | shared).eval()

    def agrees(names: list[str]) -> bool:
        return comparison.agrees(assemble(names, True))

    wanted = leaves.quantized
    prepared = assemble(wanted, False)
    if not comparison.agrees(prepared):
        kept = fitting(model, wanted, agrees)
        leaves.leave_float(set(wanted) - set(kept))
        prepared = assemble(kept, True)
    return prepared


def calibrate(
    prepared: Model,
    data: Iterable[Inputs],
    progress: bool | None = None,
    group: ProcessGroup | None = None,
) -> Model:
    """Run the prepared model on data; its observers record. Calling it again adds data.

    Args:
        prepared: from :func:`torchq.prepare`; returned for chaining.
        data: batches; a tensor is the model's one input, a tuple or list its inputs, a dict its
            keywords.
        progress: show a progress bar (needs tqdm); None shows one where tqdm is installed and the
            output is a terminal.
        group: ranks that calibrate together, such as ``torch.distributed.group.WORLD`` after
            ``init_process_group``. ``data`` is this rank's share, which may be empty. All ranks
            get the statistics of all data, the same for any shares and any number of ranks.
            ``prepared`` must not have been calibrated before.

    State that the model itself keeps between calls, such as a memory of earlier frames, is restored
    afterwards.

    Raises:
        TypeError: ``data`` is one tensor or dict instead of batches of them, or ``group`` is no
            process group.
        ValueError: ``data`` has no batches, a batch or a parameter contains NaN or inf (the message
            names it), ``prepared`` is in training mode or no prepared model, or ranks have other
            weights or settings.
        NotImplementedError: an observer has no ``_merge`` for ``group``.
        RuntimeError: another rank raised, or did not answer within the time limit of the group; or
            observers cannot merge, or have data already.

    Example:
        >>> data = [torch.randn(8, 16) for _ in range(3)]
        >>> prepared = torchq.prepare(nn.Sequential(nn.Linear(16, 4)).eval(), data[0])
        >>> prepared = torchq.calibrate(prepared, data)
        >>> prepared = torchq.calibrate(prepared, [torch.randn(8, 16)])  # adds to what it saw
    """

    def check() -> None:
        check_prepared("calibrate", prepared)
        check_mode("calibrate", prepared)

    def run() -> int:
        count = 0
        with as_before(prepared), torch.inference_mode(), torch.autocast("cpu", enabled=False):
            for batch in batches("calibrate", data, progress, may_be_empty=group is not None):
                try:
                    call(prepared, batch)
                except ValueError:
                    check_finite("calibrate", prepared, recurse=True)
                    raise
                count += 1
        return count

    if group is None:
        check()
        run()
    else:
        calibrate_ranks(prepared, group, check, run)
    return prepared
