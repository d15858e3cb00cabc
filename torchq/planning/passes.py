# SPDX-License-Identifier: Apache-2.0
"""The passes that decide what becomes of a captured model, in order.

A pass takes a plan and returns another one. What comes later may rely on what earlier ones decided.
The pass that leaves something float, or makes it dynamic, writes the reason into its operation or
layer: a sentence of :mod:`torchq.report.reasons`. A leaf takes the same passes, in a graph of its
own; what the calls of it say is added in :mod:`torchq.convert.swap.leaf_plans`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

from torch import fx

from torchq.capture.graph import Captured
from torchq.planning.attention import fuse_attention
from torchq.planning.cached import leave_cached
from torchq.planning.choose import choose_int8
from torchq.planning.coarse import leave_coarse
from torchq.planning.dynamic import quantize_rows, read_tokens
from torchq.planning.fuse import fuse
from torchq.planning.groups import find_groups
from torchq.planning.hosts import host_tables
from torchq.planning.lengths import leave_lengths, leave_sized
from torchq.planning.phases import leave_angles
from torchq.planning.plan import Plan
from torchq.planning.recognize import recognize
from torchq.planning.rotary import join_rotaries
from torchq.planning.units import find_units
from torchq.quantization.config import Overrides, QConfig

PASSES = (
    recognize,  # what each call is, by the table of patterns, or why it has no int8 form
    leave_cached,  # float: attention to keys and values of a cache
    fuse_attention,  # attention that a model spells out is one operation
    read_tokens,  # dynamic: linear layers whose sources the model fake-quantizes by tokens
    quantize_rows,  # dynamic: what a configuration wants so, with functions and additions behind it
    leave_lengths,  # dynamic or float: products of values whose range depends on sizes
    join_rotaries,  # float: a rotary position embedding is one operation
    find_units,  # recurrent modules
    fuse,  # operations become layers: batch norm, add and relu join their matmul
    leave_angles,  # float: angles of many periods
    leave_sized,  # float: layers of values whose range depends on sizes
    leave_coarse,  # dynamic or float: what the row rule of convert/recipes found to be coarse
    find_groups,  # values that share one scale, also in concatenations; scales of fake quantizers
    choose_int8,  # values that are int8, and layers that gain nothing from it
    host_tables,  # functions that a matmul computes by a table, such as SiLU
)


def decided(
    captured: Captured,
    config: QConfig,
    overrides: Overrides | None,
    coarse: Mapping[fx.Node, str] | None = None,
) -> Plan:
    """Return the plan of a captured model; ``coarse`` as in :class:`Plan`."""
    start = Plan(captured, config, overrides, coarse)
    return reduce(lambda plan, step: step(plan), PASSES, start)
