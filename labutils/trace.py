"""Trace one training step on *fake* tensors, which have shapes and dtypes but no data: what is alive, and when.

A dispatch mode sees every operation and notes when each storage is born and when it dies. Four things make a CPU build
of torch answer for CUDA (`cuda_rules`): CUDA's autocast list, its dropout mask, its attention kernels, and that what is
offloaded to the host has left the device. Not counted: the CUDA context, library workspaces, fragmentation.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labutils import checkpointing
from labutils.memory import (
    ACTIVATIONS,
    BORN_IN,
    CAST_WEIGHTS,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARIES,
    optimizer_tensors,
    thinned,
    when_loss_begins,
)
from labutils.optimizers import StepInBackward, make_state
from labutils.records import MemoryLedger

CATEGORIES = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, CAST_WEIGHTS, LOGITS, TEMPORARIES)

aten = torch.ops.aten
# CUDA's autocast runs these in float32 (ATen/autocast_mode.h); CPU's leaves them in the dtype they are given.
FLOAT32_ON_CUDA = (
    *("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "layer_norm", "native_layer_norm", "rms_norm"),
    *("group_norm", "softmax.int", "log_softmax.int", "exp", "expm1", "log", "log1p", "log2", "reciprocal", "rsqrt"),
    *("softplus", "logsumexp", "sum", "sum.dim_IntList", "cumsum", "cumprod", "prod", "prod.dim_int"),
    *("linalg_vector_norm", "cosine_similarity", "binary_cross_entropy_with_logits"),
)


@contextmanager
def cuda_rules(flash: bool = True) -> Iterator[None]:
    """Inside, operations on (fake) CPU tensors allocate what CUDA's would. Global to the process while it is open.

    It registers kernels for the CPU's autocast and autograd keys; real CPU tensors must not be computed with inside.
    """
    autocast, autograd = (torch.library.Library("aten", "IMPL", key) for key in ("AutocastCPU", "AutogradCPU"))
    no_autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def in_float32(operation: Callable) -> Callable:
        def call(*args: Any, **options: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(no_autocast):
                return operation(*[_widened(a) for a in args], **options)

        return call

    def dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        return torch.native_dropout(x, p, True)[0] if train and p > 0 else x  # keeps one byte per element

    def attention(q, k, v, mask=None, p=0.0, causal=False, *, scale=None, enable_gqa=False):
        allowed = torch.backends.cuda  # what torch.nn.attention.sdpa_kernel switches, on a CPU too
        if mask is None and flash and q.dtype != torch.float32 and allowed.flash_sdp_enabled():
            return aten._scaled_dot_product_flash_attention(q, k, v, p, causal, False, scale=scale)[0]
        if not allowed.mem_efficient_sdp_enabled():
            return aten._scaled_dot_product_attention_math(q, k, v, mask, p, causal, scale=scale)[0]
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.empty_like(mask, dtype=q.dtype)
        return aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, p, causal, scale=scale)[0]

    def on_host(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        stays = isinstance(tensor, nn.Parameter)  # anything else leaves the device, and comes back as a new allocation
        return (lambda: tensor) if stays else partial(torch.empty, tensor.shape, dtype=tensor.dtype)

    real_on_host = checkpointing.on_host
    try:
        checkpointing.on_host = on_host
        for name in FLOAT32_ON_CUDA:
            packet, _, overload = name.partition(".")
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU"):
                autocast.impl(name, in_float32(getattr(getattr(aten, packet), overload or "default")))
        autograd.impl("dropout", dropout)
        autograd.impl("scaled_dot_product_attention", attention)
        yield
    finally:
        checkpointing.on_host = real_on_host
        autocast._destroy()
        autograd._destroy()


def _widened(argument: Any) -> Any:
    is_float = isinstance(argument, torch.Tensor) and argument.is_floating_point()
    return argument.float() if is_float else argument


class CannotExtrapolate(ValueError):
    """Two traces that do not differ by repetitions of one part, so that a third cannot be computed from them."""


@dataclass(frozen=True)
class Segment:
    """A phase of the step, once: `alive[i]` are the bytes by category (CATEGORIES) during operation number `at[i]`."""

    phase: str
    operations: list[str]
    at: np.ndarray  # (operations,)
    alive: np.ndarray  # (operations, categories), bytes


@dataclass(frozen=True)
class Trace:
    """One step, operation by operation."""

    segments: list[Segment]

    def ledger(self, method: str) -> MemoryLedger:
        """Return the bytes by category at each phase's peak, and the timeline of the step."""
        phases: dict[str, dict[str, int]] = {}
        for segment in self.segments:
            peak = segment.alive[segment.alive.sum(axis=1).argmax()]
            if peak.sum() > sum(phases.get(segment.phase, {}).values()):
                phases[segment.phase] = dict(zip(CATEGORIES, peak.round().astype(int).tolist(), strict=True))
        parts = []
        for phase, group in itertools.groupby(self.segments, key=lambda segment: segment.phase):
            together = list(group)
            at, alive = (np.concatenate([getattr(s, name) for s in together]) for name in ("at", "alive"))
            parts.append((phase, at, alive))
        return MemoryLedger(phases=phases, method=method, timeline=thinned(parts))


def extrapolated(low: Trace, high: Trace, ratio: float) -> Trace:
    """Return the trace that lies `ratio` times as far from `low` as `high` does, in the number of layers or sequences.

    A phase is a beginning, a part that repeats with every layer (or not at all), and an end; at each operation the
    bytes are affine in the number of layers, and in the number of sequences (but for the rounding up of small requests,
    a few KiB). So the first operations of both traces
    are aligned from the start, the last ones from the end; what repeats in between lies between their values.
    Raises CannotExtrapolate if the operations of the two do not align.
    """
    if [s.phase for s in low.segments] != [s.phase for s in high.segments]:
        raise CannotExtrapolate("other phases")
    return Trace([_extrapolated(a, b, ratio) for a, b in zip(low.segments, high.segments, strict=True)])


def _extrapolated(low: Segment, high: Segment, ratio: float) -> Segment:
    n = len(low.operations)
    from_start = _equal_at_start(low.operations, high.operations)
    from_end = _equal_at_start(low.operations[::-1], high.operations[::-1])
    if from_start + from_end < n:
        raise CannotExtrapolate(f"the operations of the {low.phase} phase do not align")
    cut = (n - from_end + from_start) // 2  # in the middle of what repeats

    def both_ends(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        aligned = np.concatenate([b[:cut], b[len(b) - (n - cut) :]])
        return a + ratio * (aligned - a)

    return Segment(low.phase, low.operations, both_ends(low.at, high.at), both_ends(low.alive, high.alive))


def _equal_at_start(a: Sequence[str], b: Sequence[str]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass
class Storage:
    """One allocation: its size, what it is for, and the ticks (one per operation) at which it was born and died."""

    n_bytes: int
    category: str
    born: int
    died: int | None = None


class StorageLog(TorchDispatchMode):
    """Notes birth and death of every storage that the operations inside allocate."""

    def __init__(self, block: int) -> None:
        super().__init__()
        self.block, self.tick, self.phase = block, 0, ""
        self.all: list[Storage] = []
        self.alive: dict[int, tuple[Storage, weakref.ref]] = {}
        self.operations: list[str] = []
        self.starts: list[tuple[int, str]] = []

    def begin(self, phase: str) -> None:
        """Everything from the next operation on belongs to `phase`."""
        self.phase = phase
        self.starts.append((self.tick + 1, phase))

    def name(self, tensor: torch.Tensor, category: str) -> None:
        """Give a storage its sure category, for its whole life."""
        self._see(tensor, category)
        self.alive[tensor.untyped_storage()._cdata][0].category = category

    def _see(self, tensor: torch.Tensor, category: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.alive:
            return
        entry = Storage(-(-storage.nbytes() // self.block) * self.block, category, self.tick)

        def end(_: weakref.ref) -> None:
            entry.died = self.tick + 1
            del self.alive[key]

        self.alive[key] = entry, weakref.ref(storage, end)
        self.all.append(entry)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is aten.add.Tensor and not torch.is_grad_enabled() and _adds_in_place(*args[:2]):
            operation = aten.add_.Tensor
        out = operation(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if not tensors:  # a question, for the device say
            return out
        self.tick += 1
        self.operations.append(str(operation))
        category = BORN_IN.get(self.phase, TEMPORARIES)
        if self.phase in BORN_IN and operation is aten._to_copy.default and self._is_parameter(args[0]):
            category = CAST_WEIGHTS
        for tensor in tensors:
            self._see(tensor, category)
        return out

    def _is_parameter(self, tensor: torch.Tensor) -> bool:
        entry = self.alive.get(tensor.untyped_storage()._cdata)
        return entry is not None and entry[0].category == PARAMETERS

    def trace(self) -> Trace:
        """Return what was alive at each operation since the first phase began."""
        change = np.zeros((self.tick + 2, len(CATEGORIES)))
        for entry in self.all:
            column = CATEGORIES.index(entry.category)
            change[entry.born, column] += entry.n_bytes
            if entry.died is not None:
                change[entry.died, column] -= entry.n_bytes
        alive = change.cumsum(axis=0)
        ends = [*(start for start, _ in self.starts[1:]), self.tick + 1]
        first = self.starts[0][0]
        spans = [(phase, start, end) for (start, phase), end in zip(self.starts, ends, strict=True) if end > start]
        return Trace(
            [
                Segment(phase, self.operations[start - 1 : end - 1], np.arange(start, end) - first, alive[start:end])
                for phase, start, end in spans
            ]
        )


def _adds_in_place(a: Any, b: Any) -> bool:
    """Return whether autograd would sum these two gradients in place.

    It does where it alone holds the first buffer (can_accumulate_inplace in input_buffer.cpp), but never under a
    dispatch mode, so the log has to. 4 and 2 are the reference counts of such a buffer here, python's included; they
    are private to torch, and the tests against the real allocator notice when they change.
    """
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a._use_count() == 4 and torch._C._storage_Use_Count(a.untyped_storage()._cdata) == 2


def trace_step(
    model: nn.Module,
    micro_batches: Sequence[Any],
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer | StepInBackward,
    log: StorageLog,
    *,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    loss_scale: float | None = None,
    max_grad_norm: float = 0.0,
    keep_outputs: bool = False,
) -> Trace:
    """Take one step on fake tensors inside `log` and return its trace.

    Before it, the optimizer makes its state, so that the step is like all later ones. What a
    GradScaler computes is a few scalars: only the product with the scale is traced. `keep_outputs` traces the loop
    whose variable `outputs` (with the logits) lives until the next step's forward pass has replaced it.
    """
    parameters = list(model.parameters())
    for tensor in (*parameters, *model.buffers()):
        log.name(tensor, PARAMETERS)
    make_state(optimizer, parameters)
    for tensor in optimizer_tensors(optimizer):
        log.name(tensor, OPTIMIZER)
    handles = [p.register_post_accumulate_grad_hook(lambda p: log.name(p.grad, GRADIENTS)) for p in parameters]
    if isinstance(optimizer, StepInBackward):
        optimizer.attach()  # a gradient has a name before it is freed
    kept: list[Any] = [None]
    if keep_outputs:
        handles.append(model.register_forward_hook(lambda _model, _inputs, outputs: kept.__setitem__(0, outputs)))
    handles.append(when_loss_begins(model, lambda: log.begin("loss")))
    for _ in range(1 + keep_outputs):
        log.starts.clear()
        for micro_batch in micro_batches:
            log.begin("forward")
            with autocast():
                loss = loss_fn(model, micro_batch)
            if loss_scale:
                loss = loss * torch.tensor(loss_scale)
            log.begin("backward")
            loss.backward()
            del loss
        log.begin("optimizer")
        if max_grad_norm:  # clip_grad_norm_ in its two halves: a segment repeats one part only (see `extrapolated`)
            norm = nn.utils.get_total_norm([p.grad for p in parameters])
            log.begin("optimizer")
            nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
            log.begin("optimizer")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    for handle in handles:
        handle.remove()
    return log.trace()
