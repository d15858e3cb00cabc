# SPDX-License-Identifier: Apache-2.0
"""Results of CPUs without VNNI under oneDNN's rules, and where they would saturate."""

from torchq.onednn.saturation import *  # noqa: F403
from torchq.onednn.saturation import __all__ as __all__
