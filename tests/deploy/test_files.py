# SPDX-License-Identifier: Apache-2.0
"""Files: written whole or not at all, and read as they were written or not at all."""

from __future__ import annotations

import os
import pickle
import random
import resource
import signal
import stat
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.functional.packing import PackedWeight, _pack, pack_linear, unproven
from torchq.serialization.files import write_file
from torchq.serialization.tensor_file import read_tensors, write_tensors

X = torch.linspace(-1, 1, 32).reshape(2, 16)


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 7)).eval()


def saved_model(path: Path) -> Callable[[], Any]:
    """Saves a model; what loads it again and returns its result."""
    torchq.save(torchq.quantize(network(), [X]), path)
    return lambda: torchq.load(path, network())(X)


def saved_calibration(path: Path) -> Callable[[], Any]:
    prepared = torchq.calibrate(torchq.prepare(network(), X), [X])
    torchq.save_calibration(prepared, path)
    empty = torchq.prepare(network(), X)

    def load() -> Tensor:
        state = torchq.load_calibration(deepcopy(empty), path).state_dict()
        return torch.cat([value.double().flatten() for value in state.values()])

    return load


def saved_report(path: Path) -> Callable[[], Any]:
    prepared = torchq.calibrate(torchq.prepare(network(), X), [X])
    qmodel = torchq.convert(prepared)
    torchq.write_report(path, network(), prepared, qmodel, [X])
    return lambda: torch.tensor(path.read_text().endswith("</html>\n"))


SAVES = [saved_model, saved_calibration, saved_report]


# Whole or not at all


def in_child(run: Callable[[], Any]) -> int:
    """Runs something in a forked process; its number."""
    torch.set_num_threads(1)  # threads do not survive a fork
    pid = os.fork()
    if pid == 0:
        try:
            run()
        finally:
            os._exit(0)
    return pid


@pytest.mark.parametrize("save", SAVES)
def test_a_full_disk_leaves_the_old_file(save: Any, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    path = tmp_path / "file"
    load = save(path)
    expected, limit = load(), path.stat().st_size // 2

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            save(path)
        except OSError as error:
            message = str(error)
            named = "torchq." in message and str(path) in message and "Free space" in message
            os.write(out, b"named" if named else message.encode())

    into, out = os.pipe()
    os.waitpid(in_child(fill), 0)
    os.close(out)
    with os.fdopen(into) as said:
        assert said.read() == "named"
    assert torch.equal(load(), expected)
    assert os.listdir(tmp_path) == ["file"]


def test_a_killed_writer_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = [bytes([i]) * 300_000 for i in range(2)]
    write_file("torchq.save", path, contents[:1])

    def write() -> None:
        while True:
            for content in contents:
                write_file("torchq.save", path, [content])

    for i in range(8):
        pid = in_child(write)
        time.sleep(0.01 + 0.003 * i)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert path.read_bytes() in contents


def test_two_writers(tmp_path: Path) -> None:
    """Readers always see the file of one of them."""
    path = tmp_path / "file"
    contents = [bytes([i]) * 300_000 for i in range(2)]
    write_file("torchq.save", path, contents[:1])
    pids = [
        in_child(lambda c=c: [write_file("torchq.save", path, [c]) for _ in range(20)])
        for c in contents
    ]
    for _ in range(50):
        assert path.read_bytes() in contents
    for pid in pids:
        os.waitpid(pid, 0)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("fails", ["open", "replace", "fsync"])
def test_nothing_is_left_of_a_write_that_fails(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a folder that is read-only, which root does not notice."""
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, fails, refuse)
    with pytest.raises(PermissionError, match=r"torchq.save: path must be .*got '.*file': Permiss"):
        write_file("torchq.save", path, [b"new"])
    monkeypatch.undo()
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("save", SAVES)
def test_a_folder_that_does_not_exist(save: Any, tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"torchq\.\w+: path must be a file that can be wri"
    ):
        save(tmp_path / "none" / "file")
    with pytest.raises(
        IsADirectoryError, match=r"torchq\.\w+: path must be a file that can be wri"
    ):
        save(tmp_path)


def test_links_modes_and_devices(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"old")
    path.chmod(0o640)
    link.symlink_to(path)
    write_file("torchq.save", link, [b"n", b"ew"])
    assert link.is_symlink() and path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    write_file("torchq.save", "/dev/null", [b"new"])
    assert Path("/dev/null").is_char_device()
    into, out = os.pipe()
    write_file("torchq.save", f"/dev/fd/{out}", [b"new"])
    assert os.read(into, 9) == b"new"
    os.close(into)
    os.close(out)


# As they were written or not at all


def damaged(content: bytes, count: int) -> Iterator[bytes]:
    """Copies with one bit or byte changed, cut short, or with bytes more."""
    pick = random.Random(0)
    for i in range(count):
        copy = bytearray(content)
        # the header decides most, and is a small part of a large file
        at = pick.randrange(len(copy) if i % 2 else min(len(copy), 1500))
        if i % 8 == 0:
            copy = copy[:at]
        elif i % 8 == 1:
            copy[at:at] = bytes(pick.randrange(1, 9))
        elif i % 8 == 2:
            copy[at] = pick.randrange(256)
        else:
            copy[at] ^= 1 << pick.randrange(8)
        if bytes(copy) != content:
            yield bytes(copy)


@pytest.mark.parametrize("save", [saved_model, saved_calibration])
def test_damage_is_found(save: Any, tmp_path: Path) -> None:
    """A ValueError that names the file, or else the right numbers."""
    path = tmp_path / "file"
    load = save(path)
    expected, content = load(), path.read_bytes()
    path.write_bytes(content)
    refused = 0
    for copy in damaged(content, 400):
        path.write_bytes(copy)
        try:
            assert torch.equal(load(), expected)
        except ValueError as error:
            assert str(path) in str(error) and "copy the file" in str(error)
            refused += 1
    assert refused > 300


DTYPES = [
    *(torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.uint16, torch.complex64),
    *(torch.float8_e4m3fn, torch.int64),
]


def test_every_dtype_and_shape_comes_back(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.arange(3.0).to(dtype) for dtype in DTYPES}
    tensors |= {"none": torch.empty(0, 3), "one": torch.tensor(7), "t": torch.ones(2, 3).mT}
    tensors["conj"] = torch.tensor([1 + 2j]).conj()
    tensors["expanded"] = torch.tensor(5.0).expand(1)
    write_tensors("torchq.save", tmp_path / "file", tensors, {"key": "value"})
    read, metadata = read_tensors(tmp_path / "file")
    assert metadata["key"] == "value" and read.keys() == tensors.keys()
    for name, value in tensors.items():
        assert read[name].dtype == value.dtype and torch.equal(read[name].cfloat(), value.cfloat())
        assert read[name].untyped_storage().nbytes() == value.numel() * value.element_size()
    with pytest.raises(NotImplementedError, match=r"torchq.save: .*got torch.complex128 in 'wide'"):
        write_tensors(
            "torchq.save", tmp_path / "file", {"wide": torch.ones(1, dtype=torch.cdouble)}
        )


# Sums and bounds that prove kernels exact


def _conv(**kwargs: Any) -> nn.Module:
    return nn.Conv2d(kwargs.pop("inputs", 16), 32, 3, **kwargs)


IMAGE = torch.linspace(-1, 1, 2 * 16 * 36).reshape(2, 16, 6, 6)
LAYERS: dict[str, tuple[Callable[[], nn.Module], Tensor, dict[str, Any]]] = {
    "linear": (lambda: nn.Linear(21, 19), torch.linspace(-1, 1, 42).reshape(2, 21), {}),
    "dynamic": (lambda: nn.Linear(16, 19), X, {"dynamic": True}),
    "conv": (_conv, IMAGE, {}),
    "row runs": (lambda: _conv(inputs=3), IMAGE[:, :3], {}),
    "grouped": (lambda: _conv(groups=2), IMAGE, {}),
    "small groups": (lambda: nn.Conv2d(16, 16, 3, groups=4), IMAGE, {}),
    "depthwise": (lambda: nn.Conv2d(16, 16, 3, groups=16), IMAGE, {}),
    "transposed": (lambda: nn.ConvTranspose2d(16, 8, 3, 2), IMAGE, {}),
    "lstm": (lambda: nn.LSTM(16, 8, proj_size=4), X[:, None], {}),
    "dynamic gru": (lambda: nn.GRU(16, 8), X[:, None], {"dynamic": True}),
}


@pytest.mark.parametrize("way", ["load_state_dict", "assign", "pickle", "load", "script"])
@pytest.mark.parametrize("name", LAYERS)
def test_sums_and_bounds_must_follow_from_the_weights(name: str, way: str, tmp_path: Path) -> None:
    make, x, options = LAYERS[name]
    model = (nn.Sequential(make()) if way == "script" else make()).eval()  # scripts of graphs
    qmodel = torchq.quantize(model, [x], config=torchq.QConfig(**options))
    state = qmodel.state_dict()
    keys = [k for k in state if k.rpartition(".")[2].startswith(("compensation", "pair_bound"))]
    assert len(keys) >= 2
    path = tmp_path / "file"
    for key in keys:
        value = dict(qmodel.named_buffers())[key]
        value.view(-1)[-1] ^= 1 << 20
        try:
            kinds = (ValueError, torch.jit.Error)
            with pytest.raises(kinds, match="must follow from its weight") as error:
                if way == "script":
                    torch.jit.script(qmodel).save(path)
                    torch.jit.load(path)
                elif way == "pickle":
                    pickle.loads(pickle.dumps(qmodel))
                elif way == "load":
                    torchq.save(qmodel, path)
                    torchq.load(path, make().eval())
                else:
                    fresh = torchq.quantize(make().eval(), [x], config=torchq.QConfig(**options))
                    fresh.load_state_dict(qmodel.state_dict(), assign=way == "assign")
            assert way != "load" or str(path) in str(error.value)
        finally:
            value.view(-1)[-1] ^= 1 << 20


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "depthwise"])
def test_padding_must_be_zero(name: str) -> None:
    """It meets bytes of other rows; layouts without padding have nothing to check."""
    make, x, options = LAYERS[name]
    qmodel = torchq.quantize(make().eval(), [x], config=torchq.QConfig(**options))
    buffers = dict(qmodel.named_buffers())
    keys = [k for k, v in buffers.items() if v.dtype == torch.int8 and ".weight" in f".{k}"]
    assert keys
    for key in keys:
        layer = qmodel.get_submodule(key.rpartition(".")[0])
        packed = layer._packed_weights()[key.rpartition(".")[2].removeprefix("weight")]
        assert unproven(packed) == ""
        padding = (empty_like_ones(packed) == 0).nonzero()
        for place in padding[:: max(len(padding) // 5, 1)]:
            packed.weight[tuple(place)] = 1
            assert unproven(packed) != ""
            packed.weight[tuple(place)] = 0


def empty_like_ones(packed: PackedWeight) -> Tensor:
    """Ones where the packed weight has values."""
    return _pack(torch.ones_like(packed.unpack()), packed.groups, packed.stride, packed.dilation)[0]


@pytest.mark.parametrize("bits", [7, 8])
@pytest.mark.parametrize("address", [0, 1])
def test_pair_bounds_of_any_weight(bits: int, address: int) -> None:
    limit = 2 ** (bits - 1)
    weight = torch.randint(-limit, limit, (45, 67), dtype=torch.int8)
    weight[3, 4:6] = -limit
    packed = pack_linear(weight)
    memory = torch.empty(packed.weight.numel() + address, dtype=torch.int8)[address:]
    moved = packed._replace(weight=memory.view(packed.weight.shape).copy_(packed.weight))
    assert unproven(moved) == ""
    for change in (-1, 1):
        assert unproven(moved._replace(pair_bound=packed.pair_bound + change)) == "pair_bound"
        assert unproven(moved._replace(compensation=packed.compensation + change)) == "compensation"
    memory[-1 - address] ^= 3
    assert unproven(moved) != ""
