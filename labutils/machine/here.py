"""What a device is called, what it has free, and how fast a product is on it."""

from __future__ import annotations

import os
import platform
import sys
import time
from importlib.metadata import version

import torch

from labutils.machine.gpu import nvidia_smi
from labutils.machine.host import cpu_capability, cpu_name, free_host_bytes
from labutils.memory.device_memory import MALLOC


def free_bytes(device: torch.device) -> int:
    """Return how many bytes new tensors can have:

    On CUDA what the card has free and what torch holds unused.
    """
    if device.type != "cuda":
        return free_host_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def device_name(device: torch.device) -> str:
    """Return the processor's or the card's product name, with the CPU's instruction set as torch
    uses it.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()} ({torch.get_num_threads()} threads, {cpu_capability()})"


def environment(device: torch.device) -> dict[str, str]:
    """Return what a record says about the machine:

    Device, driver and library versions, all as text.
    """
    facts = {
        "device": device_name(device),
        "device_type": device.type,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "numpy": version("numpy"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if threshold := os.environ.get(MALLOC):  # steps are slower: see `memory.return_freed_blocks`
        facts["malloc"] = f"returns freed blocks of {threshold} bytes"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["capability"] = f"{properties.major}.{properties.minor}"
        facts["gpu_memory_gib"] = f"{properties.total_memory / 2**30:.1f}"
        facts["cuda"] = torch.version.cuda or f"ROCm {torch.version.hip}"
        facts["driver"] = (*nvidia_smi("driver_version"), "unknown")[0]
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
        return 2 * n**3 / min(_cuda_seconds(a, b) for _ in range(repeats))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a @ b
        seconds = min(_one_threads_seconds(a, b) for _ in range(repeats))
    finally:
        torch.set_num_threads(threads)
    return threads * 2 * n**3 / seconds


def _one_threads_seconds(a: torch.Tensor, b: torch.Tensor) -> float:
    start = _processor_seconds()
    a @ b
    return _processor_seconds() - start


def _processor_seconds() -> float:
    """Return this thread's processor time.

    Windows counts it in steps of 16 ms, so there it is the clock's time.
    """
    return time.perf_counter() if sys.platform == "win32" else time.thread_time()


def _cuda_seconds(a: torch.Tensor, b: torch.Tensor, products: int = 10) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(products):
        a @ b
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / products
