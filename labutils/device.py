"""Which device trains, what it is, and why a GPU that is there may not be usable (`python -m labutils doctor`)."""

from __future__ import annotations

import math
import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import pandas as pd
import torch

from labutils import compiling, memory, out_of_memory

INSTALL_CUDA_TORCH = (
    f"{Path(sys.executable).name} -m pip install --force-reinstall torch==2.13.0  "
    "(or the command that pytorch.org/get-started/locally gives for your system)"
)

SMALLEST_GIB = (
    3.0  # GPT-2 124M in float32, one sequence of 512 at a time, with a tenth for fragmentation: by the ledger
)


@dataclass(frozen=True)
class GpuFacts:
    """What decides whether an NVIDIA card can be used; gathered by `gpu_facts`, judged by `diagnose`."""

    cards: tuple[str, ...]  # names that the driver lists, whether or not torch can use them
    torch_cuda: str | None  # the CUDA version torch was built for; None for a CPU build
    usable: bool  # torch.cuda.is_available()
    init_error: str = ""  # what torch says when it is not
    capability: tuple[int, int] | None = None
    arch_list: tuple[str, ...] = ()
    hidden: bool = False  # CUDA_VISIBLE_DEVICES is set to nothing: the reader's choice
    free_gib: float | None = None  # for this process: free, or held by it


def gpu_facts() -> GpuFacts:
    """Ask the driver (nvidia-smi) and torch. Starts no training and allocates no tensor on the card."""
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
        cards=_nvidia_smi("name"),
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
    card = int(os.environ.get("LOCAL_RANK", 0))  # under torchrun each process has its own
    try:
        free, _ = torch.cuda.mem_get_info(card)
    except RuntimeError:  # not even room for a context, or the card is another process's alone
        return 0.0
    return (free + torch.cuda.memory_reserved(card)) / 2**30


def _nvidia_smi(field: str) -> tuple[str, ...]:
    """Return one field of each card; nothing where there is no driver or it does not answer in ten seconds."""
    program = shutil.which("nvidia-smi")
    if not program:
        return ()
    command = [program, f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(line.strip() for line in answer.stdout.splitlines() if line.strip()) if answer.returncode == 0 else ()


def diagnose(facts: GpuFacts) -> str | None:
    """Return why a card that is present cannot be used, and the command that mends it; None if there is no problem."""
    if facts.usable:
        return _unsupported_architecture(facts) or _too_full(facts)
    if not facts.cards or facts.hidden:
        return None
    card = facts.cards[0]
    if facts.torch_cuda is None:
        return f"{card} is present, but this torch is a CPU build. Mend: {INSTALL_CUDA_TORCH}"
    if "driver" in facts.init_error and "old" in facts.init_error:
        return (
            f"{card} is present, but its driver is too old for torch's CUDA {facts.torch_cuda}. Mend: update the "
            "NVIDIA driver (nvidia.com/drivers), or install a torch built for an older CUDA (pytorch.org)"
        )
    return f"{card} is present, but torch cannot start CUDA: {facts.init_error or 'no reason given'}. Try: nvidia-smi"


def _too_full(facts: GpuFacts) -> str | None:
    if facts.free_gib is None or facts.free_gib >= SMALLEST_GIB:
        return None
    return (
        f"{facts.cards[0] if facts.cards else 'The GPU'} has {facts.free_gib:.1f} GiB free; the smallest GPT-2 run of "
        f"the course takes {SMALLEST_GIB:g}. Mend: close what holds the rest (nvidia-smi lists it), restart this kernel"
    )


def _unsupported_architecture(facts: GpuFacts) -> str | None:
    """A card runs machine code of its own major version up to its minor one, or later-compiled PTX of any older one."""
    if any(arch.startswith("gfx") for arch in facts.arch_list):  # AMD, under ROCm: torch checks for itself
        return None
    major, minor = facts.capability
    binaries = [_arch(a) for a in facts.arch_list if a.startswith("sm_")]
    ptx = [_arch(a) for a in facts.arch_list if a.startswith("compute_")]
    if any(m == major and n <= minor for m, n in binaries) or any(arch <= (major, minor) for arch in ptx):
        return None
    return (
        f"{facts.cards[0] if facts.cards else 'The GPU'} has compute capability {major}.{minor}; this torch has code "
        f"for {', '.join(facts.arch_list)} only. Mend: install a torch that supports the card (pytorch.org), "
        "or set CUDA_VISIBLE_DEVICES= to train on the CPU"
    )


def _arch(name: str) -> tuple[int, int]:
    digits = "".join(c for c in name.split("_")[1] if c.isdigit())
    return int(digits[:-1]), int(digits[-1])


def choose_device() -> torch.device:
    """Return the CUDA device if torch can really use it, else the CPU."""
    facts = gpu_facts()
    return torch.device("cuda" if facts.usable and diagnose(facts) is None else "cpu")


CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def _cgroup_folders(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield (folder, is version 1) of this process's control group and of those around it; none but on Linux.

    In a container the path in MEMBERSHIP is often the host's: folders that do not exist are left out.
    """
    lines = MEMBERSHIP.read_text().splitlines() if MEMBERSHIP.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if not controllers or controller in controllers.split(","):
            root = CGROUPS / controllers
            folder = root / path.lstrip("/")
            yield from (
                (f, bool(controllers)) for f in (folder, *folder.parents) if f.is_dir() and f.is_relative_to(root)
            )


def _numbers(*files: Path) -> tuple[int, int]:
    """Return the two numbers in one file or two. Raises OSError or ValueError: also for "max" and -1, no limit."""
    first, second = (int(word) for file in files for word in file.read_text().split())
    if first < 0:
        raise ValueError("no limit")
    return first, second


def usable_cpus() -> int:
    """Return how many CPUs this process may use: of its affinity, and of its control groups' quota."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder, is_v1 in _cgroup_folders("cpu"):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_v1 else ("cpu.max",)
        with suppress(OSError, ValueError):  # unreadable, or not as the kernel documents it: no limit that we know of
            quota, period = _numbers(*(folder / name for name in names))
            found = min(found, math.ceil(quota / period))
    return max(1, found)


def free_host_bytes() -> int:
    """Return how much more memory this process can have: of the machine's free memory, and of its control groups'.

    What a group uses for files it can give back at once counts as free.
    """
    import psutil

    free = psutil.virtual_memory().available
    for folder, is_v1 in _cgroup_folders("memory"):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_v1 else ("memory.max", "memory.current")
        with suppress(OSError, ValueError):
            limit, used = _numbers(*(folder / name for name in names))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            free = min(free, limit - used + int(stat.get("total_inactive_file" if is_v1 else "inactive_file", 0)))
    return max(0, free)


def free_bytes(device: torch.device) -> int:
    """Return how many bytes new tensors can have: on CUDA what the card has free and what torch holds unused."""
    if device.type != "cuda":
        return free_host_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def device_name(device: torch.device) -> str:
    """Return the processor's or the card's product name, with the CPU's instruction set as torch uses it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()} ({torch.get_num_threads()} threads, {cpu_capability()})"


def cpu_capability() -> str:
    """Return the instruction sets torch may use on this CPU, capped by ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA."""
    cap = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    return torch.backends.cpu.get_cpu_capability() + (f", oneDNN capped to {cap}" if cap else "")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def environment(device: torch.device) -> dict[str, str]:
    """Return what a record says about the machine: device, driver and library versions, all as text."""
    facts = {
        "device": device_name(device),
        "device_type": device.type,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "numpy": version("numpy"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if threshold := os.environ.get(memory.MALLOC):  # steps are slower: see `memory.return_freed_blocks`
        facts["malloc"] = f"returns freed blocks of {threshold} bytes"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["capability"] = f"{properties.major}.{properties.minor}"
        facts["gpu_memory_gib"] = f"{properties.total_memory / 2**30:.1f}"
        facts["cuda"] = torch.version.cuda or f"ROCm {torch.version.hip}"
        facts["driver"] = (*_nvidia_smi("driver_version"), "unknown")[0]
    return facts


def setup() -> torch.device:
    """Choose the device, print what it is, and say loudly if a GPU is there that cannot be used.

    Also gives torch no more threads than this process may use CPUs, and on Windows no more of a card's memory than is
    free (see `memory.cap_to_free`), shortens errors that say out of memory (see
    `out_of_memory.explain_in_notebooks`), silences two warnings of the compiler (see
    `compiling.silence_known_warnings`), and tells pandas not to cut the reasons in our tables short.
    """
    torch.set_num_threads(min(torch.get_num_threads(), usable_cpus()))
    out_of_memory.explain_in_notebooks()
    compiling.silence_known_warnings()
    pd.set_option("display.max_colwidth", None, "display.width", 200)
    facts = gpu_facts()
    problem = diagnose(facts)
    device = torch.device("cuda" if facts.usable and not problem else "cpu")
    memory.cap_to_free(device)
    if problem:
        print(f"!! A GPU IS NOT USED: {problem}\n")
    print(", ".join(f"{key} {value}" for key, value in environment(device).items() if key != "device_type"))
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # Windows has none
    if device.type == "cpu" and busy > 1.25 * (os.cpu_count() or 1):
        print(
            f"!! OTHER PROGRAMS COMPUTE HERE: {busy:.1f} threads on {os.cpu_count()} CPUs in the last minute. "
            "Times mean little. For two notebooks at once start Jupyter with OMP_NUM_THREADS=1 in its environment"
        )
    return device
