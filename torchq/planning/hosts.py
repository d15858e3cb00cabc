# SPDX-License-Identifier: Apache-2.0
"""Puts functions into the matmuls before them, as tables that these look their results up in."""

from __future__ import annotations

from dataclasses import replace

from torchq.capture.ops import Role
from torchq.planning.layers import Layer
from torchq.planning.plan import Plan


def host_tables(plan: Plan) -> Plan:
    """Return the plan with the matmuls that have the table of the function behind them."""
    found = {layer: _host(plan, layer) for layer in plan.active if layer.role is Role.UNARY}
    hosts = {layer: host for layer, host in found.items() if host is not None}
    return replace(plan, table_hosts=hosts)


def _host(plan: Plan, layer: Layer) -> Layer | None:
    """Return the matmul whose int8 destination only this function reads."""
    host = plan.layer_at.get(layer.srcs[0])
    if host is None or host.role is not Role.MATMUL or not plan.emits_int8(host):
        return None
    alone = set(host.dst.users) <= {part.node for part in layer.parts}
    fake = plan.fakes.get(host.dst)
    return host if alone and (fake is None or fake.quantize == fake.dequantize) else None
