# SPDX-License-Identifier: Apache-2.0
"""Methods of libraries that would write a quantized model as if it were the float one."""

from __future__ import annotations

from torch import nn


def refuse_save_pretrained(model: nn.Module) -> None:
    """Make ``save_pretrained`` of a prepared or converted model, and of its parts, an error."""
    for module in model.modules():
        if hasattr(type(module), "save_pretrained"):
            vars(module)["save_pretrained"] = save_pretrained


def save_pretrained(*args: object, **kwargs: object) -> None:
    """Raise NotImplementedError: transformers would load the file with random weights."""
    raise NotImplementedError(
        "save_pretrained: a model that torchq prepared or converted cannot be written so: "
        "from_pretrained would make a float model with random weights of it. Call "
        "torchq.save(model, path) of the converted one, and torchq.load(path, float_model). For a "
        "folder of transformers, load the float one with from_pretrained(folder, "
        "quantization_config=torchq.TorchqConfig()): save_pretrained writes that model."
    )
