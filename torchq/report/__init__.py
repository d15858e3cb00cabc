# SPDX-License-Identifier: Apache-2.0
"""Rows of reports: how each module and function runs, what conversion refuses by them, tables."""
