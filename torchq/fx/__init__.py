# SPDX-License-Identifier: Apache-2.0
"""The flow on a traced graph: functions and operators are quantized as modules are.

capture -> recognize (the table in patterns.py) -> layers -> planning -> prepared -> lowering.
"""

from torchq.fx.capture import CaptureError
from torchq.fx.flow import convert, prepare

__all__ = ["CaptureError", "convert", "prepare"]
