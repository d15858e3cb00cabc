# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of language models, in PyTorch and in the runtimes that users leave it for."""
