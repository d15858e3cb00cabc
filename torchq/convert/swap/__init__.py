# SPDX-License-Identifier: Apache-2.0
"""Replace the leaves of a model by quantized ones, and leave the model's own code as it is.

A leaf is a linear layer, a convolution or a recurrent module. A quantized leaf takes float32 and
gives float32, so it is right whatever the code around it does. The converted model is a copy of the
given one: the same class, attributes, methods and hooks.

calls (one run) -> planning -> observed leaves -> compare, joined in flow. leaves finds the leaves,
checks refuses models that no flow takes.
"""
