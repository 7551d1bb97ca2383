"""Which GPU is here, and why one that is here may not be usable."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

INSTALL_CUDA_TORCH = (
    f"{Path(sys.executable).name} -m pip install --force-reinstall torch==2.13.0  "
    "(or the command that pytorch.org/get-started/locally gives for your system)"
)
# GPT-2 124M in float32, one sequence of 512 at a time, with a tenth for fragmentation: by the
# ledger
SMALLEST_GIB = 3.0


@dataclass(frozen=True)
class GpuFacts:
    """What decides whether an NVIDIA card can be used; gathered by `gpu_facts`, judged by
    `diagnose`.
    """

    cards: tuple[str, ...]  # names that the driver lists, whether or not torch can use them
    torch_cuda: str | None  # the CUDA version torch was built for; None for a CPU build
    usable: bool  # torch.cuda.is_available()
    init_error: str = ""  # what torch says when it is not
    capability: tuple[int, int] | None = None
    arch_list: tuple[str, ...] = ()
    hidden: bool = False  # CUDA_VISIBLE_DEVICES is set to nothing: the reader's choice
    free_gib: float | None = None  # for this process: free, or held by it

    @property
    def card(self) -> str:
        """The first card's name."""
        return self.cards[0] if self.cards else "The GPU"


def gpu_facts() -> GpuFacts:
    """Ask the driver (nvidia-smi) and torch.

    Starts no training and allocates no tensor on the card.
    """
    error = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own warnings; `diagnose` says it with the mend
        usable = torch.cuda.is_available()
        if not usable and torch.version.cuda:
            try:
                torch.cuda.init()
            except (RuntimeError, AssertionError) as problem:
                error = str(problem)
    return GpuFacts(
        cards=nvidia_smi("name"),
        torch_cuda=torch.version.cuda,
        usable=usable,
        init_error=error,
        capability=torch.cuda.get_device_capability() if usable else None,
        arch_list=tuple(torch.cuda.get_arch_list()) if usable else (),
        hidden=os.environ.get("CUDA_VISIBLE_DEVICES", "unset") in ("", "-1"),
        free_gib=_free_gib() if usable else None,
    )


@lru_cache(maxsize=1)
def _free_gib() -> float:
    """Asked once: what is decided by it must not change between two runs of a process."""
    card = int(os.environ.get("LOCAL_RANK", 0))  # processes launched together: each has its own
    try:
        free, _ = driver_memory(card)
    except RuntimeError:  # not even room for a context, or the card is another process's alone
        return 0.0
    return (free + torch.cuda.memory_reserved(card)) / 2**30


def driver_memory(device: torch.device | int) -> tuple[int, int]:
    """Return (bytes that no process holds, all bytes) of a GPU, as its driver says."""
    return torch.cuda.mem_get_info(device)


def nvidia_smi(field: str) -> tuple[str, ...]:
    """Return one field of each card; nothing where there is no driver or it does not answer in ten
    seconds.
    """
    program = shutil.which("nvidia-smi")
    if not program:
        return ()
    command = [program, f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return (
        tuple(line.strip() for line in answer.stdout.splitlines() if line.strip())
        if answer.returncode == 0
        else ()
    )


def diagnose(facts: GpuFacts) -> str | None:
    """Return why a card that is present cannot be used, and the command that mends it; None if
    there is no problem.
    """
    if facts.usable:
        return _unsupported_architecture(facts) or _too_full(facts)
    if not facts.cards or facts.hidden:
        return None
    card = facts.cards[0]
    if facts.torch_cuda is None:
        return f"{card} is present, but this torch is a CPU build. Fix: {INSTALL_CUDA_TORCH}"
    if "driver" in facts.init_error and "old" in facts.init_error:
        return (
            f"{card} is present, but its driver is too old for torch's CUDA {facts.torch_cuda}. "
            "Fix: update the NVIDIA driver (nvidia.com/drivers), or install a torch built for an "
            "older CUDA (pytorch.org)"
        )
    reason = facts.init_error or "no reason given"
    return f"{card} is present, but torch cannot start CUDA: {reason}. Try: nvidia-smi"


def _too_full(facts: GpuFacts) -> str | None:
    if facts.free_gib is None or facts.free_gib >= SMALLEST_GIB:
        return None
    return (
        f"{facts.card} has {facts.free_gib:.1f} GiB free; the smallest GPT-2 run of the course "
        f"takes {SMALLEST_GIB:g}. Fix: close what holds the rest (nvidia-smi lists it), restart "
        "this kernel"
    )


def _unsupported_architecture(facts: GpuFacts) -> str | None:
    """A card runs machine code of its own major version up to its minor one, or later-compiled PTX
    of any older one.
    """
    # AMD, under ROCm: torch checks for itself
    if any(arch.startswith("gfx") for arch in facts.arch_list):
        return None
    major, minor = facts.capability
    binaries = [_arch(a) for a in facts.arch_list if a.startswith("sm_")]
    ptx = [_arch(a) for a in facts.arch_list if a.startswith("compute_")]
    if any(m == major and n <= minor for m, n in binaries) or any(
        arch <= (major, minor) for arch in ptx
    ):
        return None
    return (
        f"{facts.card} has compute capability {major}.{minor}; this torch has code for "
        f"{', '.join(facts.arch_list)} only. Fix: install a torch that supports the card "
        "(pytorch.org), or set CUDA_VISIBLE_DEVICES= to train on the CPU"
    )


def _arch(name: str) -> tuple[int, int]:
    digits = "".join(c for c in name.split("_")[1] if c.isdigit())
    return int(digits[:-1]), int(digits[-1])


def choose_device() -> torch.device:
    """Return the CUDA device if torch can really use it, else the CPU."""
    facts = gpu_facts()
    return torch.device("cuda" if facts.usable and diagnose(facts) is None else "cpu")
