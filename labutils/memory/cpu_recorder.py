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
    BORN_IN,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARIES,
    MemoryLedger,
    thinned,
)
from labutils.memory.tensors import optimizer_tensors, tensor_bytes


class CpuRecorder:
    """Sums the profiler's allocation events; a gradient is recognised by the address it ended up
    at.
    """

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
        gradients = {
            p.grad.untyped_storage().data_ptr()
            for p in self.model.parameters()
            if p.grad is not None
        }
        now = np.zeros(len(self.CATEGORIES), dtype=np.int64)
        now[self.CATEGORIES.index(PARAMETERS)] = tensor_bytes(
            [*self.model.parameters(), *self.model.buffers()]
        )
        now[self.CATEGORIES.index(OPTIMIZER)] = tensor_bytes(optimizer_tensors(self.optimizer))
        events = sorted(_trace_events(self.profile), key=lambda event: event["ts"])
        allocations = [
            e for e in events if e["name"] == "[memory]" and e["args"]["Device Type"] == 0
        ]
        last_born = {
            e["args"]["Addr"]: i for i, e in enumerate(allocations) if e["args"]["Bytes"] > 0
        }
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
                    at_address[address] = self.CATEGORIES.index(
                        GRADIENTS if i in gradient_births else born_in
                    )
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
        # torch 2.11 says that events of several cycles need acc_events=True; here is one, and
        # parsing them takes longer
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
    """Measure the largest number of bytes allocated at once inside, in tensors that are there
    before included.

    On a CPU these are the floating-point tensors alive at the start plus the highest rise of the
    allocator's events, and what runs inside is slowed down; on CUDA the peak statistics are reset.
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


def highest_rise(profile: torch.profiler.profile) -> int:
    """Return how far the bytes in CPU tensors rose above those at the start of a profile with
    `profile_memory=True`.
    """
    events = sorted(_trace_events(profile), key=lambda event: event["ts"])
    changes = [
        e["args"]["Bytes"]
        for e in events
        if e["name"] == "[memory]" and e["args"]["Device Type"] == 0
    ]
    return int(np.cumsum([0, *changes]).max())


def _trace_events(profile: torch.profiler.profile) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [
        e
        for e in events
        if e.get("name") == "[memory]" or str(e.get("name", "")).startswith("phase: ")
    ]
