# SPDX-License-Identifier: Apache-2.0
"""docs/reference/support.md beside the names of oneDNN 3.13, and beside what torchq does."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import torchq
import torchq.functional as TF
from torchq import Attr, PostOps
from torchq.attributes.refused import REFUSED_SETTERS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "support.md"
HEADERS = ROOT / "build" / "onednn-3.13" / "include" / "oneapi" / "dnnl"
U8, S8, S32, F32 = torch.uint8, torch.int8, torch.int32, torch.float32

SRC = torch.ones(2, 8, dtype=U8)
WEIGHT = torch.ones(4, 8, dtype=S8)
IMAGE = torch.ones(1, 4, 6, 6, dtype=U8)
KERNEL = torch.ones(4, 4, 3, 3, dtype=S8)
REAL = torch.rand(1, 4, 6, 6)
ONE = torch.ones(1)


class Refused(NamedTuple):
    """A call that raises."""

    call: Callable[[], Any]
    error: type[Exception]
    text: str


Claim = Callable[[], Any] | Refused


def post_op(name: str, *arguments: Any, **options: Any) -> Tensor:
    post_ops = getattr(PostOps(), f"append_{name}")(*arguments, **options)
    old = []
    if name == "sum":
        old = [IMAGE]
    elif "select" in arguments:
        old = [torch.ones(1, 4, 6, 6, dtype=S8)]
    attr = Attr().set_post_ops(post_ops)
    return TF.conv2d(IMAGE, KERNEL, padding=1, attr=attr, dst_dtype=U8, post_op_srcs=old)


def recurrent(kind: str, gates: int, directions: int = 1, **options: Any) -> Tensor:
    weights = [torch.randn(1, directions, n, gates, 16) for n in (8, 16)]
    layer = getattr(torchq.nn, kind).from_onednn(*weights, **options)
    return layer(torch.rand(3, 2, 8))[0]


def batch_norm(chain: str = "", operands: tuple[Tensor, ...] = ()) -> Tensor:
    four = torch.rand(4)
    attr = Attr().set_post_ops(PostOps.parse(chain, operands))
    return TF.batch_norm(IMAGE, four, four + 1, four, four, attr=attr)


def binary(name: str) -> Tensor:
    condition = torch.ones_like(IMAGE, dtype=torch.bool) if name == "select" else None
    return TF.binary(IMAGE, IMAGE, name, condition=condition)


def no_function(name: str) -> Refused:
    return Refused(lambda: getattr(TF, name), AttributeError, name)


def no_setter(name: str) -> Refused:
    return Refused(lambda: getattr(Attr(), name), AttributeError, f"has no {name} of oneDNN: ")


def no_scale_mode(mode: str) -> Refused:
    return Refused(lambda: Attr().set_scales("dst", 0, qmode=mode), TypeError, "qmode")


def no_source(dtype: str) -> Refused:
    data = torch.zeros(2, 8, dtype=U8).view(getattr(torch, dtype))
    return Refused(lambda: TF.linear(data, WEIGHT), TypeError, "src must be torch.uint8")


def destination(dtype: torch.dtype) -> Tensor:
    dst = TF.linear(SRC, WEIGHT, dst_dtype=dtype)
    assert dst.dtype == dtype
    return dst


def int4() -> Tensor:
    weight = torchq.packing.pack_linear_int4(*TF.quantize_weight_int4(torch.randn(16, 64), 32))
    return TF.dynamic_linear_int4(torch.randn(2, 64), weight)


def stochastic(mode: str) -> Tensor:
    return TF.reorder(REAL, U8, Attr().set_rounding("dst", mode))


PRIMITIVES: dict[str, Claim] = {
    "reorder": lambda: TF.reorder(REAL, U8),
    "shuffle": lambda: TF.shuffle(IMAGE, 2),
    "concat": lambda: TF.concat([IMAGE, IMAGE]),
    "sum": lambda: TF.sum([IMAGE, IMAGE]),
    "convolution": lambda: TF.convolution(IMAGE, KERNEL),
    "deconvolution": lambda: TF.deconvolution(IMAGE, KERNEL),
    "eltwise": lambda: TF.eltwise(IMAGE, "relu"),
    "lrn": no_function("lrn"),
    "batch_normalization": batch_norm,
    "inner_product": lambda: TF.inner_product(SRC, WEIGHT),
    "rnn": lambda: recurrent("QLSTM", 4),
    "gemm": lambda: TF.gemm_u8s8s32(SRC, WEIGHT.T),
    "binary": lambda: TF.binary(IMAGE, IMAGE, "add"),
    "matmul": lambda: TF.matmul(SRC, WEIGHT.T),
    "resampling": lambda: TF.resampling(IMAGE, (12, 12)),
    "pooling": lambda: TF.max_pool(IMAGE, 2),
    "reduction": lambda: TF.reduction(IMAGE, "sum", (2, 3)),
    "prelu": lambda: TF.prelu(IMAGE, torch.rand(1, 4, 1, 1)),
    "softmax": lambda: TF.softmax(SRC),
    "layer_normalization": lambda: TF.layer_norm(SRC, 8),
    "group_normalization": lambda: TF.group_norm(IMAGE, 2),
}
NO_ALGORITHM = Refused(
    lambda: TF.convolution(IMAGE, KERNEL, algorithm="winograd"), TypeError, "algorithm"
)
ELTWISE = (
    "relu tanh elu square abs sqrt linear soft_relu hardsigmoid logistic exp gelu_tanh swish log "
    "clip pow gelu_erf round mish hardswish"
)
BINARY = "add mul max min div sub ge gt le lt eq ne select"


def no_cell(cell: str) -> Refused:
    return Refused(lambda: recurrent("QGRU", 3, cell=cell), ValueError, "'gru_vanilla' or 'gru'")


ALGORITHMS: dict[str, Claim] = {
    "convolution_direct": lambda: TF.convolution(IMAGE, KERNEL),
    "convolution_auto": lambda: TF.convolution(IMAGE, KERNEL),
    "convolution_winograd": NO_ALGORITHM,
    "deconvolution_direct": lambda: TF.deconvolution(IMAGE, KERNEL),
    "deconvolution_winograd": NO_ALGORITHM,
    **{f"eltwise_{n}": lambda n=n: TF.eltwise(REAL, n, 1.0, 2.0) for n in ELTWISE.split()},
    "eltwise_clip_v2": Refused(
        lambda: TF.eltwise(REAL, "clip_v2", 0.0, 1.0), ValueError, "Did you mean 'clip'"
    ),
    **{f"binary_{n}": lambda n=n: binary(n) for n in BINARY.split()},
    "pooling_max": lambda: TF.max_pool(IMAGE, 2),
    "pooling_avg_include_padding": lambda: TF.avg_pool(IMAGE, 3, 1, 1),
    "pooling_avg_exclude_padding": lambda: TF.avg_pool(IMAGE, 3, 1, 1, count_include_pad=False),
    "lrn_across_channels": no_function("lrn"),
    "lrn_within_channel": no_function("lrn"),
    "vanilla_rnn": lambda: recurrent("QRNN", 1, cell="rnn_relu"),
    "vanilla_lstm": lambda: recurrent("QLSTM", 4),
    "vanilla_gru": lambda: recurrent("QGRU", 3),
    "lbr_gru": lambda: recurrent("QGRU", 3, cell="gru"),
    "vanilla_augru": no_cell("augru"),
    "lbr_augru": no_cell("lbr_augru"),
    "resampling_nearest": lambda: TF.resampling(IMAGE, (9, 9)),
    "resampling_linear": lambda: TF.resampling(IMAGE, (9, 9), "linear"),
    **{
        f"reduction_{n}": lambda n=n: TF.reduction(IMAGE, n, (2,))
        for n in (
            *("max", "min", "sum", "mul", "mean", "norm_lp_max", "norm_lp_sum"),
            *("norm_lp_power_p_max", "norm_lp_power_p_sum"),
        )
    },
    "softmax_accurate": lambda: TF.softmax(SRC),
    "softmax_log": lambda: TF.log_softmax(SRC),
}
GROUPED = Attr().set_scales("weights", 3, torch.ones(4, 2), groups=(2, 2))
ATTRIBUTES: dict[str, Claim] = {
    "scales_mask": lambda: Attr().set_scales("src", 0),
    "scales": lambda: TF.matmul(SRC, torch.ones(8, 4, dtype=S8), attr=GROUPED),
    "scales_v2": lambda: TF.linear(SRC, WEIGHT, attr=Attr().set_scales("src", 0, 0.5)),
    "scales_v3": no_scale_mode("dynamic_mx"),
    "zero_points_mask": lambda: Attr().set_zero_points("src", 0),
    "zero_points": lambda: TF.linear(SRC, WEIGHT, attr=Attr().set_zero_points("src", 0, 7)),
    "zero_points_v2": lambda: TF.linear(SRC, WEIGHT, attr=Attr().set_zero_points("src", 0, 7)),
    "post_ops": lambda: Attr().set_post_ops(PostOps()),
    "rounding": lambda: stochastic("stochastic"),
    "rnn_data_qparams": lambda: Attr().set_rnn_data_qparams(127.0, 128.0),
    "rnn_weights_qparams": lambda: Attr().set_rnn_weights_qparams(0, 100.0),
    "rnn_weights_projection_qparams": lambda: Attr().set_rnn_weights_projection_qparams(0, 100.0),
    **{
        name: no_setter(f"set_{name}")
        for name in (
            *("accumulation_mode", "deterministic", "dropout", "fpmath_mode", "scratchpad_mode"),
            "precomputed_reductions",
        )
    },
    "dropout_v2": no_setter("set_dropout"),
    "fpmath_mode_v2": no_setter("set_fpmath_mode"),
}
POST_OPS: dict[str, Claim] = {
    "sum": lambda: post_op("sum"),
    "eltwise": lambda: post_op("eltwise", "relu"),
    "dw": lambda: post_op("dw_conv", torch.ones(4, 1, 3, 3, dtype=S8)),
    "binary": lambda: post_op("binary", "add", torch.rand(4), 2),
    "binary_v2": lambda: post_op("binary", "select", torch.ones(4), 2),
    "prelu": lambda: post_op("prelu", torch.rand(4), 2),
}
MODES: dict[str, Claim] = {
    "quantization_mode_static_sazp": lambda: Attr().set_scales("src", 0),
    "quantization_mode_dynamic_mx": no_scale_mode("dynamic_mx"),
    "quantization_mode_dynamic_fp": no_scale_mode("dynamic_fp"),
    "rounding_mode_environment": lambda: stochastic("environment"),
    "rounding_mode_stochastic": lambda: stochastic("stochastic"),
    "use_global_stats": batch_norm,
    "use_scale": batch_norm,
    "use_shift": batch_norm,
    "fuse_norm_relu": lambda: batch_norm("eltwise_relu"),
    "fuse_norm_add_relu": lambda: batch_norm("binary_add:15+eltwise_relu", (REAL.flatten(),)),
    "rms_norm": lambda: TF.rms_norm(SRC, 8),
    "unidirectional_left2right": lambda: recurrent("QGRU", 3),
    "unidirectional_right2left": Refused(
        lambda: recurrent("QGRU", 3, direction="right2left"), TypeError, "direction"
    ),
    "bidirectional_concat": lambda: recurrent("QGRU", 3, 2),
    "bidirectional_sum": lambda: recurrent("QGRU", 3, 2, merge="sum"),
}
DATA_TYPES: dict[str, Claim] = {
    "f16": lambda: destination(torch.float16),
    "bf16": lambda: destination(torch.bfloat16),
    "f32": lambda: destination(F32),
    "s32": lambda: destination(S32),
    "s8": lambda: (destination(S8), TF.linear(SRC.to(S8), WEIGHT)),
    "u8": lambda: (destination(U8), TF.linear(SRC, WEIGHT.to(U8))),
    "f64": no_source("float64"),
    "boolean": no_source("bool"),
    "f8_e5m2": no_source("float8_e5m2"),
    "f8_e4m3": no_source("float8_e4m3fn"),
    "s4": int4,
    "u4": int4,
    "e8m0": no_source("float8_e8m0fnu"),
    "f4_e2m1": no_source("float4_e2m1fn_x2"),
    "f4_e3m0": Refused(lambda: torch.float4_e3m0, AttributeError, "float4_e3m0"),
    "s64": no_source("int64"),
}
FORMATS: dict[str, Claim] = {
    "format_kind_any": lambda: TF.linear(SRC, torchq.packing.pack_linear(WEIGHT)),
    "blocked": lambda: TF.conv2d(IMAGE.contiguous(memory_format=torch.channels_last), KERNEL),
    "format_kind_opaque": Refused(
        lambda: TF.linear(SRC.to_mkldnn(), WEIGHT), (TypeError, RuntimeError), ""
    ),
    "format_kind_sparse": Refused(
        lambda: TF.linear(SRC.to_sparse(), WEIGHT), TypeError, "to_dense()"
    ),
    "format_kind_host_scalar": lambda: Attr().set_scales("src", 0, 0.5),
}
SECTIONS: dict[str, dict[str, Claim]] = {
    "Primitives": PRIMITIVES,
    "Algorithms": ALGORITHMS,
    "Attributes": ATTRIBUTES,
    "Post-ops": POST_OPS,
    "Modes and flags": MODES,
    "Data types": DATA_TYPES,
    "Memory formats": FORMATS,
}


def rows(section: str) -> Iterator[tuple[str, str]]:
    """Yields each name of a section's table, and its yes or no."""
    text = PAGE.read_text(encoding="utf-8").split("## oneDNN 3.13, name by name")[1]
    table = text.split(f"\n### {section}\n")[1].split("\n#")[0]
    for line in table.splitlines():
        if line.startswith("| `"):
            names, verdict = line.split("|")[1:3]
            for name in re.findall("`(.*?)`", names):
                yield name, verdict.strip()


@pytest.mark.parametrize("section", SECTIONS)
def test_the_page_has_every_name(section: str) -> None:
    claims = {
        name: "no" if isinstance(claim, Refused) else "yes"
        for name, claim in SECTIONS[section].items()
    }
    found = list(rows(section))
    assert len(found) == len(dict(found)), "a name is there twice"
    assert dict(found) == claims


@pytest.mark.parametrize(
    ("section", "name"), [(section, name) for section, names in SECTIONS.items() for name in names]
)
def test_a_verdict_holds(section: str, name: str) -> None:
    claim = SECTIONS[section][name]
    if not isinstance(claim, Refused):
        claim()
        return
    with pytest.raises(claim.error, match=re.escape(claim.text)):
        claim.call()


def enumerated(file: str, type_name: str) -> set[str]:
    """The names of an enum of oneDNN, without those that only bound it."""
    text = (HEADERS / file).read_text()
    body = text[: text.index(f"}} dnnl_{type_name}_t;")].rpartition("typedef enum {")[2]
    names = re.findall(r"^\s*dnnl_(\w+)(?: =[^,]*)?,", body, re.MULTILINE)
    return {name for name in names if not re.search("undef|_max$|_bwd$|_none$", name)}


def declared(prefix: str) -> set[str]:
    """The ends of the functions whose names begin so."""
    return set(re.findall(rf"DNNL_API dnnl_{prefix}(\w+)\(", (HEADERS / "dnnl.h").read_text()))


def test_the_names_are_those_of_the_headers() -> None:
    if not HEADERS.is_dir():
        pytest.skip("oneDNN 3.13 is not downloaded: `make conformance`")
    bounds = {"pooling_max", "reduction_max", "reduction_norm_lp_max", "binary_max"}
    bounds |= {"reduction_norm_lp_power_p_max"}  # algorithms, although they end in _max
    assert enumerated("dnnl_types.h", "primitive_kind") == set(PRIMITIVES) - {"undefined_primitive"}
    assert enumerated("dnnl_types.h", "alg_kind") | bounds == set(ALGORITHMS)
    assert declared("primitive_attr_set_") == set(ATTRIBUTES)
    assert declared("post_ops_append_") == set(POST_OPS)
    modes = set()
    for name in ("quantization_mode", "rounding_mode", "normalization_flags", "rnn_direction"):
        modes |= enumerated("dnnl_types.h", name)
    assert modes == set(MODES)
    assert enumerated("dnnl_common_types.h", "data_type") == set(DATA_TYPES)
    assert enumerated("dnnl_types.h", "format_kind") == set(FORMATS)


def test_a_missing_setter_leaves_an_attr_as_it_was() -> None:
    attr = Attr().set_scales("src", 0, 0.5)
    for name in REFUSED_SETTERS:
        assert not hasattr(attr, name)
    with pytest.raises(AttributeError, match="'Attr' object has no attribute 'set_scale'"):
        attr.set_scale("src", 0)
    assert copy.copy(attr) == copy.deepcopy(attr) == pickle.loads(pickle.dumps(attr)) == attr
