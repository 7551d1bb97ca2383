"""One training step on *fake* tensors, which have shapes and dtypes but no data: what each
operation allocates, frees and computes.

The step is the very one that trains (`take_step`), with all layers of the model, inside a dispatch
mode that sees every operation. From its events come the ledger and the requests that an allocator
gets (`prediction.memory`), and the time (`prediction.time`).
"""

from __future__ import annotations

import re
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import (  # private: no public tensors without data
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode  # private, but documented
from torch.utils._pytree import tree_leaves, tree_map_only  # private: as torch walks arguments

from labutils.config.card import Card, Gpu
from labutils.config.choices import PRECISIONS
from labutils.config.schema import Config, precision_on
from labutils.files import REFERENCE_DIR
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
from labutils.memory.snapshot import NO_LINE, TORCH, own_line
from labutils.memory.tensors import on_loss_begin, optimizer_tensors
from labutils.prediction import compiled
from labutils.prediction.cuda_rules import (
    PRODUCTS,
    Rule,
    borrowed,
    copied,
    cuda_rules,
    off_card,
    outputs_in_order,
    unwatched_products,
)
from labutils.prediction.work import TENSORS_PER_LAUNCH, Work, work_of
from labutils.techniques import precision
from labutils.techniques.checkpointing import CheckpointedBlocks
from labutils.techniques.loss import LossFn, lm_loss_sum
from labutils.techniques.optimizer_in_backward import OptimizerInBackward
from labutils.techniques.optimizers import LowBitAdamW
from labutils.techniques.step import take_step
from labutils.workload.build import build_optimizer, float32_model

NEEDS_DATA = (  # what torch raises where a step reads what a tensor without data does not have
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    NotImplementedError,
)
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
OPERATION, BIRTH, DEATH = "operation", "birth", "death"
ON_CPU = torch.device("cpu")
aten = torch.ops.aten
ZEROS = {aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default}
WRITES_ELEMENTS = re.compile(
    r"aten::(index_(put|add|copy|fill)|scatter(_add)?|masked_fill|put)(\.|$)"
)


@dataclass(eq=False, slots=True)
class Storage:
    """One allocation: its size in bytes, what it is for, and its dtype.

    What a kernel borrows has no dtype, but a `rule` for its bytes (see `cuda_rules.borrowed`).
    """

    n_bytes: int
    category: str
    dtype: torch.dtype | None = None
    rule: Rule | None = None
    numbers: tuple[int, ...] = ()


class Event(NamedTuple):
    """An operation, or the birth or death of a storage.

    `work` is what an operation has to do, None if it computes nothing.
    """

    kind: str
    storage: Storage | None = None
    work: Work | None = None


@dataclass(frozen=True, eq=False)
class Segment:
    """A part of a step. `micro_batch` counts from 0; it is None where there is none."""

    phase: str
    micro_batch: int | None
    events: list[Event] = field(default_factory=list)


@dataclass(frozen=True)
class Trace:
    """The first step of a training run.

    `standing` are parameters and buffers, in the order in which they are made. In this step the
    optimizer makes its state, so later steps are this one without the births of what lasts.
    """

    standing: list[Storage]
    segments: list[Segment]


class StorageLog(TorchDispatchMode):
    """Notes operations, and birth and death of every storage that they allocate."""

    is_compiled = False

    def __init__(self, gpu: Gpu | None = None) -> None:
        """With a `gpu`, what its kernels request for themselves is noted too."""
        super().__init__()
        self.gpu = gpu
        self.phase, self.n_micro_batches = "", 0
        self.segments: list[Segment] = []
        self.events: list[Event] = []  # of the segment that is being traced
        self.alive: dict[int, tuple[Storage, weakref.ref]] = {}
        # cuBLAS has one handle of the thread that runs forward, and one of autograd's.
        self.handles: set[bool] = set()
        # On CUDA one launch takes many of the tensors that a CPU takes one by one.
        self.in_lists = False
        self.updates: dict[tuple, list[Event]] = {}  # of LowBitAdamW, by the size of a tensor
        self.zeros: set[Storage | None] = set()  # which nothing has written to
        # of any module, by id: tensors that are no parameter, buffer or batch, and their twins
        self.others: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return whether compiled code runs as such inside; torch asks."""
        return cls.is_compiled

    def begin(self, phase: str) -> None:
        """Everything from the next operation on belongs to `phase`."""
        if phase == "clear":  # to the ledger that is the end of the optimizer's phase
            return
        self.phase = phase
        self.n_micro_batches += phase == "forward"
        micro_batch = None if phase == "optimizer" else self.n_micro_batches - 1
        self.segments.append(Segment(phase, micro_batch))
        self.events = self.segments[-1].events

    def name(self, tensor: torch.Tensor, category: str) -> Storage:
        """Give a storage its sure category, for its whole life, and return it."""
        storage = self._see(tensor, category)
        storage.category = category
        return storage

    def of(self, tensor: torch.Tensor) -> Storage | None:
        """Return the storage behind a tensor, None if it was never seen."""
        # `_cdata` is private: the address of torch's own object, since a fake tensor has no data
        storage, _ = self.alive.get(tensor.untyped_storage()._cdata, (None, None))
        return storage

    def _see(self, tensor: torch.Tensor, category: str) -> Storage:
        memory = tensor.untyped_storage()
        if memory._cdata not in self.alive:
            storage = Storage(memory.nbytes(), category, tensor.dtype)
            end = partial(self._end, memory._cdata)
            self.alive[memory._cdata] = storage, weakref.ref(memory, end)
            self.events.append(Event(BIRTH, storage))
        return self.alive[memory._cdata][0]

    def _end(self, key: int, _: weakref.ref) -> None:
        storage, _ = self.alive.pop(key)
        self.events.append(Event(DEATH, storage))

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if operation is torch.ops.prim.device.default:  # most calls: a question, no operation
            return operation(*args, **kwargs)
        # a lift is how torch.tensor([1]) begins: a tensor of this step, with data
        if self.others is not None and operation is not aten.lift_fresh.default:
            args, kwargs = tree_map_only(torch.Tensor, self._without_data, (args, kwargs))
        if not torch.is_grad_enabled():
            operation = self._in_place(operation, args)
        compute = _grouped_mm if operation is aten._grouped_mm.default else operation
        out = compute(*args, **kwargs)
        at = len(self.events)
        category = self._category_of(operation, args)
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        for tensor in outputs_in_order(operation, tensors) if self.gpu else tensors:
            self._see(tensor, category)
        if operation in ZEROS and self.phase == "backward" and not torch.is_grad_enabled():
            self.zeros.add(self.of(out))
        work = work_of(operation, args, kwargs, out, self.of)
        if operation is aten.lift_fresh.default and self.phase == "optimizer":
            work = None  # an optimizer's count of steps stays on the host
        if work and self.gpu and self.in_lists:
            work.calls /= TENSORS_PER_LAUNCH
        if tensors or work:  # or it is another question
            self.events.insert(at, Event(OPERATION, None, work))
        self._borrow(operation, args, out)
        return out

    def _in_place(self, operation: Any, args: tuple) -> Any:
        """Return the operation that autograd takes where no dispatch mode looks on.

        It adds up gradients, and writes to the elements of fresh zeros, in place. Under a mode it
        never does (isTensorSubclassLike in FunctionsManual.cpp), so the log has to.
        """
        if operation is aten.add.Tensor and _adds_in_place(*args[:2]):
            return aten.add_.Tensor
        if not self.zeros or not WRITES_ELEMENTS.match(operation.name()):
            return operation
        target = self.of(args[0])
        if target not in self.zeros:
            return operation
        self.zeros.discard(target)
        packet, overload = operation.overloadpacket, operation._overloadname
        return getattr(getattr(aten, f"{packet.__name__}_"), overload)

    def _without_data(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or for one with data its counterpart, which stands from now on."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if tensor.requires_grad:
            raise ValueError(
                f"a tensor {tuple(tensor.shape)} that requires a gradient is no parameter of the "
                "model: register it as one"
            )
        if id(tensor) not in self.others:
            self.others[id(tensor)] = tensor, _twin(tensor)
            self.name(self.others[id(tensor)][1], PARAMETERS)
        return self.others[id(tensor)][1]

    def _category_of(self, operation: Any, args: tuple) -> str:
        """Return what a tensor is for that an operation makes in this phase."""
        category = CATEGORY_OF_PHASE.get(self.phase, TEMPORARIES)
        if category != TEMPORARIES and operation is aten._to_copy.default:
            source = self.of(args[0])
            if source and source.category == PARAMETERS:
                return CAST_WEIGHTS
        return category

    def _borrow(self, operation: Any, args: tuple, out: Any) -> None:
        """Note what the kernels of an operation request, and cuBLAS's workspaces, which stay."""
        for n_bytes in copied(operation, args, out, is_cuda=bool(self.gpu)):
            storage = Storage(n_bytes, TEMPORARIES)
            self.events += [Event(BIRTH, storage), Event(DEATH, storage)]
        if not self.gpu:
            return
        thread = self.phase == "backward"
        if operation in PRODUCTS and thread not in self.handles:
            self.handles.add(thread)
            workspace = Storage(self.gpu.cublas_workspace_bytes, WORKSPACES)
            self.events.append(Event(BIRTH, workspace))
        for rule, numbers in borrowed(operation, args, self.gpu):
            storage = Storage(rule(*numbers), TEMPORARIES, None, rule, numbers)
            self.events += [Event(BIRTH, storage), Event(DEATH, storage)]


class CompiledLog(StorageLog):
    """The log of a compiled step."""

    is_compiled = True


def _adds_in_place(a: Any, b: Any) -> bool:
    """Return whether autograd would sum these two gradients in place.

    It does where it alone holds the first buffer (can_accumulate_inplace in input_buffer.cpp). It
    never does so under a dispatch mode, so the log has to.
    """
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    # Autograd asks whether anybody else could see the sum happen in the first buffer. So we ask,
    # too, and in the only way there is: by counting. There is no public question for it, and a
    # book of our own about who holds which gradient would have to follow hooks, views, checkpoints.
    # 4 and 2 are the reference counts of such a buffer here, Python's included. They are private to
    # torch; the tests against the real allocator notice when they change.
    return a._use_count() == 4 and torch._C._storage_Use_Count(a.untyped_storage()._cdata) == 2


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return an empty result of experts' matrix multiplications: as large for any routing.

    Torch's rule for tensors without data takes BF16 alone, its kernels float32 as well. Either `b`
    is an expert's matrix in each row of its first dimension, or the result is.
    """
    experts = (len(offs),) if a.dim() == b.dim() else ()
    return a.new_empty(*experts, a.shape[-2], b.shape[-1])


# ---- One step, of any module


def trace_step(
    model: nn.Module,
    micro_batches: Sequence[Any],
    loss_fn: LossFn,
    optimizer: torch.optim.Optimizer | OptimizerInBackward,
    log: StorageLog,
    *,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    loss_scale: float | None = None,
    max_grad_norm: float = 0.0,
) -> Trace:
    """Take the first step of a run on fake tensors inside `log` and return its trace.

    `loss_fn` returns the loss to differentiate: it has divided by the number of targets, if at all.
    Raises NoPlan where the log is of a compiled step, and compiling fails.
    """
    standing: dict[Storage, None] = {}

    def traced_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if log.gpu:  # it is moved there: in new tensors
            batch = tree_map_only(torch.Tensor, torch.clone, batch)
        # Backward begins with the scaled loss, so both are alive until then.
        loss = loss_fn(model, batch)
        # All that is traced of a GradScaler, whose other work is on a few scalars.
        return loss * torch.tensor(loss_scale) if loss_scale else loss

    n_plans = compiled.plans_made() if log.is_compiled else 0
    if log.is_compiled:
        for _ in range(2):  # a first call may set what the second is compiled by
            with compiled.compiling():
                with autocast():
                    loss = traced_loss(model, micro_batches[0])
                loss.backward()
                del loss
                optimizer.zero_grad()
        if compiled.plans_made() == n_plans:
            raise compiled.NoPlan("torch compiles nothing of it")
        n_plans = compiled.plans_made()

    def name_tensors(module: nn.Module) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            standing[log.name(tensor, PARAMETERS)] = None

    # The order decides which tensors share a segment of the allocator.
    model.apply(name_tensors)  # in the order of `model.to(device)`

    def name_gradient(parameter: torch.Tensor) -> None:
        log.name(parameter.grad, GRADIENTS)

    # compiled code has no hooks to tell phases by
    hooks = [] if log.is_compiled else [on_loss_begin(model, partial(log.begin, "loss"))]
    for parameter in model.parameters():
        if parameter.requires_grad:
            hooks.append(parameter.register_post_accumulate_grad_hook(name_gradient))
    parts = [optimizer]
    if isinstance(optimizer, OptimizerInBackward):
        optimizer.attach()  # after those hooks: a gradient has a name before it is freed
        parts = [*optimizer.parts.values()]
    for part in parts:
        if isinstance(part, LowBitAdamW):
            _once(log, part)
    for module in model.modules() if log.gpu else ():
        if isinstance(module, CheckpointedBlocks):
            module.on_host = off_card

    def clip(parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor:
        log.in_lists = True
        norm = nn.utils.clip_grad_norm_(parameters, max_norm)
        log.in_lists = False
        return norm

    grad_norm = take_step(
        model,
        micro_batches,
        traced_loss,
        optimizer,
        n_targets=_Undivided(),
        autocast=autocast,
        # A scaler cannot run here: it reads whether a gradient is inf, and there is no data.
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        max_grad_norm=max_grad_norm,
        clip=clip,
        phase=log.begin,
    )
    if log.is_compiled and compiled.plans_made() != n_plans:
        raise compiled.NoPlan("it is compiled again in each step")
    for tensor in optimizer_tensors(optimizer):
        log.name(tensor, OPTIMIZER)
    for hook in hooks:
        hook.remove()
    log.events = []  # what dies from here on dies with the run
    del grad_norm
    return Trace([*standing], log.segments)


class _Undivided:
    """In place of a number of targets: a loss divided by this is the same tensor."""

    def __rtruediv__(self, loss: torch.Tensor) -> torch.Tensor:
        return loss


def traced_module(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    precision_name: str,
    card: Card,
    grad_accum_steps: int = 1,
    max_grad_norm: float = 0.0,
    keeps_gradients: bool = False,
    keeps_outputs: bool = False,
    as_eager: bool = False,
) -> Trace:
    """Return the trace of one step of any module on a card. The module is left alone.

    For arguments see `predict_module`. Of more than two micro-batches two are traced: the second
    meets the gradients of the first.
    On a card the optimizer updates lists of tensors where CUDA's default does: its temporaries are
    then as large as all tensors of a group, not as one (`foreach` in `torch.optim.AdamW`).
    Tensors that model or loss hold beside parameters and buffers are counted with these. Raises
    ValueError, with the line, where a step depends on its data; and NoPlan where a model or a loss
    that `torch.compile` has made cannot be compiled, unless `as_eager`.
    """
    if not isinstance(grad_accum_steps, int) or grad_accum_steps < 1:
        raise ValueError(f"grad_accum_steps: expected 1 or more, got {grad_accum_steps!r}")
    if isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            "give what makes the optimizer from parameters, as torch.optim."
            f"{type(optimizer).__name__}"
        )
    parts = model, loss_fn
    is_compiled = not as_eager and any(compiled.original(part) is not None for part in parts)
    with fake_world(card.gpu, is_compiled) as (log, fake), without_data(model):
        model, loss_fn = (compiled.as_traced(part, card.gpu, is_compiled) for part in parts)
        updates = optimizer(model.parameters())
        for group in updates.param_groups if card.gpu else ():
            is_open = group.get("foreach", False) is None
            if is_open and not group.get("fused") and not group.get("differentiable"):
                group["foreach"] = True
        # A third micro-batch does what the second does: it would cost time and tell nothing.
        batches = [batch] * min(grad_accum_steps, 2)
        batches = tree_map_only(torch.Tensor, lambda x: fake.from_tensor(_twin(x)), batches)
        log.others, kept = {}, [None]

        def keep(module: nn.Module, arguments: Any, outputs: Any) -> None:
            if keeps_outputs:
                kept[0] = outputs  # until the next ones replace them

        hook = model.register_forward_hook(keep)

        def loss_beside_gradients(model: nn.Module, batch: Any) -> torch.Tensor:
            old = [p for p in model.parameters() if p.requires_grad and p.grad is None]
            for parameter in old:
                parameter.grad = torch.empty_like(parameter)
                log.name(parameter.grad, GRADIENTS)
            loss = loss_fn(model, batch)
            for parameter in old:
                parameter.grad = None
            return loss

        try:
            return trace_step(
                model.train(),
                batches,
                loss_beside_gradients if keeps_gradients else loss_fn,
                updates,
                log,
                autocast=partial(precision.autocast, precision_on(precision_name, card), ON_CPU),
                max_grad_norm=max_grad_norm,
            )
        except NEEDS_DATA as error:
            frames = traceback.extract_tb(error.__traceback__)
            places = [
                (*frame,)[:3]
                for frame in reversed(frames)
                if str(REFERENCE_DIR.parent) not in frame.filename
            ]
            place = own_line(places).replace(NO_LINE, "backward or the optimizer")
            for file, line, _ in places:
                if not TORCH.search(file):
                    place += f", at {Path(file).name}:{line}"
                    break
            hint = "FlexAttention" in str(error) and ". Take scaled_dot_product_attention for it"
            raise ValueError(
                "cannot be predicted: this step depends on its data, or on an operation without a "
                f"rule, in {place} ({error!r}){hint or ''}"
            ) from None
        finally:
            hook.remove()


@contextmanager
def without_data(model: nn.Module) -> Iterator[None]:
    """Inside, a model's parameters and buffers have no data. Afterwards all is as before."""
    # Tied weights are one tensor under two names, so each gets one twin, found by `id`.
    before = []
    twins: dict[int, torch.Tensor] = {}
    attributes = [(module, {**vars(module)}) for module in model.modules()]
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                before.append((module, name, tensor))
    try:
        for module, name, tensor in before:
            if id(tensor) not in twins:
                twins[id(tensor)] = _twin(tensor)
            setattr(module, name, twins[id(tensor)])
        yield
    finally:
        for module, own in attributes:  # what forward has set goes; the mode comes back
            vars(module).clear()
            vars(module).update(own)
        for module, name, tensor in before:
            setattr(module, name, tensor)


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor like this one, on the CPU wherever it lies."""
    twin = torch.empty(tensor.shape, dtype=tensor.dtype)
    return nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin


@contextmanager
def fake_world(
    gpu: Gpu | None, is_compiled: bool = False
) -> Iterator[tuple[StorageLog, FakeTensorMode]]:
    """Inside, tensors have no data, and the log sees what operations would allocate on a device,
    in a step that is compiled or not.
    """
    rules = cuda_rules(gpu.flash, is_compiled) if gpu else nullcontext()
    products = nullcontext() if is_compiled else unwatched_products()
    log_of = CompiledLog if is_compiled else StorageLog
    with rules, products, FakeTensorMode() as fake, log_of(gpu) as log:
        yield log, fake


def _once(log: StorageLog, optimizer: LowBitAdamW) -> None:
    """Let an optimizer compute one tensor of each size; for others its events are repeated.

    Without it `labutils predict xl` takes twice as long.
    """
    update = optimizer.update

    def update_or_repeat(
        p: nn.Parameter, gradient: torch.Tensor, *moments: Any, **how: Any
    ) -> None:
        key = p.shape, p.dtype, gradient.dtype, len(moments)
        if key not in log.updates:
            start = len(log.events)
            update(p, gradient, *moments, **how)
            log.updates[key] = log.events[start:]
            return
        # all that is born in an update dies in it
        log.events += log.updates[key]

    optimizer.update = update_or_repeat


# ---- The step of a config

# These leave a step as it is: equal steps are traced once. Random weights have the shapes of
# pretrained ones, and need no download.
SAME = {
    "name": "x",
    "weights": "random",
    "seed": 0,
    "steps": 1,
    "lr_warmup_steps": 0,
    "compile": "off",
    "memory_limit_gib": 0,
    "expandable_segments": False,
}


def with_shape(config: Config, micro_batch_size: int, n_micro_batches: int = 1) -> Config:
    """Return a config with a step of so many micro-batches of so many sequences."""
    tokens = n_micro_batches * micro_batch_size * config.seq_len
    shape = {"micro_batch_size": micro_batch_size, "tokens_per_step": tokens}
    return config.model_copy(update=shape)


def trace_config(config: Config, gpu: Gpu | None, is_compiled: bool = False) -> Trace:
    """Return the first step of a resolved config; without a `gpu` it is traced for a CPU.

    Whatever the config says, it is compiled only if asked for: for `predict_time`, which has rules
    of its own for what is fused, it is not.

    Two micro-batches stand for more: a second one meets the gradients of the first, as all later
    ones do.
    """
    shaped = with_shape(config, config.micro_batch_size, min(config.grad_accum_steps, 2))
    return _traced(shaped.model_copy(update=SAME).model_dump_json(), gpu, is_compiled)


# A search asks for the same step again and again.
@lru_cache(maxsize=32)
def _traced(config_json: str, gpu: Gpu | None, is_compiled: bool) -> Trace:
    config = Config.model_validate_json(config_json)
    row = PRECISIONS[config.precision]

    def mean_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return lm_loss_sum(model, batch, config.loss_chunk_tokens) / config.seq_len

    with fake_world(gpu, is_compiled) as (log, _):
        with default_dtype(precision.weights_dtype(config.precision)):
            model = float32_model(config, seed=None)  # torch's generator stays as it is
        micro_batches = []
        for _ in range(config.grad_accum_steps):
            ids = torch.zeros((config.micro_batch_size, config.seq_len), dtype=torch.int64)
            micro_batches.append({"input_ids": ids, "labels": ids})
        return trace_step(
            model,
            micro_batches,
            compiled.planned(mean_loss, gpu) if is_compiled else mean_loss,
            build_optimizer(model, config),
            log,
            autocast=partial(precision.autocast, config.precision, ON_CPU),
            loss_scale=config.init_scale if row.loss_scale else None,
            max_grad_norm=config.max_grad_norm,
        )


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, new floating-point tensors have a dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
