# SPDX-License-Identifier: Apache-2.0
"""Take over what torch.ao and torchao have quantized, and the calls that did it."""

from torchq.migrate.dynamic import quantize_dynamic

__all__ = ["quantize_dynamic"]
