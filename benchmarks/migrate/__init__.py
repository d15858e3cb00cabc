# SPDX-License-Identifier: Apache-2.0
"""Each way to quantize a PyTorch model for CPUs, on the same models: code, time, size, accuracy."""
