# SPDX-License-Identifier: Apache-2.0
"""Loads the library and runs it: fake kernels of its ops, instruction sets and CPUs."""
