# SPDX-License-Identifier: Apache-2.0
"""The flow on a traced graph: functions and operators are quantized as modules are.

What the files do, along the way of a model:

A model and example inputs become a graph:

    place, nodes       where in the model's code a node comes from; what it computes
    guards             what a graph checks at run time; containers: numbers of items
    recorder, proxy    nodes that are computed while they are recorded; what the code handles
    respelled          calls that are recorded as others: attention, einsum, sequences
    tracer             torch.fx's, with these; results: of classes of their own;
                       factories: functions of torch that do not dispatch
    capture            all of it; memory: whether the graph does what the model does, call after
                       call; batches: for which batch sizes

Its nodes become layers, and its values get a dtype:

    ops, patterns      roles; the one table of what is recognized; matmuls, moves, fake: the float
                       modules and fake quantizers that it names
    recognize, layers  from nodes to operations; from operations to what one op computes
    constants          what is computed once
    planning           which values are int8, and which share a scale
    prepared, report   the graph with observers; a row for every module and function

The calibrated graph is converted:

    sharing            which concatenations give their scale to what they read
    scripting          spellings of the float model that TorchScript refuses
    lowering           layers become modules of torchq.nn
    module, direct     the converted model; its code for eager mode, tracing and TorchScript
    structure, names   its graph as text, and the functions that this may call

flow has the verbs.
"""

from torchq.fx.capture import CaptureError
from torchq.fx.flow import convert, prepare

__all__ = ["CaptureError", "convert", "prepare"]
