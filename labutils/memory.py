"""Measure the memory of one training step, by category and phase, and give memory back.

On CUDA: the allocator's own statistics, phase by phase. On a CPU, which has no such statistics: the allocator events
that `torch.profiler` records, summed. Both count bytes that tensors occupy; neither counts the allocator's cache, the
CUDA context or the Python process, so `nvidia-smi` and the task manager show more.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from labutils import models
from labutils.records import MemoryLedger

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's start and stop messages are not for students
PARAMETERS, GRADIENTS, OPTIMIZER, REST = "parameters", "gradients", "optimizer state", "activations and temporaries"
CATEGORIES = (PARAMETERS, GRADIENTS, OPTIMIZER, REST)


def free_memory() -> None:
    """Collect garbage, return cached blocks to the driver, reset peak statistics: in this order.

    The other way round the new peak starts with the garbage in it. On a CPU only the first step does anything.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


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

    Phases: forward (with the loss), backward, optimizer (with unscaling and clipping). The step really updates the
    model; never time it: instrumented steps are slow. `loss_fn` returns a sum over `count_targets(micro_batch)`;
    `micro_batches` are already on the model's device. Raises ValueError if the optimizer makes its state in this very
    step: the first step has another peak than all others.
    """
    device = next(model.parameters()).device
    scaler = scaler or torch.amp.GradScaler(device.type, enabled=False)
    optimizer.zero_grad(set_to_none=True)
    parameters = list(model.parameters())
    n_targets, n_states = sum(map(count_targets, micro_batches)), len(optimizer.state)
    recorder = (_CudaPhases if device.type == "cuda" else _CpuPhases)(model, optimizer)
    with recorder.recording():
        for micro_batch in micro_batches:
            with recorder.phase("forward"), autocast():
                loss = loss_fn(model, micro_batch) / n_targets
            with recorder.phase("backward"):
                scaler.scale(loss).backward()
            del loss
        with recorder.phase("optimizer"):
            scaler.unscale_(optimizer)
            if max_grad_norm:
                nn.utils.clip_grad_norm_(parameters, max_grad_norm)
            scaler.step(optimizer)
            scaler.update()
    report = recorder.report()
    optimizer.zero_grad(set_to_none=True)
    if len(optimizer.state) != n_states:
        raise ValueError("the optimizer had no state yet: run an ordinary step first")
    return report


class _CpuPhases:
    """Sums the profiler's allocation events; a gradient is recognised by the address it ended up at."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    @contextmanager
    def recording(self) -> Iterator[None]:
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as self.profile:
            yield

    def phase(self, name: str) -> AbstractContextManager:
        return torch.profiler.record_function(f"phase: {name}")

    def report(self) -> MemoryLedger:
        gradients = {p.grad.untyped_storage().data_ptr() for p in self.model.parameters() if p.grad is not None}
        standing = {
            PARAMETERS: tensor_bytes([*self.model.parameters(), *self.model.buffers()]),
            OPTIMIZER: tensor_bytes(optimizer_tensors(self.optimizer)),
        }
        events = sorted(_trace_events(self.profile), key=lambda event: event["ts"])
        spans = [(e["ts"], e["ts"] + e["dur"], e["name"][7:]) for e in events if e["name"].startswith("phase: ")]
        allocations = [e for e in events if e["name"] == "[memory]" and e["args"]["Device Type"] == 0]
        born = {e["args"]["Addr"]: i for i, e in enumerate(allocations) if e["args"]["Bytes"] > 0}
        gradient_births = {born[address] for address in gradients if address in born}
        phases = {name: {**standing, GRADIENTS: 0, REST: 0} for _, _, name in spans}
        rest = in_gradients = 0
        for i, event in enumerate(allocations):
            if i in gradient_births:
                in_gradients += event["args"]["Bytes"]
            else:
                rest += event["args"]["Bytes"]
            name = next((n for start, end, n in spans if start <= event["ts"] <= end), None)
            if name and rest + in_gradients > phases[name][REST] + phases[name][GRADIENTS]:
                phases[name] = {**standing, GRADIENTS: in_gradients, REST: rest}
        ordered = {phase: {c: found[c] for c in CATEGORIES} for phase, found in phases.items()}
        return MemoryLedger(phases=ordered, method="CPU allocator events (torch.profiler)")


def _trace_events(profile: torch.profiler.profile) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [e for e in events if e.get("name") == "[memory]" or str(e.get("name", "")).startswith("phase: ")]


class _CudaPhases:
    """Reads the allocator's peak after each phase; in backward also whenever a gradient is finished."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.phases: dict[str, dict[str, int]] = {}
        self.current = ""
        self.others = torch.cuda.memory_allocated() - sum(self._known().values())  # of other code in this process

    @contextmanager
    def recording(self) -> Iterator[None]:
        hooks = [p.register_post_accumulate_grad_hook(self._note) for p in self.model.parameters()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.current = name
        yield
        torch.cuda.synchronize()
        self._note()

    def _note(self, _: torch.Tensor | None = None) -> None:
        """Keep the categories if the allocator's peak has grown since the last look."""
        peak = torch.cuda.max_memory_allocated() - self.others
        if peak <= sum(self.phases.get(self.current, {}).values()):
            return
        found = self._known()
        self.phases[self.current] = {**found, REST: peak - sum(found.values())}

    def _known(self) -> dict[str, int]:
        return {
            PARAMETERS: tensor_bytes([*self.model.parameters(), *self.model.buffers()]),
            GRADIENTS: tensor_bytes([p.grad for p in self.model.parameters() if p.grad is not None]),
            OPTIMIZER: tensor_bytes([t for t in optimizer_tensors(self.optimizer) if t.is_cuda]),
        }

    def report(self) -> MemoryLedger:
        return MemoryLedger(
            phases=self.phases,
            method="CUDA allocator statistics (max_memory_allocated)",
            reserved_bytes=torch.cuda.max_memory_reserved(),
        )
