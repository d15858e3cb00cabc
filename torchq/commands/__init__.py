# SPDX-License-Identifier: Apache-2.0
"""Commands of ``python -m torchq`` that are too long for ``__main__.py``."""
