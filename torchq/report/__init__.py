# SPDX-License-Identifier: Apache-2.0
"""What a report says of modules and functions, and what conversion refuses by it."""
