"""Which GPU is here, and why one that is here may not be usable."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path

import torch

INSTALL_CUDA_TORCH = (
    f"{Path(sys.executable).name} -m pip install --force-reinstall torch==2.13.0  "
    "(or the command that pytorch.org/get-started/locally gives for your system)"
)
# GPT-2 124M in float32, one sequence of 512 at a time, with a tenth for fragmentation: as the
# ledger predicts
SMALLEST_GIB = 3.0


@cache  # what is decided by it must not change between two runs of a process
def gpu_problem() -> str:
    """Return why an NVIDIA card that is present cannot be used, and the fix; "" if all is well.

    One number is computed on the card. To hide a card by CUDA_VISIBLE_DEVICES= is a choice, and no
    problem.
    """
    name = (*nvidia_smi("name"), "")[0]
    if not torch.cuda.is_available():
        if not name or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            return ""
        if torch.version.cuda is None:
            return f"{name} is present, but this torch is a CPU build. Fix: {INSTALL_CUDA_TORCH}"
    card = int(os.environ.get("LOCAL_RANK", 0))  # processes launched together: each has its own
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own: the error says it
            torch.ones(1, device=f"cuda:{card}").sum().item()
            free = driver_memory(card)[0] + torch.cuda.memory_reserved(card)
    except (RuntimeError, AssertionError) as error:
        return (
            f"{name} is present, but torch cannot compute on it: {str(error).splitlines()[0]}. "
            "Fix: update the NVIDIA driver (nvidia.com/drivers), or install a torch that supports "
            "the card (pytorch.org); CUDA_VISIBLE_DEVICES= trains on the CPU"
        )
    if free / 2**30 >= SMALLEST_GIB:
        return ""
    return (
        f"{name} has {free / 2**30:.1f} GiB free; the smallest GPT-2 run of the course takes "
        f"{SMALLEST_GIB:g}. Fix: close what holds the rest (see nvidia-smi), restart this kernel"
    )


def driver_memory(device: torch.device | int) -> tuple[int, int]:
    """Return (bytes that no process holds, all bytes) of a GPU, as its driver says."""
    return torch.cuda.mem_get_info(device)


def nvidia_smi(field: str) -> tuple[str, ...]:
    """Return one field of each card; nothing where there is no driver or it does not answer in ten
    seconds.
    """
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(answer.stdout.strip().splitlines())


def choose_device() -> torch.device:
    """Return the CUDA device if torch can really use it, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() and not gpu_problem() else "cpu")
