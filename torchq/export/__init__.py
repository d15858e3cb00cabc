# SPDX-License-Identifier: Apache-2.0
"""Writes converted models as files that other runtimes run."""

from torchq.export.write import to_onnx

__all__ = ["to_onnx"]
