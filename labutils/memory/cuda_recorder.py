"""CUDA's caching allocator, read after each phase."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from labutils.memory.device_memory import cublas_bytes
from labutils.memory.ledger import (
    ACTIVATIONS,
    GRADIENTS,
    KEPT_AND_TEMPORARY,
    LOGITS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARIES,
    WORKSPACES,
    MemoryLedger,
    downsample_timeline,
)
from labutils.memory.tensors import optimizer_tensors, tensor_bytes

# Totals are all that the allocator tells: what is not known otherwise goes into one category.
REST_OF = {"forward": ACTIVATIONS, "loss": LOGITS, "backward": KEPT_AND_TEMPORARY}


class CudaRecorder:
    """Reads the allocator's peak after each phase.

    It also looks after each module's forward pass, and whenever a gradient is finished.
    """

    CATEGORIES = (
        PARAMETERS,
        GRADIENTS,
        OPTIMIZER,
        ACTIVATIONS,
        LOGITS,
        TEMPORARIES,
        KEPT_AND_TEMPORARY,
        WORKSPACES,
    )

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.workspaces = model, optimizer, cublas_bytes()
        self.phases: dict[str, dict[str, int]] = {}
        self.segments: list[tuple[str, list, list]] = []
        self.n_looks = self.activations = 0
        # What other code in this process has allocated.
        self.others = torch.cuda.memory_allocated() - sum(self._known().values())

    @contextmanager
    def recording(self) -> Iterator[None]:
        learns = [p for p in self.model.parameters() if p.requires_grad]  # others have no gradient
        hooks = [p.register_post_accumulate_grad_hook(self._look) for p in learns]
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
            known = sum(self._known().values())
            self.activations = torch.cuda.memory_allocated() - self.others - known
        torch.cuda.reset_peak_memory_stats()
        self.segments.append((phase, [], []))
        self._look()

    def end(self) -> None:
        """Called where a phase is over; after the last one the gradients are still there."""
        torch.cuda.synchronize()
        if self.segments:
            self._look()

    def _look(self, *_: Any) -> None:
        """Note what is allocated; keep the categories if the peak has grown since the last look."""
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
        found[REST_OF.get(phase, TEMPORARIES)] = rest
        return found

    def _known(self) -> dict[str, int]:
        weights = [*self.model.parameters(), *self.model.buffers()]
        gradients = []
        for p in self.model.parameters():
            if p.grad is not None:
                gradients.append(p.grad)
        state = [t for t in optimizer_tensors(self.optimizer) if t.is_cuda]
        return {
            PARAMETERS: tensor_bytes(weights),
            GRADIENTS: tensor_bytes(gradients),
            OPTIMIZER: tensor_bytes(state),
            WORKSPACES: self.workspaces,
        }

    def report(self) -> MemoryLedger:
        segments = []
        for phase, at, alive in self.segments:
            segments.append((phase, np.array(at), np.array(alive)))
        return MemoryLedger(
            phases=self.phases,
            method="CUDA allocator statistics (max_memory_allocated)",
            reserved_bytes=torch.cuda.max_memory_reserved(),
            timeline=downsample_timeline(segments),
        )
