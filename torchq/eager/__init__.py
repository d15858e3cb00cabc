# SPDX-License-Identifier: Apache-2.0
"""The eager flow: swap modules, leave the model's own Python code as it is.

:func:`prepare` runs the model and records who consumes what. A module will emit int8 only if
every reader of its result is a quantized module too (through views, pools and dropout), else
float32; plain torch operations in between therefore see float tensors and mean what they always
meant. A reader takes the scale of the layer it reads from.

What was recorded must hold in every later run: a converted model must call the same modules in the
same order, whatever its input. Where a second call does not, for what the model keeps between
calls, no layer emits int8. Where another input leads another way, a module raises if it is given a
dtype that it was not made for; code that looks into a uint8 tensor by itself cannot be stopped.

recording -> fuse -> planning -> observed -> lowering; report says what became of each module.
"""

from torchq.eager.flow import calibrate, check_model, convert, prepare, prepare_call, quantize

__all__ = ["calibrate", "check_model", "convert", "prepare", "prepare_call", "quantize"]
