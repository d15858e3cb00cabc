# SPDX-License-Identifier: Apache-2.0
"""Observers: what records activations, and a base class for your own."""

from torchq.quantization.observers import *  # noqa: F403
from torchq.quantization.observers import __all__ as __all__
