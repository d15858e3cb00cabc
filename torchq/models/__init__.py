# SPDX-License-Identifier: Apache-2.0
"""Handles a user's model: runs, copies and restores it, finds its graphs and observers."""
