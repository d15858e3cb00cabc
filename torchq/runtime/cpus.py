# SPDX-License-Identifier: Apache-2.0
"""Counts the CPUs that this process may really use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def usable_cpus(root: Path = Path("/")) -> float:
    """Return how many CPUs the affinity and the quotas of cgroups (v1 or v2) leave.

    Quotas, as containers set them, may be fractions. ``root`` is where /proc and /sys are.
    """
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    return min([float(count), *_quotas(root)])


def _quotas(root: Path) -> Iterator[float]:
    """CPUs of every group that this process is in, and of those around it."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # no Linux, or not mounted
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # A container sees its own group at the top, under the path that the host knows.
        for name in ("cpu", "cpu,cpuacct") if controllers else ("",):
            top = root / "sys/fs/cgroup" / name
            group = top / path.lstrip("/")
            for folder in (group, *group.parents):
                if folder == top or top in folder.parents:
                    yield from _quota(folder)


def _quota(folder: Path) -> Iterator[float]:
    """Return the quota that a group sets itself, if it does."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        if quota != "max" and int(quota) > 0:
            yield int(quota) / int(period)
    except (OSError, ValueError):  # the group at the top has no such files
        return
