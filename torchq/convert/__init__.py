# SPDX-License-Identifier: Apache-2.0
"""Turns a float model into an int8 one that keeps its class.

The stages, in order:

    api                prepare, calibrate, convert, quantize
    pipeline           the stages of these
    swap               the leaves: layers that the model's own code calls
    parts              the calls that torch.export captures, by torchq.capture; the passes of
                       torchq.planning decide what becomes of them
    prepared           the graph with what the plan and the recipes watch
    recipes            what they make of the records, once calibrated
    lower              the graph of quantized modules, by torchq.graphs
    dispatch           which calls take a graph; checks: the same within scripts
    report             what became of each module
"""
