# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware training: round in training what the int8 model will round.

``prepare_qat`` (``place.py``) asks ``torchq.prepare`` which layers and values become int8. Each of
these layers gets a parametrization that rounds its weight. Each of these values gets one quantizer
(``quantizer.py``): a forward hook applies it to what the layers read or, where an addition, say,
reads the value as well, to the result of the module that makes it. All other code of the model
runs as it is. A batch norm needs no folding in training: a factor per channel behind a layer
changes the scales of its weight, and none of its integers.

``convert`` (``lower.py``) puts a ``torchq.FakeQuantize`` of the trained scale in the place of each
quantizer, and takes the way of all models with fake quantizers. What was not rounded in training
stays float.
"""
