"""The exhibit `step`: which bytes are alive at each moment of a training step, by dtype.

The step is traced on tensors without data (`prediction.trace`). Hooks of modules and parameters
note where in the trace each moment is.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from labutils import machine
from labutils.config.choices import PRECISIONS, Precision
from labutils.config.reader import load_config
from labutils.config.schema import Config, resolve
from labutils.memory.ledger import CAST_WEIGHTS
from labutils.prediction.fusion import OPTIMIZER_PHASE
from labutils.prediction.trace import (
    BIRTH,
    CATEGORIES,
    DEATH,
    LASTING,
    Event,
    Segment,
    Storage,
    StorageLog,
    Trace,
    fake_world,
    trace_step,
)
from labutils.techniques import precision
from labutils.techniques.loss import lm_loss_sum
from labutils.workload.build import build_optimizer, float32_model

CPU = torch.device("cpu")
# Part of GPT-2: its name for a reader. A part of a block follows "block N, ".
NAMES = {
    "wte": "token embedding",
    "wpe": "position embedding",
    "ln_1": "first layer norm",
    "attn.c_attn": "query, key, value",
    "attn.c_proj": "output of attention",
    "ln_2": "second layer norm",
    "mlp.c_fc": "first layer of the MLP",
    "mlp.act": "activation function",
    "mlp.c_proj": "second layer of the MLP",
    "ln_f": "last layer norm",
    "lm_head": "logits",
}
PEAK = "the most bytes of this phase"
CLIPPED, STEPPED = "the gradients are clipped", "the weights are updated"
ENDS = {
    "loss": "the loss is known",
    "backward": "all gradients are complete",
    OPTIMIZER_PHASE: "the gradients are freed",
}
Alive = Counter[tuple[str, str]]  # {(category, dtype): bytes}


@dataclass(frozen=True)
class Moment:
    """What is alive after a part of a step. `made` is the dtype of that part's result, if any."""

    phase: str
    what: str
    made: str
    alive: Alive


@dataclass
class Marks:
    """Places in a log: behind so many events of a segment stands a moment with this name."""

    log: StorageLog
    at: dict[int, list[tuple[int, str, str]]] = field(default_factory=dict)

    def put(self, what: str, made: str = "") -> None:
        events = self.log.events
        self.at.setdefault(id(events), []).append((len(events), what, made))

    def watch(self, model: nn.Module) -> None:
        """Mark results of GPT-2's parts, and gradients of their weights, from now on."""
        for name, module in model.named_modules():
            label = reader_name(name)
            if label:
                module.register_forward_hook(partial(self._made, label))
        for name, parameter in model.named_parameters():
            module, _, kind = name.rpartition(".")
            if kind == "weight":
                text = f"the gradient of a weight: {reader_name(module)}"
                parameter.register_post_accumulate_grad_hook(partial(self._gradient, text))

    def _made(self, label: str, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.put(label, dtype_name(output.dtype))

    def _gradient(self, text: str, parameter: torch.Tensor) -> None:
        self.put(text, dtype_name(parameter.grad.dtype))


def moments(config: Config) -> list[Moment]:
    """Return the moments of one training step of a config on a CPU, after the first step.

    The first moment is before the forward pass, the last one after the gradients are cleared. Each
    phase up to backward has a moment with its peak, which is that of `predict_memory`.
    """
    config = resolve(config, machine.card_of("cpu")).config
    row = PRECISIONS[config.precision]
    with fake_world(None) as (log, _):
        model = float32_model(config)
        marks = Marks(log)
        marks.watch(model)
        optimizer = build_optimizer(model, config)
        optimizer.register_step_pre_hook(lambda *_: marks.put(CLIPPED))
        optimizer.register_step_post_hook(lambda *_: marks.put(STEPPED))
        ids = torch.zeros((config.micro_batch_size, config.seq_len), dtype=torch.int64)

        def mean_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return lm_loss_sum(model, batch) / config.seq_len

        trace = trace_step(
            model,
            [{"input_ids": ids, "labels": ids}],
            mean_loss,
            optimizer,
            log,
            autocast=partial(precision.autocast, config.precision, CPU),
            loss_scale=config.init_scale if row.loss_scale else None,
            max_grad_norm=config.max_grad_norm,
        )
    return _replayed(trace, marks, row)


def _replayed(trace: Trace, marks: Marks, row: Precision) -> list[Moment]:
    """Return the moments at a trace's marks, at the peaks of its phases, and at their ends."""
    books = _Books(trace.lasting())
    found = [books.moment("forward", "before the step")]
    for phase, group in itertools.groupby(trace.segments, key=lambda segment: segment.phase):
        part = _of_phase(phase, list(group), marks, books)
        is_update = phase == OPTIMIZER_PHASE
        found += _updates(part, found[-1].alive, row.loss_scale) if is_update else part
    return found


def _of_phase(phase: str, segments: list[Segment], marks: Marks, books: _Books) -> list[Moment]:
    """Return the moments of one phase, its peak among them."""
    found: list[Moment] = []
    place, peak = 0, books.moment(phase, PEAK)
    for segment in segments:
        waiting = list(marks.at.get(id(segment.events), []))
        for i, event in enumerate(segment.events):
            while waiting and waiting[0][0] <= i:
                found.append(books.moment(phase, *waiting.pop(0)[1:]))
            books.enter(event)
            if books.alive.total() > peak.alive.total():
                place, peak = len(found), books.moment(phase, PEAK)
        for _, what, made in waiting:
            found.append(books.moment(phase, what, made))
    if phase in ENDS:
        found.append(books.moment(phase, ENDS[phase]))
    found.insert(place, peak)
    return found


def _updates(part: list[Moment], before: Alive, has_scaler: bool) -> list[Moment]:
    """Return the moments behind the backward pass: those of a loop's lines.

    A GradScaler cannot run in the trace. It divides in place, and changes one number: the bytes
    stay.
    """
    clipped = next(one for one in part if one.what == CLIPPED).alive
    stepped = [one for one in part if one.what == STEPPED][-1].alive
    found = [
        Moment("unscale", "the gradients are divided by the scale", "", before),
        Moment("clip", CLIPPED, "", clipped),
        Moment("step", STEPPED, "", stepped),
        Moment("update", "the scaler chooses the next scale", "", stepped),
        Moment("clear", ENDS[OPTIMIZER_PHASE], "", part[-1].alive),
    ]
    return [one for one in found if has_scaler or one.phase not in ("unscale", "update")]


class _Books:
    """What is alive, in bytes by category and dtype, while events go by."""

    def __init__(self, lasting: list[Storage]) -> None:
        self.alive: Alive = Counter()
        self.living: set[int] = set()
        for storage in lasting:
            self._add(storage)

    def moment(self, phase: str, what: str, made: str = "") -> Moment:
        return Moment(phase, what, made, Counter(self.alive))

    def enter(self, event: Event) -> None:
        storage = event.storage
        is_new = storage is not None and id(storage) not in self.living
        if event.kind == BIRTH and is_new and storage.category not in LASTING:
            self._add(storage)
        elif event.kind == DEATH and not is_new:
            self.living.remove(id(storage))
            self.alive[storage.category, dtype_name(storage.dtype)] -= storage.n_bytes

    def _add(self, storage: Storage) -> None:
        self.living.add(id(storage))
        self.alive[storage.category, dtype_name(storage.dtype)] += storage.n_bytes


@lru_cache(maxsize=1)
def data() -> dict[str, Any]:
    """Return what the page needs: a step of the small GPT-2 in every precision of a CPU.

    Weights are float32 in all of them. A moment is [phase, number of its text, dtype of what it
    made, [group, bytes more, …]]; the first one counts from nothing.
    """
    rows = [row for row in PRECISIONS.values() if not row.not_on_cpu and row.weights == "float32"]
    steps = {row.name: moments(load_config(row.name)) for row in rows}
    groups = sorted({group for found in steps.values() for one in found for group in one.alive})
    groups.sort(key=lambda group: CATEGORIES.index(group[0]))
    texts: dict[str, int] = {}
    runs = {}
    for row in rows:
        before: Alive = Counter()
        changed = []
        for one in steps[row.name]:
            more: list[int] = []
            for i, group in enumerate(groups):
                if one.alive[group] != before[group]:
                    more += [i, one.alive[group] - before[group]]
            text = texts.setdefault(one.what, len(texts))
            changed.append([one.phase, text, one.made, more])
            before = one.alive
        about = {"autocast": row.products if row.autocast else "", "scaler": row.loss_scale}
        runs[row.name] = {**about, "moments": changed}
    return {"groups": groups, "texts": list(texts), "copies": CAST_WEIGHTS, "runs": runs}


def reader_name(module: str) -> str:
    """Return what a reader calls a part of GPT-2, "" for a part without a name."""
    parts = module.removeprefix("transformer.").split(".")
    if parts[0] == "h" and len(parts) > 2:
        label = NAMES.get(".".join(parts[2:]), "")
        return f"block {int(parts[1]) + 1}, {label}" if label else ""
    return NAMES.get(".".join(parts), "")


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float16" for torch.float16."""
    return str(dtype).removeprefix("torch.")
