# SPDX-License-Identifier: Apache-2.0
"""Searches files by meaning, with an int8 sentence encoder and an index of faiss.

pip install -r examples/search/requirements.txt
python examples/search/run.py --model sentence-transformers/all-MiniLM-L6-v2 docs/*.md

Each paragraph of the files is one vector; each line of input is a query. --float takes the float
encoder, to compare time and answers.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import torchq

try:
    import faiss
    from sentence_transformers import SentenceTransformer
except ImportError as error:
    sys.exit(f"{error}: run `pip install -r examples/search/requirements.txt`.")


def load(name: str, is_float: bool = False) -> SentenceTransformer:
    """Loads an encoder, whose linear layers become int8 as their weights are read."""
    options = {} if is_float else {"quantization_config": torchq.TorchqConfig()}
    try:
        return SentenceTransformer(name, device="cpu", model_kwargs=options)
    except OSError as error:
        sys.exit(f"No model {name}: give --model a folder, or a name that the Hub has.\n{error}")


def passages(paths: list[Path]) -> list[tuple[str, str]]:
    """Returns file and text of each paragraph of more than 40 letters."""
    parts = ((path, re.split(r"\n\s*\n", path.read_text(encoding="utf-8"))) for path in paths)
    texts = ((path.name, " ".join(part.split())) for path, many in parts for part in many)
    return [(name, text) for name, text in texts if len(text) > 40]


def embed(model: SentenceTransformer, texts: list[str]) -> np.ndarray[Any, Any]:
    return model.encode(texts, normalize_embeddings=True, convert_to_numpy=True)


def index_of(vectors: np.ndarray[Any, Any]) -> Any:
    """Returns a graph of near neighbours (HNSW); its scores are cosines of unit vectors."""
    index = faiss.IndexHNSWFlat(vectors.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
    index.add(vectors)
    return index


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--float", action="store_true")
    parser.add_argument("--count", type=int, default=3, help="results of a query; default 3")
    args = parser.parse_args()
    model, found = load(args.model, args.float), passages(args.files)
    start = time.perf_counter()
    index = index_of(embed(model, [text for _, text in found]))
    print(f"{len(found)} paragraphs in {time.perf_counter() - start:.1f} s")
    for query in map(str.strip, sys.stdin):
        (scores,), (rows,) = index.search(embed(model, [query]), args.count)
        for score, (file, text) in zip(scores, (found[row] for row in rows), strict=True):
            print(f"{score:.3f} {file}: {text[:100]}", flush=True)


if __name__ == "__main__":
    main()
