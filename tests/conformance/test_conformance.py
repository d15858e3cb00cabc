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
from peers import LARGE, exact_weight, skip_if_not_at_hand, start_onednn
from run import PRIMITIVES, VERSIONS, offers, run_primitive

import torchq.functional as TF
from benchmarks.onednn import WheelsUnavailableError
from torchq import Attr, PostOps

CASES = int(os.environ.get("TORCHQ_CONFORMANCE_CASES", "22"))

# no eltwise post-ops there; no sources of int32
MOST = {("eltwise", LARGE): 0.6, ("reduction", "3.2"): 0.5}
"""The part of the cases that a version of oneDNN may refuse."""


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_conforms(primitive: str, version: str) -> None:
    if not offers(version, primitive):
        pytest.skip("this oneDNN has no such primitive, or no longer")
    skip_if_not_at_hand(version)
    try:
        tally = run_primitive(primitive, CASES, version=version)
    except WheelsUnavailableError as error:
        pytest.skip(str(error))
    assert not tally.failures, "\n".join(tally.failures[:5])
    assert tally.refused_by_torchq == 0, tally.reasons
    assert tally.refused_by_onednn <= MOST.get((primitive, version), 0.3) * CASES, tally.reasons
    assert tally.compared > 0


@pytest.mark.parametrize(
    "dtype,kernel,post_ops,dst_dtype",
    [(torch.uint8, 2, "sum:0.5:7", torch.uint8), (torch.int8, 1, "", torch.int32)],
)
def test_a_deconvolution_of_onednn_is_wrong(
    dtype: torch.dtype, kernel: int, post_ops: str, dst_dtype: torch.dtype
) -> None:
    """oneDNN 3.2 at strides above 1, by tens of steps: the defect of `differential.py`.

    Its kernels for AMX are right about these two.
    """
    rng = torch.Generator().manual_seed(0)
    limits, old = torch.iinfo(dtype), torch.iinfo(dst_dtype)
    src = torch.randint(limits.min, limits.max + 1, (1, 8, 6, 6), generator=rng, dtype=dtype)
    weight = torch.randint(-127, 128, (8, 5, kernel, kernel), generator=rng, dtype=torch.int8)
    acc = F.conv_transpose2d(src.double(), weight.double(), stride=3)
    olds = []
    if post_ops:
        olds = [torch.randint(0, old.max + 1, acc.shape, generator=rng, dtype=dst_dtype)]
    real = 1e-3 * acc + (0.5 * (olds[0].double() - 7) if olds else 0)
    expected = real.round().clamp(old.min, old.max)
    attr = Attr().set_scales("src", 0, 1e-3).set_post_ops(PostOps.parse(post_ops))
    dst = TF.conv_transpose2d(
        src, weight, stride=3, attr=attr, dst_dtype=dst_dtype, post_op_srcs=olds
    )
    assert torch.equal(dst.double(), expected)
    given = {"post_ops": post_ops, "dst": olds[0]} if olds else {"dst_dtype": dst_dtype}
    with start_onednn(max_isa="AVX512_CORE_VNNI") as peer:
        theirs = peer.deconvolution(src, weight, stride=3, src_scale=1e-3, **given)
        assert peer.implementation.startswith("jit_")
    assert (theirs.double() - expected).abs().max() > 5


def test_a_deconvolution_of_onednn_today_is_wrong() -> None:
    """oneDNN 3.13 at strides above 1 with int8 sources, where no tap of some reaches."""
    rng = torch.Generator().manual_seed(0)
    src = torch.randint(-128, 128, (2, 12, 6, 6), generator=rng, dtype=torch.int8)
    weight = torch.randint(-128, 128, (12, 16, 2, 4), generator=rng, dtype=torch.int8)
    weight = exact_weight(weight)
    window = {"stride": (1, 3), "padding": (1, 0), "groups": 4}
    acc = F.conv_transpose2d(src.double(), weight.double(), **window)
    given = {key: list(value) if key != "groups" else value for key, value in window.items()}
    assert torch.equal(
        TF.conv_transpose2d(src, weight, **window, dst_dtype=torch.int32).double(), acc
    )
    with start_onednn(version=LARGE, max_isa="AVX512_CORE_VNNI") as peer:
        theirs = peer.deconvolution(src, weight, **given, dst_dtype=torch.int32)
        is_brgemm = peer.implementation.startswith("brg_deconv")  # others are right about these
    assert torch.equal(theirs.double(), acc) != is_brgemm


def test_a_prelu_of_onednn_reads_the_operand_of_another() -> None:
    """oneDNN 3.13 takes the first one's mask for the second: it reads beyond the operand."""
    rng = torch.Generator().manual_seed(0)
    src = torch.randint(0, 256, (2, 8, 4), generator=rng, dtype=torch.uint8)
    weight = exact_weight(torch.randint(-127, 128, (2, 4, 21), generator=rng, dtype=torch.int8))
    slopes = [torch.rand(2 * 8 * 21, generator=rng), torch.rand(21, generator=rng)]
    acc = src.double() @ weight.double()
    first = torch.where(acc > 0, acc, acc * slopes[0].double().view_as(acc))
    expected = torch.where(first < 0, -first, -first * slopes[1].double())
    chain = "prelu:7+eltwise_linear:-1:0+prelu:4"
    attr = Attr().set_post_ops(PostOps.parse(chain, slopes))
    torch.testing.assert_close(TF.matmul(src, weight, attr=attr).double(), expected)
    asked = {"post_ops": chain, "post_op_tensors": slopes, "dst_dtype": torch.float32}
    with start_onednn(version=LARGE) as peer:
        theirs = peer.matmul(src, weight, **asked)
        assert peer.implementation.startswith("ref_int8")
    near = torch.isclose(theirs.double(), expected, rtol=1e-5, atol=1e-3)
    assert near[expected > 0].all() and not near.all()


def test_scales_per_k_of_onednn_are_read_per_row() -> None:
    """oneDNN 3.13's brg_matmul reads those of src per group of k as if each row had its own."""
    rng = torch.Generator().manual_seed(0)
    src = torch.randint(1, 256, (2, 64), generator=rng, dtype=torch.uint8)
    weight = exact_weight(torch.randint(1, 128, (64, 16), generator=rng, dtype=torch.int8))
    scales = torch.tensor([1.0, 2.0, 0.5, 4.0])
    real = src.double() * scales.repeat_interleave(16)
    expected = real @ weight.double()
    attr = Attr().set_scales("src", 2, scales, (1, 16))
    assert torch.equal(TF.matmul(src, weight, attr=attr).double(), expected)
    asked = {"dst_dtype": torch.float32, "groups": {"src_scale": (1, 16)}}
    with start_onednn(version=LARGE) as peer:
        each = peer.matmul(src, weight, src_scale=scales.repeat(2), masks={"src_scale": 3}, **asked)
        theirs = peer.matmul(src, weight, src_scale=scales, masks={"src_scale": 2}, **asked)
        wrong = peer.implementation.startswith("brg_matmul")
    assert torch.equal(each.double(), expected) and torch.equal(theirs[0].double(), expected[0])
    assert wrong != torch.equal(theirs[1].double(), expected[1])


def test_an_int32_bias_is_in_accumulator_units() -> None:
    """oneDNN 3 adds it behind the scales, as any other bias."""
    rng = torch.Generator().manual_seed(0)
    src = torch.randint(0, 256, (4, 32), generator=rng, dtype=torch.uint8)
    weight = torch.randint(-127, 128, (9, 32), generator=rng, dtype=torch.int8)
    weight = exact_weight(weight)
    bias = torch.randint(-5000, 5000, (9,), generator=rng, dtype=torch.int32)
    acc = src.double() @ weight.double().T
    attr = Attr().set_scales("src", 0, 1 / 512)
    assert torch.equal(TF.linear(src, weight, bias, attr).double(), (acc + bias) / 512)
    with start_onednn() as peer:
        theirs = peer.inner_product(src, weight, bias, src_scale=1 / 512, dst_dtype=torch.float32)
    assert torch.equal(theirs.double(), acc / 512 + bias)


def test_a_comparison_behind_an_average_of_onednn_is_wrong() -> None:
    """oneDNN, 3.13 too, compares the first 16 channels only."""
    src = torch.randint(0, 256, (1, 48, 8, 8), dtype=torch.uint8)
    attr = Attr().set_post_ops(PostOps.parse("binary_gt:0", [torch.tensor([100.0])]))
    expected = (F.avg_pool2d(src.double(), 2) > 100).to(torch.uint8)
    assert torch.equal(TF.avg_pool(src, 2, 2, 0, attr=attr), expected)
    asked = {"post_ops": "binary_gt:0", "post_op_tensors": [torch.tensor([100.0])]}
    with start_onednn(max_isa="AVX512_CORE_VNNI") as peer:
        theirs = peer.pooling(src, "avg_include_padding", 2, **asked)
        assert peer.implementation.startswith("jit_int")
        only_16 = "avx512" in peer.implementation  # those for AVX2 are right
    right = theirs == expected
    assert right[:, :16].all() and right[:, 16:].all() != only_16


def test_a_comparison_behind_a_softmax_of_onednn_is_wrong() -> None:
    """oneDNN 3.13's kernel for AVX2 gives 0 behind the last multiple of eight rows."""
    src = torch.randint(-8, 8, (1, 18, 1, 2), dtype=torch.int8)
    limit = torch.full((1, 18, 1, 2), 2.0)
    attr = Attr().set_post_ops(PostOps.parse("binary_le:15", [limit]))
    ones = torch.ones(src.shape)
    assert torch.equal(TF.softmax(src, 3, attr=attr), ones)
    asked = {"post_ops": "binary_le:15", "post_op_tensors": (limit,), "dst_dtype": torch.float32}
    with start_onednn(version=LARGE) as peer:
        theirs = peer.softmax(src, 3, **asked)
        only_16 = peer.implementation == "jit:avx2"  # those for AVX-512 are not known to be wrong
    assert torch.equal(theirs[:, :16], ones[:, :16])
    assert not only_16 or not theirs[:, 16:].any()


def test_an_average_of_onednn_beyond_16_bits_wraps() -> None:
    """oneDNN 3.2's kernels for AVX2: results of 2^15 and more become 0 as u8.

    Those of all its kernels of 2^31 and more become the lowest s32.
    """
    src = torch.full((1, 16, 4, 4), 128, dtype=torch.uint8)
    attr = Attr().set_post_ops(PostOps.parse("eltwise_square+eltwise_linear:2"))
    assert (TF.avg_pool(src, 2, 2, 0, attr=attr) == 255).all()
    with start_onednn(max_isa="AVX2") as peer:
        for factor, expected in ((2.0, 0), (1.999, 255)):
            post_ops = f"eltwise_square+eltwise_linear:{factor}:0"
            theirs = peer.pooling(src, "avg_include_padding", 2, stride=2, post_ops=post_ops)
            assert (theirs == expected).all() and peer.implementation == "jit_int:avx2"
    wide = torch.full((1, 16, 4, 4), 2**16, dtype=torch.int32)
    attr = Attr().set_post_ops(PostOps.parse("eltwise_square"))
    assert (TF.avg_pool(wide, 2, attr=attr) == 2**31 - 1).all()
    with start_onednn() as peer:
        theirs = peer.pooling(wide, "avg_include_padding", 2, stride=2, post_ops="eltwise_square")
        assert (theirs == -(2**31)).all() and peer.implementation.startswith("jit_int")


@pytest.mark.parametrize("step", ["binary_add:2", "prelu:2"])
def test_an_operand_behind_a_depthwise_convolution_of_onednn_is_ignored(step: str) -> None:
    """oneDNN 3.2's kernels for AVX2, beyond the first channel of those that fill no vector."""
    rng = torch.Generator().manual_seed(0)
    src = torch.randint(1, 256, (1, 19, 6, 6), generator=rng, dtype=torch.uint8)
    weight = torch.randint(-64, 0, (19, 1, 3, 3), generator=rng, dtype=torch.int8)
    values = torch.full((19,), 0.5)
    acc = F.conv2d(src.double(), weight.double(), groups=19)
    expected = acc + 0.5 if step == "binary_add:2" else 0.5 * acc
    attr = Attr().set_post_ops(PostOps.parse(step, [values]))
    dst = TF.conv2d(src, weight, groups=19, attr=attr, dst_dtype=torch.float32)
    assert torch.equal(dst.double(), expected)
    asked = {"groups": 19, "dst_dtype": torch.float32, "post_op_tensors": [values]}
    with start_onednn(max_isa="AVX2") as peer:
        theirs = peer.convolution(src, weight, post_ops=step, **asked)
        assert peer.implementation == "jit_uni_int8:avx2"
    right = (theirs.double() == expected).all(-1).all(-1)[0]
    assert right[:17].all() and not right[17:].any()


def test_a_comparison_behind_a_binary_of_onednn_is_wrong() -> None:
    """oneDNN 3.2 for AVX2 compares with other values if the destination is u8."""
    a, b = torch.ones(2, 1, 16, 2, 2, dtype=torch.uint8)
    bounds = torch.full((16,), 0.5)
    attr = Attr().set_post_ops(PostOps.parse("binary_le:2", [bounds]))
    assert (TF.binary(a, b, "add", attr=attr, dst_dtype=torch.uint8) == 0).all()
    asked = {"post_ops": "binary_le:2", "post_op_tensors": [bounds]}
    with start_onednn(max_isa="AVX2") as peer:
        assert (peer.binary(a, b, "add", dst_dtype=torch.float32, **asked) == 0).all()
        assert (peer.binary(a, b, "add", dst_dtype=torch.uint8, **asked) == 1).all()


def test_a_sum_behind_an_eltwise_of_onednn_is_left_out() -> None:
    """oneDNN 3.2 takes the post-op and ignores it, so the cases have none."""
    src = torch.randint(0, 100, (2, 3, 4, 5), dtype=torch.uint8)
    old = torch.randint(1, 100, src.shape, dtype=torch.uint8)
    attr = Attr().set_post_ops(PostOps.parse("sum"))
    assert torch.equal(TF.eltwise(src, "relu", attr=attr, post_op_srcs=[old]), src + old)
    with start_onednn() as peer:
        assert torch.equal(peer.eltwise(src, "relu", post_ops="sum", dst=old), src)


def test_an_operand_behind_a_resampling_of_onednn_is_misplaced() -> None:
    """oneDNN 3.2 addresses it as if the channels-last destination were plain."""
    src = torch.zeros(2, 3, 4, 5, dtype=torch.uint8)
    operand = torch.randint(0, 256, src.shape).float()
    attr = Attr().set_post_ops(PostOps.parse("binary_add:15").with_values([operand.flatten()]))
    assert torch.equal(TF.resampling(src, (4, 5), attr=attr).float(), operand)
    asked = {"post_ops": "binary_add:15", "post_op_tensors": [operand]}
    with start_onednn() as peer:
        assert torch.equal(
            peer.resampling(src, "nearest", (4, 5), layout="abcd", **asked).float(), operand
        )
        assert not torch.equal(peer.resampling(src, "nearest", (4, 5), **asked).float(), operand)
