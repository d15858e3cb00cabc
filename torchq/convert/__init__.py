# SPDX-License-Identifier: Apache-2.0
"""Turns a float model into an int8 one that keeps its class.

Along the way of a model:

    api                prepare, calibrate, convert, quantize
    swap               the leaves: layers that the model's own code calls
    parts, capture     the calls that torch.export captures; recurrent, fake_calls: as one call each
    aten, spelling     from an exported program to a plain graph that scripts
    patterns           one table, ATen call -> role; makers, matmuls, layout_ops: its float modules
    recognize, fuse    from nodes to operations, and to what one op computes
    plan, phases       which values are int8, and which share a scale
    prepared           the graph with observers
    lower, quantized   the graph of quantized modules; sharing: scales of concatenations
    graph_module       that graph; direct: its code for eager mode
    guards, dispatch   which calls take a graph; checks: the same within scripts
    report, explain    what is int8, what is float and why
"""
