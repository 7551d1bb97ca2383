"""What this machine is and has: its GPU and why it may not be usable, its CPUs and memory, what is
free, how fast a product is, and how many threads compute.
"""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
import sys
import time
import timeit
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, lru_cache, partial
from importlib.metadata import version
from pathlib import Path

import psutil
import torch
from tqdm import tqdm

from labutils.config.card import CONTEXT_GIB, CPU, Card, Gpu, Support
from labutils.config.reader import card_named

CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def _limits(controller: str, *files: str) -> Iterator[tuple[Path, int, int]]:
    """Yield (folder, limit, other number) of the control groups of this process that set a limit.

    `files` names the file or files in a group's folder that hold the two numbers. Version 2 has one
    tree of groups, version 1 one for each controller, and other systems than Linux have none. In a
    container the path in MEMBERSHIP is often the host's: some folders do not exist.
    """
    lines = MEMBERSHIP.read_text().splitlines() if MEMBERSHIP.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and controller not in controllers.split(","):
            continue
        folder = CGROUPS / controllers / path.lstrip("/")  # joined whole, "/…" would replace it
        for group in (folder, *folder.parents):  # a limit of any group above holds here, too
            with suppress(OSError, ValueError):  # "max" in version 2 is no limit
                words = " ".join((group / file).read_text() for file in files).split()
                limit, other = map(int, words)
                if limit >= 0:  # -1 in version 1 is none
                    yield group, limit, other


def usable_cpus() -> int:
    """Return how many CPUs this process may use, by its affinity and its control groups' quota."""
    cpus = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cpus = len(os.sched_getaffinity(0))
    version_1 = _limits("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us")
    for _, quota, period in (*_limits("cpu", "cpu.max"), *version_1):
        cpus = min(cpus, math.ceil(quota / period))  # half a CPU is one thread, not none
    return cpus


def free_host_bytes() -> int:
    """Return how much more memory this process can have: of the machine's free memory, and of its
    control groups'.

    What a group uses for files it can give back at once counts as free.
    """
    free = psutil.virtual_memory().available
    version_1 = _limits("memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
    for group, limit, used in (*_limits("memory", "memory.max", "memory.current"), *version_1):
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        files = stat.get("total_inactive_file") or stat.get("inactive_file", 0)
        free = min(free, limit - used + int(files))
    return max(0, free)


def in_notebook() -> bool:
    """Return whether a Jupyter kernel runs this code."""
    ipython = sys.modules.get("IPython")
    return hasattr(ipython and ipython.get_ipython(), "kernel")


def late_bar(what: str, of: Iterable | None = None, total: int | None = None) -> tqdm:
    """Return a progress bar that shows after three seconds, and leaves nothing behind.

    It goes through `of`, or up to a total by `update`. A notebook shows stderr in red: there it is
    on stdout.
    """
    file = sys.stdout if in_notebook() else sys.stderr
    return tqdm(of, what, total, delay=3, leave=False, mininterval=1, file=file)


def cpu_name() -> str:
    """Return the processor's product name."""
    with suppress(OSError, IndexError):
        lines = Path("/proc/cpuinfo").read_text().partition("model name")[2].splitlines()
        return lines[0].partition(":")[2].strip()
    return platform.processor() or platform.machine()


INSTALL_CUDA_TORCH = (
    f"{Path(sys.executable).name} -m pip install --force-reinstall torch==2.13.0  "
    "(or the command that pytorch.org/get-started/locally gives for your system)"
)
NONE_ON_COLAB = "this session of Colab has none. Fix: Runtime, Change runtime type, T4; begin anew"
# GPT-2 124M in float32, one sequence of 512 at a time, with a tenth for fragmentation: as the
# ledger predicts
SMALLEST_GIB = 3.0


@cache  # what is decided by it must not change between two runs of a process
def gpu_problem() -> str:
    """Return why an NVIDIA card that is present cannot be used, and the fix; "" if all is well.

    On Colab, where a GPU is there for the asking, it is a problem to have none. One number is
    computed on the card. To hide a card by CUDA_VISIBLE_DEVICES= is a choice, and no problem.
    """
    name = nvidia_smi("name")
    if not torch.cuda.is_available():
        if not name and "google.colab" in sys.modules:
            return NONE_ON_COLAB
        if not name or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            return ""
        if torch.version.cuda is None:
            return f"{name} is present, but this torch is a CPU build. Fix: {INSTALL_CUDA_TORCH}"
    card = int(os.environ.get("LOCAL_RANK", 0))  # processes launched together: each has its own
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own: the error says it
            # its cuda:0 is the fastest, not nvidia-smi's first
            name = torch.cuda.get_device_name(card)
            torch.ones(1, device=f"cuda:{card}").sum().item()
            free = torch.cuda.mem_get_info(card)[0] + torch.cuda.memory_reserved(card)
    # torch asserts that it has CUDA, and a card of this number
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


def nvidia_smi(field: str) -> str:
    """Return one field of the card that CUDA_VISIBLE_DEVICES names first, else of the first one; ""
    where there is no driver or it does not answer in ten seconds.
    """
    command = ["nvidia-smi", f"--query-gpu=index,uuid,{field}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    # A product's name may have commas, so only the first two of a line divide it. Without a card
    # the answer is a sentence, in which nothing is found.
    cards = re.findall(r"(?m)^(\d+), (\S+), (.+)$", answer.stdout)
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
    for index, uuid, value in cards:
        if wanted == index or (wanted and uuid.startswith(wanted)):  # CUDA takes shortened UUIDs
            return value
    return cards[0][-1] if cards else ""


def choose_device() -> torch.device:
    """Return the CUDA device if torch can really use it, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() and not gpu_problem() else "cpu")


THIS = "this"  # the GPU of this machine, among the names of cards


def free_bytes(device: torch.device) -> int:
    """Return how many bytes new tensors can have on a device of this machine.

    On CUDA that is what the driver has free, and what torch holds without using it.
    """
    if device.type != "cuda":
        return free_host_bytes()
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free, _ = torch.cuda.mem_get_info(device)
    return free + unused


def card(device: torch.device) -> Card:
    """Return a device of this machine as a card, with the memory that a run can have now.

    On CUDA the context counts as free: it is there already, and a run is charged for it.
    """
    free_gib = free_bytes(device) / 2**30
    if device.type != "cuda":
        return Card("cpu", free_gib, is_here=True, slowdown=cpu_slowdown)
    facts = torch.cuda.get_device_properties(device)
    gpu = Gpu(
        capability=(facts.major, facts.minor),
        n_sms=facts.multi_processor_count,
        threads_per_sm=facts.max_threads_per_multi_processor,
    )
    return Card(facts.name, free_gib + CONTEXT_GIB, gpu, is_here=True)


def card_of(device: str | torch.device | Card) -> Card:
    """Return the card that is meant: one of CARDS by name ("RTX 4090" too), "this" GPU, or "cpu".

    Raises ValueError for another name, RuntimeError for "this" without a CUDA GPU.
    """
    if isinstance(device, Card):
        return device
    if isinstance(device, torch.device):
        return card(device) if device.type == "cuda" else CPU
    if device == CPU.name:
        return CPU
    if device != THIS:
        return card_named(device)
    if not torch.cuda.is_available():
        raise RuntimeError('there is no CUDA GPU here; device="cpu" predicts this machine')
    return card(torch.device("cuda"))


def support(precision: str, device: torch.device) -> Support:
    """Return what a device of this machine makes of a precision.

    On a CPU one small product per dtype is timed, once per process: see `matmul_rate`.
    """
    return card(device).support(precision)


@lru_cache(maxsize=8)
def cpu_slowdown(dtype_name: str) -> float:
    """Return how many times as long as a float32 product one of another dtype takes here."""
    cpu = torch.device("cpu")
    # Small and few: where 16 bits are emulated, a product of 2,048 can take a minute.
    rate = matmul_rate(getattr(torch, dtype_name), cpu, 256, repeats=3)
    return matmul_rate(torch.float32, cpu, 256, repeats=10) / rate


def product_name(device: torch.device) -> str:
    """Return the processor's or the card's product name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def device_name(device: torch.device) -> str:
    """Return the product's name; of a CPU also its threads and its instruction set, as torch uses
    them.
    """
    if device.type == "cuda":
        return product_name(device)
    cap = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    capped = f", oneDNN capped to {cap}" if cap else ""
    capability = torch.backends.cpu.get_cpu_capability()  # capped by ATEN_CPU_CAPABILITY
    n = torch.get_num_threads()
    return f"{cpu_name()} ({n} thread{'s' * (n > 1)}, {capability}{capped})"


def environment(device: torch.device) -> dict[str, str]:
    """Return what a record says about the machine: device, driver and versions, all as text."""
    facts = {
        "device": device_name(device),
        "device_type": device.type,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "numpy": version("numpy"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if "LABUTILS_NOTEBOOK" in os.environ:  # set where a notebook is executed as a whole
        facts["notebook"] = os.environ["LABUTILS_NOTEBOOK"]
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["capability"] = f"{properties.major}.{properties.minor}"
        facts["gpu_memory_gib"] = f"{properties.total_memory / 2**30:.1f}"
        facts["cuda"] = torch.version.cuda or f"ROCm {torch.version.hip}"
        facts["driver"] = nvidia_smi("driver_version") or "unknown"
    else:
        facts["threads"] = str(torch.get_num_threads())
    return facts


def matmul_rate(dtype: torch.dtype, device: torch.device, n: int, repeats: int = 5) -> float:
    """Return the FLOP/s of an n×n by n×n product, 2n³ operations: the best of `repeats` after one
    warm-up.

    On CUDA ten products are timed together with events, so that launch overhead does not count. On
    a CPU one thread is timed, by its processor time, and its rate is multiplied by the number of
    torch's threads. That is an upper bound: threads that share a core or a small product reach
    less. The clock would tell what all of them reach, but while other programs compute, threads
    wait for each other, and it errs by factors of 100. The numbers are random (zeros are faster)
    and drawn apart from torch's global generator: probing changes no training.
    """
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(n, n, device=device, generator=generator).to(dtype) for _ in range(2))
    product = partial(torch.matmul, a, b)
    if device.type == "cuda":
        product()
        return 2 * n**3 / min(cuda_seconds(product) for _ in range(repeats))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # Windows counts a thread's time in steps of 16 ms.
    clock = time.perf_counter if sys.platform == "win32" else time.thread_time
    try:
        product()
        seconds = min(timeit.repeat(product, timer=clock, repeat=repeats, number=1))
    finally:
        torch.set_num_threads(threads)
    return threads * 2 * n**3 / seconds


def cuda_seconds(call: Callable[[], object], times: int = 10) -> float:
    """Return the seconds of one of so many calls that the GPU computes without a pause."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / times


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
