# SPDX-License-Identifier: Apache-2.0
"""ImageNet's validation images, for those who have them, and the networks of NNCF's own tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.accuracy.task import Task, seeded

_TRANSFORMERS = (
    "torchvision/vit_b_16", "torchvision/swin_v2_s", "timm/deit3_small_patch16_224",
    "timm/swin_base_patch4_window7_224", "timm/crossvit_9_240", "timm/levit_128",
    "timm/visformer_small",
)  # fmt: skip
MODELS = (
    "torchvision/resnet18", "torchvision/mobilenet_v3_small", "timm/mobilenetv2_050",
    "timm/mobilenetv3_small_050", "timm/efficientnet_b0", "timm/efficientnet_lite0",
    "timm/regnetx_002", "timm/darknet53", "timm/dla34", "timm/dpn68", "timm/hrnet_w18",
    "timm/inception_resnet_v2", "timm/tf_inception_v3", "timm/resnest14d", "timm/vgg11",
    "timm/wide_resnet50_2", *_TRANSFORMERS,
)  # fmt: skip
_CLASSES, _CALIBRATION, _BATCH = 1000, 300, 32
_ENDINGS = (".jpeg", ".jpg", ".png")

Transform = Callable[[Any], Tensor]


class Batches:
    """Batches of images, read anew by each loop: all of them at once would take 30 GB."""

    def __init__(self, files: Sequence[Path], transform: Transform) -> None:
        self.files, self.transform = files, transform

    def __iter__(self) -> Iterator[Tensor]:
        for begin in range(0, len(self.files), _BATCH):
            yield torch.stack([self._image(f) for f in self.files[begin : begin + _BATCH]])

    def _image(self, file: Path) -> Tensor:
        from PIL import Image

        with Image.open(file) as picture:
            return self.transform(picture.convert("RGB"))


def loaders(path: Path, weights: Path | None) -> dict[str, Callable[[], Task]]:
    """Return functions that load the task of each network.

    Args:
        path: folder of the images, as of :func:`labelled`.
        weights: folder of state dicts; None for published weights.

    Raises:
        RuntimeError: ``path`` has no images, or not the classes of the published weights.
    """
    files, labels, classes = labelled(path)
    if weights is None and classes != _CLASSES:
        raise RuntimeError(
            f"accuracy: --imagenet must have {_CLASSES} folders, one for each class of published "
            f"weights, got {classes} in {path}. Sorted names are classes 0 to {_CLASSES - 1}. "
            "--weights takes networks of other classes."
        )
    return {name: partial(_load, name, files, labels, classes, weights) for name in MODELS}


def labelled(path: Path) -> tuple[list[Path], list[int], int]:
    """Return the images, their classes, and how many classes there are.

    Sorted names of folders are the classes from 0 on.

    Raises:
        RuntimeError: there are fewer than two images.
    """
    root = path / "val" if (path / "val").is_dir() else path
    folders = sorted(f for f in root.iterdir() if f.is_dir()) if root.is_dir() else []
    found = [
        (file, label)
        for label, folder in enumerate(folders)
        for file in sorted(folder.iterdir())
        if file.suffix.lower() in _ENDINGS
    ]
    if len(found) < 2:
        raise RuntimeError(
            "accuracy: --imagenet must be a folder of folders with images, one for each class, got "
            f"{len(found)} images in {path}. Move them to {path}/val/<class>/*.JPEG."
        )
    return [file for file, _ in found], [label for _, label in found], len(folders)


def _load(
    name: str, files: list[Path], labels: list[int], classes: int, weights: Path | None
) -> Task:
    model, transform = network(name, weights, classes)
    order = torch.randperm(len(files), generator=seeded(0)).tolist()
    count = min(_CALIBRATION, len(files) // 2)
    first, second = ([files[i] for i in part] for part in (order[:count], order[count:]))
    calibration, right = list(Batches(first, transform)), torch.tensor(labels)[order[count:]]
    return Task(
        name=name,
        about=f"{len(first)} images calibrate, {len(second)} others measure. SQNR is that of the "
        "logits.",
        metric="top-1 / top-5, %",
        model=model.eval().requires_grad_(False),
        calibration=calibration,
        test=Batches(second, transform),
        score=lambda _, found: f"{_top(found, right, 1):.2f} / {_top(found, right, 5):.2f}",
        timed=calibration[0][:1],
        variable={0: (0,)},
        is_transformer=name in _TRANSFORMERS,
        knows_answers=True,
    )


def network(name: str, weights: Path | None, classes: int) -> tuple[nn.Module, Transform]:
    """Return a network and what prepares its images.

    The library loads the published weights, from its cache where they are there.

    Raises:
        RuntimeError: the library, the weights or a file of them is missing.
    """
    library, _, short = name.partition("/")
    options = {} if weights is None else {"num_classes": classes}
    try:
        module = import_module(library)
        if library == "torchvision":
            published = module.models.get_model_weights(short).DEFAULT
            options["weights"] = published if weights is None else None
            model, transform = module.models.get_model(short, **options), published.transforms()
        else:
            model = module.create_model(short, pretrained=weights is None, **options)
            data = import_module("timm.data")
            transform = data.create_transform(**data.resolve_data_config({}, model=model))
        if weights is not None:
            _load_weights(model, weights / f"{short}.pth", classes)
    except (ImportError, OSError) as error:  # OSError: no file, or no connection
        raise RuntimeError(f"{error}; --weights takes a folder of state dicts") from None
    return model, transform


def _load_weights(model: nn.Module, file: Path, classes: int) -> None:
    state = torch.load(file, weights_only=True)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise RuntimeError(f"{file} must fit {classes} classes, one a folder: {error}") from None


def _top(found: Tensor, right: Tensor, count: int) -> float:
    """Return the percentage of images whose class is among the likeliest."""
    likeliest = found.topk(min(count, found.shape[-1])).indices
    return 100 * float((likeliest == right.unsqueeze(1)).any(1).float().mean())
