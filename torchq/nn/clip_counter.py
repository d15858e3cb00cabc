# SPDX-License-Identifier: Apache-2.0
"""Counts what quantized inputs clip, on samples of a few calls, and refuses NaN where asked to."""

from __future__ import annotations

import os
import traceback
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch._C import _functorch, _get_tracing_state, _len_torch_dispatch_stack

_FOLDERS = Path(torch.__file__).parent, Path(__file__).parents[1]
_OURS = (*(f"{folder}{os.sep}" for folder in _FOLDERS), "<torchq", "<eval_with_key")
"""Begin the names of files of torch and torchq, and of the code of graphs."""
SAMPLE = 256
"""Values that are looked at in a call."""
_PERIOD = 1024  # calls between two samples, at most
_STRIDE = 0.6180339887  # of the input: multiples of the golden ratio leave no large gaps
SHARE = 0.01
"""Of an input's values, which more calls than a few may clip without a warning."""
_FEW_CALLS = 0.2  # the values of a call resemble each other: one call may have this much more


def warn(text: str) -> None:
    """Warn in the name of the nearest caller outside of torch and torchq."""
    files = [entry.filename for entry in traceback.extract_stack()[::-1]]
    outside = (i for i, file in enumerate(files) if not file.startswith(_OURS))
    warnings.warn(text, stacklevel=next(outside, 1) + 1)


def check_finite(src: Tensor, name: str) -> None:
    """Raise ValueError if a source has NaN or inf; TorchScript compiles this."""
    finite = torch.isfinite(src)
    if not bool(finite.all()):
        nans, infs = int(src.isnan().sum()), int(src.isinf().sum())
        first: list[int] = finite.logical_not().nonzero()[0].tolist()
        raise ValueError(
            f"torchq: {name} must be finite with check_inputs=True, got {nans} NaN and {infs} inf "
            f"in shape {list(src.shape)}, the first at {first}. Repair what produced them. Without "
            "check_inputs, NaN counts as the zero point, and inf as the end of the range."
        )


class Told:
    """Remembers that a model has warned; its copies warn anew.

    Attributes:
        share: of an input's values, which may be clipped.
        told: whether the model has warned.
    """

    __slots__ = ("share", "told")

    def __init__(self, share: float = SHARE) -> None:
        """Start without a warning."""
        self.share, self.told = share, False

    def __reduce__(self) -> tuple[type[object], tuple[float]]:
        """Let copies start anew."""
        return Told, (self.share,)


class ClipCounter:
    """Counts the values beyond the range of an input, in samples of calls 1, 3, 6, 13 and so on.

    A call that takes no sample adds 1 and compares. Threads may lose counts. Copies start anew.

    Attributes:
        name: of the input, for the user.
        checks: raise ValueError for NaN and inf, in every call.
        model: shared by the inputs of a model, the first of which warns.
        sampled, clipped, nans: values that were looked at, that lie beyond the range, that are NaN.
        low, high: the range.
        seen_low, seen_high: the smallest and the largest value that was looked at.
    """

    __slots__ = (
        *("calls", "checks", "clipped", "high", "low", "model", "name", "nans", "next"),
        *("sampled", "samples", "seen_high", "seen_low"),
    )

    def __init__(self, name: str = "", checks: bool = False, model: Told | None = None) -> None:
        """``model`` None is for an input that never warns."""
        self.name, self.checks, self.model = name, checks, model
        self.calls = self.samples = self.sampled = self.clipped = self.nans = 0
        self.next = 1
        self.low = self.high = 0.0
        self.seen_low, self.seen_high = np.inf, -np.inf

    def __reduce__(self) -> tuple[type[object], tuple[object, ...]]:
        """Let copies start anew."""
        return ClipCounter, (self.name, self.checks, self.model)

    def look(self, src: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int) -> None:
        """Take a float source that becomes the integers from ``low`` to ``high``."""
        self.calls += 1
        if (self.checks or self.calls >= self.next) and _is_plain(src):
            if self.checks:
                check_finite(src, self.name)
            if self.calls >= self.next:
                self._sample(src.detach(), float(scale), int(zero_point), low, high)

    def _sample(self, src: Tensor, scale: float, zero_point: int, low: int, high: int) -> None:
        self.samples += 1
        # odd and even ones in turn: a module with two sources counts them alternately
        self.next = min(2 * self.calls, self.calls + _PERIOD) + self.samples % 2
        size = src.numel()
        if size > SAMPLE:
            step = int(size * _STRIDE) | 1
            at = (self.calls + step * np.arange(SAMPLE, dtype=np.int64)) % size
            src = src.take(torch.from_numpy(at))
        values = src.reshape(-1).float().numpy()
        self.low, self.high = (low - zero_point) * scale, (high - zero_point) * scale
        clipped = (values < self.low - scale / 2) | (values > self.high + scale / 2)
        self.sampled += len(values)
        self.clipped += int(np.count_nonzero(clipped))
        self.nans += int(np.count_nonzero(np.isnan(values)))
        self.seen_low = float(np.fmin.reduce(values, initial=self.seen_low))
        self.seen_high = float(np.fmax.reduce(values, initial=self.seen_high))
        share, model = self.clipped / max(self.sampled, 1), self.model
        if model is None or model.told:
            return
        if share > model.share + _FEW_CALLS / self.samples**2:
            model.told = True
            warn(
                f"torchq: {100 * share:.3g} % of the sampled values of {self.name} lie beyond the "
                f"range that calibration chose, {self.low:.4g} to {self.high:.4g}, and are "
                f"clipped: calls bring {self.seen_low:.4g} to {self.seen_high:.4g}. Calibrate with "
                "data as the calls bring it, preprocessed in the same way. torchq.explain counts "
                "such values of all inputs."
            )


def _is_plain(src: Tensor) -> bool:
    """Return whether a source has values that may be read, and nobody records how."""
    plain = type(src) in (Tensor, nn.Parameter) and src.device.type == "cpu"
    recorded = _get_tracing_state() is not None or _len_torch_dispatch_stack() > 0
    return plain and not recorded and not _functorch.is_functorch_wrapped_tensor(src)
