"""The CPU's allocator, read from torch's profiler."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from labutils.memory.device_memory import allocated_bytes
from labutils.memory.ledger import (
    ACTIVATIONS,
    CATEGORY_OF_PHASE,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARIES,
    MemoryLedger,
    downsample_timeline,
)
from labutils.memory.tensors import optimizer_tensors, tensor_bytes

PHASE = "phase: "  # begins the name of the profiler's spans that are ours
ALLOCATION = "[memory]"  # the profiler's name for allocating and freeing
AFTER = "after the step"  # not a phase of the ledger


class CpuRecorder:
    """Sums the profiler's allocation events.

    A gradient is recognised by its address, which is known only after backward.
    """

    CATEGORIES = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS, TEMPORARIES)

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.span = model, optimizer, None
        self.gradients: set[int] = set()  # addresses

    @contextmanager
    def recording(self) -> Iterator[None]:
        with allocation_profile() as self.profile:
            yield

    def begin(self, phase: str) -> None:
        if self.span:
            self.span.__exit__(None, None, None)
        self.span = torch.profiler.record_function(f"{PHASE}{phase}")
        self.span.__enter__()

    def end(self) -> None:
        """Called where the step is over, and its gradients are still there."""
        self.begin(AFTER)
        self.span.__exit__(None, None, None)
        for p in self.model.parameters():
            if p.grad is not None:
                self.gradients.add(p.grad.untyped_storage().data_ptr())

    def report(self) -> MemoryLedger:
        segments = self._segments()
        phases: dict[str, dict[str, int]] = {}
        for phase, _, by_category in segments:
            peak = by_category[by_category.sum(axis=1).argmax()]
            if peak.sum() > sum(phases.get(phase, {}).values()):
                phases[phase] = dict(zip(self.CATEGORIES, peak.tolist(), strict=True))
        method = "CPU allocator events (torch.profiler)"
        return MemoryLedger(phases=phases, method=method, timeline=downsample_timeline(segments))

    def _segments(self) -> list[tuple[str, np.ndarray, np.ndarray]]:
        """Return (phase, positions, bytes by category after each event) of each phase."""
        events = _trace_events(self.profile)
        gradient_births = self._gradient_births(events)
        now = self._bytes_before()
        category_at: dict[int, int] = {}  # by address, of what lives there
        rows: list[tuple[str, list[int], list[np.ndarray]]] = []
        n_seen = 0
        phase = ""
        for event in events:
            if event["name"].startswith(PHASE):
                phase = event["name"].removeprefix(PHASE)
                rows.append((phase, [], []))
            else:
                address, n_bytes = event["args"]["Addr"], event["args"]["Bytes"]
                if n_bytes > 0:
                    category = CATEGORY_OF_PHASE.get(phase, TEMPORARIES)
                    if n_seen in gradient_births:
                        category = GRADIENTS
                    category_at[address] = self.CATEGORIES.index(category)
                if address in category_at:  # else it was there before, and is in no category
                    now[category_at[address]] += n_bytes
                n_seen += 1
            if rows:
                rows[-1][1].append(n_seen)
                rows[-1][2].append(now.copy())
        segments = []
        for phase, at, alive in rows:
            if phase != AFTER:
                segments.append((phase, np.array(at), np.array(alive)))
        return segments

    def _gradient_births(self, events: list[dict]) -> set[int]:
        """Return the numbers of the allocations that made what are gradients at the end."""
        last_born: dict[int, int] = {}  # by address
        n_seen = 0
        for event in events:
            if event["name"].startswith(PHASE):
                continue
            if event["args"]["Bytes"] > 0:
                last_born[event["args"]["Addr"]] = n_seen
            n_seen += 1
        return {last_born[address] for address in self.gradients if address in last_born}

    def _bytes_before(self) -> np.ndarray:
        weights = [*self.model.parameters(), *self.model.buffers()]
        found = np.zeros(len(self.CATEGORIES), dtype=np.int64)
        found[self.CATEGORIES.index(PARAMETERS)] = tensor_bytes(weights)
        found[self.CATEGORIES.index(OPTIMIZER)] = tensor_bytes(optimizer_tensors(self.optimizer))
        return found


@contextmanager
def allocation_profile() -> Iterator[torch.profiler.profile]:
    """Record the CPU allocator's events inside; read them when it has ended."""
    with warnings.catch_warnings():
        # torch 2.11 says that events of several cycles need acc_events=True. Here is one cycle.
        warnings.filterwarnings("ignore", message=r"(?s).*acc_events")
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            yield profile


@dataclass
class Peak:
    """Filled when the block of `peak_allocated` has ended."""

    n_bytes: int = 0


@contextmanager
def peak_allocated(device: torch.device) -> Iterator[Peak]:
    """Measure the largest number of bytes allocated at once inside.

    Tensors that are there before count. On a CPU these are the floating-point tensors alive at the
    start, to which the highest rise of the allocator's events is added; what runs inside is slowed
    down. On CUDA the peak statistics are reset.
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
    found.n_bytes = before + peak_above_start(profile)


def peak_above_start(profile: torch.profiler.profile) -> int:
    """Return how far the bytes in CPU tensors rose above those at the start of a profile.

    The profile needs `profile_memory=True`.
    """
    now = highest = 0
    for event in _trace_events(profile):
        if event["name"] == ALLOCATION:
            now += event["args"]["Bytes"]
            highest = max(highest, now)
    return highest


def _trace_events(profile: torch.profiler.profile) -> list[dict]:
    """Return the CPU's allocations, and where our phases begin, in order."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    found = []
    for event in events:
        name = str(event.get("name", ""))
        on_cpu = name == ALLOCATION and event["args"]["Device Type"] == 0
        if on_cpu or name.startswith(PHASE):
            found.append(event)
    return sorted(found, key=lambda event: event["ts"])
