# SPDX-License-Identifier: Apache-2.0
"""torch.ao's FX flow with its x86 engine."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn

__all__ = ["quantized"]

# What torch.ao quantizes to something else with this engine in torch 2.13; so float, for its sake.
_WRONG = (
    # Its integer kernels: -3 dB on 64 -> 32 channels, 2x2, stride 2, where QNNPACK's have 41.
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    # Behind what stays float, such as a chunk, their sources get the range of their results.
    *(torch.sigmoid, torch.tanh),
)


def quantized(model: nn.Module, batches: list[Tensor], dynamic: bool) -> nn.Module:
    """Return the converted model.

    Args:
        model: float, in eval mode.
        batches: calibration data.
        dynamic: swap linears and LSTMs for dynamic ones instead, without a trace.
    """
    torch.backends.quantized.engine = "x86"
    with _quiet():
        if dynamic:
            from torch.ao.quantization import quantize_dynamic

            return quantize_dynamic(model, {nn.Linear, nn.LSTM}, torch.qint8)
        from torch.ao.quantization import get_default_qconfig_mapping
        from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

        example = (batches[0][:1],)
        mapping = get_default_qconfig_mapping("x86")
        for kind in _WRONG:
            mapping.set_object_type(kind, None)
        prepared = prepare_fx(model, mapping, example)
        with torch.inference_mode():
            for batch in batches:
                prepared(batch)
        converted: nn.Module = convert_fx(prepared)
        return converted


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings that it is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
