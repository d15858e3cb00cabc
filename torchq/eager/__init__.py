# SPDX-License-Identifier: Apache-2.0
"""The eager flow: swap modules, leave the model's own Python code as it is.

Nothing is known about that code, so nothing is assumed: a convolution or linear layer that it calls
takes float32 and gives float32, whatever way later inputs go and whatever reads the result.
int8 values go from layer to layer, and batch norms and activations into them, only where all code
in between is torch's: in an ``nn.Sequential`` of modules of torch.nn. If the model calls it as a
whole, and none of its parts elsewhere, :mod:`torchq.fx` makes it a graph; a part of that cannot be
called by itself any more. What that code asks of its modules, their classes, parts and parameters,
is answered as before, or raises (:mod:`torchq.nn.standing`).

recording -> planning -> observed, joined in flow; checks says what it refuses, leaves which modules
count as a whole, report what became of each module.
"""

from torchq.eager.checks import check_model
from torchq.eager.flow import calibrate, convert, prepare, prepare_call, quantize

__all__ = ["calibrate", "check_model", "convert", "prepare", "prepare_call", "quantize"]
