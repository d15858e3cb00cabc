# SPDX-License-Identifier: Apache-2.0
"""Register ``torchq.TorchqConfig`` with transformers, whichever of the two is imported first.

transformers finds formats by what was registered, and reads no entry points. Importing it takes
seconds, so ``import torchq`` does not. A finder on ``sys.meta_path``, Python's own way to take part
in imports, registers the format when the module that loads models has run.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

_LOADS_MODELS = "transformers.modeling_utils"


def register() -> None:
    """Register the format now where transformers can load models already, else when it can."""
    if _LOADS_MODELS in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    with contextlib.suppress(ImportError):  # of another version; TorchqConfig says which fit
        importlib.import_module("torchq.integrations.transformers")


class _Finder(MetaPathFinder):
    """Finds one module, where Python would, with a loader that registers the format."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _LOADS_MODELS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return spec
        spec.loader = _Loader(fullname, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _register()
