# SPDX-License-Identifier: Apache-2.0
"""Take over what torch.ao and torchao have quantized, and the calls that did it."""

from torchq.migrate.dynamic import quantize_dynamic
from torchq.migrate.pt2e import from_pt2e
from torchq.migrate.torch_ao import from_torch_ao
from torchq.migrate.torchao import from_torchao

__all__ = ["from_pt2e", "from_torch_ao", "from_torchao", "quantize_dynamic"]
