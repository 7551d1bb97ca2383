"""One training step on *fake* tensors, which have shapes and dtypes but no data: what each
operation allocates, frees and computes.

The step is the very one that trains (`take_step`), with all layers of the model, inside a dispatch
mode that sees every operation. From its events come the ledger (which bytes are alive at each
moment), the requests that an allocator gets (`prediction.replay`), and the time
(`prediction.time`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from labutils.config.card import Gpu
from labutils.config.choices import PRECISIONS
from labutils.config.schema import Config
from labutils.memory.ledger import (
    ACTIVATIONS,
    CAST_WEIGHTS,
    CATEGORY_OF_PHASE,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARIES,
    WORKSPACES,
)
from labutils.memory.tensors import on_loss_begin, optimizer_tensors
from labutils.prediction.cuda_rules import PRODUCTS, borrowed, cuda_rules, outputs_in_order
from labutils.prediction.fusion import fuse
from labutils.prediction.work import TENSORS_PER_LAUNCH, Work, between, work_of
from labutils.techniques import optimizers, precision
from labutils.techniques.loss import lm_loss_sum
from labutils.techniques.optimizer_in_backward import OptimizerInBackward
from labutils.techniques.step import take_step
from labutils.workload.build import build_optimizer, float32_model

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
ON_CPU = torch.device("cpu")
aten = torch.ops.aten


@dataclass(eq=False, slots=True)
class Storage:
    """One allocation: its size in bytes, what it is for, and its dtype.

    What a kernel borrows has no dtype, but a `rule` for its bytes (see `cuda_rules.borrowed`).
    """

    n_bytes: int
    category: str
    rule: Callable[..., int] | None = None
    numbers: tuple[int, ...] = ()
    dtype: torch.dtype | None = None


class Event(NamedTuple):
    """An operation, or the birth or death of a storage.

    `name` is that of the operation that computes, or that made the storage. `work` is what an
    operation has to do, None if it computes nothing.
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
        self._see(tensor, category)
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

    def _see(self, tensor: torch.Tensor, category: str, operation: str = "") -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.alive:
            return
        entry = Storage(storage.nbytes(), category, dtype=tensor.dtype)

        def end(_: weakref.ref) -> None:
            self.events.append(Event(DEATH, "", entry))
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
        return out

    def _category_of(self, operation: Any, args: tuple) -> str:
        """Return what a tensor is for that an operation makes in this phase."""
        if self.phase not in CATEGORY_OF_PHASE:
            return TEMPORARIES
        source = self._seen(args[0]) if operation is aten._to_copy.default else None
        if source and source.category == PARAMETERS:
            return CAST_WEIGHTS
        return CATEGORY_OF_PHASE[self.phase]

    def _borrow(self, operation: Any, args: tuple, name: str) -> None:
        """Note what the kernels of an operation request, and cuBLAS's workspaces, which stay."""
        thread = self.phase == "backward"
        if operation in PRODUCTS and thread not in self.handles:
            self.handles.add(thread)
            workspace = Storage(self.gpu.cublas_workspace_bytes, WORKSPACES)
            self.events.append(Event(BIRTH, "cuBLAS", workspace))
        for rule, numbers in borrowed(operation, args, self.gpu):
            storage = Storage(rule(*numbers), TEMPORARIES, rule, numbers)
            self.events += [Event(BIRTH, name, storage), Event(DEATH, "", storage)]


def _tensors_in(out: Any) -> list[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        return [out]
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]


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


@dataclass(frozen=True)
class Trace:
    """The first step of a training run.

    `standing` are parameters and buffers, in the order in which they are made. In this step the
    optimizer makes its state, so later steps are this one without what lasts (LASTING). Where a
    second step was traced because it differs, its segments follow.
    """

    standing: list[Storage]
    segments: list[Segment]

    def step(self, number: int) -> list[Segment]:
        """Return the segments of a step, those of the last traced step for all later ones."""
        last = self.segments[-1].step
        return [segment for segment in self.segments if segment.step == min(number, last)]

    def lasting(self) -> list[Storage]:
        """Return what is alive before every step but the first."""
        found = list(self.standing)
        for segment in self.segments:
            for event in segment.events:
                if event.kind == BIRTH and event.storage.category in LASTING:
                    found.append(event.storage)
        return found


def trace_step(
    model: nn.Module,
    micro_batches: Sequence[Any],
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer | OptimizerInBackward,
    log: StorageLog,
    *,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    loss_scale: float | None = None,
    max_grad_norm: float = 0.0,
    keep_outputs: bool = False,
) -> Trace:
    """Take the first step of a run on fake tensors inside `log` and return its trace.

    `loss_fn` returns the loss to differentiate: it has divided by the number of targets, if at all.
    `keep_outputs` traces a loop whose variable `outputs` holds the logits until the next forward
    pass has replaced them. That takes two steps.
    """
    for tensor in tensors_in_order(model):
        log.name(tensor, PARAMETERS)
    standing = [log.of(tensor) for tensor in tensors_in_order(model)]
    handles = _name_gradients(model, log)
    if isinstance(optimizer, OptimizerInBackward):
        optimizer.attach()  # after those hooks: a gradient has a name before it is freed
    kept: dict[str, Any] = {}  # what a loop's variables hold until the next step

    def keep(model: nn.Module, inputs: Any, outputs: Any) -> None:
        kept["outputs"] = outputs

    def traced_loss(model: nn.Module, micro_batch: Any) -> torch.Tensor:
        loss = loss_fn(model, log.on_device(micro_batch))
        # All that is traced of a GradScaler, whose other work is on a few scalars.
        return loss * torch.tensor(loss_scale) if loss_scale else loss

    def window() -> Iterator[Any]:
        for log.micro_batch, micro_batch in enumerate(micro_batches):
            yield micro_batch
        log.micro_batch = None

    def clip(parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor:
        log.in_lists = True
        kept["norm"] = nn.utils.clip_grad_norm_(parameters, max_norm)
        log.in_lists = False
        return kept["norm"]

    def begin(phase: str) -> None:
        if phase != "clear":  # to the ledger that is the end of the optimizer's phase
            log.begin(phase)

    if keep_outputs:
        handles.append(model.register_forward_hook(keep))
    handles.append(on_loss_begin(model, lambda: log.begin("loss")))
    for log.step in range(1 + keep_outputs):
        take_step(
            model,
            window(),
            traced_loss,
            optimizer,
            n_targets=_Undivided(),
            autocast=autocast,
            # A scaler cannot run here: it reads whether a gradient is inf, and there is no data.
            scaler=torch.amp.GradScaler("cpu", enabled=False),
            max_grad_norm=max_grad_norm,
            clip=clip,
            phase=begin,
        )
        for tensor in optimizer_tensors(optimizer):
            log.name(tensor, OPTIMIZER)
    for handle in handles:
        handle.remove()
    log.events = []  # what dies from here on dies with the run
    fuse(log.segments)
    return Trace(standing, log.segments)


class _Undivided:
    """In place of a number of targets: a loss divided by this is the same tensor."""

    def __rtruediv__(self, loss: torch.Tensor) -> torch.Tensor:
        return loss


def _name_gradients(model: nn.Module, log: StorageLog) -> list[RemovableHandle]:
    """Let each gradient be named as soon as backward has finished it."""
    handles = []
    for p in model.parameters():
        if not p.requires_grad:
            continue  # frozen: it has no gradient
        handle = p.register_post_accumulate_grad_hook(lambda p: log.name(p.grad, GRADIENTS))
        handles.append(handle)
    return handles


def tensors_in_order(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield a module's parameters and buffers, each once, in the order of `module.to(device)`."""
    found: dict[int, torch.Tensor] = {}
    for child in module.children():
        for tensor in tensors_in_order(child):
            found.setdefault(id(tensor), tensor)
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            found.setdefault(id(tensor), tensor)
    return iter(found.values())


# ---- The step of a config

# Keys that leave the bytes of a step alone get one value, so that equal steps are traced once.
SAME = {
    "name": "x",
    "note": "",
    "seed": 0,
    "corpus": "stdlib",
    "weights": "random",
    "steps": 1,
    "learning_rate": 1e-3,
    "lr_schedule": "constant",
    "lr_warmup_steps": 0,
    "eval_every": 0,
    "micro_batch_size": 1,
    "compile": "off",
    "memory_limit_gib": 0,
    "expandable_segments": False,
}


FEW_SEQUENCES = 2, 3  # a batch of one has views where larger ones have copies


class Traces:
    """The first step of a resolved config, traced at any micro-batch size."""

    def __init__(self, config: Config, gpu: Gpu | None, keep_outputs: bool = False) -> None:
        """Without a `gpu` it is traced for a CPU; `keep_outputs` as for `trace_step`."""
        self.config, self.gpu, self.keep_outputs = config, gpu, keep_outputs
        self._known: dict[tuple[int, int], Trace] = {}

    def at(self, micro_batch_size: int, n_micro_batches: int) -> Trace:
        """Return the trace of a step of one or two micro-batches.

        Two stand for more: a second one meets the gradients of the first, as all later ones do.
        """
        key = micro_batch_size, n_micro_batches
        if key not in self._known:
            self._known[key] = self._from_smaller(*key) or self._traced(*key)
        return self._known[key]

    def _from_smaller(self, micro_batch_size: int, n_micro_batches: int) -> Trace | None:
        """Return the trace that those of few sequences make known, if they do."""
        low, high = FEW_SEQUENCES
        # One size alone is traced as it is: a second one is worth two traces for all. A loss in
        # chunks has other operations at each size.
        if not self._known or micro_batch_size <= high or self.config.loss_chunk_tokens:
            return None
        smaller, larger = self.at(low, n_micro_batches), self.at(high, n_micro_batches)
        return with_more_sequences(smaller, larger, micro_batch_size - low)

    def _traced(self, micro_batch_size: int, n_micro_batches: int) -> Trace:
        step = self.config.model_copy(update=SAME | {"tokens_per_step": self.config.seq_len})
        key = step.model_dump_json(), self.gpu, self.keep_outputs
        return _traced(*key, micro_batch_size, n_micro_batches)


@lru_cache(maxsize=32)
def _traced(
    config_json: str,
    gpu: Gpu | None,
    keep_outputs: bool,
    micro_batch_size: int,
    n_micro_batches: int,
) -> Trace:
    config = Config.model_validate_json(config_json)
    row = PRECISIONS[config.precision]

    def mean_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return lm_loss_sum(model, batch, config.loss_chunk_tokens) / config.seq_len

    with fake_world(gpu) as (log, _):
        with default_dtype(precision.weights_dtype(config.precision)):
            # random weights have the shapes of pretrained ones, and need no download
            model = float32_model(config)
        micro_batches = []
        for _ in range(n_micro_batches):
            ids = torch.zeros((micro_batch_size, config.seq_len), dtype=torch.int64)
            micro_batches.append({"input_ids": ids, "labels": ids})
        return trace_step(
            model,
            micro_batches,
            mean_loss,
            build_optimizer(model, config),
            log,
            autocast=partial(precision.autocast, config.precision, ON_CPU),
            loss_scale=config.init_scale if row.loss_scale else None,
            max_grad_norm=config.max_grad_norm,
            keep_outputs=keep_outputs,
        )


@contextmanager
def fake_world(gpu: Gpu | None) -> Iterator[tuple[StorageLog, FakeTensorMode]]:
    """Inside, tensors have no data, and the log sees what operations would allocate on a device."""
    rules = cuda_rules(flash=gpu.flash) if gpu else nullcontext()
    with rules, FakeTensorMode() as fake, StorageLog(gpu) as log, each_size_once(log):
        yield log, fake


@contextmanager
def each_size_once(log: StorageLog) -> Iterator[None]:
    """Inside, `LowBitAdamW` computes one tensor of each size; for others its events are repeated.

    Without it the trace of GPT-2 XL takes three times as long.
    """
    update, known = optimizers._update, {}

    def update_or_repeat(
        p: nn.Parameter, gradient: torch.Tensor, *moments: Any, **how: Any
    ) -> None:
        key = p.shape, p.dtype, gradient.dtype, len(moments)
        if key in known:
            log.events += with_own_storages(known[key])
            return
        start = len(log.events)
        update(p, gradient, *moments, **how)
        known[key] = log.events[start:]

    optimizers._update = update_or_repeat
    try:
        yield
    finally:
        optimizers._update = update


def with_own_storages(events: list[Event]) -> list[Event]:
    """Return the same events of storages of their own."""
    copies = {id(event.storage): replace(event.storage) for event in events if event.storage}
    return [event._replace(storage=copies.get(id(event.storage))) for event in events]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, new floating-point tensors have a dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def with_more_sequences(low: Trace, high: Trace, more: int) -> Trace | None:
    """Return the trace with `more` sequences than `low`, where `high` has one more than `low`.

    Bytes and work are affine in their number. None if the two do not have the same operations.
    """
    storages: dict[int, Storage] = {}
    standing = []
    for storage in high.standing:
        storages[id(storage)] = replace(storage)
        standing.append(storages[id(storage)])
    segments = []
    for few, many in zip(low.segments, high.segments, strict=True):
        if [event[:2] for event in few.events] != [event[:2] for event in many.events]:
            return None
        events = []
        for first, second in zip(few.events, many.events, strict=True):
            if second.kind == BIRTH:
                grown = _grown(first.storage, second.storage, more)
                storages[id(second.storage)] = grown
            storage = storages[id(second.storage)] if second.storage else None
            work = between(first.work, second.work, more)
            events.append(Event(second.kind, second.name, storage, work))
        segments.append(replace(many, events=events))
    return Trace(standing, segments)


def _grown(low: Storage, high: Storage, more: int) -> Storage:
    """Return the storage with `more` sequences than `low`: what it is computed from is affine."""
    numbers = tuple(a + more * (b - a) for a, b in zip(low.numbers, high.numbers, strict=True))
    n_bytes = low.n_bytes + more * (high.n_bytes - low.n_bytes)
    if high.rule:
        n_bytes = high.rule(*numbers)
    return replace(high, n_bytes=n_bytes, numbers=numbers)
