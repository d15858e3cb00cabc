# SPDX-License-Identifier: Apache-2.0
"""Phases of many periods: 8 bits do not say where in a period they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchq.report import reasons

ANGLES = {
    **{"sin": (0, 1.0), "cos": (0, 1.0), "tan": (0, 2.0), "polar": (1, 1.0), "exp": (0, 1.0)},
    **{"sinc": (0, math.pi), "frac": (0, math.tau)},
    **dict.fromkeys(("remainder", "fmod", "mod"), (0, math.tau)),
}
"""Periodic functions -> which argument they have a period in, and its factor to radians.

Of those with a divisor, the factor to a divisor of 1; of exp, of complex numbers.
"""

# An error of 1/883 of a range of 2 (half a step of 255, as its root mean square) is A / 441 in
# phases of up to A. Beyond four periods either way, less than 25 dB of the wave are right.
_LARGEST = 25.0


def largest_phase(name: str, args: Sequence[Any]) -> float | None:
    """Return the largest angle that a call of this name takes; None of other functions."""
    at, factor = ANGLES.get(name, (len(args), 0.0))
    source = args[at] if at < len(args) else None
    if not isinstance(source, Tensor) or not source.numel():
        return None
    if name == "exp":
        if not source.is_complex():
            return None
        source = source.imag
    if not source.is_floating_point():
        return None
    if name in ("remainder", "fmod", "mod"):
        source = source / args[1]
    return factor * float(source.abs().max())


def why_coarse(largest: float | None) -> str:
    """Return why a layer in front of such phases stays float; "" where it need not."""
    if largest is None or largest <= _LARGEST:
        return ""
    return reasons.PHASES.format(largest=largest)
