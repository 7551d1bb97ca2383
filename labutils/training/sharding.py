"""Real CPU processes that share one training: replicas, ZeRO-1 and FSDP2, and their checkpoints.

Functions that end in `_in_process` are for `processes.in_processes`: every process calls them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from labutils.memory.cpu_recorder import allocation_profile, peak_above_start
from labutils.memory.ledger import GRADIENTS, OPTIMIZER, PARAMETERS
from labutils.memory.tensors import optimizer_tensors, tensor_bytes
from labutils.techniques.loss import count_targets, lm_loss_sum
from labutils.workload.gpt2 import build_model

LEARNING_RATE = 1e-3
ONE, DDP, ZERO_1, FSDP, FSDP_KEEPS = (
    "one process",
    "DDP",
    "ZeRO-1",
    "FSDP2",
    "FSDP2, weights kept until backward",
)
WAYS = (DDP, ZERO_1, FSDP, FSDP_KEEPS)


@dataclass(frozen=True)
class SharedRun:
    """A short training by several processes: losses `(steps,)`, and bytes of each process."""

    losses: list[float]
    standing: list[dict[str, int]]  # by process: bytes by category, just before the update
    peaks: list[int] = field(default_factory=list)  # by process: highest bytes in a step


def greedy_parts(sizes: Sequence[int], n: int) -> list[int]:
    """Return the sizes of n parts: the largest item first, each to the part that has least.

    So `ZeroRedundancyOptimizer` gives whole parameters to processes.
    """
    parts = [0] * n
    for size in sorted(sizes, reverse=True):
        parts[parts.index(min(parts))] += size
    return parts


def row_parts(shapes: Sequence[Sequence[int]], n: int) -> list[int]:
    """Return the numbers of elements of n parts that hold rows of each tensor, as FSDP2 does.

    Each tensor is cut along its first dimension into equal pieces of ceil(rows / n) rows; every
    process stores as many, the last ones with padding.
    """
    total = 0
    for rows, *rest in shapes:
        total += -(-rows // n) * torch.Size(rest).numel()
    return [total] * n


class Shared:
    """`gpt2-nano` and AdamW in this process's part of a group, shared in one of WAYS, or ONE."""

    def __init__(self, way: str) -> None:
        self.model = build_model("gpt2-nano", dropout=0.0)
        self.called: nn.Module = self.model
        self.size, self.rank, self.n_bucket_bytes = 1, 0, 0
        if way != ONE:
            self.size, self.rank = dist.get_world_size(), dist.get_rank()
        if way in (FSDP, FSDP_KEEPS):
            mesh = init_device_mesh("cpu", (self.size,))
            kept = {} if way == FSDP else {"reshard_after_forward": False}
            for block in self.model.transformer.h:
                fully_shard(block, mesh=mesh, **kept)
            fully_shard(self.model, mesh=mesh, **kept)
        elif way in (DDP, ZERO_1):
            self.called = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
            self.n_bucket_bytes = tensor_bytes(list(self.model.parameters()))
        elif way != ONE:
            raise ValueError(f"{way!r} is none of {', '.join((ONE, *WAYS))}")
        parameters = self.model.parameters()
        if way == ZERO_1:
            made = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=LEARNING_RATE)
            self.optimizer, self.local = made, made.optim
        else:
            self.optimizer = self.local = torch.optim.AdamW(parameters, LEARNING_RATE)

    def before_a_step(self) -> int:
        """Return this process's bytes between two steps: DDP keeps its buckets of gradients."""
        n_bytes = sum(self.standing().values())
        return n_bytes + self.n_bucket_bytes

    def backward(self, ids: torch.Tensor) -> float:
        """Make the gradient of the mean loss over `ids`, `(B, T)`; return that loss.

        Process number i takes rows i, i + n, ….
        """
        own = ids[self.rank :: self.size]
        n_targets = count_targets({"input_ids": ids, "labels": ids})
        loss = lm_loss_sum(self.called, {"input_ids": own, "labels": own}) / n_targets
        (loss * self.size).backward()  # DDP and FSDP2 divide by the number of processes
        total = loss.detach().clone()
        if self.size > 1:
            dist.all_reduce(total)
        return total.item()

    def update(self) -> None:
        """Take the optimizer's step, and clear the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def standing(self) -> dict[str, int]:
        """Return this process's bytes of weights, gradients and optimizer state."""
        weights = list(self.model.parameters())
        gradients = [p.grad for p in weights if p.grad is not None]
        groups = {PARAMETERS: weights, GRADIENTS: gradients}
        groups[OPTIMIZER] = optimizer_tensors(self.local)
        return {name: tensor_bytes(_local(tensors)) for name, tensors in groups.items()}


def _local(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def train_shared(way: str, batches: Sequence[torch.Tensor]) -> SharedRun:
    """Return the losses of a step on each of `batches`, `(B, T)` ids, and each process's bytes.

    What stands is counted in the last step. Needs a process group, if `way` is not ONE.
    A peak is the lowest of the steps' after the first, which makes the moments: what a thread of
    Gloo frees is sometimes not noted, so a step can seem to need more than it did.
    """
    shared, losses, peaks = Shared(way), [], []
    for i, ids in enumerate(batches):
        before = shared.before_a_step()
        with allocation_profile() as profile:
            losses.append(shared.backward(ids))
            standing = shared.standing()
            shared.update()
        if i or len(batches) == 1:
            peaks.append(before + peak_above_start(profile))
    own = standing, min(peaks)
    everyone = [own]
    if way != ONE:
        everyone = [None] * shared.size
        dist.all_gather_object(everyone, own)
    return SharedRun(losses, [s for s, _ in everyone], [peak for _, peak in everyone])


def train_in_process(ways: Sequence[str], batches: Sequence[torch.Tensor]) -> dict[str, SharedRun]:
    """Return {way: its run}: one start of processes for all."""
    return {way: train_shared(way, batches) for way in ways}


def save_in_process(batches: Sequence[torch.Tensor], folder: Path) -> list[float]:
    """Train with FSDP2, save weights and moments to `folder`, and return the losses.

    Every process writes the parts that it has.
    """
    shared = Shared(FSDP)
    losses = _go_on(shared, batches)
    weights, moments = get_state_dict(shared.model, shared.optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    return losses


def resume_in_process(batches: Sequence[torch.Tensor], folder: Path) -> list[float]:
    """Load what `save_in_process` wrote, by any number of processes; train on; return losses."""
    shared = Shared(FSDP)
    weights, moments = get_state_dict(shared.model, shared.optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        shared.model,
        shared.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return _go_on(shared, batches)


def _go_on(shared: Shared, batches: Sequence[torch.Tensor]) -> list[float]:
    losses = []
    for ids in batches:
        losses.append(shared.backward(ids))
        shared.update()
    return losses
