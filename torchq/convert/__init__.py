# SPDX-License-Identifier: Apache-2.0
"""Turns a float model into an int8 one that keeps its class."""
