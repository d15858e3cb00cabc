# SPDX-License-Identifier: Apache-2.0
"""``torchq.from_compressed_tensors``: models that llm-compressor quantized."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from torchq.integrations.compressed_files import read_folder


def from_compressed_tensors(path: str | os.PathLike[str], model_class: object = None) -> nn.Module:
    """Load a folder of int8 or 4-bit weights that llm-compressor wrote.

    Linear layers keep the integers and scales of their weights. They quantize each row of a source
    by its own range, unless the folder has a fixed scale for sources. Scales of 4-bit groups are
    rounded to bfloat16. The rest of the model is float32. ``save_pretrained`` of the result writes
    a folder that :class:`torchq.TorchqConfig` loads.

    Args:
        path: a folder with ``quant_method: compressed-tensors`` in its config.json.
        model_class: of transformers, such as AutoModel; the default is what config.json names.

    Returns:
        The model of transformers, with quantized layers.

    Raises:
        ImportError: transformers is not installed.
        ValueError: the folder is of another kind, is damaged, or has layers without a form here,
            such as float8 or int8 weights in groups; the message names them.

    Example::

        model = torchq.from_compressed_tensors("Qwen3-0.6B-W8A8")
    """
    folder = Path(path)
    facts, layers = read_folder(folder)
    from torchq.integrations.compressed_quantizer import load  # needs transformers

    return load(folder, facts, layers, model_class)
