# SPDX-License-Identifier: Apache-2.0
"""Turns a float model into an int8 one that keeps its class.

The stages, in order:

    api                prepare, calibrate, convert, quantize
    swap               the leaves: layers that the model's own code calls
    parts              the calls that torch.export captures, by torchq.capture
    recognize, fuse    from nodes to operations, and to what one op computes
    plan               which values are int8, and which share a scale
    prepared           the graph with observers
    lower              the graph of quantized modules, by torchq.graphs
    dispatch           which calls take a graph; checks: the same within scripts
    rows, report       what became of each module
"""
