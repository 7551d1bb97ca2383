"""How many threads torch computes with on a CPU: decided once, before anything is trained."""

from __future__ import annotations

import os
from functools import cache

import psutil
import torch

from labutils.machine.host import usable_cpus

SAMPLE_S = 0.3
A_BIT = 0.5  # CPUs that the system and idle programs use all the time


def busy_cpus() -> float:
    """Return how many CPUs are computing now; this process sleeps meanwhile."""
    return psutil.cpu_percent(interval=SAMPLE_S) / 100 * (os.cpu_count() or 1)


@cache  # once in a process: runs of one notebook are compared
def choose_threads() -> str:
    """Set the number of torch's threads; return a sentence if other programs had a say in it.

    No more threads than this process may use CPUs. One thread where other programs leave fewer
    CPUs than that: threads wait for each other by spinning, and on a shared CPU that takes many
    times as long. OMP_NUM_THREADS in the environment is a user's own choice, and stays.
    """
    wanted = min(torch.get_num_threads(), usable_cpus())
    torch.set_num_threads(wanted)
    cpus, busy = os.cpu_count() or 1, busy_cpus()
    if cpus - busy > wanted - A_BIT:
        return ""
    text = f"This machine is busy (other programs compute on {busy:.1f} of {cpus} CPUs)"
    if wanted == 1 or "OMP_NUM_THREADS" in os.environ:
        return f"{text}: times mean little"
    torch.set_num_threads(1)
    return (
        f"{text}: torch computes with 1 thread here, not {wanted}, which would wait for each other"
    )


def use_recorded_threads(recorded: str) -> str:
    """Continue a run with its own number of threads; return a sentence if that changes it.

    `recorded` is a record's `threads`; a number that this process may not use changes nothing.
    """
    now = torch.get_num_threads()
    if not recorded or int(recorded) in (now, 0) or int(recorded) > usable_cpus():
        return ""
    torch.set_num_threads(int(recorded))
    return f"continues with {recorded} thread(s), as it began; this process had {now}"
