# SPDX-License-Identifier: Apache-2.0
"""``torchq.from_compressed_tensors``: models that llm-compressor quantized."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from torchq.integrations.compressed_files import read_folder


def from_compressed_tensors(path: str | os.PathLike[str], model_class: Any = None) -> nn.Module:
    """Load a folder of int8 or 4-bit weights that llm-compressor wrote, for inference here.

    Linear layers keep the integers and scales of their weights. They quantize each row of a source
    by its own range, also where the folder has float sources; where it has a fixed scale for
    sources, that one. The rest of the model is float32. ``save_pretrained`` of the result writes a
    folder that :class:`torchq.TorchqConfig` loads.

    Args:
        path: a folder with ``quant_method: compressed-tensors`` in its config.json.
        model_class: of transformers, such as AutoModel; the default is what config.json names.

    Returns:
        The model of transformers, its quantized layers as they are in the folder.

    Raises:
        ImportError: transformers is not installed.
        ValueError: it is no such folder, is damaged, or has layers without a form here, such as
            float8 weights; the message names them.

    Example::

        model = torchq.from_compressed_tensors("Qwen3-0.6B-W8A8")
    """
    folder = Path(path)
    facts, layers = read_folder(folder)
    from torchq.integrations.compressed_quantizer import load  # needs transformers

    return load(folder, facts, layers, model_class)
