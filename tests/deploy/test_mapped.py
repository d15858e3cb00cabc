# SPDX-License-Identifier: Apache-2.0
"""``torchq.load(mmap=True)``, and files of earlier versions."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path

import models
import pytest
import torch
from torch import nn

import torchq
import torchq.nn as tnn
from torchq.serialization.tensor_file import read_tensors, write_tensors

FILES = next(p / "files" for p in Path(__file__).parents if (p / "files").is_dir())
"""Written by earlier versions, whose format is in the name; nothing writes them anew."""
BY_FORMAT = pytest.mark.parametrize("version", ["0_1", "format_2"])


@pytest.mark.parametrize("name", ["resnet", "tied", "lstm", "lookups"])
def test_mapped_models_have_the_same_bits(name: str, tmp_path: Path) -> None:
    make, shape, _, _ = models.CASES[name]
    model, x = models.randomize(make()), torch.randn(shape)
    converted = torchq.quantize(model, [x, 2 * x], x)
    torchq.save(converted, tmp_path / "model")
    before = (tmp_path / "model").read_bytes()
    loaded = torchq.load(tmp_path / "model", model, mmap=True)
    assert torch.equal(loaded(x), converted(x)) and repr(loaded) == repr(converted)
    read = torchq.load(tmp_path / "model", model)
    assert loaded.state_dict().keys() == read.state_dict().keys()
    for key, value in read.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value)
    assert torch.equal(copy.deepcopy(loaded)(x), converted(x))
    with torch.no_grad():
        for tensor in (*loaded.parameters(), *loaded.buffers()):
            tensor.zero_()  # stays in this process
    assert (tmp_path / "model").read_bytes() == before
    torchq.save(read, tmp_path / "model")  # a new file: who has the old one keeps it
    torchq.save(torchq.load(tmp_path / "model", model, mmap=True), tmp_path / "model")
    assert torch.equal(torchq.load(tmp_path / "model", model)(x), converted(x))


def test_tied_parameters_stay_tied(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9)).eval()
    model[2].weight = model[0].weight
    x = torch.arange(9)[None]
    converted = torchq.quantize(model, [x], x, overrides={"2": None})
    torchq.save(converted, tmp_path / "model")
    loaded = torchq.load(tmp_path / "model", model, mmap=True)
    assert torch.equal(loaded(x), converted(x))
    if converted[0].weight is converted[2].weight:
        assert loaded[0].weight is loaded[2].weight


def test_mapped_models_pickle_without_the_file(tmp_path: Path) -> None:
    model, x = float_model(), torch.randn(2, 3, 6, 6)
    converted = torchq.quantize(model, [x])
    torchq.save(converted, tmp_path / "model")
    text = pickle.dumps(torchq.load(tmp_path / "model", mmap=True))
    (tmp_path / "model").unlink()
    assert torch.equal(pickle.loads(text)(x), converted(x))
    assert len(text) < 1.1 * len(pickle.dumps(converted))


def test_packed_weights_are_aligned(tmp_path: Path) -> None:
    """Rows of 64 bytes that lie in two cache lines take twice the loads."""
    tensors = {"odd": torch.ones(3), "weight": torch.ones(1, 1, 3, 16, 4, dtype=torch.int8)}
    tensors |= {"text": torch.ones(7, dtype=torch.uint8), "scale": torch.ones(16)}
    for length in range(0, 70, 7):  # of the header
        write_tensors("torchq.save", tmp_path / "file", tensors, {"text": "x" * length})
        read, _ = read_tensors(tmp_path / "file", mapped=True)
        assert all(torch.equal(read[name], value) for name, value in tensors.items())
        assert read["weight"].data_ptr() % 64 == read["scale"].data_ptr() % 64 == 0
        assert read["odd"].data_ptr() % 4 == 0


def test_files_of_other_tools_are_copied_where_they_are_not_aligned(tmp_path: Path) -> None:
    header = {"a": {"dtype": "F64", "shape": [2], "data_offsets": [0, 16]}}
    for spaces in range(8):
        text = json.dumps(header).encode() + b" " * spaces
        values = torch.tensor([1.5, -2.0], dtype=torch.float64)
        content = len(text).to_bytes(8, "little") + text + values.numpy().tobytes()
        (tmp_path / "file").write_bytes(content)
        read, _ = read_tensors(tmp_path / "file", mapped=True)
        assert torch.equal(read["a"], values) and read["a"].data_ptr() % 8 == 0


def test_damage_is_found_in_mapped_files(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(16, 40)).eval(), torch.randn(2, 16)
    path = tmp_path / "model"
    torchq.save(torchq.quantize(model, [x]), path)
    content = path.read_bytes()
    for place in range(9, len(content), 97):
        damaged = bytearray(content)
        damaged[place] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="copy the file"):
            torchq.load(path, model, mmap=True)
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match="copy the file"):
        torchq.load(path, model, mmap=True)


WORKER = """
import sys, torch, torchq
from torch import nn

def private():
    lines = open("/proc/self/smaps_rollup").read().splitlines()[1:]
    return next(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty")) * 1024

torch.set_num_threads(1)
with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(6))).eval()
small = nn.Sequential(nn.Linear(16, 16)).eval()
torchq.load(sys.argv[2], small, mmap=True)(torch.ones(1, 16))  # imports what loading takes
x = torch.ones(1, 4096)
before = private()
loaded = torchq.load(sys.argv[1], model, mmap=True)
loaded(x)
print(private() - before, float(loaded(x).double().sum()), flush=True)
input()  # so that the next one shares the file with a living process
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs smaps")
def test_a_worker_more_shares_the_weights(tmp_path: Path) -> None:
    src = torchq.QParams.per_tensor(0.02, 128, torch.uint8)

    def save(name: str, width: int, layers: int) -> int:
        linears = (nn.Linear(width, width) for _ in range(layers))
        made = nn.Sequential(*(tnn.QLinear.from_float(linear, src) for linear in linears))
        torchq.save(made.eval(), tmp_path / name)
        return (tmp_path / name).stat().st_size

    size = save("large", 4096, 6)
    save("small", 16, 1)
    assert size > 100e6
    workers, told = [], []
    for _ in range(2):
        command = [sys.executable, "-c", WORKER, str(tmp_path / "large"), str(tmp_path / "small")]
        pipe = subprocess.PIPE
        workers.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        told.append(workers[-1].stdout.readline().split())  # type: ignore[union-attr]
    for worker in workers:
        worker.communicate("\n")
    assert told[0][1] == told[1][1]
    assert int(told[1][0]) < 0.1 * size, f"{told[1][0]} bytes of {size}"


# Versions


@BY_FORMAT
def test_files_of_earlier_versions_load(version: str) -> None:
    """Bit for bit, as the version that wrote them computed."""
    expected, _ = read_tensors(FILES / "results_0_1.safetensors")
    for mmap in (False, True):
        loaded = torchq.load(FILES / f"model_{version}.safetensors", mmap=mmap)
        assert torch.equal(loaded(expected["src"]), expected["dst"])
    assert torchq.explain(loaded).rows[0].quantized


@BY_FORMAT
def test_calibration_of_earlier_versions_loads(version: str) -> None:
    expected, _ = read_tensors(FILES / "results_0_1.safetensors")
    config = torchq.QConfig(activation_observer="minmax")
    prepared = torchq.prepare(float_model(), expected["src"], config)
    torchq.load_calibration(prepared, FILES / f"calibration_{version}.safetensors", merge=True)
    assert torch.equal(torchq.convert(prepared)(expected["src"]), expected["dst"])


def float_model() -> nn.Module:
    """The model of the files; its weights come from no random numbers."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            steps = torch.arange(parameter.numel()).reshape(parameter.shape)
            parameter.copy_((steps * 37 % 101 - 50) / 128)
    return model.eval()


@pytest.mark.parametrize("version", ["3", "17", "one", ""])
def test_files_of_later_versions_are_refused(version: str, tmp_path: Path) -> None:
    tensors, metadata = read_tensors(FILES / "model_0_1.safetensors")
    assert metadata["torchq_format"] == "1"
    write_tensors("torchq.save", tmp_path / "file", tensors, {"torchq_format": version})
    text = f"format has version {version}, and this torchq reads up to 2; a newer torchq reads it"
    with pytest.raises(ValueError, match=text):
        torchq.load(tmp_path / "file")


@pytest.mark.parametrize(("version", "key"), [("0_1", "sha256"), ("format_2", "digest")])
def test_a_digest_cannot_be_left_out(version: str, key: str, tmp_path: Path) -> None:
    content = (FILES / f"model_{version}.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    del header["__metadata__"][key]
    text = json.dumps(header).encode()
    (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with pytest.raises(ValueError, match="its digest is another one"):
        torchq.load(tmp_path / "file")
