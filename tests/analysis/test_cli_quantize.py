# SPDX-License-Identifier: Apache-2.0
"""``python -m torchq quantize``."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from torchq.__main__ import main
from torchq.commands import samples
from torchq.commands.model import call_function

DEFINITION = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 400)
    return nn.Sequential(*layers).eval()

def batches():
    return net(), [torch.randn(2, 3, 8, 8) for _ in range(3)]

def one():
    return net(), (torch.randn(2, 3, 8, 8),)

def number():
    return 3, 4

def ao():
    layers = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(*layers).eval(), {nn.Linear})
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "definition.py"
    path.write_text(DEFINITION)
    return str(path)


def quantize(model: object, out: Path, *options: object) -> int:
    return main(["quantize", str(model), "-o", str(out), *map(str, options)])


@pytest.mark.parametrize(
    "function,data", [("batches", "3 batches, 6 rows"), ("one", "1 batch, 2 rows")]
)
def test_a_function_with_data(
    function: str, data: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "int8.safetensors"
    assert quantize(f"{file}:{function}", out) == 0
    told = capsys.readouterr().out
    assert "2 of 2 layers in int8" in told
    model, (x, *_) = call_function(f"{file}:{function}")
    loaded = torchq.load(out, model)
    assert torchq.sqnr(model(x), loaded(x)) > 30
    found = re.search(r"([\d.]+) dB output SQNR against the given model, on (.*)", told)
    assert found and float(found[1]) > 30 and found[2] == data
    size = re.search(r"([\d.]+) MB, from ([\d.]+) MB", told)
    assert size and float(size[1]) < float(size[2])
    assert float(size[1]) == pytest.approx(out.stat().st_size / 1e6, rel=0.01)


def test_a_function_without_data(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "int8.safetensors"
    assert quantize(f"{file}:net", out) == 2
    err = capsys.readouterr().err
    assert "Return (model, batches), or add --dynamic" in err and err.count("\n") == 1
    assert not out.exists()
    assert quantize(f"{file}:net", out, "--dynamic") == 0
    told = capsys.readouterr().out
    assert "1 of 2 layers in int8" in told and "float: 0: " in told and "dB" not in told
    x, model = torch.randn(2, 3, 8, 8), call_function(f"{file}:net")
    assert 30 < torchq.sqnr(model(x), torchq.load(out, model)(x)) < 80


def test_models_of_torch_ao(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    assert quantize(f"{file}:ao", tmp_path / "a.safetensors") == 0
    assert "2 of 2 layers in int8" in capsys.readouterr().out
    old = call_function(f"{file}:ao")
    torch.save(old, tmp_path / "old.pt")
    out = tmp_path / "b.safetensors"
    assert quantize(tmp_path / "old.pt", out) == 2
    assert "If you trust who wrote it, add --trust-pickle" in capsys.readouterr().err
    assert not out.exists()
    assert quantize(tmp_path / "old.pt", out, "--trust-pickle") == 0
    floats = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    loaded, x = torchq.load(out, floats), torch.randn(5, 8)
    assert torchq.sqnr(old(x), loaded(x)) > 30
    torch.save(old.state_dict(), tmp_path / "state.pt")
    assert quantize(tmp_path / "state.pt", out, "--trust-pickle") == 2
    assert "which holds a OrderedDict" in capsys.readouterr().err
    (tmp_path / "broken.pt").write_bytes((tmp_path / "old.pt").read_bytes()[:100])
    assert quantize(tmp_path / "broken.pt", out, "--trust-pickle") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_models_of_torchao(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchao")
    (tmp_path / "theirs.py").write_text(
        "from torch import nn\n"
        "from torchao.quantization import Int8WeightOnlyConfig, quantize_\n"
        "def make():\n"
        "    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()\n"
        "    quantize_(model, Int8WeightOnlyConfig())\n"
        "    return model\n"
    )
    assert quantize(f"{tmp_path}/theirs.py:make", tmp_path / "out") == 0
    assert "2 of 2 layers in int8" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options,message",
    [
        (["nothing", "-o", "{}/out"], "MODEL must be file.py:function, got 'nothing'"),
        (["{}/definition.py:number", "-o", "{}/out"], "which returns a tuple of 2: int, int"),
        (["{}/definition.py:batches", "-o", "{}/missing/out"], "in a folder that exists"),
        (["{}/definition.py:batches", "-o", "{}"], "OUT must be a file, got the folder"),
        (["{}/definition.py:batches", "-o", "{}/out", "--data", "x"], "--data must be left out"),
        (["{}/definition.py:batches", "-o", "{}/out", "--samples", "0"], "--samples must be posi"),
        (["{}", "-o", "{}/out"], "whose config.json cannot be read"),
    ],
)
def test_mistakes_are_one_line(
    options: list[str], message: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", *(option.format(tmp_path) for option in options)]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["definition.py"]


def test_an_error_leaves_the_old_file(file: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("old")
    assert quantize(f"{file}:net", out) == 2
    assert out.read_text() == "old"


def test_progress_without_tqdm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(samples, "find_spec", lambda _: None)
    assert list(samples.shown("calibrate", [5, 6])) == [5, 6]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert list(samples.shown("calibrate", [5, 6])) == [5, 6]
    assert capsys.readouterr().err == "\rcalibrate: 1 of 2\rcalibrate: 2 of 2\n"


# Folders


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A tiny BERT with its tokenizer."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *["one", "two", "three", "four", "five"]]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"))
    (tmp_path / "vocab.txt").unlink()
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=16,
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path / "bert"
    transformers.BertForSequenceClassification(config).eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("one two\n\nthree four five one\n" + "two " * 40 + "\n")
    return path


def test_a_folder_of_transformers(
    bert: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = bert.parent / "int8"
    assert quantize(bert, out, "--dynamic", "--data", texts) == 0
    told = capsys.readouterr().out
    assert "14 of 14 layers in int8" in told and "on 3 samples" in told
    assert "load it: BertForSequenceClassification.from_pretrained(" in told
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in out.iterdir()}
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(bert)
    again = transformers.AutoModelForSequenceClassification.from_pretrained(out)
    ids = torch.tensor([[2, 5, 6, 3]])
    assert torchq.sqnr(model(ids).logits, again(ids).logits) > 25
    assert quantize(bert, out, "--dynamic") == 2
    assert "OUT must be a new folder" in capsys.readouterr().err
    assert quantize(out, bert.parent / "twice", "--dynamic") == 2
    assert "quantized by torchq" in capsys.readouterr().err


def test_a_folder_of_transformers_with_calibration(
    bert: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = bert.parent / "int8.safetensors"
    assert quantize(bert, out) == 2
    assert "--data must be given to calibrate" in capsys.readouterr().err
    assert quantize(bert, out, "--data", texts, "--samples", "2") == 0
    assert "on 2 samples" in capsys.readouterr().out
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(bert)
    ids = torch.tensor([[2, 5, 6, 3]])
    batch = {"input_ids": ids, "token_type_ids": ids * 0, "attention_mask": ids * 0 + 1}
    assert torchq.sqnr(model(**batch).logits, torchq.load(out, model)(**batch).logits) > 15


def test_damaged_folders(
    bert: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, weights = tmp_path / "int8", bert / "model.safetensors"
    mistakes = [("missing.txt", "which does not exist"), ("empty.txt", "at least one line")]
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\xfd")
    (tmp_path / "images").mkdir()
    mistakes += [("binary.txt", "text in UTF-8"), ("images", "a folder with images")]
    for name, message in mistakes:
        assert quantize(bert, out, "--dynamic", "--data", tmp_path / name) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1
    before = sorted(path.name for path in tmp_path.iterdir())
    for data in (weights.read_bytes()[:1000], b""):
        weights.write_bytes(data)
        assert quantize(bert, out, "--dynamic") == 2
        err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("torchq")]
        assert len(err) == 1 and "a folder that its library loads" in err[0]
    (bert / "config.json").write_text("{")
    assert quantize(bert, out, "--dynamic") == 2
    assert "whose config.json cannot be read" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_folder_that_cannot_be_written_is_left_out(
    bert: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    def fails(self: Any, folder: Path) -> None:
        (Path(folder) / "config.json").write_text("half")
        raise OSError("torchq quantize: the disk is full")

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", fails)
    before = sorted(bert.parent.iterdir())
    assert quantize(bert, bert.parent / "int8", "--dynamic") == 2
    assert "the disk is full" in capsys.readouterr().err
    assert sorted(bert.parent.iterdir()) == before


def test_a_folder_of_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.24")
    image = pytest.importorskip("PIL.Image")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        image_size=32, patch_size=16,
    )  # fmt: skip
    folder, images = tmp_path / "vit", tmp_path / "images"
    transformers.ViTForImageClassification(config).eval().save_pretrained(folder)
    size = {"height": 32, "width": 32}
    transformers.ViTImageProcessorPil(size=size).save_pretrained(folder)
    images.mkdir()
    for i in range(2):
        image.new("RGB", (40, 50), (90 * i, 50, 70)).save(images / f"{i}.png")
    (images / "notes.txt").write_text("no image")
    assert quantize(folder, tmp_path / "int8", "--dynamic", "--data", images) == 0
    assert "on 2 samples" in capsys.readouterr().out
    (images / "1.png").write_bytes(b"no image")
    assert quantize(folder, tmp_path / "again", "--dynamic", "--data", images) == 2
    assert "images that Pillow reads" in capsys.readouterr().err


def test_a_folder_of_sentence_transformers(
    bert: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sentences = pytest.importorskip("sentence_transformers")
    model = sentences.SentenceTransformer(str(bert), device="cpu")
    model.save(str(tmp_path / "sentences"))
    assert quantize(tmp_path / "sentences", tmp_path / "int8", "--data", texts) == 2
    assert "without --dynamic. Add it." in capsys.readouterr().err
    assert quantize(tmp_path / "sentences", tmp_path / "int8", "--dynamic", "--data", texts) == 0
    told = capsys.readouterr().out
    assert "in int8" in told and "on 3 samples" in told
    again = sentences.SentenceTransformer(str(tmp_path / "int8"), device="cpu")
    expected, got = (m.encode(["one two three"], convert_to_tensor=True) for m in (model, again))
    assert 25 < torchq.sqnr(expected, got) < 80
