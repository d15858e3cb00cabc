# SPDX-License-Identifier: Apache-2.0
"""Answers what users of oneDNN ask: how its steps fuse, and what it computes without VNNI."""
