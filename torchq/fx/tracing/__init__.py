# SPDX-License-Identifier: Apache-2.0
"""From a model and example inputs to a graph.

Bottom up:

    place, nodes           where in the model's code a node comes from; what it computes
    guards, containers     what a graph checks at run time; numbers of items
    recorder, proxy        nodes that are computed while they are recorded; what the code handles;
                           arrays: and gives to numpy
    arguments              what the model is given: tensors and constants
    fake                   fake quantizers, of torchq and of others
    attention, einsum      as linears and matrix products; sequences: packed ones; respelled: calls
                           that are recorded as these
    results, written       results of classes of their own; constants that the code writes to
    tracer, factories      torch.fx's, with these; functions of torch that do not dispatch
    overwritten            copies where memory is written that was read before
    memory, batches        whether the graph does what the model does, call after call; for which
                           batch sizes
    capture                all of it
"""
