# SPDX-License-Identifier: Apache-2.0
"""Loads the shared library, and what fake kernels are made with."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

LIBRARY_PATH = Path(__file__).parents[1] / "libtorchq.so"
"""The shared library; a C++ program loads the same file."""

DTYPES = {0: torch.uint8, 1: torch.int8, 3: torch.int32, 6: torch.float32}
DTYPES |= {15: torch.bfloat16, 5: torch.float16}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


SUPPORTED_TORCH = ((2, 13), (2, 16))
"""The oldest release of torch that works, and the first that was not tried."""


def built_for() -> str:
    """Return the torch release and the machine that the library was built for."""
    try:
        return LIBRARY_PATH.with_name("built_for.txt").read_text().strip()
    except OSError:
        return "unknown"


def dtype_code(dtype: torch.dtype, op: str = "") -> int:
    """Return the ``dst_dtype`` argument of an op for a torch dtype.

    Raises:
        NotImplementedError: ``dtype`` is not uint8, int8, int32, float32, bfloat16 or float16.
    """
    if not isinstance(dtype, torch.dtype) or dtype not in _CODES:
        raise NotImplementedError(
            f"torchq{op and '.'}{op}: dst_dtype must be one of {', '.join(map(str, _CODES))}, got "
            f"{dtype}. The nearest supported destination is torch.float32."
        )
    return _CODES[dtype]


def _load() -> ModuleType:
    """Load the ops; return the module ``_C``, which makes sites."""
    here = f"torch {torch.__version__}, {platform.machine()}"
    python = f"Python {platform.python_version()}"
    oldest, newest = (".".join(map(str, release)) for release in SUPPORTED_TORCH)
    remedy = (
        f"Install torch>={oldest},<{newest} and torchq-cpu for it, or build torchq for this torch: "
        "`pip install --no-build-isolation -e .` in its source tree."
    )
    if not LIBRARY_PATH.exists():
        raise ImportError(
            f"torchq: {LIBRARY_PATH} does not exist: the extension was not built, or its build is "
            f"not complete. This is {python}, {here}. {remedy}"
        )
    expected = f"torchq is for torch {oldest} to before {newest}, and was built for {built_for()}"
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not SUPPORTED_TORCH[0] <= release < SUPPORTED_TORCH[1]:
        raise ImportError(f"torchq: {expected}. This is {here}. {remedy}")
    try:
        torch.ops.load_library(str(LIBRARY_PATH))
    except OSError as error:
        raise ImportError(
            f"torchq: {LIBRARY_PATH.name} does not load here: {expected}. This is {here}. "
            f"{remedy} ({error})"
        ) from error
    try:
        return import_module("torchq._C")
    except ImportError as error:
        found = sorted(path.name for path in LIBRARY_PATH.parent.glob("_C.*.so"))
        raise ImportError(
            f"torchq: torchq._C does not load in {python} ({error}). There is "
            f"{', '.join(found) or 'none'}. {remedy}"
        ) from error


new_site: Callable[[type], Callable[..., object]] = _load().site
"""A place where modules are called, ``site(module, *args)``, or their ops without them, where the
modules' class is a subclass of the one given."""


def channels_last_strides(sizes: Sequence[int]) -> list[int]:
    """Strides of (N, C, spatial...) with the channels innermost."""
    strides = [0] * len(sizes)
    strides[1] = 1
    stride = sizes[1]
    for dim in range(len(sizes) - 1, 1, -1):
        strides[dim] = stride
        stride = stride * sizes[dim]
    strides[0] = stride
    return strides


def empty_channels_last(src: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a new (N, C, spatial...) on the device of ``src``."""
    return torch.empty_strided(sizes, channels_last_strides(sizes), dtype=dtype, device=src.device)


def refuse_onnx_export() -> None:
    """Raise NotImplementedError within torch.onnx.export, which has no form of int8 operators."""
    # torch imports torch.onnx when it is first named, which takes a fifth of the time of a load
    if "torch.onnx" in sys.modules and torch.onnx.is_in_onnx_export():
        raise NotImplementedError(
            "torch.onnx.export: model must be float, got one that torchq converted. Write it with "
            "torchq.to_onnx(model, path, example_inputs)."
        )
