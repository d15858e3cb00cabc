# SPDX-License-Identifier: Apache-2.0
"""The flow on a traced graph: functions and operators are quantized as modules are.

capture (by tracer) -> recognize (the table in patterns; matmuls, moves and fake make its float
modules) -> layers -> planning -> prepared -> sharing -> lowering. structure writes and reads the
result.
"""

from torchq.fx.capture import CaptureError
from torchq.fx.flow import convert, prepare

__all__ = ["CaptureError", "convert", "prepare"]
