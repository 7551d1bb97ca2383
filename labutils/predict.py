"""Predict the peak memory of a training step, by category and phase, without running it and without a GPU.

The real model takes a real step on tensors without data (`labutils.trace`). Deep models are traced with two and three
layers only: the bytes at each operation are affine in the number of layers, and in the number of sequences.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from labutils import checkpointing, experiment, models, precision
from labutils.config import Config
from labutils.formula import closed_form
from labutils.records import MemoryLedger
from labutils.trace import CannotExtrapolate, StorageLog, Trace, cuda_rules, extrapolated, trace_step

CUDA_BLOCK = 512  # the caching allocator rounds every request up to a multiple of this
CONTEXT_GIB = 0.5  # what a process takes on the card before its first tensor: driver and library code
FEW_LAYERS = 2, 3  # traced in place of more: a first and a last one; of units if blocks are checkpointed together
FEW_SEQUENCES = 2, 3  # likewise; a batch of one has views where larger ones have copies
KNOWN_GOOD_TORCH = "2.11 to 2.13"
CPU = torch.device("cpu")


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


def predict_memory(config: Config, device: str = "a100", *, keep_outputs: bool = False) -> MemoryLedger:
    """Return the predicted ledger of one training step of a config on a device: bytes by category at each phase's peak.

    `device` is a key of CARDS, "this" for the GPU here, or "cpu" (then `when_cpu` applies, and no CUDA rule).
    `keep_outputs` predicts a loop that keeps the model's outputs, logits among them, from one step to the next.
    Nothing is allocated. Should torch have changed so that steps cannot be traced, a warning says so and the ledger is
    the closed form's; its `method` tells.
    Raises ConfigError if the config cannot run there, PrecisionUnsupported if the device lacks what it asks for.
    """
    resolved = resolve(config, device)
    return Sweep(resolved, device, keep_outputs).ledger(resolved.micro_batch_size)


def resolve(config: Config, device: str) -> Config:
    """Return a config as it runs on a device. Raises ConfigError or PrecisionUnsupported if it cannot."""
    resolved = config.on("cpu" if device == "cpu" else "cuda")
    if device == "cpu":
        resolved = resolved.model_copy(update={"precision": precision.without_choice(resolved.precision, True)})
    if device != "cpu":
        card = card_named(device)
        has_bf16 = card.capability >= (8, 0)
        resolved = resolved.model_copy(update={"precision": precision.without_choice(resolved.precision, has_bf16)})
        answer = precision.cuda_support(resolved.precision, card.capability, has_bf16)
        if not answer.ok:
            reason = f"precision {resolved.precision} cannot run on {device}: {answer.reason}"
            raise precision.PrecisionUnsupported(reason)
        if resolved.attention == "flash" and not card.flash:
            raise precision.PrecisionUnsupported(f"flash attention needs Ampere or later, not {device}; use auto")
    return resolved


@dataclass
class Sweep:
    """The ledgers of one config, resolved for its device, at any micro-batch size; two sizes are traced for all."""

    config: Config
    device: str
    keep_outputs: bool = False
    _traces: dict[tuple[int, int], Trace] = field(default_factory=dict)

    def ledger(self, micro_batch_size: int) -> MemoryLedger:
        """Return the ledger with `micro_batch_size` sequences at a time, `tokens_per_step` staying."""
        per_pass = self.config.seq_len * micro_batch_size
        accumulates = self.config.tokens_per_step > per_pass
        if not tracing_works():
            config = self.config.model_copy(
                update={
                    "micro_batch_size": micro_batch_size,
                    "tokens_per_step": max(self.config.tokens_per_step // per_pass, 1) * per_pass,
                }
            )
            return closed_form(config)
        trace = self._at(micro_batch_size, 2 if accumulates else 1)
        return trace.ledger(f"predicted for {self.device}")

    def _at(self, micro_batch_size: int, n_micro_batches: int) -> Trace:
        """Return a trace; a second micro-batch meets the gradients of the first, and all later ones are like it."""
        key = micro_batch_size, n_micro_batches
        low, high = FEW_SEQUENCES
        chunk = self.config.loss_chunk_tokens
        # affine in the batch only if each further sequence brings whole chunks, and two of them are not all there are
        uneven = chunk and (self.config.seq_len % chunk or self.config.seq_len < 2 * chunk)
        if key not in self._traces and self._traces and micro_batch_size > high and not uneven:
            a, b = (self._at(size, n_micro_batches) for size in (low, high))
            with suppress(CannotExtrapolate):
                self._traces[key] = extrapolated(a, b, micro_batch_size - low)
        if key not in self._traces:
            self._traces[key] = self._traced(*key)
        return self._traces[key]

    def _traced(self, micro_batch_size: int, n_micro_batches: int) -> Trace:
        step = _step_only(self.config).model_dump_json()
        traced = partial(_trace, step, self.device, micro_batch_size, n_micro_batches, self.keep_outputs)
        n_layer = models.SIZES[self.config.model][0]
        unit = checkpointing.BLOCKS_PER_UNIT.get(self.config.gradient_checkpointing, 1)
        low, high = (n * unit + n_layer % unit for n in FEW_LAYERS)  # what repeats is a unit; the last may be smaller
        if n_layer > low + high:  # else all of them cost no more
            with suppress(CannotExtrapolate):  # an optimizer that goes through the parameters one by one
                return extrapolated(traced(low), traced(high), (n_layer - low) // unit)
        return traced(n_layer)


def _step_only(config: Config) -> Config:
    """Return the config with one value in all keys that leave the bytes of a step alone: equal steps, traced once."""
    same = {"name": "x", "note": "", "seed": 0, "corpus": "stdlib", "steps": 1, "learning_rate": 1e-3}
    same |= {"lr_schedule": "constant", "lr_warmup_steps": 0, "eval_every": 0, "micro_batch_size": 1}
    same |= {"tokens_per_step": config.seq_len, "memory_limit_gib": 0, "weights": "random"}
    same |= {"compile": "off"}
    return config.model_copy(update=same)


@lru_cache(maxsize=128)
def _trace(
    config_json: str, device: str, micro_batch_size: int, n_micro_batches: int, keep_outputs: bool, n_layer: int
) -> Trace:
    config = Config.model_validate_json(config_json)
    with _fake_world(device) as (log, _):
        with _default_dtype(torch.bfloat16 if config.precision == "pure_bf16" else torch.float32):
            model = experiment.float32_model(config, n_layer)  # random: the shapes of pretrained ones, no download
        ids = [torch.zeros((micro_batch_size, config.seq_len), dtype=torch.int64) for _ in range(n_micro_batches)]
        return trace_step(
            model,
            [{"input_ids": i, "labels": i} for i in ids],
            lambda model, batch: models.lm_loss_sum(model, batch, config.loss_chunk_tokens) / config.seq_len,
            experiment.build_optimizer(model, config),
            log,
            autocast=partial(precision.autocast, config.precision, CPU),
            loss_scale=config.init_scale if config.precision == "fp16" else None,
            max_grad_norm=config.max_grad_norm,
            keep_outputs=keep_outputs,
        )


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
    Raises RuntimeError if steps cannot be traced with this torch: a closed form exists for GPT-2 only.
    """
    if not tracing_works():
        raise RuntimeError(f"a step cannot be traced with torch {torch.__version__}; known to work: {KNOWN_GOOD_TORCH}")
    return _predict_module(model, batch, loss_fn, optimizer, precision_name, device)


def _predict_module(
    model: nn.Module, batch: Any, loss_fn: Callable, optimizer: Callable, precision_name: str, device: str
) -> MemoryLedger:
    on_cpu = tree_map_only(torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype), batch)  # wherever it lies
    with _fake_world(device) as (log, fake):
        # a deep copy in which every tensor already has its fake counterpart
        tensors = [*model.parameters(), *model.buffers()]
        memo = {id(t): _fake_like(t) for t in tensors}
        twin = copy.deepcopy(model, memo)
        trace = trace_step(
            twin.train(),
            [tree_map_only(torch.Tensor, fake.from_tensor, on_cpu)],
            loss_fn,
            optimizer(twin.parameters()),
            log,
            autocast=partial(precision.autocast, precision_name, CPU),
        )
    return trace.ledger(f"predicted for {device}")


@contextmanager
def _fake_world(device: str) -> Iterator[tuple[StorageLog, FakeTensorMode]]:
    """Inside, tensors are fake, operations allocate what those of `device` would, and the log sees them."""
    log = StorageLog(block=1 if device == "cpu" else CUDA_BLOCK)
    with ExitStack() as stack:
        if device != "cpu":
            stack.enter_context(cuda_rules(flash=card_named(device).flash))
        fake = stack.enter_context(FakeTensorMode())
        yield stack.enter_context(log), fake


class UsesItsWeightTwice(nn.Module):
    """256 float32 numbers, and the peak of its backward pass; a test asks the real allocator."""

    BACKWARD_BYTES = 3080  # the weight and its first gradient, the second for a moment, three scalars

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.weight * x


@lru_cache(maxsize=1)
def tracing_works() -> bool:
    """Whether this torch can be traced: it must count the bytes of a small step right. Warns if not.

    The log rests on private parts of torch. Two gradients of one weight are summed in place, as they are where nobody
    watches; a log that can no longer tell counts one more buffer.
    """
    module = UsesItsWeightTwice()
    try:
        ledger = _predict_module(module, torch.empty(256), lambda m, x: m(x).sum(), torch.optim.SGD, "fp32", "cpu")
        found = sum(ledger.phases["backward"].values())
        problem = "" if found == module.BACKWARD_BYTES else f"{found} bytes for {module.BACKWARD_BYTES}"
    except Exception as error:  # whatever a changed private interface raises
        problem = f"{type(error).__name__}: {error}"
    if problem:
        warnings.warn(
            f"A training step cannot be traced with torch {torch.__version__} ({problem[:100]}). Known to work: torch "
            f"{KNOWN_GOOD_TORCH}. Predictions come from the closed form, which is rougher.",
            stacklevel=2,
        )
    return not problem


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _fake_like(tensor: torch.Tensor) -> torch.Tensor:
    twin = torch.empty(tensor.shape, dtype=tensor.dtype)
    return nn.Parameter(twin, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
