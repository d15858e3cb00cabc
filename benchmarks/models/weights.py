# SPDX-License-Identifier: Apache-2.0
"""Random weights that behave like trained ones: activations keep their size, channels differ."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["randomize"]


def randomize(model: nn.Module, data: Tensor) -> nn.Module:
    """Draws weights from torch's global generator, and takes the norms' statistics from ``data``.

    Convolutions and linears get the deviation ``sqrt(2 / inputs)``, which keeps the size of what
    passes a relu, and small biases. Batch norms get factors of 0.7 to 1.3 and offsets around 1:
    with offsets around 0 each random convolution with its relu enlarges the relative size of any
    disturbance, and deep networks drown in it, whoever quantizes them; trained ones do not.
    Embeddings, LSTMs and parameters of other modules stay as their constructors drew them.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.conv._ConvNd | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.normal_(module.bias, 0, 0.05)
        elif isinstance(module, _BatchNorm | nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.7, 1.3)
            nn.init.normal_(module.bias, 1.0 if isinstance(module, _BatchNorm) else 0.0, 0.3)
    _set_statistics(model, data)
    return model.eval()


def _set_statistics(model: nn.Module, data: Tensor) -> None:
    """One run in which batch norms work as in training and keep the statistics they see."""
    norms = [module for module in model.eval().modules() if isinstance(module, _BatchNorm)]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train().momentum = 1.0
    with torch.no_grad():
        model(data)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval().momentum = momentum
