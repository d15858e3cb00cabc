# SPDX-License-Identifier: Apache-2.0
"""Registers torchq with other libraries; each module here needs the one that it is named after."""
