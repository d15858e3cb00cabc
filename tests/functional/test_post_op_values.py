# SPDX-License-Identifier: Apache-2.0
"""Values of post-ops: order, copies, zero points, sources, and the chains that fold."""

import copy
import pickle

import pytest
import torch

from torchq.attributes.post_ops import PostOps, foldable

DTYPES = {"u8": torch.uint8, "s8": torch.int8, "s32": torch.int32, "f32": torch.float32}


@pytest.mark.parametrize(
    ("zero_point", "dtype", "expected"),
    [
        (5, torch.float32, "zero_point must be 0 for a torch.float32 source, got 5"),
        (256, torch.uint8, r"must be in \[0, 255\], got 256"),
        (-129, "s8", r"must be in \[-128, 127\], got -129"),
        (2**31, None, r"zero_point must be in \[-2147483648, 2147483647\]"),
    ],
)
def test_sum_zero_point(zero_point: int, dtype: object, expected: str) -> None:
    with pytest.raises(ValueError, match=r"torchq\.PostOps\.append_sum: .*" + expected):
        PostOps().append_sum(1.0, zero_point, dtype)  # type: ignore[arg-type]


def test_sum_zero_point_without_dtype_is_checked_against_dst() -> None:
    chain = PostOps().append_sum(1.0, 128)
    assert foldable(chain, torch.uint8)
    chain.check_supported("linear", torch.uint8)
    with pytest.raises(ValueError, match=r"must be in \[-128, 127\], got 128"):
        chain.check_supported("linear", torch.int8)
    with pytest.raises(ValueError, match=r"zero_point must be 0 for a torch.float32 source"):
        foldable(chain, torch.float32)


def test_sum_dtypes_agree() -> None:
    chain = PostOps().append_sum(dtype="u8").append_sum(dtype=torch.uint8)
    with pytest.raises(
        ValueError, match=r"dtype must be torch.uint8 as in the earlier sum, got to"
    ):
        chain.append_sum(dtype=torch.int8)
    with pytest.raises(ValueError, match="got None"):
        chain.append_sum()
    with pytest.raises(ValueError, match=r"append_sum: dtype must be one of torch.uint8"):
        PostOps().append_sum(dtype=torch.float64)
    assert chain.num_srcs == 2


def test_values_in_order_and_copied() -> None:
    src1 = torch.tensor([1.0, 2.0, 3.0])
    chain = PostOps().append_binary("add", src1, 2).append_sum().append_prelu([0.25, 0.5, 1], 2)
    chain.append_binary("mul", 2, 0).append_binary("add", torch.ones(1, 3, 1, dtype=torch.int8), 2)
    src1.zero_()
    assert [values.tolist() for values in chain.values] == [
        [1.0, 2.0, 3.0],
        [0.25, 0.5, 1.0],
        [2.0],
        [1, 1, 1],
    ]
    assert str(chain) == "binary_add:2+sum+prelu:2+binary_mul:0+binary_add:2:s8"
    chain.check((8, 3, 5, 5))


def test_values_ignore_default_dtype_and_device() -> None:
    old = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            chain = PostOps().append_binary("add", [0.1], 0)
    finally:
        torch.set_default_dtype(old)
    assert chain.values[0].equal(torch.tensor([0.1], dtype=torch.float32))
    assert chain.values[0].device.type == "cpu"


def test_missing_values_raise_and_name_the_post_op() -> None:
    chain = PostOps.parse("sum+binary_add:2+prelu:0", None)
    with pytest.raises(ValueError, match=r"got none for binary_add:2\. Supply them"):
        _ = chain.values
    supplied = chain.with_values([[1.0, 2.0], 0.25])
    assert [values.tolist() for values in supplied.values] == [[1.0, 2.0], [0.25]]
    with pytest.raises(ValueError, match=r"values must be 2 tensors for 'sum.*', got 1"):
        chain.with_values([[1.0]])
    with pytest.raises(ValueError, match="values must be 0 tensors"):
        PostOps.parse("sum", [torch.ones(1)])


def test_value_errors() -> None:
    with pytest.raises(ValueError, match="src1 must be 1 value for mask 0, got 3"):
        PostOps().append_binary("add", torch.ones(3), 0)
    with pytest.raises(ValueError, match="src1 must be finite float32 values, got nan at index 1"):
        PostOps().append_binary("add", [1.0, float("nan")], 2)
    with pytest.raises(ValueError, match=r"src1 must be torch.uint8, got torch.float32"):
        PostOps.parse("binary_add:2:u8", [torch.ones(3)])
    with pytest.raises(TypeError, match="weight must be numbers, got 'x'"):
        PostOps().append_prelu("x", 2)
    with pytest.raises(TypeError, match="src1 must be numbers"):
        PostOps().append_binary("add", torch.ones(3, dtype=torch.bool), 2)
    with pytest.raises(ValueError, match="mask must be in"):
        PostOps().append_prelu(1.0, 4096)
    with pytest.raises(TypeError, match="mask must be an integer"):
        PostOps().append_prelu(1.0, 2.0)  # type: ignore[arg-type]


def test_check_prints_both_numbers() -> None:
    chain = PostOps().append_binary("add", torch.ones(3), 2)
    with pytest.raises(ValueError) as error:
        chain.check((8, 4))
    assert str(error.value) == (
        "torchq.PostOps.check: values of binary_add:2 must be 4 values (mask 2 of dims [8, 4] "
        "selects [1, 4]), got 3. Supply 4 values or change the mask."
    )
    with pytest.raises(ValueError, match=r"must use a mask below 2 for dims \[3\], got mask 2"):
        chain.check((3,))


def test_sources_come_in_the_order_of_the_chain() -> None:
    rows, full = torch.arange(3.0), torch.rand(2, 3)
    chain = PostOps().append_sum().append_binary("mul", rows, 8).append_binary("add", None, 3)
    chain.append_binary("select", [1.0, 2.0], 2).append_binary("sub", [1.0, 2.0], 2)
    assert chain.num_srcs == 3  # the sum, the operand of mask 3, the condition
    old, condition = torch.rand(4), torch.ones(4, dtype=torch.int8)
    got = chain.sources("conv2d", lambda: (1, 2, 5, 3), [old, full, condition])
    assert [source.shape for source in got] == [(4,), (1, 1, 1, 3), (2, 3), (4,)]
    assert torch.equal(got[1].reshape(-1), rows)
    assert [str(owner) for owner in chain.source_owners] == [
        *("sum", "binary_mul:8", "binary_add:3", "binary_select:2")
    ]
    assert [values.numel() for values in chain.channel_values] == [2, 2]
    with pytest.raises(ValueError, match=r"post_op_srcs must be 3 tensors for .*, got 1\. Pass"):
        chain.sources("conv2d", lambda: (1, 2, 5, 3), [old])
    with pytest.raises(ValueError, match="must be 4 values"):
        chain.sources("conv2d", lambda: (1, 2, 5, 4), [old, full, condition])


def test_number_of_sums() -> None:
    PostOps.parse("+".join(["sum"] * 32)).check_supported("linear")


@pytest.mark.parametrize("dst_dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", True),
        ("sum", True),
        ("sum:0.5+eltwise_relu", True),
        ("sum+sum", True),
        ("eltwise_linear:2:1:3+binary_mul:2+binary_add:2+sum+eltwise_clip:0:6", True),
        ("binary_add:0+eltwise_relu", True),
        ("eltwise_linear:-2", True),
        ("eltwise_relu+sum", False),
        ("eltwise_relu+eltwise_relu", False),
        ("eltwise_clip:0:6+eltwise_linear:2", False),
        ("eltwise_relu:0.1", False),
        ("eltwise_relu:0:0:2", False),
        ("eltwise_relu:0:0:-1", False),
        ("eltwise_clip:0:6:2", False),
        ("binary_add:3", False),
        ("binary_sub:2", False),
        ("prelu:0", False),
        ("eltwise_tanh", False),
    ],
)
def test_foldable(text: str, expected: bool, dst_dtype: torch.dtype) -> None:
    assert foldable(PostOps.parse(text), dst_dtype) is expected


def test_foldable_refuses_an_unknown_dtype() -> None:
    with pytest.raises(ValueError, match=r"torchq\.foldable: dst_dtype must be one of"):
        foldable(PostOps(), torch.float64)


def test_equality_is_by_content() -> None:
    chain = PostOps().append_binary("add", [1.0, 2.0], 2)
    assert chain == PostOps().append_binary("add", torch.tensor([1.0, 2.0]), 2)
    assert chain != PostOps().append_binary("add", [1.0, 3.0], 2)
    assert chain != PostOps.parse("binary_add:2")
    assert PostOps().append_sum(0.0) != PostOps().append_sum(-0.0)
    assert chain != "binary_add:2"
    assert repr(chain) == "PostOps('binary_add:2')"


def test_copies() -> None:
    chain = PostOps().append_sum(0.5).append_binary("add", [1.0, 2.0], 2)
    for other in (copy.deepcopy(chain), pickle.loads(pickle.dumps(chain))):
        assert other == chain
        other.append_eltwise("relu")
        assert len(chain) == 2
