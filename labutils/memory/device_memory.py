"""Every call of a device's allocator: what is allocated, a limit, giving memory back.

Taught in 04, section 2.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import platform
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import nn

from labutils.memory.tensors import tensor_bytes

# the profiler's start and stop messages are not for students
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def free_memory() -> None:
    """Give back what nothing needs any more, and reset peak statistics.

    The last error's frames are cleared, garbage is collected, cached blocks are returned. (So
    `%debug` finds no variables after this.) On a CPU glibc gives back what it can.
    """
    # An error's traceback keeps the variables of every function it has passed, tensors among them;
    # IPython keeps the traceback until the next error.
    error = getattr(sys, "last_value", None)
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        for frame, _ in traceback.walk_tb(error.__traceback__):
            # before Python 3.13 a debugger's copy of the variables; reading it renews it
            frame.f_locals  # noqa: B018
        error = error.__context__
    gc.collect()
    with suppress(OSError):  # not Linux, or not glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        # last: before the garbage is collected the new peak would start with it
        torch.cuda.reset_peak_memory_stats()


@contextmanager
def memory_limit(gib: float, device: torch.device) -> Iterator[None]:
    """Inside, CUDA's caching allocator hands out at most `gib` GiB: a small card on a large one.

    The CUDA context and other processes are not limited. 0 is no limit; on a CPU nothing is
    limited. On Windows see `cap_to_free`.
    """
    if not gib or device.type != "cuda":
        yield
        return
    free_memory()
    cap_to_free(device, gib)
    try:
        yield
    finally:
        cap_to_free(device)


def cap_to_free(device: torch.device, gib: float = math.inf) -> None:
    """Let CUDA's allocator have at most `gib` GiB, and on Windows no more than the card has free.

    There, and on Linux inside it, the driver does not refuse what is too much. It moves memory to
    the host, and all becomes many times slower. With the cap, too much is an error as elsewhere.
    """
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    spills = sys.platform == "win32" or "microsoft" in platform.release().lower()
    most = free + torch.cuda.memory_reserved(device) if spills else total
    # the function takes no bare "cuda"
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_per_process_memory_fraction(min(1.0, most / total, gib * 2**30 / total), index)


def without_expandable_segments() -> str:
    """Return why CUDA's allocator has no expandable segments here; "" if it has. They need Linux's
    way to map memory.

    Windows: from torch 2.14 on (pull request 189163). Under WSL some drivers refuse them (issue
    192330). On Jetson boards they fail.
    """
    if sys.platform != "linux":
        return f"not on {platform.system()} with torch {torch.__version__}"
    if "microsoft" in platform.release().lower():
        return "not under WSL"
    if torch.version.hip:
        return "not under ROCm"
    return "not on a Jetson board" if Path("/etc/nv_tegra_release").exists() else ""


@contextmanager
def expandable_segments(on: bool, device: torch.device) -> Iterator[None]:
    """Inside, CUDA's allocator maps memory piece by piece into segments that grow, where that
    exists: fewer holes.

    What PYTORCH_ALLOC_CONF says otherwise stays. Nothing happens on a CPU or if not `on`.
    """
    if not on or device.type != "cuda" or without_expandable_segments():
        yield
        return
    free_memory()  # what is cached is in segments of the other kind
    conf = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    others = [part for part in conf.split(",") if part and "expandable_segments" not in part]

    def switch(to: bool) -> None:
        # private: there is no public way to change the settings of an allocator that is at work
        settings = ",".join([*others, f"expandable_segments:{to}"])
        torch._C._accelerator_setAllocatorSettings(settings)

    switch(True)
    try:
        yield
    finally:
        switch("expandable_segments:True" in conf)


def cublas_bytes() -> int:
    """Return the bytes of cuBLAS's workspaces on this GPU, which are made anew to be counted."""
    torch._C._cuda_clearCublasWorkspaces()  # private: torch tells their size nowhere
    x = torch.ones(1, 1, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    # not `autograd.grad`: backward's own thread may hold what that returns a little longer
    (x @ x).square().backward()  # a kernel first: without one, cuBLAS may warn of no CUDA context
    x.grad = None
    return torch.cuda.memory_allocated() - before


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes of all tensors alive on a device: CUDA's statistics, or on a CPU its
    floating-point tensors, the `.grad` of each among them.

    On a CPU those that only autograd holds are not found.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    gc.collect()
    # no compiler's fakes
    plain = [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter)]
    # Python may never have looked at a gradient: then the collector does not know it
    plain += [leaf.grad for leaf in plain if leaf.is_leaf and leaf.grad is not None]
    return tensor_bytes(
        [tensor for tensor in plain if tensor.is_floating_point() and tensor.device.type == "cpu"]
    )
