"""The CPUs and the memory that this process may use, its control groups counted."""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def _control_groups(controller: str) -> Iterator[Path]:
    """Yield the folder of this process's control group, and those around it; none but on Linux.

    Of version 2, and of version 1 for a controller. In a container the path in MEMBERSHIP is often
    the host's: some folders do not exist.
    """
    lines = MEMBERSHIP.read_text().splitlines() if MEMBERSHIP.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if not controllers or controller in controllers.split(","):
            folder = CGROUPS / controllers / path.lstrip("/")
            yield from (folder, *folder.parents)


def _limit(group: Path, *files: str) -> list[int]:
    """Return the numbers in files of a group; nothing if one is missing, or sets no limit."""
    numbers = []
    with suppress(OSError, ValueError):  # "max" in version 2, -1 in version 1
        for file in files:
            numbers += [int(word) for word in (group / file).read_text().split()]
    return numbers if len(numbers) == 2 and numbers[0] >= 0 else []


def usable_cpus() -> int:
    """Return how many CPUs this process may use, by its affinity and its control groups' quota."""
    cpus = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cpus = len(os.sched_getaffinity(0))
    for group in _control_groups("cpu"):
        version_1 = _limit(group, "cpu.cfs_quota_us", "cpu.cfs_period_us")
        if limit := _limit(group, "cpu.max") or version_1:
            cpus = min(cpus, math.ceil(limit[0] / limit[1]))
    return cpus


def free_host_bytes() -> int:
    """Return how much more memory this process can have: of the machine's free memory, and of its
    control groups'.

    What a group uses for files it can give back at once counts as free.
    """
    free = psutil.virtual_memory().available
    for group in _control_groups("memory"):
        version_1 = _limit(group, "memory.limit_in_bytes", "memory.usage_in_bytes")
        if limit := _limit(group, "memory.max", "memory.current") or version_1:
            lines = (group / "memory.stat").read_text().splitlines()
            stat = dict(line.split() for line in lines)
            files = stat.get("total_inactive_file") or stat.get("inactive_file", 0)
            free = min(free, limit[0] - limit[1] + int(files))
    return max(0, free)


def in_notebook() -> bool:
    """Return whether a Jupyter kernel runs this code."""
    ipython = sys.modules.get("IPython")
    return hasattr(ipython and ipython.get_ipython(), "kernel")


def cpu_name() -> str:
    """Return the processor's product name."""
    with suppress(OSError, IndexError):
        lines = Path("/proc/cpuinfo").read_text().partition("model name")[2].splitlines()
        return lines[0].partition(":")[2].strip()
    return platform.processor() or platform.machine()
