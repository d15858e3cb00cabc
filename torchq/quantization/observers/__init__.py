# SPDX-License-Identifier: Apache-2.0
"""Observers: modules that watch activations during calibration and choose their QParams.

Memory is bounded: no observer stores activations. All state lives in buffers, so ``state_dict``,
``deepcopy`` and pickle carry it, and ``merge`` joins what several processes have seen. Observers
look at values, so graph captures must keep them as leaf modules.
"""

from torchq.quantization.observers.base import Observer
from torchq.quantization.observers.binned import (
    EntropyObserver,
    HistogramObserver,
    PercentileObserver,
)
from torchq.quantization.observers.minmax import (
    MinMaxObserver,
    MovingAverageObserver,
    PerChannelMinMaxObserver,
)

__all__ = [
    "EntropyObserver",
    "HistogramObserver",
    "MinMaxObserver",
    "MovingAverageObserver",
    "Observer",
    "PerChannelMinMaxObserver",
    "PercentileObserver",
]
