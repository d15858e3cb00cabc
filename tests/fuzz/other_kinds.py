# SPDX-License-Identifier: Apache-2.0
"""Kinds of files that libraries read: archives of torch.jit, folders of transformers."""

from __future__ import annotations

import io
import json
import random
import re
import traceback
import zipfile
from pathlib import Path
from typing import Any

import torch
from attacks import attack, attack_index, attacked_config
from file_kinds import Kind
from mutations import damaged, forge_tensor, forge_text
from torch import Tensor, nn

import torchq

try:
    import transformers
    from safetensors import torch as safetensors

    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()

    HAS_TRANSFORMERS = True
except ImportError:  # then there are no folders
    HAS_TRANSFORMERS = False


_BEYOND = "memory beyond a record"
"""torch.jit.load takes records that are shorter than their tensors, which then have other values
in each call."""


class Script(Kind):
    """An archive of torch.jit, read by torch.jit.load.

    A damaged one has other bytes anywhere. Of a forged one, tensors, code, and numbers of the
    pickle change, under sums that zip files have. Crashes in torch.jit.load look alike, whoever
    causes them, so only their number is limited: of 2,004 files 1 crashed, 7 took much memory.
    """

    name, ways, is_own = "script", ("damage", "forge"), False
    most_excused = 0.01

    def save(self) -> None:
        torchq.calibrate(self.prepared, [self.x])
        torch.jit.script(torchq.convert(self.prepared)).save(self.path)

    def load(self) -> Any:
        return torch.jit.load(self.path)

    def use(self, loaded: nn.Module) -> Tensor:
        # as written: compiling takes seven times as long
        with torch.inference_mode(), torch.jit.optimized_execution(False):
            result: Tensor = loaded(self.x)
        return result.clone()

    def change(self, pick: random.Random, way: str) -> None:
        self.unsafe = _BEYOND if way == "damage" else ""
        self.path.write_bytes(damaged(pick, self.content) if way == "damage" else self.forged(pick))

    def forged(self, pick: random.Random) -> bytes:
        with zipfile.ZipFile(io.BytesIO(self.content)) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        for _ in range(pick.choice([1, 1, 1, 2, 3])):
            names = [name for name, value in entries.items() if value and "debug_pkl" not in name]
            place = pick.choice(["/data/", "/data/", ".py", "/data.pkl"])
            name = pick.choice([name for name in names if place in name] or names)
            value = bytearray(entries[name])
            if place == ".py":
                numbers = list(re.finditer(rb"(?<![\w.])\d+(?!\w|\.\d)", value))
                if numbers:
                    number = pick.choice(numbers)
                    other = str(pick.choice([0, 1, 2, 3, 5, 16, 255, 2**31, 2**40, 2**62]))
                    line = value[value.rfind(b"\n", 0, number.start()) :].split(b"\n")[1]
                    if b"torchq" not in line:  # a call of torch with other arguments
                        self.unsafe = "other code of torch"
                    value[slice(*number.span())] = other.encode()
            elif place == "/data.pkl" or pick.random() < 0.5:
                value[pick.randrange(len(value))] = pick.randrange(256)
            else:
                raw = torch.frombuffer(value, dtype=torch.uint8)
                words = raw.view(torch.float32) if len(value) % 4 == 0 else raw
                changed = forge_tensor(pick, pick.choice([raw, words]))
                value = bytearray(changed.flatten().view(torch.uint8).numpy().tobytes())
            if ".py" not in name and (len(value) < len(entries[name]) or "/data/" not in name):
                self.unsafe = _BEYOND
            entries[name] = bytes(value)
        with io.BytesIO() as content:
            with zipfile.ZipFile(content, "w") as archive:
                for name, own in entries.items():
                    archive.writestr(name, own)
            return content.getvalue()

    def excuse(self) -> str:
        return "torch.jit.load"

    def refuses(self, error: Exception, way: str) -> str:
        return "refused" if "torchq." in str(error) else "refused by torch"

    def may_differ(self, way: str) -> str:
        if way == "forge":
            return "another model"
        try:
            with zipfile.ZipFile(self.path) as archive:
                return "other numbers; zipfile finds the damage" if archive.testzip() else ""
        except Exception:
            return "other numbers; zipfile finds the damage"


class Pretrained(Kind):
    """A folder that save_pretrained of transformers wrote, with a configuration of torchq.

    Its parts are config.json and model.safetensors. What transformers finds in its own fields, or
    in tensors of its own, is not judged.
    """

    name, is_own = "pretrained", False
    variables = "HF_DEACTIVATE_ASYNC_LOAD", "COLUMNS", "LINES"
    part, method = "quantization_config", "torchq"

    def __init__(self, folder: Path, x: Tensor, options: Any) -> None:
        self.path, self.folder, self.options = folder / "model.safetensors", folder, options
        self.reads = (folder, Path("/proc/mounts"))
        self.cls, self.x = transformers.BertForSequenceClassification, x
        self.config_path = folder / "config.json"
        self.save()
        self.content, self.config_text = self.path.read_bytes(), self.config_path.read_text()
        self.quantization = json.loads(self.config_text)[self.part]
        self.tensors = safetensors.load_file(self.path)
        self.changed, self.written = "", {*folder.iterdir()}
        self.expected = self.use(self.load())

    def save(self) -> None:
        self.save_float()
        made = torchq.TorchqConfig(**self.options)
        model = self.cls.from_pretrained(self.folder, quantization_config=made)
        model.save_pretrained(self.folder)

    def save_float(self) -> Any:
        config = transformers.BertConfig(
            vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
            intermediate_size=64, max_position_embeddings=16,
        )  # fmt: skip
        torch.manual_seed(0)
        model = transformers.BertForSequenceClassification(config).eval()
        model.save_pretrained(self.folder)
        return model

    def load(self) -> Any:
        return self.cls.from_pretrained(self.folder)

    def use(self, loaded: Any) -> Tensor:
        with torch.inference_mode():
            result: Tensor = loaded(self.x).logits
        return result.clone()

    def files(self) -> list[Path]:
        return [file for file in self.folder.iterdir() if file.is_file()]

    def change(self, pick: random.Random, way: str) -> None:
        for other in {*self.folder.iterdir()} - self.written:
            other.unlink()
        self.path.write_bytes(self.content)
        self.config_path.write_text(self.config_text)
        self.changed = pick.choice(["config", "weights"])
        if way == "attack" and self.changed == "weights":
            (attack_index if pick.random() < 0.15 else attack)(pick, self.path)
        elif way == "attack":
            self.config_path.write_text(attacked_config(pick, self.config_text, self.part))
        elif self.changed == "config" and way == "damage":
            self.config_path.write_bytes(damaged(pick, self.config_text.encode()))
        elif self.changed == "config" and pick.random() < 0.2:
            self.config_path.write_text(forge_text(pick, self.config_text))
        elif self.changed == "config":
            own = forge_text(pick, json.dumps(self.quantization))
            text = json.dumps(json.loads(self.config_text) | {self.part: "HERE"})
            self.config_path.write_text(text.replace('"HERE"', own))
        elif way == "damage":
            self.path.write_bytes(damaged(pick, self.content))
        else:
            safetensors.save_file(self.forged(pick), self.path, {"format": "pt"})

    def forged(self, pick: random.Random) -> dict[str, Tensor]:
        tensors = dict(self.tensors)
        for _ in range(pick.choice([1, 1, 1, 2, 3])):
            texts = [name for name in tensors if name.endswith(".spec")]
            name = pick.choice(texts if texts and pick.random() < 0.5 else list(tensors))
            value = tensors[name]
            if name in texts and value.dtype == torch.uint8 and pick.random() < 0.9:
                try:
                    raw = forge_text(pick, bytes(value.flatten().tolist()).decode()).encode()
                except ValueError:  # changed before
                    continue
                tensors[name] = torch.frombuffer(bytearray(raw or b" "), dtype=torch.uint8)
                continue
            match pick.randrange(5):
                case 0:
                    del tensors[name]
                case 1:
                    tensors[pick.choice(list(tensors))] = value.clone()
                case _:
                    tensors[name] = forge_tensor(pick, value).contiguous()
        return tensors

    def fields(self) -> tuple[Any, Any]:
        """Returns what config.json says to transformers and to torchq; None if it is no JSON."""
        try:
            facts = json.loads(self.config_path.read_text())
            return facts, facts.pop(self.part, None)
        except (ValueError, AttributeError, RecursionError):
            return None, None

    def excuse(self) -> str:
        """Returns why what transformers makes of the folder is not judged, or ""."""
        theirs, ours = self.fields()
        facts = json.loads(self.config_text)
        del facts[self.part]
        if theirs != facts:
            return "a field of transformers"
        if not isinstance(ours, dict) or ours.get("quant_method") != self.method:
            return "no method of torchq"
        if self.changed == "weights" and self.same_layers():
            return "a tensor of transformers"
        return ""

    def same_layers(self) -> bool:
        """Returns whether the tensors of quantized layers are as they were."""
        try:
            found = safetensors.load_file(self.path)  # not there where an index is
        except Exception:
            return False
        layers = tuple(name.removesuffix("spec") for name in self.tensors if name.endswith(".spec"))
        ours = [name for name in {*self.tensors, *found} if name.startswith(layers)]
        return all(_same(self.tensors.get(name), found.get(name)) for name in ours)

    def refuses(self, error: Exception, way: str) -> str:
        if str(error).startswith("torchq."):
            assert type(error) is ValueError, repr(error)
            return "refused"
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f for f in frames if f.filename.startswith(str(Path(torchq.__file__).parent))]
        if ours and not self.excuse() and ours[-1].name != "load":
            raise error
        return "refused by transformers"

    def may_differ(self, way: str) -> str:
        if self.changed == "weights" and way != "damage":
            return "another model"
        return self.excuse() or ("another model" if way == "attack" else "")


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return False
    return a.dtype == b.dtype and torch.equal(
        a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)
    )


class Compressed(Pretrained):
    """A folder of compressed-tensors, read by from_compressed_tensors. The format has no digest."""

    name, method = "compressed", "compressed-tensors"

    def save(self) -> None:
        model = self.save_float()
        tensors = dict(model.state_dict())
        bits = self.options["bits"]
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and name != "classifier":
                scale = module.weight.data.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
                tensors[f"{name}.weight"] = (module.weight.data / scale).round().to(torch.int8)
                tensors[f"{name}.weight_scale"] = scale
        safetensors.save_file(tensors, self.path, {"format": "pt"})
        facts = json.loads(self.config_path.read_text())
        common = {"type": "int", "symmetric": True}
        sources = {"num_bits": 8, "strategy": "token", "dynamic": True, **common}
        group = {"targets": ["Linear"], "input_activations": sources, "output_activations": None}
        weights = {"num_bits": bits, "strategy": "channel", **common}
        facts[self.part] = {
            "quant_method": "compressed-tensors", "format": "int-quantized",
            "ignore": ["classifier"], "config_groups": {"group_0": {**group, "weights": weights}},
            "quantization_status": "compressed",
        }  # fmt: skip
        self.config_path.write_text(json.dumps(facts, indent=2))

    def load(self) -> Any:
        return torchq.from_compressed_tensors(self.folder, self.cls)

    def may_differ(self, way: str) -> str:
        is_whole = self.changed == "config" and way == "damage"
        return self.excuse() if is_whole else "another model"
