"""Measure the memory of one training step, by category and phase, and give memory back.

On CUDA: the allocator's own statistics, phase by phase. On a CPU, which has no such statistics: the allocator events
that `torch.profiler` records, summed. Both count bytes that tensors occupy; neither counts the allocator's cache, the
CUDA context or the Python process, so `nvidia-smi` and the task manager show more.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import platform
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from labutils import models
from labutils.optimizers import StepInBackward
from labutils.records import MemoryLedger

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's start and stop messages are not for students
PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer state"
# The other categories say when a tensor was made: in the forward pass, in the loss, after it (or all three).
ACTIVATIONS, CAST_WEIGHTS, LOGITS, TEMPORARIES = "activations", "cast weights", "logits and loss", "temporaries"
REST = "activations and temporaries"
WORKSPACES, ROUNDING = "library workspaces", "rounding up"  # on CUDA: what cuBLAS keeps; what blocks are too large
BORN_IN = {"forward": ACTIVATIONS, "loss": LOGITS}
TIMELINE_POINTS = 400
MALLOC, MMAP_THRESHOLD = "MALLOC_MMAP_THRESHOLD_", 2**18  # bytes; see `return_freed_blocks`


def _libc() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libc.so.6")  # glibc
    except OSError:
        return None


def return_freed_blocks(on: bool = True) -> bool:
    """Let this process, and those it starts, give freed blocks of at least MMAP_THRESHOLD bytes back at once, or not.

    Return whether that was done: only glibc can. Left alone it keeps many for later: a GPT-2 step whose tensors
    take 2.14 GiB made its process grow by 3.26 GiB, so by 2.24; its time grew by a third (on two AVX-512 cores; small
    GPT-2's doubled). MALLOC is glibc's own name for this in the environment.
    """
    m_mmap_threshold, threshold = -3, MMAP_THRESHOLD if on else 2**25  # of malloc.h; what glibc comes to by itself
    done = (libc := _libc()) is not None and libc.mallopt(m_mmap_threshold, threshold) == 1
    if done:
        os.environ.pop(MALLOC, None)
    if done and on:
        os.environ[MALLOC] = str(threshold)
    return done


def free_memory() -> None:
    """Let go of the last error's frames, collect garbage, return cached blocks, reset peak statistics: in this order.

    The traceback of an error keeps the local variables of every function it has passed, tensors among them; IPython
    keeps the traceback until the next error. (So `%debug` finds no variables after this.) Were peak statistics reset
    before the garbage is collected, the new peak would start with it. On a CPU glibc gives back what it can.
    """
    errors, seen = [getattr(sys, "last_value", None)], set()
    while errors:
        error = errors.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        errors += [error.__cause__, error.__context__]
        traceback.clear_frames(error.__traceback__)
        for frame, _ in traceback.walk_tb(error.__traceback__):
            frame.f_locals  # noqa: B018 (before Python 3.13 a debugger's copy of the variables; reading it renews it)
    gc.collect()
    if libc := _libc():
        libc.malloc_trim(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@contextmanager
def memory_limit(gib: float, device: torch.device) -> Iterator[None]:
    """Inside, CUDA's caching allocator hands out at most `gib` GiB, so that a large card behaves like a small one.

    The CUDA context and other processes are not limited. 0 is no limit; on a CPU nothing is limited. On Windows see
    `cap_to_free`.
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
    """Let CUDA's allocator have at most `gib`, and on Windows (and Linux inside it) no more than the card has free.

    There the driver does not refuse what is too much: it moves memory to the host, and all becomes many times slower.
    With the cap, too much is an error as elsewhere.
    """
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    spills = sys.platform == "win32" or "microsoft" in platform.release().lower()
    most = free + torch.cuda.memory_reserved(device) if spills else total
    index = torch.cuda.current_device() if device.index is None else device.index  # the function takes no bare "cuda"
    torch.cuda.set_per_process_memory_fraction(min(1.0, most / total, gib * 2**30 / total), index)


def without_expandable_segments() -> str:
    """Return why CUDA's allocator has no expandable segments here; "" if it has. They need Linux's way to map memory.

    Windows: from torch 2.14 on (pull request 189163). Under WSL some drivers refuse them (issue 192330). On Jetson
    boards they fail.
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
    """Inside, CUDA's allocator maps memory piece by piece into segments that grow, where that exists: fewer holes.

    What PYTORCH_ALLOC_CONF says otherwise stays. Nothing happens on a CPU or if not `on`.
    """
    if not on or device.type != "cuda" or without_expandable_segments():
        yield
        return
    free_memory()  # what is cached is in segments of the other kind
    others = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    kept = [part for part in others.split(",") if part and not part.startswith("expandable_segments")]
    before = "True" if "expandable_segments:True" in others else "False"
    torch._C._accelerator_setAllocatorSettings(",".join([*kept, "expandable_segments:True"]))
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(",".join([*kept, f"expandable_segments:{before}"]))


def cublas_bytes() -> int:
    """Return what cuBLAS's workspaces hold on this GPU: they are let go, and made again by a product in each thread."""
    torch._C._cuda_clearCublasWorkspaces()
    one = torch.ones(1, 1, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    product = one @ one
    torch.autograd.grad(product, one)
    del product
    return torch.cuda.memory_allocated() - before


def cuda_memory(device: torch.device) -> dict[str, int]:
    """Return `allocated`, `reserved` and `peak` (allocated) bytes of a CUDA device. Raises ValueError for another."""
    if device.type != "cuda":
        raise ValueError(f"{device} has no CUDA memory; measure_step measures a step on any device")
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "peak": torch.cuda.max_memory_allocated(device),
    }


def tensor_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes of the storages behind some tensors, each storage once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors an optimizer keeps from step to step: for Adam, two moments per parameter."""
    return [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]


def when_loss_begins(model: nn.Module, call: Callable[[], None]) -> RemovableHandle:
    """Call back where the forward phase ends: behind the last block of a Hugging Face model (its head makes logits),
    behind a whole module that has no `base_model`."""
    return getattr(model, "base_model", model).register_forward_hook(lambda *_: call())


def thinned(segments: Sequence[tuple[str, np.ndarray, np.ndarray]]) -> list[tuple[str, list[list[int]]]]:
    """Return a ledger's timeline from (phase, positions (n,), bytes by category (n, categories)) of each phase.

    Of long phases a few hundred points stay, the peak among them.
    """
    timeline = []
    for phase, at, alive in segments:
        n = min(len(at), max(4, TIMELINE_POINTS // len(segments)))
        rows = {*np.linspace(0, len(at) - 1, n).round().astype(int).tolist(), int(alive.sum(axis=1).argmax())}
        timeline.append((phase, [[round(at[i]), *alive[i].round().astype(int).tolist()] for i in sorted(rows)]))
    return timeline


def measure_step(
    model: nn.Module,
    micro_batches: Sequence[Any],
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    count_targets: Callable[[Any], int] = models.count_targets,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    scaler: torch.amp.GradScaler | None = None,
    max_grad_norm: float = 0.0,
) -> MemoryLedger:
    """Run one optimizer step over `micro_batches` as `train` does, and return its peak bytes by phase and category.

    Phases: forward, loss, backward, optimizer (with unscaling and clipping). The step really updates the model; never
    time it: instrumented steps are slow. `loss_fn` returns a sum over `count_targets(micro_batch)`; `micro_batches` are
    already on the model's device. On a CPU every byte has a category, and the ledger a timeline. On CUDA the allocator
    tells totals: at the peak of backward, what autograd keeps and what is temporary are one category. Of an
    `optimizers.StepInBackward` the gradients, which do not outlive backward, are temporaries on a CPU.
    Raises ValueError if the optimizer makes its state in this very step: the first step has another peak than others.
    """
    device = next(model.parameters()).device
    scaler = scaler or torch.amp.GradScaler(device.type, enabled=False)
    optimizer.zero_grad(set_to_none=True)
    parameters = list(model.parameters())
    n_targets, n_states = sum(map(count_targets, micro_batches)), len(optimizer.state)
    recorder = (_CudaPhases if device.type == "cuda" else _CpuPhases)(model, optimizer)
    handle = when_loss_begins(model, lambda: recorder.begin("loss"))
    try:
        with recorder.recording():
            if isinstance(optimizer, StepInBackward):
                optimizer.attach()  # after the recorder's hooks, which read gradients
            for micro_batch in micro_batches:
                recorder.begin("forward")
                with autocast():
                    loss = loss_fn(model, micro_batch) / n_targets
                recorder.begin("backward")
                scaler.scale(loss).backward()
                del loss
            recorder.begin("optimizer")
            scaler.unscale_(optimizer)
            if max_grad_norm:
                nn.utils.clip_grad_norm_(parameters, max_grad_norm)
            scaler.step(optimizer)
            scaler.update()
            recorder.end()
    finally:
        handle.remove()
    report = recorder.report()
    optimizer.zero_grad(set_to_none=True)
    if len(optimizer.state) != n_states:
        raise ValueError("the optimizer had no state yet: run an ordinary step first")
    return report


class _CpuPhases:
    """Sums the profiler's allocation events; a gradient is recognised by the address it ended up at."""

    CATEGORIES = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS, TEMPORARIES)

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.span = model, optimizer, None

    @contextmanager
    def recording(self) -> Iterator[None]:
        with allocation_profile() as self.profile:
            yield

    def begin(self, phase: str) -> None:
        self.end()
        self.span = torch.profiler.record_function(f"phase: {phase}")
        self.span.__enter__()

    def end(self) -> None:
        if self.span:
            self.span.__exit__(None, None, None)

    def report(self) -> MemoryLedger:
        gradients = {p.grad.untyped_storage().data_ptr() for p in self.model.parameters() if p.grad is not None}
        now = np.zeros(len(self.CATEGORIES), dtype=np.int64)
        now[self.CATEGORIES.index(PARAMETERS)] = tensor_bytes([*self.model.parameters(), *self.model.buffers()])
        now[self.CATEGORIES.index(OPTIMIZER)] = tensor_bytes(optimizer_tensors(self.optimizer))
        events = sorted(_trace_events(self.profile), key=lambda event: event["ts"])
        allocations = [e for e in events if e["name"] == "[memory]" and e["args"]["Device Type"] == 0]
        last_born = {e["args"]["Addr"]: i for i, e in enumerate(allocations) if e["args"]["Bytes"] > 0}
        gradient_births = {last_born[address] for address in gradients if address in last_born}
        at_address: dict[int, int] = {}  # the category of what lives there
        rows: list[tuple[str, list[int], list[np.ndarray]]] = []
        i = 0  # allocations seen
        for event in events:
            if event["name"].startswith("phase: "):
                rows.append((event["name"].removeprefix("phase: "), [], []))
            elif event["args"]["Device Type"] == 0:
                address, n_bytes = event["args"]["Addr"], event["args"]["Bytes"]
                if n_bytes > 0:
                    born_in = BORN_IN.get(rows[-1][0], TEMPORARIES) if rows else TEMPORARIES
                    at_address[address] = self.CATEGORIES.index(GRADIENTS if i in gradient_births else born_in)
                if address in at_address:  # else it was there before, and is in no category
                    now[at_address[address]] += n_bytes
                i += 1
            if rows:
                rows[-1][1].append(i)
                rows[-1][2].append(now.copy())
        segments = [(phase, np.array(at), np.array(alive)) for phase, at, alive in rows]
        phases: dict[str, dict[str, int]] = {}
        for phase, _, by_category in segments:
            peak = by_category[by_category.sum(axis=1).argmax()]
            if peak.sum() > sum(phases.get(phase, {}).values()):
                phases[phase] = dict(zip(self.CATEGORIES, peak.tolist(), strict=True))
        method = "CPU allocator events (torch.profiler)"
        return MemoryLedger(phases=phases, method=method, timeline=thinned(segments))


@contextmanager
def allocation_profile() -> Iterator[torch.profiler.profile]:
    """Record the CPU allocator's events inside; read them when it has ended."""
    with warnings.catch_warnings():
        # torch 2.11 says that events of several cycles need acc_events=True; here is one, and parsing them takes longer
        warnings.filterwarnings("ignore", message=r"(?s).*acc_events")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            yield profile


@dataclass
class Peak:
    """Filled when the block of `peak_allocated` has ended."""

    n_bytes: int = 0


@contextmanager
def peak_allocated(device: torch.device) -> Iterator[Peak]:
    """Measure the largest number of bytes allocated at once inside, in tensors that are there before included.

    On a CPU these are the floating-point tensors alive at the start plus the highest rise of the allocator's events,
    and what runs inside is slowed down; on CUDA the peak statistics are reset.
    """
    found = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield found
        torch.cuda.synchronize(device)
        found.n_bytes = torch.cuda.max_memory_allocated(device)
        return
    before = allocated_bytes(device)
    with allocation_profile() as profile:
        yield found
    found.n_bytes = before + highest_rise(profile)


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes of all tensors alive on a device: CUDA's statistics, or on a CPU its floating-point tensors.

    On a CPU those that only autograd holds are not found.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    gc.collect()
    plain = (o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter))  # no compiler's fakes
    return tensor_bytes([tensor for tensor in plain if tensor.is_floating_point() and tensor.device.type == "cpu"])


def highest_rise(profile: torch.profiler.profile) -> int:
    """Return how far the bytes in CPU tensors rose above those at the start of a profile with `profile_memory=True`."""
    events = sorted(_trace_events(profile), key=lambda event: event["ts"])
    changes = [e["args"]["Bytes"] for e in events if e["name"] == "[memory]" and e["args"]["Device Type"] == 0]
    return int(np.cumsum([0, *changes]).max())


def _trace_events(profile: torch.profiler.profile) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [e for e in events if e.get("name") == "[memory]" or str(e.get("name", "")).startswith("phase: ")]


class _CudaPhases:
    """Reads the allocator's peak after each phase; in backward also whenever a gradient is finished."""

    CATEGORIES = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS, TEMPORARIES, REST, WORKSPACES)

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.workspaces = model, optimizer, cublas_bytes()
        self.phases: dict[str, dict[str, int]] = {}
        self.segments: list[tuple[str, list, list]] = []
        self.n_looks = self.activations = 0
        self.others = torch.cuda.memory_allocated() - sum(self._known().values())  # of other code in this process

    @contextmanager
    def recording(self) -> Iterator[None]:
        hooks = [p.register_post_accumulate_grad_hook(self._look) for p in self.model.parameters()]
        hooks += [module.register_forward_hook(self._look) for module in self.model.modules()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def begin(self, phase: str) -> None:
        self.end()
        if phase == "forward":
            self.activations = 0
        if phase == "loss":
            self.activations = torch.cuda.memory_allocated() - self.others - sum(self._known().values())
        torch.cuda.reset_peak_memory_stats()
        self.segments.append((phase, [], []))
        self._look()

    def end(self) -> None:
        torch.cuda.synchronize()
        if self.segments:
            self._look()

    def _look(self, *_: Any) -> None:
        """Note what is allocated, and keep the categories if the allocator's peak has grown since the last look."""
        phase, at, alive = self.segments[-1]
        at.append(self.n_looks)
        alive.append(list(self._categories(phase, torch.cuda.memory_allocated()).values()))
        self.n_looks += 1
        found = self._categories(phase, torch.cuda.max_memory_allocated())
        if sum(found.values()) > sum(self.phases.get(phase, {}).values()):
            self.phases[phase] = found

    def _categories(self, phase: str, allocated: int) -> dict[str, int]:
        found = dict.fromkeys(self.CATEGORIES, 0) | self._known()
        rest = allocated - self.others - sum(found.values())
        if phase == "loss":
            found[ACTIVATIONS] = self.activations
            rest -= self.activations
        found[{"forward": ACTIVATIONS, "loss": LOGITS, "backward": REST}.get(phase, TEMPORARIES)] = rest
        return found

    def _known(self) -> dict[str, int]:
        return {
            PARAMETERS: tensor_bytes([*self.model.parameters(), *self.model.buffers()]),
            GRADIENTS: tensor_bytes([p.grad for p in self.model.parameters() if p.grad is not None]),
            OPTIMIZER: tensor_bytes([t for t in optimizer_tensors(self.optimizer) if t.is_cuda]),
            WORKSPACES: self.workspaces,
        }

    def report(self) -> MemoryLedger:
        return MemoryLedger(
            phases=self.phases,
            method="CUDA allocator statistics (max_memory_allocated)",
            reserved_bytes=torch.cuda.max_memory_reserved(),
            timeline=thinned([(phase, np.array(at), np.array(alive)) for phase, at, alive in self.segments]),
        )
