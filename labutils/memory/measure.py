"""Measure what one training step takes: its peak by phase and category.

On a CPU torch's profiler tells of each allocation. CUDA's caching allocator is asked for its peak
after each phase. Neither knows anything of a prediction.

Taught in 04, section 1.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn

from labutils.config.choices import PRECISIONS
from labutils.machine import late_bar
from labutils.memory.device_memory import allocated_bytes, cublas_bytes
from labutils.memory.ledger import (
    ACTIVATIONS,
    CATEGORY_OF_PHASE,
    GRADIENTS,
    KEPT_AND_TEMPORARY,
    LOGITS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARIES,
    WORKSPACES,
    MemoryLedger,
)
from labutils.memory.tensors import on_loss_begin, optimizer_tensors, tensor_bytes
from labutils.techniques.loss import count_targets
from labutils.techniques.optimizer_in_backward import OptimizerInBackward
from labutils.techniques.precision import autocast, grad_scaler, tf32
from labutils.techniques.step import take_step


def measure_step(
    model: nn.Module,
    micro_batches: Sequence[Any],
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    count_targets: Callable[[Any], int] = count_targets,
    precision: str = "fp32",
    scaler: torch.amp.GradScaler | None = None,
    max_grad_norm: float = 0.0,
) -> MemoryLedger:
    """Take one optimizer step as `train` does; return its peak bytes by phase and category.

    `loss_fn` returns a sum over `count_targets(micro_batch)`. The micro-batches are on the model's
    device already. The step really updates the model. Never time it: what is recorded is slow.
    The phases are forward, loss, backward, and optimizer (with unscaling and clipping).
    Without the training's `scaler` fp16 gets a new one. Its first scale may be too large: then the
    step is skipped, and temporaries of the optimizer are missed.

    On a CPU every byte has a category. CUDA's allocator only tells totals: at the peak of backward,
    activations and temporaries are one category. The gradients of an `OptimizerInBackward` do not
    outlive backward: on a CPU they are temporaries.
    Raises ValueError if the optimizer makes its state in this step, which gives it another peak.
    """
    device = next(model.parameters()).device
    scaler = scaler or grad_scaler(precision, device)
    optimizer.zero_grad(set_to_none=True)
    n_states = len(optimizer.state)
    recorder = (CudaRecorder if device.type == "cuda" else CpuRecorder)(model, optimizer)
    handle = on_loss_begin(model, lambda: recorder.begin("loss"))
    bar = late_bar("measuring a step", total=2 * len(micro_batches) + 2)  # its phases

    def begin(phase: str) -> None:
        recorder.begin(phase)
        bar.update()

    try:
        with bar, tf32(PRECISIONS[precision].tf32), recorder.recording():
            if isinstance(optimizer, OptimizerInBackward):
                optimizer.attach()  # after the recorder's hooks, which read gradients
            take_step(
                model,
                micro_batches,
                loss_fn,
                optimizer,
                n_targets=sum(map(count_targets, micro_batches)),
                autocast=partial(autocast, precision, device),
                scaler=scaler,
                max_grad_norm=max_grad_norm,
                phase=begin,
            )
    finally:
        handle.remove()
    if len(optimizer.state) != n_states:
        raise ValueError("the optimizer had no state yet: run an ordinary step first")
    return recorder.report()


def _standing_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes of weights with buffers, of gradients, and of the optimizer's state."""
    weights = [*model.parameters(), *model.buffers()]
    state = [t for t in optimizer_tensors(optimizer) if t.device == weights[0].device]
    return {
        PARAMETERS: tensor_bytes(weights),
        GRADIENTS: tensor_bytes([p.grad for p in model.parameters() if p.grad is not None]),
        OPTIMIZER: tensor_bytes(state),
    }


AFTER = "clear"  # the step is over, and its gradients are still there: no phase of the ledger


def _keep_peak(phases: dict[str, dict[str, int]], phase: str, categories: dict[str, int]) -> None:
    """Keep the bytes by category if there are more of them than at the phase's peak so far."""
    if sum(categories.values()) > sum(phases.get(phase, {}).values()):
        phases[phase] = dict(categories)


# ---- A CPU

PHASE = "phase: "  # begins the names of the marks that we set in a profile
ALLOCATION = "[memory]"  # the profiler's name for allocating and freeing


class CpuRecorder:
    """Sums the profiler's allocation events.

    A gradient is recognised by its address, which is known only after backward.
    """

    CATEGORIES = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS, TEMPORARIES)

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.standing = _standing_bytes(model, optimizer)
        self.gradients: set[int] = set()  # addresses

    @contextmanager
    def recording(self) -> Iterator[None]:
        with allocation_profile() as self.profile:
            yield

    def begin(self, phase: str) -> None:
        with torch.profiler.record_function(f"{PHASE}{phase}"):
            pass  # where it begins is all that is read
        for p in self.model.parameters():
            if phase == AFTER and p.grad is not None:
                self.gradients.add(p.grad.untyped_storage().data_ptr())

    def report(self) -> MemoryLedger:
        events = _trace_events(self.profile)
        # By address, which is given out again and again: a gradient is what was born there last.
        last_birth = {}
        for i, event in enumerate(events):
            if event["name"] == ALLOCATION and event["args"]["Bytes"] > 0:
                last_birth[event["args"]["Addr"]] = i
        gradients = {last_birth.get(address) for address in self.gradients}
        alive = dict.fromkeys(self.CATEGORIES, 0) | self.standing
        category_at: dict[int, str] = {}  # by address: of what lives there
        phases: dict[str, dict[str, int]] = {}
        phase = AFTER  # what is allocated before the first mark belongs to no phase either
        for i, event in enumerate(events):
            if event["name"] == ALLOCATION:
                address, n_bytes = event["args"]["Addr"], event["args"]["Bytes"]
                if n_bytes > 0:
                    category = CATEGORY_OF_PHASE.get(phase, TEMPORARIES)
                    category_at[address] = GRADIENTS if i in gradients else category
                if address in category_at:  # else it was there before, and is in no category
                    alive[category_at[address]] += n_bytes
            else:
                phase = event["name"].removeprefix(PHASE)
            if phase != AFTER:
                _keep_peak(phases, phase, alive)
        return MemoryLedger(phases=phases, method="CPU allocator events (torch.profiler)")


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


def _trace_events(profile: torch.profiler.profile) -> list[dict]:
    """Return the CPU's allocations, and our marks, in order."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    events = []
    for event in trace:
        name = str(event.get("name", ""))
        on_cpu = name == ALLOCATION and event["args"]["Device Type"] == 0  # 0 is a CPU
        if on_cpu or name.startswith(PHASE):
            events.append(event)
    return sorted(events, key=lambda event: event["ts"])  # in the file they are not in order


@dataclass
class Peak:
    """The result of `peak_allocated`: `n_bytes` is 0 until its block has ended."""

    n_bytes: int = 0


@contextmanager
def peak_allocated(device: torch.device) -> Iterator[Peak]:
    """Measure the largest number of bytes allocated at once inside.

    Tensors that are there before count. On a CPU these are the floating-point tensors alive at the
    start, to which the highest rise of the allocator's events is added; what runs inside is slowed
    down. On CUDA the peak statistics are reset.
    """
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.n_bytes = torch.cuda.max_memory_allocated(device)
        return
    before = allocated_bytes(device)
    with allocation_profile() as profile:
        yield peak
    changes = [event["args"]["Bytes"] for event in _trace_events(profile)]  # no marks are set here
    peak.n_bytes = max(accumulate(changes, initial=before))


# ---- CUDA

# Totals are all that the allocator tells: what is not known otherwise goes into one category.
REST_OF = {"forward": ACTIVATIONS, "loss": LOGITS, "backward": KEPT_AND_TEMPORARY}


class CudaRecorder:
    """Reads the allocator's peak after each phase.

    It also looks after each module's forward pass, and whenever a gradient is finished.
    """

    CATEGORIES = (*CpuRecorder.CATEGORIES, KEPT_AND_TEMPORARY, WORKSPACES)

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.workspaces = cublas_bytes()
        self.phases: dict[str, dict[str, int]] = {}
        self.phase = AFTER
        self.activations = 0  # known in the loss phase alone: what is alive when it begins
        # What other code in this process has allocated.
        self.others = torch.cuda.memory_allocated() - sum(self._known().values())

    @contextmanager
    def recording(self) -> Iterator[None]:
        hooks = [module.register_forward_hook(self._look) for module in self.model.modules()]
        for p in self.model.parameters():
            if p.requires_grad:  # others have no gradient
                hooks.append(p.register_post_accumulate_grad_hook(self._look))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def begin(self, phase: str) -> None:
        torch.cuda.synchronize()
        self._look()  # at the end of the phase before
        if phase == AFTER:
            return
        self.activations = 0
        if phase == "loss":
            known = sum(self._known().values())
            self.activations = torch.cuda.memory_allocated() - self.others - known
        torch.cuda.reset_peak_memory_stats()
        self.phase = phase
        self._look()

    def _look(self, *_: Any) -> None:
        """Keep the categories if the peak has grown since the last look."""
        if self.phase == AFTER:
            return
        parts = dict.fromkeys(self.CATEGORIES, 0) | self._known()
        rest = torch.cuda.max_memory_allocated() - self.others - sum(parts.values())
        parts[REST_OF.get(self.phase, TEMPORARIES)] = rest
        _keep_peak(self.phases, self.phase, parts)

    def _known(self) -> dict[str, int]:
        known = {WORKSPACES: self.workspaces, ACTIVATIONS: self.activations}
        return _standing_bytes(self.model, self.optimizer) | known

    def report(self) -> MemoryLedger:
        return MemoryLedger(
            phases=self.phases,
            method="CUDA allocator statistics (max_memory_allocated)",
            reserved_bytes=torch.cuda.max_memory_reserved(),
        )
