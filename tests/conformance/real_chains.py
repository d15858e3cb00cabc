# SPDX-License-Identifier: Apache-2.0
"""Random post-ops of ops in real units: as torchq, the oracle and oneDNN take them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import reference_primitives as oracle
import torch
from chains import Chain, ChainMaker
from differential import Exact
from torch import Tensor

from benchmarks.onednn.request import plain
from torchq import Attr

ELTWISE, BINARY, SUM = ("eltwise",) * 3, ("binary",) * 3, ("sum",)


def draw_chain(
    rng: random.Random,
    data: torch.Generator,
    shape: Sequence[int],
    dtype: torch.dtype,
    kinds: Sequence[str],
    scale: float | None = None,
) -> Chain:
    """Draws a chain of the kinds that oneDNN's primitive takes."""
    broadcasts = ("one", "channel", "full", "some")
    maker = ChainMaker(rng, data, shape, dtype, scale or 1.0, broadcasts=broadcasts, kinds=kinds)
    return maker.chain()


def keywords(chain: Chain, attr: Attr | None = None) -> dict[str, Any]:
    """Returns the chain as arguments of torchq's function."""
    attr = (attr or Attr()).set_post_ops(chain.post_ops())
    return {"attr": attr, "post_op_srcs": chain.olds}


def safe_layout(chain: Chain, dims: int) -> str | None:
    """None (channels-last), or plain where oneDNN's ``simple`` resampling would be wrong.

    It addresses the operands of binaries as if dst were plain; test_conformance.py shows it.
    """
    return plain(dims) if "binary" in chain.text else None


def finished(x: Tensor, chain: Chain, dtype: torch.dtype, scale: float | None = None) -> Tensor:
    """The oracle behind the float32 result x of an op."""
    values, olds, operands = iter(chain.values), iter(chain.olds), []
    for word in chain.words:
        if word.startswith("sum"):
            operands.append(next(olds))
        elif not word.startswith("eltwise"):
            mask = int(word.split(":")[1])
            sizes = [size if mask >> d & 1 else 1 for d, size in enumerate(x.shape)]
            operands.append(next(values).reshape(sizes))
    return oracle.finish(x, chain.text, operands, (scale or 1.0, 0), dtype)[1]


def scaled(exact: Exact, chain: Chain, scale: float | None) -> Exact:
    exact = chain.exact(exact)
    return exact if scale is None else exact.times(1 / scale)
