# SPDX-License-Identifier: Apache-2.0
"""Graphs as modules: int8 graphs, a user's own graphs, and both as data that pickle takes."""
