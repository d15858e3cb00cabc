# SPDX-License-Identifier: Apache-2.0
"""Captures a call of a model with ``torch.export``, and tells what each call of its graph means.

exported           the program that torch.export makes; one_call: modules as one call
guards             which calls the program stands for
aten, rewrites     from the program to a plain graph that scripts; einsum: as products
graph              that graph, and the facts about each of its nodes
patterns           the one table, ATen call -> role; makers, matmuls: its float modules
ops                what the table says of a call
cached             calls with a cache of keys and values; caches: those of transformers
module_kinds       the classes of layers that can be int8
"""
