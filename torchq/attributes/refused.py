# SPDX-License-Identifier: Apache-2.0
"""Setters of oneDNN's attributes that `Attr` has not, each with the reason and the nearest form."""

from __future__ import annotations

REFUSED_SETTERS = {
    "set_accumulation_mode": "sums of int8 products are exact in int32. Leave the setter out.",
    "set_deterministic": "results have the same bits in every run. Leave the setter out.",
    "set_dropout": "inference drops nothing out. Leave the setter out.",
    "set_fpmath_mode": "float32 steps are never done in fewer bits; float32 sources are quantized "
    "first. The nearest form is torchq.functional.dynamic_linear.",
    "set_precomputed_reductions": "sums of the source are part of the product. Leave the setter "
    "out; those of weights are computed by torchq.packing.",
    "set_scratchpad_mode": "ops allocate what they need and share it. Leave the setter out; "
    "torchq.release_memory() returns it to the system.",
}


def missing_attribute(name: str) -> AttributeError:
    """Return the error for a name that `Attr` has not."""
    reason = REFUSED_SETTERS.get(name)
    if reason is None:
        return AttributeError(f"'Attr' object has no attribute {name!r}")
    return AttributeError(f"torchq.Attr has no {name} of oneDNN: {reason}")
