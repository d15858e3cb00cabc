# SPDX-License-Identifier: Apache-2.0
"""Decides what becomes of each operation of a captured model, by passes from a plan to a plan."""
