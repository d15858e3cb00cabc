# SPDX-License-Identifier: Apache-2.0
"""A converted model's code calls ops past its modules, and goes to the module for all else."""

from __future__ import annotations

import copy
import gc
import itertools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from calls import assert_same, python_calls
from cases import random_q
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import torchq
import torchq.nn as tnn
from torchq import _C, PostOps, QParams
from torchq.nn.module import QModule
from torchq.quantization.qparams import choose_qparams

U8 = QParams.per_tensor(0.021, 117)
S8 = QParams.per_tensor(0.034, -9, torch.int8)
SEVEN = choose_qparams(torch.tensor(-2.0), torch.tensor(3.0), torch.uint8, 7)
RELU, ADD = PostOps().append_eltwise("relu"), PostOps().append_binary("add", None, 3)
SUM = PostOps().append_sum(0.5).append_eltwise("relu")


class Sub(Tensor):
    pass


def conv(**options: Any) -> tnn.QConv2d:
    torch.manual_seed(0)
    options = {"src": U8, "dst": U8, **options}
    return tnn.QConv2d.from_float(nn.Conv2d(6, 8, 3, padding=1), **options)


def linear(**options: Any) -> tnn.QLinear:
    torch.manual_seed(0)
    return tnn.QLinear.from_float(nn.Linear(7, 8), **{"src": U8, "dst": U8, **options})


def table(src: QParams = U8) -> tnn.QLookup:
    return tnn.QLookup(torch.sigmoid, src, S8)


IMAGE, OTHER = random_q((2, 6, 5, 5), torch.uint8, 1), random_q((2, 6, 5, 5), torch.int8, 2)
RESIDUAL = random_q((2, 8, 5, 5), torch.uint8, 3)
ROW = random_q((3, 7), torch.uint8, 4)
TRANSPOSED = tnn.QConvTranspose2d.from_float(nn.ConvTranspose2d(6, 4, 2, 2), U8, S8)

REAL, REST = torch.randn(3, 64), torch.randn(3, 8)
DYNAMIC = tnn.DynamicQLinear.from_float(nn.Linear(64, 8))
INT4 = tnn.DynamicQLinearInt4.from_float(nn.Linear(64, 8, bias=False))

SHORT: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
    "conv": (conv(), (IMAGE,)),
    "conv of three": (tnn.QConv3d.from_float(nn.Conv3d(2, 3, 2), U8, S8), (IMAGE[None],)),
    "residual": (conv(post_ops=SUM), (IMAGE, RESIDUAL)),
    "no residual": (conv(), (IMAGE, None)),
    "no others": (conv(), (IMAGE, None, None)),
    "float dst": (conv(dst=None), (IMAGE,)),
    "affine": (conv(affine=True), (IMAGE,)),
    "table": (conv().with_lookup(table()), (IMAGE,)),
    "seven bits": (conv(dst=SEVEN), (IMAGE,)),
    "linear": (linear(), (ROW,)),
    "transposed": (TRANSPOSED, (IMAGE,)),
    "lookup": (table(), (IMAGE,)),
    "add": (tnn.QAdd([U8, S8], U8, relu=True), (IMAGE, OTHER)),
    "mul": (tnn.QMul([S8, U8], None), (OTHER, IMAGE)),
    "cat": (tnn.QCat([U8, S8, U8], S8), ([IMAGE, OTHER, IMAGE],)),
    "max_pool": (tnn.QMaxPool2d(U8, 2), (IMAGE,)),
    "avg_pool": (tnn.QAvgPool2d(U8, 2, dst=S8), (IMAGE,)),
    "avg_pool with its source's scale": (tnn.QAvgPool2d(U8, 3, padding=1), (IMAGE,)),
    "dynamic": (DYNAMIC, (REAL,)),
    "dynamic bfloat16": (DYNAMIC, (REAL.bfloat16(),)),
    "dynamic with relu": (DYNAMIC, (REAL, str(RELU))),
    "dynamic with a sum": (DYNAMIC, (REAL, str(ADD), [REST])),
    "dynamic without operands": (DYNAMIC, (REAL, "", None)),
    "4 bits": (INT4, (REAL,)),
    "4 bits with a sum": (INT4, (REAL, str(ADD), [REST])),
}
LONG: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
    "float": (conv(), (torch.randn(1, 6, 4, 4),)),
    "float pair": (tnn.QAdd([U8, S8], U8), (torch.randn(2, 6, 5, 5), OTHER)),
    "float in a list": (tnn.QCat([U8, U8], S8), ([IMAGE, torch.randn(2, 6, 5, 5)],)),
    "contiguous": (conv(contiguous=True), (IMAGE,)),
    "contiguous pool": (tnn.QMaxPool2d(U8, 2, contiguous=True), (IMAGE,)),
    "list of operands": (conv(post_ops=SUM), (IMAGE, None, [RESIDUAL])),
    "seven bits of a sum": (tnn.QAdd([U8, U8], SEVEN), (IMAGE, IMAGE)),
    "subclass": (conv(), (IMAGE.as_subclass(Sub),)),
    "residual of a subclass": (conv(post_ops=SUM), (IMAGE, RESIDUAL.as_subclass(Sub))),
    "subclass in a list": (tnn.QCat([U8, U8], S8), ([IMAGE, IMAGE.as_subclass(Sub)],)),
    "dynamic operand of a subclass": (DYNAMIC, (REAL, str(ADD), [REST.as_subclass(Sub)])),
    "factors": (
        tnn.DynamicQLinear(
            DYNAMIC.packed(), DYNAMIC.weight_scale, None, src_factor=torch.full((64,), 2.0)
        ),
        (REAL,),
    ),
    "another module": (nn.ReLU(), (IMAGE,)),
    "not a module": (len, ([],)),
}


def new_site() -> Callable[..., Any]:
    return _C.site(QModule)


def took_short_way(site: Callable[..., Any], *args: Any) -> bool:
    """Returns True if no forward ran; checks the result."""
    with python_calls() as called:
        got = site(*args)
    expected = args[0](*args[1:])
    if isinstance(expected, Tensor):
        assert type(got) is type(expected) and got.stride() == expected.stride()
        assert_same(got.as_subclass(Tensor), expected.as_subclass(Tensor))
    else:
        assert got == expected
    return "_call_impl" not in called


@pytest.mark.parametrize("name", SHORT)
def test_what_goes_to_the_op(name: str):
    module, args = SHORT[name]
    site = new_site()
    for _ in range(3):
        assert took_short_way(site, module, *args)


@pytest.mark.parametrize("name", LONG)
def test_what_goes_to_the_module(name: str):
    module, args = LONG[name]
    site = new_site()
    for _ in range(2):
        site(module, *args)
        if isinstance(module, nn.Module):
            assert not took_short_way(site, module, *args)


def test_a_dw_convolution_goes_to_the_module():
    depthwise = tnn.QConv2d.from_float(nn.Conv2d(8, 8, 3, 1, 1, groups=8), U8, U8)
    assert not took_short_way(new_site(), conv(dw=depthwise), IMAGE)


def replace_buffer(m: Any) -> None:
    m.multiplier = m.multiplier * 2


def write_to_buffers(m: Any) -> None:
    m._buffers["offset"] = m.offset + 1


def rescale(m: Any) -> None:
    m.dst_scale.mul_(3)
    m.refold()


def load_state(m: Any) -> None:
    m.load_state_dict(conv(weight_scale=torch.full((8,), 0.01)).state_dict())


def add_table(m: Any) -> None:
    m.with_lookup(table())


def replace_table(m: Any) -> None:
    if m.lookup is None:
        m.with_lookup(table())
    _ = SITE(m, IMAGE)
    m.lookup.table = m.lookup.table.flip(0)


def other_stride(m: Any) -> None:
    m.geometry = [*conv().geometry[:2], 2, 2, *conv().geometry[4:]]


def in_place(m: Any) -> None:
    m.offset.add_(1)


def stride_in_place(m: Any) -> None:
    m.geometry[2:4] = [2, 2]


def swap(m: Any) -> None:
    torch.utils.swap_tensors(m.offset, m.offset + 1)


SITE = new_site()
CHANGES = [
    replace_buffer, write_to_buffers, rescale, load_state, add_table, replace_table, other_stride,
    in_place, stride_in_place, swap,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_the_module_count(change: Callable[[Any], None]):
    module = conv()
    before = SITE(module, IMAGE)
    change(module)
    assert took_short_way(SITE, module, IMAGE)
    after = SITE(module, IMAGE)
    assert after.shape != before.shape or not torch.equal(after, before)


def test_modules_in_one_place():
    """As when a user replaces a submodule, by one of another class, too."""
    site = new_site()
    for module in (conv(), conv(dst=S8), table(), copy.deepcopy(conv()), tnn.QMaxPool2d(U8, 2)):
        assert took_short_way(site, module, IMAGE)
    assert not took_short_way(site, nn.Identity(), IMAGE)
    assert took_short_way(site, conv(), IMAGE)


def test_hooks_and_other_forwards_run():
    module, site = conv(), new_site()
    expected = site(module, IMAGE)
    seen: list[str] = []
    registrations = [
        lambda: module.register_forward_hook(lambda *_: seen.append("hook")),
        lambda: module.register_forward_pre_hook(lambda *_: seen.append("pre")),
        lambda: nn.modules.module.register_module_forward_hook(lambda *_: seen.append("global")),
        lambda: nn.modules.module.register_module_forward_pre_hook(lambda *_: seen.append("all")),
    ]
    for register in registrations:
        handle = register()
        assert_same(site(module, IMAGE), expected)
        handle.remove()
        assert took_short_way(site, module, IMAGE)
    assert seen == ["hook", "pre", "global", "all"]

    module.forward = lambda src: src
    assert site(module, IMAGE) is IMAGE
    del module.forward
    assert took_short_way(site, module, IMAGE)
    with mock.patch.object(tnn.QConv2d, "forward", lambda self, src: src):
        assert site(module, IMAGE) is IMAGE
    with mock.patch.object(nn.Module, "__call__", lambda self, src: src):
        assert site(module, IMAGE) is IMAGE
    module._compiled_call_impl = lambda src: src
    assert site(module, IMAGE) is IMAGE
    module._compiled_call_impl = None
    assert took_short_way(site, module, IMAGE)


class Twice:
    def forward(self, src: Tensor) -> Tensor:
        return super().forward(src).float() * 2  # type: ignore[misc]


def test_a_subclass_keeps_its_forward():
    with mock.patch.dict(QModule.registry):
        own = type("Own", (tnn.QConv2d,), {"forward": lambda self, src: src.float()})
        inherited, mixed = type("Inherited", (own,), {}), type("Mixed", (Twice, tnn.QConv2d), {})
    for cls in (own, inherited, mixed):
        module = cls.from_float(nn.Conv2d(6, 8, 3), U8, U8)
        assert not took_short_way(new_site(), module, IMAGE) and module(IMAGE).is_floating_point()


def test_what_was_patched_before_the_first_call():
    module = conv()
    for target, name in (
        (tnn.QConv2d, "forward"),
        (nn.Module, "__call__"),
        (nn.Module, "_call_impl"),
    ):
        site = new_site()
        with mock.patch.object(target, name, lambda self, src: src):
            assert site(module, IMAGE) is IMAGE, name
        assert took_short_way(site, module, IMAGE), name


@pytest.mark.parametrize("direct", [("no op", "", ""), "text", lambda self: 3, 7])
def test_a_float_module_may_have_the_same_name(direct: Any):
    module = type("Leaf", (nn.Module,), {"_direct": direct, "forward": lambda self, x: x})()
    site = new_site()
    assert site(module, IMAGE) is IMAGE and site(module, IMAGE) is IMAGE


def test_threads_change_what_others_call():
    """Giving a tensor back lets other threads run, into the same site."""
    kinds = [conv(), conv(dst=S8), tnn.QMaxPool2d(U8, 2), table()]
    expected = [module(IMAGE) for module in kinds]
    site, wrong, stop = new_site(), [], threading.Event()

    def call() -> None:
        for i in itertools.cycle(range(len(kinds))):
            if stop.is_set():
                return
            if not torch.equal(site(kinds[i], IMAGE), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 1
    while time.monotonic() < end:
        kinds[0].offset = kinds[0].offset.clone()
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_errors_are_the_modules():
    site, module = new_site(), conv()
    site(module, IMAGE)
    wrong: list[tuple[Any, ...]] = [(IMAGE[:, :5],), (IMAGE.int(),), (), (IMAGE, RESIDUAL), (3,)]
    for args in wrong:
        with pytest.raises(Exception) as expected:
            module(*args)
        with pytest.raises(type(expected.value)) as got:
            site(module, *args)
        assert str(got.value) == str(expected.value)
    with pytest.raises(TypeError, match="a site must be called with a module"):
        site()


def test_modes_see_the_call():
    site, module = new_site(), conv()
    site(module, IMAGE)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = site(module, mode.from_tensor(IMAGE))
    assert fake.shape == (2, 8, 5, 5)
    seen = []

    class Spy(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Spy():
        site(module, IMAGE)
    assert any("conv" in name for name in seen)
    traced = torch.jit.trace(lambda x: site(module, x), IMAGE, check_trace=False)
    other = random_q((1, 6, 9, 4), torch.uint8, 8)
    assert_same(traced(other), module(other))


def test_other_threads_run_meanwhile():
    """The op holds no lock of Python's while it computes."""
    module = tnn.QLinear.from_float(nn.Linear(1024, 256), U8, U8)
    site, src, done = new_site(), random_q((256, 1024), torch.uint8), threading.Event()

    def work() -> None:
        with torchq.use_isa("reference"):
            site(module, src)
        done.set()

    thread = threading.Thread(target=work)
    start = time.perf_counter()
    thread.start()
    turns = 0
    while not done.wait(1e-3):
        turns += 1
    thread.join()
    assert turns >= 5, f"{turns} turns in {time.perf_counter() - start:.3f} s"


def test_nothing_is_kept_alive():
    module, site = conv(), new_site()
    site(module, IMAGE)
    counts = [sys.getrefcount(b) for b in (module.weight, module.geometry, IMAGE)]
    for _ in range(100):
        site(module, IMAGE)
    assert [sys.getrefcount(b) for b in (module.weight, module.geometry, IMAGE)] == counts
    del site
    gc.collect()
    assert sys.getrefcount(module.geometry) < counts[1]
