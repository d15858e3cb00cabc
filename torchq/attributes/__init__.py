# SPDX-License-Identifier: Apache-2.0
"""Describes what an op does beside its product: `Attr` and `PostOps`, and the text of both."""
