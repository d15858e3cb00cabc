# SPDX-License-Identifier: Apache-2.0
"""What a model's code handles while it is traced: a node that knows its value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from torchq.fx.guards import with_item

if TYPE_CHECKING:
    from torchq.fx.tracer import Tracer

__all__ = ["CONSTANT_METHODS", "SHAPE_METHODS", "Proxy"]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


CONSTANT_METHODS = _words(
    "dim ndimension is_floating_point is_complex element_size get_device is_inference"
)
_CONSTANT_ATTRIBUTES = _words(
    "dtype device ndim layout requires_grad is_cuda is_cpu is_meta is_sparse is_quantized "
    "is_mkldnn is_nested itemsize grad_fn grad is_leaf names"
)
SHAPE_METHODS = _words("size shape numel nelement stride storage_offset is_contiguous")


class Proxy(fx.Proxy):
    """A node that knows its value on the example inputs."""

    tracer: Tracer

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What ``isinstance`` says in the model's code: a tensor, tuple, list or dict is one."""
        value = self.tracer.values.get(self.node)
        containers = (Tensor, tuple, list, dict)
        return next((cls for cls in containers if isinstance(value, cls)), Proxy)

    def __getattr__(self, name: str) -> Any:
        """As of its value; a tensor's dtype and the like are constants."""
        value = self.tracer.values[self.node]
        found = getattr(value, name)  # AttributeError as the value would raise it
        if isinstance(value, Tensor) and name in _CONSTANT_ATTRIBUTES:
            self.tracer.asked_rank |= name == "ndim"
            return found
        if callable(found):
            return fx.proxy.Attribute(self, name)
        return self.tracer.create_proxy("call_function", getattr, (self, name), {})

    def __setitem__(self, index: Any, value: Any) -> None:
        """From here on, this is another node: what was written to."""
        if not isinstance(self.tracer.values[self.node], Tensor):
            raise fx.proxy.TraceError("its Python code writes to what is no tensor")
        written = self.tracer.create_proxy("call_function", with_item, (self, index, value), {})
        self.tracer.replace(self, written)

    def __len__(self) -> int:
        """Guarded, of a tensor."""
        value = self.tracer.values[self.node]
        if isinstance(value, Tensor):
            return int(self.tracer.known(self.size(0)))
        self.tracer.asked_rank = True
        return len(value)

    def __contains__(self, item: Any) -> bool:
        """Guarded."""
        return item in self.tracer.known(self)

    def __index__(self) -> int:
        """Guarded."""
        return int(self.tracer.known(self))

    __int__ = __index__

    def __float__(self) -> float:
        """Guarded."""
        return float(self.tracer.known(self))

    def __hash__(self) -> int:
        """By identity."""
        if isinstance(self.tracer.values[self.node], torch.Size):  # a key of somebody's cache
            raise TypeError("unhashable: a size that is traced")
        return id(self)
