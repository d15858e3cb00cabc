# SPDX-License-Identifier: Apache-2.0
"""Accuracy recipes: what is done to a layer's weight and source so that 8 bits lose less of it."""
