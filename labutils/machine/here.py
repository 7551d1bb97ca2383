"""What a device is called, what it has free, and how fast a product is on it."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from functools import lru_cache, partial
from importlib.metadata import version

import torch

from labutils.config.card import CONTEXT_GIB, CPU, Card, Gpu, Support
from labutils.config.cards import CARDS
from labutils.machine.gpu import driver_memory, nvidia_smi
from labutils.machine.host import cpu_name, free_host_bytes

THIS = "this"  # the GPU of this machine, among the names of cards


def free_bytes(device: torch.device) -> int:
    """Return how many bytes new tensors can have on a device of this machine.

    On CUDA that is what the driver has free, and what torch holds without using it.
    """
    if device.type != "cuda":
        return free_host_bytes()
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free, _ = driver_memory(device)
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
        # without emulation: with it the answer is True on a T4, which has no such hardware
        bf16=torch.cuda.is_bf16_supported(including_emulation=False),
    )
    return Card(THIS, free_gib + CONTEXT_GIB, gpu, is_here=True)


def card_of(device: str | torch.device | Card) -> Card:
    """Return the card that is meant: one of CARDS by name, "this" GPU, or "cpu".

    Raises ValueError for another name, RuntimeError for "this" without a CUDA GPU.
    """
    if isinstance(device, Card):
        return device
    if isinstance(device, torch.device):
        return card(device) if device.type == "cuda" else CPU
    if device == CPU.name:
        return CPU
    if device != THIS:
        return CARDS[device]
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
    return f"{cpu_name()} ({torch.get_num_threads()} threads, {capability}{capped})"


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
        facts["driver"] = (*nvidia_smi("driver_version"), "unknown")[0]
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
    if device.type == "cuda":
        a @ b
        return 2 * n**3 / min(cuda_seconds(partial(torch.matmul, a, b)) for _ in range(repeats))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # Windows counts a thread's time in steps of 16 ms.
    clock = time.perf_counter if sys.platform == "win32" else time.thread_time
    seconds = []
    try:
        a @ b
        for _ in range(repeats):
            start = clock()
            a @ b
            seconds.append(clock() - start)
    finally:
        torch.set_num_threads(threads)
    return threads * 2 * n**3 / min(seconds)


def cuda_seconds(call: Callable[[], object], times: int = 10) -> float:
    """Return the seconds of one of so many calls that the GPU computes without a pause."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / times
