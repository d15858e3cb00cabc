# SPDX-License-Identifier: Apache-2.0
"""The weight and bias of a quantized layer, as a model's own code reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, SupportsIndex

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only


def written(
    func: OpOverload[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> Iterator[object]:
    """Yield the tensors that a call of an operator writes to."""
    for i, expected in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
        given = args[i] if i < len(args) else kwargs.get(expected.name)
        if expected.alias_info is not None and expected.alias_info.is_write:
            yield from given if isinstance(given, list | tuple) else (given,)


class FloatWeight(Tensor):
    """A float parameter without memory: its values are computed when something reads them.

    Class, dtype, shape and device cost as much as those of any tensor. All else gets ``values()``.
    Writing raises: the layer computes with integers, which a write would not reach.
    """

    _is_param = True  # isinstance(weight, nn.Parameter)
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _values: Callable[[], Tensor]
    _label: str

    @staticmethod
    def __new__(
        cls,
        values: Callable[[], Any],
        shape: torch.Size,
        label: str,
        dtype: torch.dtype = torch.float32,
    ) -> FloatWeight:
        """``label`` names the tensor in messages; ``dtype`` is that of the values."""
        with torch.inference_mode(False):
            weight = Tensor._make_wrapper_subclass(
                cls, shape, dtype=dtype, device=torch.device("cpu")
            )
        weight._values, weight._label = values, label
        return weight

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run an operator on the values."""
        kwargs = kwargs or {}
        for weight in written(func, args, kwargs):
            if isinstance(weight, FloatWeight):
                weight._refuse()
        args, kwargs = tree_map_only(FloatWeight, lambda weight: weight._values(), (args, kwargs))
        return func(*args, **kwargs)

    def _refuse(self, *args: object) -> NoReturn:
        """Raise RuntimeError: of everything that writes."""
        raise RuntimeError(
            f"torchq.nn: {self._label} of a quantized layer must not be written to, got an "
            "in-place change. Change the float model before torchq.prepare, or keep the layer "
            "float: name it in overrides with None."
        )

    __setitem__ = _refuse

    @property
    def data(self) -> FloatWeight:
        """Itself, so that writing to it raises, too."""
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        self._refuse()

    def detach(self) -> FloatWeight:
        """Return itself: it has no gradient."""
        return self

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """Return the values as an array."""
        return self._values().numpy(force=force)

    def tolist(self) -> list[object]:
        """Return the values as numbers."""
        return self._values().tolist()

    def __array__(self, *args: object, **kwargs: object) -> object:
        """Return the values as an array."""
        return self._values().__array__(*args, **kwargs)

    def __repr__(self, **kwargs: object) -> str:  # type: ignore[override]
        """Print the values."""
        return repr(self._parameter())

    def _parameter(self) -> nn.Parameter:
        return nn.Parameter(self._values().clone(), False)

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        """Return a parameter with the values, as pickling does."""
        return memo.setdefault(id(self), self._parameter())

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Pickle as a parameter with the values."""
        return self._parameter().__reduce_ex__(protocol)
