"""Trace one training step on *fake* tensors, which have shapes and dtypes but no data: what is
alive, and when.

A dispatch mode sees every operation and notes when each storage is born and when it dies. From
these events come the ledger (which bytes are alive at each moment) and the requests that an
allocator gets (`labutils.allocator`).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from labutils.config.cards import Gpu
from labutils.memory.ledger import (
    ACTIVATIONS,
    BORN_IN,
    CAST_WEIGHTS,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARIES,
    WORKSPACES,
)
from labutils.memory.tensors import optimizer_tensors, when_loss_begins
from labutils.prediction.cuda_rules import PRODUCTS, borrowed, outputs_in_order
from labutils.techniques import optimizers
from labutils.techniques.optimizers import StepInBackward

CATEGORIES = (
    PARAMETERS,
    GRADIENTS,
    OPTIMIZER,
    ACTIVATIONS,
    CAST_WEIGHTS,
    LOGITS,
    TEMPORARIES,
    WORKSPACES,
)
LASTING = (PARAMETERS, OPTIMIZER, WORKSPACES)  # what is alive from one step to the next
OPERATION, BIRTH, DEATH = "operation", "birth", "death"
aten = torch.ops.aten


@dataclass(eq=False, slots=True)
class Storage:
    """One allocation: its size in bytes, what it is for, and the operation that made it.

    What a kernel borrows has a `rule` that computes the bytes from some `numbers` (see
    `cuda_rules.borrowed`).
    """

    n_bytes: int
    category: str
    made_by: str
    rule: Callable[..., int] | None = None
    numbers: tuple[int, ...] = ()


class Event(NamedTuple):
    """An operation, or the birth or death of a storage; `name` is the operation's, or of the one
    that made it.
    """

    kind: str
    name: str
    storage: Storage | None = None


@dataclass(frozen=True, eq=False)
class Segment:
    """A part of a step, in order.

    `step` counts from 0; `micro_batch` too, None where there is none.
    """

    phase: str
    step: int
    micro_batch: int | None
    events: list[Event] = field(default_factory=list)


@dataclass(frozen=True)
class Trace:
    """The first step of a training run. `standing` are parameters and buffers, in the order in
    which they are made.

    In this step the optimizer makes its state, so later steps are this one without what lasts
    (LASTING). Where a second step was traced because it differs, its segments follow.
    """

    standing: list[Storage]
    segments: list[Segment]

    def step(self, number: int) -> list[Segment]:
        """Return the segments of a step, those of the last traced step for all later ones."""
        last = self.segments[-1].step
        return [s for s in self.segments if s.step == min(number, last)]

    def lasting(self) -> list[Storage]:
        """Return what is alive before every step but the first."""
        born = (e.storage for s in self.segments for e in s.events if e.kind == BIRTH)
        return self.standing + [storage for storage in born if storage.category in LASTING]


class StorageLog(TorchDispatchMode):
    """Notes operations, and birth and death of every storage that they allocate."""

    def __init__(self, gpu: Gpu | None = None) -> None:
        """With a `gpu` its kernels' own requests are noted too."""
        super().__init__()
        self.gpu = gpu
        self.step, self.micro_batch, self.phase = 0, None, ""
        self.segments: list[Segment] = []
        self.events: list[Event] = []  # of the segment that is being traced
        self.alive: dict[int, tuple[Storage, weakref.ref]] = {}
        self.handles: set[bool] = (
            set()
        )  # cuBLAS's: one of the thread that runs forward, one of autograd's

    def begin(self, phase: str) -> None:
        """Everything from the next operation on belongs to `phase`."""
        self.phase = phase
        self.segments.append(Segment(phase, self.step, self.micro_batch))
        self.events = self.segments[-1].events

    def name(self, tensor: torch.Tensor, category: str) -> None:
        """Give a storage its sure category, for its whole life."""
        self._see(tensor, category, "")
        self.of(tensor).category = category

    def of(self, tensor: torch.Tensor) -> Storage:
        """Return the storage behind a tensor that was seen."""
        return self.alive[tensor.untyped_storage()._cdata][0]

    def on_device(self, batch: Any) -> Any:
        """Return a batch as it is moved to a card, in tensors of its own; on a CPU the batch
        itself.
        """
        return tree_map_only(torch.Tensor, torch.clone, batch) if self.gpu else batch

    def _see(self, tensor: torch.Tensor, category: str, operation: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.alive:
            return
        entry = Storage(storage.nbytes(), category, operation)

        def end(_: weakref.ref) -> None:
            self.events.append(Event(DEATH, entry.made_by, entry))
            del self.alive[key]

        self.alive[key] = entry, weakref.ref(storage, end)
        self.events.append(Event(BIRTH, operation, entry))

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if (
            operation is aten.add.Tensor
            and not torch.is_grad_enabled()
            and _adds_in_place(*args[:2])
        ):
            operation = aten.add_.Tensor
        out = operation(*args, **(kwargs or {}))
        tensors = (
            [out]
            if isinstance(out, torch.Tensor)
            else [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        )
        if not tensors:  # a question, for the device say
            return out
        name = str(operation)
        on_lists = self.phase == "optimizer" and _is_list_of_tensors(args[0] if args else None)
        # what it makes, and what dies before it, is as long as the list: segments repeat one part
        # only
        if on_lists:
            self.begin(self.phase)
        self.events.append(Event(OPERATION, name))
        category = BORN_IN.get(self.phase, TEMPORARIES)
        if (
            self.phase in BORN_IN
            and operation is aten._to_copy.default
            and self._is_parameter(args[0])
        ):
            category = CAST_WEIGHTS
        for tensor in outputs_in_order(operation, tensors) if self.gpu else tensors:
            self._see(tensor, category, name)
        if self.gpu:
            self._borrow(operation, args, name)
        if on_lists:
            self.begin(self.phase)
        return out

    def _borrow(self, operation: Any, args: tuple, name: str) -> None:
        """Note what the kernels of an operation request for themselves, and cuBLAS's workspaces,
        which stay.
        """
        thread = self.phase == "backward"
        if operation in PRODUCTS and thread not in self.handles:
            self.handles.add(thread)
            workspace = Storage(self.gpu.cublas_workspace_bytes, WORKSPACES, "cuBLAS")
            self.events.append(Event(BIRTH, "cuBLAS", workspace))
        for rule, numbers in borrowed(operation, args, self.gpu):
            storage = Storage(rule(*numbers), TEMPORARIES, name, rule, numbers)
            self.events += [Event(BIRTH, name, storage), Event(DEATH, name, storage)]

    def _is_parameter(self, tensor: torch.Tensor) -> bool:
        entry = self.alive.get(tensor.untyped_storage()._cdata)
        return entry is not None and entry[0].category == PARAMETERS


def _is_list_of_tensors(argument: Any) -> bool:
    return (
        isinstance(argument, (list, tuple))
        and bool(argument)
        and isinstance(argument[0], torch.Tensor)
    )


def _adds_in_place(a: Any, b: Any) -> bool:
    """Return whether autograd would sum these two gradients in place.

    It does where it alone holds the first buffer (can_accumulate_inplace in input_buffer.cpp), but
    never under a dispatch mode, so the log has to. 4 and 2 are the reference counts of such a
    buffer here, python's included; they are private to torch, and the tests against the real
    allocator notice when they change.
    """
    if (
        not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor))
        or a.shape != b.shape
        or a.dtype != b.dtype
    ):
        return False
    return a._use_count() == 4 and torch._C._storage_Use_Count(a.untyped_storage()._cdata) == 2


@contextmanager
def each_slab_size_once(log: StorageLog) -> Iterator[None]:
    """Inside, `SmallAdamW` computes one slab of each size; for the others the events of that one
    are repeated.
    """
    update, seen = optimizers._update, {}

    def update_or_repeat(
        p: torch.Tensor, gradient: torch.Tensor, *moments: torch.Tensor, **how: Any
    ) -> None:
        key = p.shape, p.dtype, gradient.dtype, len(moments)
        if key in seen:
            copies = {id(e.storage): replace(e.storage) for e in seen[key] if e.kind == BIRTH}
            log.events += [e._replace(storage=copies.get(id(e.storage))) for e in seen[key]]
            return
        start = len(log.events)
        update(p, gradient, *moments, **how)
        seen[key] = log.events[start:]

    optimizers._update = update_or_repeat
    try:
        yield
    finally:
        optimizers._update = update


def tensors_in_order(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield a module's parameters and buffers in the order in which `module.to(device)` moves them,
    each once.
    """
    inner = itertools.chain.from_iterable(tensors_in_order(child) for child in module.children())
    own = (*module._parameters.values(), *module._buffers.values())
    return iter({id(t): t for t in (*inner, *own) if t is not None}.values())


def _group_by_group(
    optimizer: torch.optim.Optimizer | StepInBackward, log: StorageLog, call: Callable
) -> None:
    """Call an optimizer's method for one parameter group after the other: each is a segment."""
    log.begin("optimizer")
    if isinstance(optimizer, StepInBackward):
        call()
        return
    groups = optimizer.param_groups
    for group in groups:
        optimizer.param_groups = [group]
        call()
        log.begin("optimizer")
    optimizer.param_groups = groups


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
    """Take the first step of a run on fake tensors inside `log` and return its trace.

    What a GradScaler computes is a few scalars: only the product with the scale is traced.
    `keep_outputs` traces the loop whose variable `outputs` (with the logits) lives until the next
    step's forward pass has replaced it: two steps.
    """
    parameters = list(model.parameters())
    for tensor in tensors_in_order(model):
        log.name(tensor, PARAMETERS)
    standing = [log.of(tensor) for tensor in tensors_in_order(model)]
    handles = [
        p.register_post_accumulate_grad_hook(lambda p: log.name(p.grad, GRADIENTS))
        for p in parameters
    ]
    if isinstance(optimizer, StepInBackward):
        optimizer.attach()  # a gradient has a name before it is freed
    kept: list[Any] = [None]
    if keep_outputs:
        handles.append(
            model.register_forward_hook(
                lambda _model, _inputs, outputs: kept.__setitem__(0, outputs)
            )
        )
    handles.append(when_loss_begins(model, lambda: log.begin("loss")))
    for log.step in range(1 + keep_outputs):
        for log.micro_batch, micro_batch in enumerate(micro_batches):
            log.begin("forward")
            with autocast():
                loss = loss_fn(model, log.on_device(micro_batch))
            if loss_scale:
                loss = loss * torch.tensor(loss_scale)
            log.begin("backward")
            loss.backward()
            del loss
        log.micro_batch = None
        log.begin("optimizer")
        # clip_grad_norm_ in its two halves: a segment repeats one part only (see `extrapolation`)
        if max_grad_norm:
            norm = nn.utils.get_total_norm([p.grad for p in parameters])
            log.begin("optimizer")
            nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
        for call in (optimizer.step, optimizer.zero_grad):
            _group_by_group(optimizer, log, call)
        for tensor in optimizer_tensors(optimizer):
            log.name(tensor, OPTIMIZER)
    for handle in handles:
        handle.remove()
    log.events = []  # what dies from here on dies with the run
    _order_deaths(log.segments)
    return Trace(standing, log.segments)


def _order_deaths(segments: list[Segment]) -> None:
    """Sort deaths that follow each other by birth:

    Autocast forgets cast weights in an order that differs each time.
    """
    births = (
        event.storage for segment in segments for event in segment.events if event.kind == BIRTH
    )
    number = {id(storage): i for i, storage in enumerate(births)}
    for segment in segments:
        runs = itertools.groupby(segment.events, key=lambda event: event.kind == DEATH)
        ordered: list[Event] = []
        for are_deaths, run in runs:
            ordered += (
                sorted(run, key=lambda event: number.get(id(event.storage), -1))
                if are_deaths
                else run
            )
        segment.events[:] = ordered
