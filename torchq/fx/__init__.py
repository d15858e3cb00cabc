# SPDX-License-Identifier: Apache-2.0
"""The flow on a traced graph: functions and operators are quantized as modules are.

What the files do, along the way of a model. ``tracing`` makes a model and example inputs a graph.

Its nodes become layers, and its values get a dtype:

    ops, patterns      roles; the one table of what is recognized; matmuls, moves: the float
                       modules that it names
    recognize, layers  from nodes to operations; from operations to what one op computes
    constants          what is computed once
    planning           which values are int8, and which share a scale; phases: what 8 bits are too
                       coarse for
    prepared, report   the graph with observers; a row for every module and function

The calibrated graph is converted:

    sharing            which concatenations give their scale to what they read
    scripting          spellings of the float model that TorchScript refuses
    quantized          the module of torchq.nn that a layer becomes
    lowering           the graph that calls these modules
    module, direct     the converted model; its code for eager mode, tracing and TorchScript
    exporting          what torch.export gives it by keyword
    structure, names   its graph as text, and the functions that this may call

flow has the verbs.
"""

from torchq.fx.flow import convert, prepare
from torchq.fx.tracing.capture import CaptureError

__all__ = ["CaptureError", "convert", "prepare"]
