# SPDX-License-Identifier: Apache-2.0
"""The samples of ``--data``, lines of a text or images of a folder, and progress over them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from torchq.models.inputs import with_progress

Item = TypeVar("Item")
_IMAGES = {".bmp", ".jpeg", ".jpg", ".png", ".webp"}


def read_texts(path: Path, count: int) -> list[str]:
    """Return the first lines of a text file that are not empty.

    Raises:
        ValueError: it is no text in UTF-8, or has no lines.
    """
    try:
        with path.open(encoding="utf-8") as file:
            texts = [line.strip() for line in file if line.strip()][:count]
    except UnicodeDecodeError as error:
        raise ValueError(
            f"torchq quantize: --data must be text in UTF-8, one sample per line, got '{path}': "
            f"{error.reason}. Pass a .txt file, or a folder of images for a model of images."
        ) from None
    if not texts:
        raise ValueError(
            f"torchq quantize: --data must have at least one line, got none in '{path}'. Write one "
            "sample per line."
        )
    return texts


def find_images(folder: Path, count: int) -> list[Path]:
    """Return the first images of a folder, by name.

    Raises:
        ValueError: there are none.
    """
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in _IMAGES)
    if not found:
        kinds = ", ".join(sorted(_IMAGES))
        raise ValueError(
            f"torchq quantize: --data must be a folder with images ({kinds}), got none in "
            f"'{folder}'. Put some there."
        )
    return found[:count]


def shown(title: str, items: Sequence[Item]) -> Iterator[Item]:
    """Yield the items behind a progress bar on a terminal, of tqdm where it is installed."""
    if find_spec("tqdm") is not None:
        yield from with_progress(title, items, None)
        return
    visible = sys.stderr.isatty()
    for number, item in enumerate(items, 1):
        if visible:
            print(f"\r{title}: {number} of {len(items)}", end="", file=sys.stderr, flush=True)
        yield item
    if visible:
        print(file=sys.stderr)
