"""A log of storages: a dispatch mode sees every operation, and what it allocates and frees.

It is made for *fake* tensors, which have shapes and dtypes but no data.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from labutils.config.card import Gpu
from labutils.memory.ledger import (
    CAST_WEIGHTS,
    CATEGORY_OF_PHASE,
    PARAMETERS,
    TEMPORARIES,
    WORKSPACES,
)
from labutils.prediction.cuda_rules import PRODUCTS, borrowed, outputs_in_order
from labutils.prediction.work import TENSORS_PER_LAUNCH, Work, work_of
from labutils.techniques import optimizers

OPERATION, BIRTH, DEATH = "operation", "birth", "death"
aten = torch.ops.aten


@dataclass(eq=False, slots=True)
class Storage:
    """One allocation: its size in bytes, what it is for, the operation that made it, its dtype.

    What a kernel borrows has no dtype, but a `rule` for its bytes (see `cuda_rules.borrowed`).
    """

    n_bytes: int
    category: str
    made_by: str
    rule: Callable[..., int] | None = None
    numbers: tuple[int, ...] = ()
    dtype: torch.dtype | None = None


class Event(NamedTuple):
    """An operation, or the birth or death of a storage.

    `name` is the operation's; for a storage it is that of the operation that made it. `work` is
    what an operation has to do, None if it computes nothing.
    """

    kind: str
    name: str
    storage: Storage | None = None
    work: Work | None = None


@dataclass(frozen=True, eq=False)
class Segment:
    """A part of a step, in order.

    `step` counts from 0; `micro_batch` too, None where there is none.
    """

    phase: str
    step: int
    micro_batch: int | None
    events: list[Event] = field(default_factory=list)


class StorageLog(TorchDispatchMode):
    """Notes operations, and birth and death of every storage that they allocate."""

    def __init__(self, gpu: Gpu | None = None) -> None:
        """With a `gpu`, what its kernels request for themselves is noted too."""
        super().__init__()
        self.gpu = gpu
        self.step, self.micro_batch, self.phase = 0, None, ""
        self.segments: list[Segment] = []
        self.events: list[Event] = []  # of the segment that is being traced
        self.alive: dict[int, tuple[Storage, weakref.ref]] = {}
        # cuBLAS has one handle of the thread that runs forward, and one of autograd's.
        self.handles: set[bool] = set()
        # On CUDA one launch takes many of the tensors that a CPU takes one by one.
        self.in_lists = False

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

    def _seen(self, tensor: torch.Tensor) -> Storage | None:
        entry = self.alive.get(tensor.untyped_storage()._cdata)
        return entry[0] if entry else None

    def on_device(self, batch: Any) -> Any:
        """Return a batch as it is moved to a card, in new tensors; on a CPU the batch itself."""
        return tree_map_only(torch.Tensor, torch.clone, batch) if self.gpu else batch

    def _see(self, tensor: torch.Tensor, category: str, operation: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.alive:
            return
        entry = Storage(storage.nbytes(), category, operation, dtype=tensor.dtype)

        def end(_: weakref.ref) -> None:
            self.events.append(Event(DEATH, entry.made_by, entry))
            del self.alive[key]

        self.alive[key] = entry, weakref.ref(storage, end)
        self.events.append(Event(BIRTH, operation, entry))

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        adds_up = operation is aten.add.Tensor and not torch.is_grad_enabled()
        if adds_up and _adds_in_place(*args[:2]):
            operation = aten.add_.Tensor
        out = operation(*args, **(kwargs or {}))
        tensors = _tensors_in(out)
        name = str(operation)
        if not tensors:
            # it changes lists of tensors, or is a question, for the device say
            work = work_of(operation, args, kwargs or {}, out, self._seen)
            if work and work.n_bytes:
                self.events.append(Event(OPERATION, name, None, work))
            return out
        on_lists = self.phase == "optimizer" and _is_list_of_tensors(args[0] if args else None)
        # What it makes, and what dies before it, is as long as the list. It needs a segment of its
        # own, because of each segment only one part may repeat (see `extrapolation`).
        if on_lists:
            self.begin(self.phase)
        at = len(self.events)
        category = self._category_of(operation, args)
        for tensor in outputs_in_order(operation, tensors) if self.gpu else tensors:
            self._see(tensor, category, name)
        work = work_of(operation, args, kwargs or {}, out, self._seen)
        if operation is aten.lift_fresh.default and self.phase == "optimizer":
            work = None  # an optimizer's count of steps stays on the host
        if work and self.gpu and self.in_lists:
            work.calls /= TENSORS_PER_LAUNCH
        self.events.insert(at, Event(OPERATION, name, None, work))
        if self.gpu:
            self._borrow(operation, args, name)
        if on_lists:
            self.begin(self.phase)
        return out

    def _category_of(self, operation: Any, args: tuple) -> str:
        """Return what a tensor is for that an operation makes in this phase."""
        if self.phase not in CATEGORY_OF_PHASE:
            return TEMPORARIES
        if operation is aten._to_copy.default and self._is_parameter(args[0]):
            return CAST_WEIGHTS
        return CATEGORY_OF_PHASE[self.phase]

    def _borrow(self, operation: Any, args: tuple, name: str) -> None:
        """Note what the kernels of an operation request, and cuBLAS's workspaces, which stay."""
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


def _tensors_in(out: Any) -> list[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        return [out]
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]


def _is_list_of_tensors(argument: Any) -> bool:
    if not isinstance(argument, (list, tuple)) or not argument:
        return False
    return isinstance(argument[0], torch.Tensor)


def _adds_in_place(a: Any, b: Any) -> bool:
    """Return whether autograd would sum these two gradients in place.

    It does where it alone holds the first buffer (can_accumulate_inplace in input_buffer.cpp). It
    never does so under a dispatch mode, so the log has to.
    """
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    # 4 and 2 are the reference counts of such a buffer here, Python's included. They are private to
    # torch; the tests against the real allocator notice when they change.
    return a._use_count() == 4 and torch._C._storage_Use_Count(a.untyped_storage()._cdata) == 2


@contextmanager
def each_size_once(log: StorageLog) -> Iterator[None]:
    """Inside, `LowBitAdamW` computes one slab of each size.

    For all other slabs the events of that one are repeated.
    """
    update, seen = optimizers._update, {}

    def update_or_repeat(
        p: torch.Tensor, gradient: torch.Tensor, *moments: torch.Tensor, **how: Any
    ) -> None:
        key = p.shape, p.dtype, gradient.dtype, len(moments)
        if key in seen:
            log.events += _copied(seen[key])
            return
        start = len(log.events)
        update(p, gradient, *moments, **how)
        seen[key] = log.events[start:]

    optimizers._update = update_or_repeat
    try:
        yield
    finally:
        optimizers._update = update


def _copied(events: list[Event]) -> list[Event]:
    """Return the same events with storages of their own."""
    copies: dict[int, Storage] = {}
    found = []
    for event in events:
        storage = event.storage
        if event.kind == BIRTH:
            copies[id(storage)] = replace(storage)
        found.append(event._replace(storage=copies.get(id(storage))))
    return found
