# SPDX-License-Identifier: Apache-2.0
"""Accuracy as users count it: models with trained weights, their own metric, and time."""
