# SPDX-License-Identifier: Apache-2.0
"""Sentences per second of text encoders, in PyTorch and in the runtimes that users leave it for."""
