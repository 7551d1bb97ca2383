"""The CPUs and the memory that this process may use, its control groups counted."""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def _cgroup_folders(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield (folder, is version 1) of this process's control group and of those around it; none but
    on Linux.

    In a container the path in MEMBERSHIP is often the host's: folders that do not exist are left
    out.
    """
    lines = MEMBERSHIP.read_text().splitlines() if MEMBERSHIP.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if not controllers or controller in controllers.split(","):
            root = CGROUPS / controllers
            folder = root / path.lstrip("/")
            yield from (
                (f, bool(controllers))
                for f in (folder, *folder.parents)
                if f.is_dir() and f.is_relative_to(root)
            )


def _numbers(*files: Path) -> tuple[int, int]:
    """Return the two numbers in one file or two.

    Raises OSError or ValueError: also for "max" and -1, no limit.
    """
    first, second = (int(word) for file in files for word in file.read_text().split())
    if first < 0:
        raise ValueError("no limit")
    return first, second


def usable_cpus() -> int:
    """Return how many CPUs this process may use, by its affinity and its control groups' quota."""
    found = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    for folder, is_v1 in _cgroup_folders("cpu"):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_v1 else ("cpu.max",)
        # unreadable, or not as the kernel documents it: no limit that we know of
        with suppress(OSError, ValueError):
            quota, period = _numbers(*(folder / name for name in names))
            found = min(found, math.ceil(quota / period))
    return max(1, found)


def free_host_bytes() -> int:
    """Return how much more memory this process can have: of the machine's free memory, and of its
    control groups'.

    What a group uses for files it can give back at once counts as free.
    """
    import psutil

    free = psutil.virtual_memory().available
    for folder, is_v1 in _cgroup_folders("memory"):
        names = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes")
            if is_v1
            else ("memory.max", "memory.current")
        )
        with suppress(OSError, ValueError):
            limit, used = _numbers(*(folder / name for name in names))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            free = min(
                free,
                limit
                - used
                + int(stat.get("total_inactive_file" if is_v1 else "inactive_file", 0)),
            )
    return max(0, free)


def in_notebook() -> bool:
    """Return whether a Jupyter kernel runs this code."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")


def cpu_capability() -> str:
    """Return the instruction sets torch may use on this CPU, capped by ATEN_CPU_CAPABILITY and
    ONEDNN_MAX_CPU_ISA.
    """
    cap = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    return torch.backends.cpu.get_cpu_capability() + (f", oneDNN capped to {cap}" if cap else "")


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
