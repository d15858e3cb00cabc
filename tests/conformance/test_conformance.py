# SPDX-License-Identifier: Apache-2.0
"""Generated cases against real oneDNN, in its own process; `differential.py` says how they compare.

TORCHQ_CONFORMANCE_CASES is the number of cases of each primitive. Every case depends on its
primitive and number only, so that a failure's number is enough to run it again:

    python tests/conformance/run.py --primitive convolution --first 17 --cases 1
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from run import PRIMITIVES, run_primitive

import torchq.functional as TF
from benchmarks.onednn import Peer, WheelsUnavailableError
from torchq import Attr, PostOps

CASES = int(os.environ.get("TORCHQ_CONFORMANCE_CASES", "22"))


@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_conforms(primitive: str) -> None:
    try:
        tally = run_primitive(primitive, CASES)
    except WheelsUnavailableError as error:
        pytest.skip(str(error))
    assert not tally.failures, "\n".join(tally.failures[:5])
    assert tally.refused_by_torchq == 0, tally.reasons
    assert tally.refused_by_onednn <= 0.3 * CASES, tally.reasons
    assert tally.compared > 0


@pytest.mark.parametrize("dtype,post_ops", [(torch.uint8, "sum:0.5:7"), (torch.int8, "")])
def test_a_deconvolution_of_onednn_is_wrong(dtype: torch.dtype, post_ops: str) -> None:
    """oneDNN 3.2's strided jit_uni_int8:avx2, by tens of steps: the defect of `differential.py`."""
    rng = torch.Generator().manual_seed(0)
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max + 1
    src = torch.randint(low, high, (1, 8, 6, 6), generator=rng, dtype=dtype)
    weight = torch.randint(-127, 128, (8, 1, 2, 2), generator=rng, dtype=torch.int8)
    old = torch.randint(0, 256, (1, 1, 17, 7), generator=rng, dtype=torch.uint8)
    acc = F.conv_transpose2d(src.double(), weight.double(), stride=(3, 1))
    real = 1e-3 * acc + (0.5 * (old.double() - 7) if post_ops else 0)
    attr = Attr().set_scales("src", 0, 1e-3).set_post_ops(PostOps.parse(post_ops))
    olds = [old] if post_ops else []
    dst = TF.conv_transpose2d(
        src, weight, stride=(3, 1), attr=attr, dst_dtype=torch.uint8, post_op_srcs=olds
    )
    expected = real.round().clamp(0, 255)
    assert torch.equal(dst.double(), expected)
    try:
        started = Peer(threads=1)
    except WheelsUnavailableError as error:
        pytest.skip(str(error))
    with started as peer:
        theirs = peer.deconvolution(
            src, weight, stride=(3, 1), src_scale=1e-3, post_ops=post_ops,
            dst=old if post_ops else None, dst_dtype=torch.uint8,
        )  # fmt: skip
        assert peer.implementation == "jit_uni_int8:avx2"
    assert (theirs.double() - expected).abs().max() > 5
