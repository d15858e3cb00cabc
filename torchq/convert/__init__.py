# SPDX-License-Identifier: Apache-2.0
"""Turns a float model into an int8 one that keeps its class.

The stages, in order:

    api                prepare, calibrate, convert, quantize
    swap               the leaves: layers that the model's own code calls
    parts, capture     the calls that torch.export captures; one_call: modules as one call
    aten, rewrites     from an exported program to a plain graph that scripts
    patterns           the one table, ATen call -> role; makers, matmuls: its float modules
    recognize, fuse    from nodes to operations, and to what one op computes
    plan               which values are int8, and which share a scale
    prepared           the graph with observers
    lower              the graph of quantized modules
    graph_module       that graph, and its code for eager mode; graph_data: as data
    guards, dispatch   which calls take a graph; checks: the same within scripts
    rows, report       what became of each module
"""
