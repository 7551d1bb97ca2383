"""Traces of one config at any batch size: few layers and few sequences are traced for all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from labutils.config.card import Gpu
from labutils.config.choices import CHECKPOINTING, MODELS, PRECISIONS
from labutils.config.schema import Config
from labutils.prediction.cuda_rules import cuda_rules
from labutils.prediction.extrapolation import CannotExtrapolate, extrapolated
from labutils.prediction.storage_log import StorageLog, each_size_once
from labutils.prediction.trace import Trace, trace_step
from labutils.techniques import precision
from labutils.techniques.loss import lm_loss_sum
from labutils.workload.build import build_optimizer, float32_model

# Traced in place of more: a first layer and a last one, and one more. Of units, where blocks are
# checkpointed together.
FEW_LAYERS = 2, 3
FEW_SEQUENCES = 2, 3  # a batch of one has views where larger ones have copies
ON_CPU = torch.device("cpu")
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


@dataclass
class Traces:
    """The first step of a resolved config, traced at any micro-batch size."""

    config: Config
    gpu: Gpu | None  # None: a CPU
    keep_outputs: bool = False
    _known: dict[tuple[int, int], Trace] = field(default_factory=dict)

    def at(self, micro_batch_size: int, n_micro_batches: int) -> Trace:
        """Return the trace of a step of one or two micro-batches.

        Two stand for more: a second one meets the gradients of the first, as all later ones do.
        """
        key = micro_batch_size, n_micro_batches
        if key not in self._known:
            self._known[key] = self._from_smaller(*key) or self._from_few_layers(*key)
        return self._known[key]

    def _from_smaller(self, micro_batch_size: int, n_micro_batches: int) -> Trace | None:
        """Return the trace that those of few sequences make known, if they do."""
        low, high = FEW_SEQUENCES
        # one batch alone is traced as it is; a second one is worth two traces for all
        if not self._known or micro_batch_size <= high or not self._is_affine():
            return None
        with suppress(CannotExtrapolate):
            smaller = self.at(low, n_micro_batches)
            larger = self.at(high, n_micro_batches)
            return extrapolated(smaller, larger, micro_batch_size - low)
        return None

    def _is_affine(self) -> bool:
        """Whether each further sequence brings the same: whole chunks of the loss, if it has any.

        A sequence must bring two chunks at least, for a chunk that is all there is has no repeats.
        """
        chunk, length = self.config.loss_chunk_tokens, self.config.seq_len
        return not chunk or (length % chunk == 0 and length >= 2 * chunk)

    def _from_few_layers(self, micro_batch_size: int, n_micro_batches: int) -> Trace:
        step = self.config.model_copy(update=SAME | {"tokens_per_step": self.config.seq_len})
        traced = partial(
            _traced,
            step.model_dump_json(),
            self.gpu,
            micro_batch_size,
            n_micro_batches,
            self.keep_outputs,
        )
        n_layer = MODELS[self.config.model].n_layer
        unit = CHECKPOINTING[self.config.gradient_checkpointing].blocks_per_unit
        last_unit = n_layer % unit  # the last may be smaller
        low = FEW_LAYERS[0] * unit + last_unit
        high = FEW_LAYERS[1] * unit + last_unit
        if n_layer > low + high:  # else all of them cost no more
            # an optimizer that goes through the parameters one by one cannot be extrapolated
            with suppress(CannotExtrapolate):
                return extrapolated(traced(low), traced(high), (n_layer - low) // unit)
        return traced(n_layer)


@lru_cache(maxsize=128)
def _traced(
    config_json: str,
    gpu: Gpu | None,
    micro_batch_size: int,
    n_micro_batches: int,
    keep_outputs: bool,
    n_layer: int,
) -> Trace:
    config = Config.model_validate_json(config_json)
    row = PRECISIONS[config.precision]

    def mean_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return lm_loss_sum(model, batch, config.loss_chunk_tokens) / config.seq_len

    with fake_world(gpu) as (log, _):
        with default_dtype(precision.weights_dtype(config.precision)):
            # random weights have the shapes of pretrained ones, and need no download
            model = float32_model(config, n_layer)
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
    log = StorageLog(gpu)
    with ExitStack() as stack:
        if gpu:
            stack.enter_context(cuda_rules(flash=gpu.flash))
        fake = stack.enter_context(FakeTensorMode())
        stack.enter_context(each_size_once(log))
        yield stack.enter_context(log), fake


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, new floating-point tensors have a dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
