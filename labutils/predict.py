"""Predict the peak memory of a training step, by category and phase, without running it and without a GPU.

The real model takes real steps on *fake* tensors, which have shapes and dtypes but no data: nothing is allocated or
computed. A dispatch mode sees every operation and notes when each storage is born and when it dies; the bytes alive at
each instant follow. Three things make a CPU build of torch answer for CUDA (`cuda_rules`): CUDA's autocast list, its
dropout mask, its attention kernels. Not counted: the CUDA context, library workspaces, fragmentation.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from labutils import experiment, models, precision
from labutils.config import Config
from labutils.memory import GRADIENTS, OPTIMIZER, PARAMETERS, optimizer_tensors
from labutils.records import MemoryLedger

ACTIVATIONS, CAST_WEIGHTS, LOGITS, TEMPORARIES = "activations", "cast weights", "logits and loss", "temporaries"
LEDGER_CATEGORIES = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, CAST_WEIGHTS, LOGITS, TEMPORARIES)
CUDA_BLOCK = 512  # the caching allocator rounds every request up to a multiple of this
CONTEXT_GIB = 0.5  # what a process takes on the card before its first tensor: driver and library code

aten = torch.ops.aten
# CUDA's autocast runs these in float32 (ATen/autocast_mode.h); CPU's leaves them in the dtype they are given.
FLOAT32_ON_CUDA = (
    *("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "layer_norm", "native_layer_norm", "rms_norm"),
    *("group_norm", "softmax.int", "log_softmax.int", "exp", "expm1", "log", "log1p", "log2", "reciprocal", "rsqrt"),
    *("softplus", "logsumexp", "sum", "sum.dim_IntList", "cumsum", "cumprod", "prod", "prod.dim_int"),
    *("linalg_vector_norm", "cosine_similarity", "binary_cross_entropy_with_logits"),
)


@dataclass(frozen=True)
class Card:
    """What a prediction needs to know of a device. `flash` in 16 bits exists since Ampere; T4 is Turing."""

    memory_gib: float
    capability: tuple[int, int]

    @property
    def flash(self) -> bool:
        """Whether 16-bit attention runs as flash attention; else the memory-efficient kernel."""
        return self.capability >= (8, 0)


CARDS = {
    "t4": Card(14.6, (7, 5)),
    "rtx4060": Card(7.6, (8, 9)),
    "a100": Card(79.2, (8, 0)),
    "h200": Card(139.8, (9, 0)),
}


def card_named(device: str) -> Card:
    """Return a card of CARDS, or for "this" the one in this machine with the memory that is free now.

    Raises KeyError for another name, RuntimeError for "this" without a CUDA GPU.
    """
    if device != "this":
        return CARDS[device]
    if not torch.cuda.is_available():
        raise RuntimeError('there is no CUDA GPU here; device="cpu" predicts this machine')
    free_bytes, _ = torch.cuda.mem_get_info()
    return Card(free_bytes / 2**30, torch.cuda.get_device_capability())


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
        if mask is None and flash and q.dtype != torch.float32:
            return aten._scaled_dot_product_flash_attention(q, k, v, p, causal, False, scale=scale)[0]
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.empty_like(mask, dtype=q.dtype)
        return aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, p, causal, scale=scale)[0]

    try:
        for name in FLOAT32_ON_CUDA:
            packet, _, overload = name.partition(".")
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU"):
                autocast.impl(name, in_float32(getattr(getattr(aten, packet), overload or "default")))
        autograd.impl("dropout", dropout)
        autograd.impl("scaled_dot_product_attention", attention)
        yield
    finally:
        autocast._destroy()
        autograd._destroy()


def _widened(argument: Any) -> Any:
    is_float = isinstance(argument, torch.Tensor) and argument.is_floating_point()
    return argument.float() if is_float else argument


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
        self.in_loss = False
        self.all: list[Storage] = []
        self.alive: dict[int, tuple[Storage, weakref.ref]] = {}
        self.starts: list[tuple[int, str]] = []

    def begin(self, phase: str) -> None:
        """Everything from the next operation on belongs to `phase`."""
        self.phase, self.in_loss = phase, False
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
        self.tick += 1
        category = TEMPORARIES
        if self.phase == "forward" or torch.is_grad_enabled():  # recomputation in backward has gradients enabled
            category = LOGITS if self.in_loss else ACTIVATIONS
            if operation is aten._to_copy.default and self._is_parameter(args[0]):
                category = CAST_WEIGHTS
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, category)
        return out

    def _is_parameter(self, tensor: torch.Tensor) -> bool:
        entry = self.alive.get(tensor.untyped_storage()._cdata)
        return entry is not None and entry[0].category == PARAMETERS

    def ledger(self, since: int, method: str) -> MemoryLedger:
        """Return the bytes by category at each phase's peak, from tick `since` on."""
        changes: dict[int, Counter] = {}
        for entry in self.all:
            changes.setdefault(entry.born, Counter())[entry.category] += entry.n_bytes
            if entry.died is not None:
                changes.setdefault(entry.died, Counter())[entry.category] -= entry.n_bytes
        starts, phase = dict(self.starts), ""
        alive: Counter = Counter()
        phases: dict[str, dict[str, int]] = {}
        for tick in range(self.tick + 2):
            alive.update(changes.get(tick, {}))
            phase = starts.get(tick, phase)
            if tick >= since and phase and sum(alive.values()) > sum(phases.get(phase, {}).values()):
                phases[phase] = {category: alive[category] for category in LEDGER_CATEGORIES}
        return MemoryLedger(phases=phases, method=method)


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
    optimizer: torch.optim.Optimizer,
    log: StorageLog,
    *,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    loss_scale: float | None = None,
    max_grad_norm: float = 0.0,
) -> int:
    """Take one step on fake tensors inside `log`, and return the tick at which it began.

    Before it, the optimizer makes its state from gradients of zero, so that the step is like all later ones. What a
    GradScaler computes is a few scalars: only the product with the scale is traced.
    """
    parameters = list(model.parameters())
    for tensor in (*parameters, *model.buffers()):
        log.name(tensor, PARAMETERS)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for tensor in optimizer_tensors(optimizer):
        log.name(tensor, OPTIMIZER)
    handles = [p.register_post_accumulate_grad_hook(lambda p: log.name(p.grad, GRADIENTS)) for p in parameters]
    body = getattr(model, "base_model", model)  # in Hugging Face's models: without the head

    def enter_loss(*_: Any) -> None:
        log.in_loss = True

    handles.append(body.register_forward_hook(enter_loss))
    start = log.tick + 1
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
    if max_grad_norm:
        nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for handle in handles:
        handle.remove()
    return start


def predict_memory(config: Config, device: str = "a100") -> MemoryLedger:
    """Return the predicted ledger of one training step of a config on a device: bytes by category at each phase's peak.

    `device` is a key of CARDS, "this" for the GPU here, or "cpu" (then `when_cpu` applies, and no CUDA rule).
    Nothing is allocated.
    Raises ConfigError if the config cannot run there, PrecisionUnsupported if the device lacks its precision.
    """
    resolved = config.on("cpu" if device == "cpu" else "cuda")
    if device != "cpu":
        card = card_named(device)
        answer = precision.cuda_support(resolved.precision, card.capability, card.capability >= (8, 0))
        if not answer.ok:
            raise precision.PrecisionUnsupported(
                f"precision {resolved.precision} cannot run on {device}: {answer.reason}"
            )
    cpu = torch.device("cpu")
    log = StorageLog(block=1 if device == "cpu" else CUDA_BLOCK)
    with ExitStack() as stack:
        if device != "cpu":
            stack.enter_context(cuda_rules(flash=card.flash))
        stack.enter_context(FakeTensorMode())
        stack.enter_context(log)
        with _default_dtype(torch.bfloat16 if resolved.precision == "pure_bf16" else torch.float32):
            # random weights have the shapes of pretrained ones, without a download
            model = experiment.float32_model(resolved.model_copy(update={"weights": "random"}))
        models.use_maskless_attention(model)
        optimizer = experiment.build_optimizer(model, resolved)
        shape = resolved.micro_batch_size, resolved.seq_len
        # a second micro-batch meets the gradients of the first; all later ones are like it
        batches = [torch.zeros(shape, dtype=torch.int64) for _ in range(min(2, resolved.grad_accum_steps))]
        n_targets = resolved.tokens_per_step // resolved.seq_len * (resolved.seq_len - 1)
        start = trace_step(
            model,
            [{"input_ids": ids, "labels": ids} for ids in batches],
            lambda model, batch: models.lm_loss_sum(model, batch, resolved.loss_chunk_tokens) / n_targets,
            optimizer,
            log,
            autocast=partial(precision.autocast, resolved.precision, cpu),
            loss_scale=resolved.init_scale if resolved.precision == "fp16" else None,
            max_grad_norm=resolved.max_grad_norm,
        )
        ledger = log.ledger(start, f"predicted for {device}")
        del model, optimizer
    return ledger


def predict_module(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    *,
    precision_name: str = "fp32",
    device: str = "a100",
) -> MemoryLedger:
    """Return the predicted ledger of one step of any module: `loss_fn(model, batch)` is a scalar.

    `optimizer` makes one from parameters, for example `torch.optim.AdamW`. The module itself is left alone.
    """
    cpu = torch.device("cpu")
    log = StorageLog(block=1 if device == "cpu" else CUDA_BLOCK)
    fake = FakeTensorMode()
    with ExitStack() as stack:
        if device != "cpu":
            stack.enter_context(cuda_rules(flash=card_named(device).flash))
        stack.enter_context(fake)
        stack.enter_context(log)
        # a deep copy in which every tensor already has its fake counterpart
        tensors = [*model.parameters(), *model.buffers()]
        memo = {id(t): _fake_like(fake, t) for t in tensors}
        twin = copy.deepcopy(model, memo)
        batch = tree_map_only(torch.Tensor, fake.from_tensor, batch)
        start = trace_step(
            twin.train(),
            [batch],
            loss_fn,
            optimizer(twin.parameters()),
            log,
            autocast=partial(precision.autocast, precision_name, cpu),
        )
        ledger = log.ledger(start, f"predicted for {device}")
        del twin
    return ledger


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _fake_like(fake: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    twin = torch.empty(tensor.shape, dtype=tensor.dtype)
    return nn.Parameter(twin, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin


@dataclass(frozen=True)
class Fit:
    """What makes a config fit: the changes, what they cost, and the ledger with them. No changes: it fits as it is."""

    changes: dict[str, Any]
    costs: tuple[str, ...]
    ledger: MemoryLedger

    def fits(self, budget_gib: float) -> bool:
        """Whether the peak, the context and a tenth for fragmentation stay within a card's memory."""
        return needed_gib(self.ledger) <= budget_gib


def needed_gib(ledger: MemoryLedger) -> float:
    """Return the card memory a ledger asks for, in GiB: peak, a tenth more for fragmentation, and the CUDA context."""
    return 1.1 * ledger.peak_bytes / 2**30 + CONTEXT_GIB


def fit(config: Config, budget_gib: float, device: str = "a100") -> Fit:
    """Return the fewest changes, cheapest first, with which a config's step fits `budget_gib` of card memory.

    Tokens per step stay: a smaller micro-batch accumulates. If nothing fits, the last and smallest try is returned;
    `Fit.fits` tells.
    """
    sixteen = "bf16" if card_named(device).capability >= (8, 0) else "fp16"
    candidates = [
        ("use_cache", False, "nothing: training never reads the cache"),
        ("activation", "gelu_tanh", "nothing: the same function, fused"),
        ("optimizer_impl", "fused", "nothing: the same update, without temporaries"),
        ("loss_chunk_tokens", 512, "computing the logits twice"),
    ]
    candidates = [(key, value, cost) for key, value, cost in candidates if getattr(config, key) != value]
    if config.precision in ("fp32", "tf32"):
        candidates.append(("precision", sixteen, "16-bit rounding of products"))
    size = config.micro_batch_size
    while size > 1:
        size = max(n for n in range(1, size) if config.micro_batch_size * config.grad_accum_steps % n == 0)
        candidates.append(("micro_batch_size", size, "smaller, less efficient products; gradients accumulate"))
    if config.gradient_checkpointing == "none":
        candidates.append(
            ("gradient_checkpointing", "block", "each block's forward pass twice: up to a third more FLOPs")
        )
    found = Fit({}, (), predict_memory(config, device))
    for key, value, cost in candidates:
        if found.fits(budget_gib):
            break
        changes = found.changes | {key: value}
        ledger = predict_memory(config.model_copy(update=changes), device)
        if ledger.peak_bytes < found.ledger.peak_bytes:
            kept = tuple(c for c in found.costs if not c.startswith(f"{key} "))
            found = Fit(changes, (*kept, f"{key} {value}: costs {cost}"), ledger)
    return found
