# SPDX-License-Identifier: Apache-2.0
"""Chooses scales and zero points: parameters, ranges, configurations and observers."""
