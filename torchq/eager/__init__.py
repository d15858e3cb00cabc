# SPDX-License-Identifier: Apache-2.0
"""The eager flow: swap modules, leave the model's own Python code as it is.

Nothing is known about that code, so nothing is assumed: a convolution or linear layer that it calls
takes float32 and gives float32, whatever way later inputs go and whatever reads the result.
int8 values go from layer to layer, and batch norms and activations into them, where all code in
between is known: in modules that the model calls as a whole, and otherwise leaves alone, be it an
``nn.Sequential`` or one with a forward of its own, as a residual block. :mod:`torchq.fx` makes it a
graph if nothing but the shapes of its inputs can change what it does; asking for a part of it
raises.

recording -> planning -> wholes and observed; report says what became of each module.
"""

from torchq.eager.flow import calibrate, check_model, convert, prepare, prepare_call, quantize

__all__ = ["calibrate", "check_model", "convert", "prepare", "prepare_call", "quantize"]
