"""What would fit? One table of changes that save memory: each alone, few that are enough; and the
largest batch and model that a device can train.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import pandas as pd
import torch

from labutils import machine
from labutils.config.card import CONTEXT_GIB, CPU, Card, PrecisionUnsupported
from labutils.config.choices import (
    ATTENTION,
    CHECKPOINTING,
    COMPILE_MODES,
    EACH_BLOCK,
    MODELS,
    OPTIMIZERS,
    PRECISIONS,
    SMALLEST_STATE,
    WITH_BF16,
    WITHOUT_BF16,
)
from labutils.config.reader import load_config
from labutils.config.schema import Config, ConfigError, Run, resolve
from labutils.machine import choose_device
from labutils.memory.device_memory import free_memory, without_expandable_segments
from labutils.memory.ledger import GIB, MIB, NOT_COMPILED, readable_size
from labutils.prediction.memory import (
    Device,
    Prediction,
    boundary,
    needed_gib,
    predicted,
    with_more_sequences,
)
from labutils.prediction.time import TimeLedger, timed
from labutils.prediction.trace import with_shape

Changes = dict[str, Any]  # {key of a config: new value}
COMPILED: Changes = {"compile": "default"}
CHUNK_TOKENS = 512
ROOM = 0.95  # of a budget: a desktop or another process takes some, too
OTHER_ARITHMETIC = {"precision", "optimizer", "optimizer_in_backward"}
FEW_SEQUENCES = 2, 3  # a batch of one has views where larger ones have copies
(PURE_BF16,) = (row.name for row in PRECISIONS.values() if row.weights == "bfloat16")
ON_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Forecast:
    """A config on a card: its run, its bytes, its time, and what would make it fit; each is
    computed when it is asked for, and once.

    What needs the run raises ConfigError or PrecisionUnsupported if the card cannot run it.
    """

    config: Config
    card: Card
    changes: Changes = field(default_factory=dict)  # what was made of another config
    costs: dict[str, str] = field(default_factory=dict)  # {key: what it costs besides time}

    @cached_property
    def run(self) -> Run:
        """The config as it runs on the card."""
        return resolve(self.config, self.card)

    @cached_property
    def prediction(self) -> Prediction:
        """What the run asks of the card."""
        return predicted(self.run.config, self.card)

    @cached_property
    def time(self) -> TimeLedger:
        """A step's time. Raises ValueError for a CPU."""
        return timed(self.run.config, self.card)

    @property
    def step_ms(self) -> float:
        """The milliseconds of a step."""
        return self.time.step_ms

    @property
    def peak_bytes(self) -> int:
        """The peak of the bytes allocated."""
        return self.prediction.tensors.peak_bytes

    @property
    def needed_gib(self) -> float:
        """The memory in GiB of the smallest device on which it runs."""
        if self.card.gpu is None:
            return needed_gib(self.prediction.tensors, self.card)
        return self.prediction.taken(self.prediction.settings)[1] / 2**30

    def fits(self, budget_gib: float) -> bool:
        """Whether it runs in so much memory, on a card with its context in it."""
        return self.prediction.fits(budget_gib)

    @property
    def name(self) -> str:
        """The changes as `--set` takes them."""
        return " ".join(f"{key}={value}" for key, value in self.changes.items())

    def __str__(self) -> str:
        """The bytes, and on a card the time."""
        said = f"{self.config.name}: {self.prediction.ledger}"
        return f"{said}\n\n{self.time}" if self.card.gpu else said

    def changed(self, changes: Changes, cost: str) -> Forecast:
        """Return this one with a further change, of one key and those that follow from it."""
        first, *_ = changes
        known = self.config if self.changes else self.run.config  # that is resolved already
        config = known.model_copy(update=changes)
        return Forecast(config, self.card, self.changes | changes, self.costs | {first: cost})

    def way_out(self, budget_gib: float, may_compile: bool = True) -> Forecast:
        """Return few changes with which a step fits `budget_gib` of memory; `fits` tells.

        The table's changes are made one after the other until it fits, so that the arithmetic is
        left alone for as long as can be. Then each one goes without which it fits as well, the
        dearest first. The tokens per step stay. A twentieth is left free where no other arithmetic
        is needed for that alone. If nothing fits, the forecast with all changes is returned. On a
        card, changes that take time or other arithmetic stand back if a compiled step alone fits;
        only if `may_compile`, because to know that takes half a minute, and what the changes cost
        must be predicted.
        """
        plan = self
        if plan.fits(budget_gib):
            return plan
        goal = ROOM * budget_gib
        taken: list[tuple[Changes, str]] = []
        table = changes_of(self.run.config, self.card)
        quick = [row for row in table if row[0] != COMPILED]  # each compiled trial takes as long
        for changes, cost in machine.late_bar("changes tried", quick):
            if plan.fits(goal) or (plan.fits(budget_gib) and changes.keys() & OTHER_ARITHMETIC):
                break
            if _why_slow(plan, changes):
                continue
            with suppress(ConfigError, PrecisionUnsupported):  # some exclude each other
                candidate = plan.changed(changes, cost)
                if candidate.peak_bytes <= plan.peak_bytes:
                    plan = candidate
                    taken.append((changes, cost))
        compiled = next((self.changed(*row) for row in table if row[0] == COMPILED), None)
        if may_compile and compiled:
            is_dear = plan.changes.keys() & OTHER_ARITHMETIC or plan.step_ms > self.step_ms
            # the update is not compiled: half a minute would be in vain if it alone does not fit
            update_bytes = sum(self.prediction.ledger.phases["optimizer"].values())
            if is_dear and update_bytes / GIB + CONTEXT_GIB < goal and compiled.fits(goal):
                return compiled
        if not plan.fits(goal):
            goal = budget_gib
            if not plan.fits(goal):
                return plan
        # in a second round, too: segments that grow may need more where nothing is missing
        for one in machine.late_bar("does it fit without", 2 * taken[::-1]):
            rest = [row for row in taken if row is not one]
            fewer = self
            for row in rest:
                fewer = fewer.changed(*row)
            with suppress(ConfigError):
                if fewer.fits(goal):
                    plan, taken = fewer, rest
        return plan


# ---- The table of changes


def smaller_batches(config: Config) -> list[int]:
    """Return smaller micro-batches of a step of equally many tokens, largest first: each is the
    largest that is at most half of the one before.
    """
    sequences, sizes = config.tokens_per_step // config.seq_len, [config.micro_batch_size]
    for size in reversed(range(1, config.micro_batch_size)):
        if sequences % size == 0 and 2 * size <= sizes[-1]:
            sizes.append(size)
    return sizes[1:]


def changes_of(config: Config, card: Card) -> list[tuple[Changes, str]]:
    """Return what saves memory in a resolved config, and what it costs besides time."""
    is_set = dict(config).items()
    return [row for row in _possible_changes(config, card) if not row[0].items() <= is_set]


def _possible_changes(config: Config, card: Card) -> Iterator[tuple[Changes, str]]:
    """Yield what can be changed on a card, whether it is so already or not, and what it costs.

    First come changes that leave the arithmetic alone, the cheapest before the others; then those
    of its precision; last those that change what is learned.
    """
    if card.gpu and not (card.is_here and without_expandable_segments()):
        yield {"expandable_segments": True}, "fewer holes between tensors; Linux only"
    yield {"use_cache": False}, "no cost: training never reads the cache"
    yield {"activation": "gelu_tanh"}, "no cost: the same function in one kernel"
    yield {"optimizer_impl": "fused"}, "no cost: the same update, without temporaries"
    if ATTENTION[config.attention].keeps_matrices:
        yield {"attention": "auto"}, "the same sums in another order, without (T, T) matrices"
    if card.gpu and not COMPILE_MODES[config.compile].is_on:
        yield COMPILED, "the same sums in fused kernels; the first step waits for the compiler"
    if not 0 < config.loss_chunk_tokens <= CHUNK_TOKENS:
        chunk = min(CHUNK_TOKENS, max(2, config.micro_batch_size * config.seq_len // 4))
        yield {"loss_chunk_tokens": chunk}, "the same products in smaller pieces"
    if not config.optimizer_in_backward:  # which cannot accumulate
        for size in smaller_batches(config):
            yield {"micro_batch_size": size}, "more micro-batches, equal tokens per step"
    if not CHECKPOINTING[config.gradient_checkpointing].is_on:
        yield {"gradient_checkpointing": EACH_BLOCK.name}, "each block's forward pass twice"
    is_emulated = card.gpu and card.support(config.precision).slow
    if is_emulated or not PRECISIONS[config.precision].is_16bit:
        sixteen_bit = WITH_BF16 if card.has_bf16 else WITHOUT_BF16
        yield {"precision": sixteen_bit.name}, "matrix multiplications in 16 bits"
    if OPTIMIZERS[config.optimizer].is_adamw:
        cost = "a slower update, and moments of 8 bits: compare the losses"
        yield {"optimizer": SMALLEST_STATE.name}, cost
    in_backward: Changes = {"optimizer_in_backward": True}
    if config.max_grad_norm:
        in_backward["max_grad_norm"] = 0.0
    yield in_backward, "no clipping and no accumulation; the same update otherwise"
    if card.gpu and card.has_bf16:
        cost = "weights of 8 significant bits lose small updates: compare the losses"
        yield {"precision": PURE_BF16}, cost
    if config.optimizer_in_backward and config.seq_len > 3:
        half = config.seq_len // 2
        shorter = {"tokens_per_step": half * config.micro_batch_size, "seq_len": half}
        yield shorter, "less context: another experiment"


def _why_slow(plan: Forecast, changes: Changes) -> str:
    """Return why 16 bits would be slow on a CPU of this machine: nothing if they are not."""
    is_cpu = plan.card.gpu is None and "precision" in changes
    answer = machine.support(changes["precision"], ON_CPU) if is_cpu else None
    return answer.reason if answer and answer.slow else ""


def advise(config: Config, device: Device = "a100") -> pd.DataFrame:
    """Return what single changes would do to a config: a row for each, by the MiB that it saves.

    `device` as for `predict_memory`. `saves MiB` is of the predicted peak, `adds ms`, on a card, of
    the predicted step; `needs GiB` is the smallest device with it. A change that cannot be made,
    or is slow here, says why, without numbers. An index is the change as `--set` takes it. `attrs`
    have the `device`, and `method`, `peak_bytes`, `needed_gib` and `step_ms` of the config as it
    is. Raises what `predict_memory` raises, for the config as it is.
    """
    original = Forecast(config, machine.card_of(device))
    rows = {}
    table = changes_of(original.run.config, original.card)
    for changes, cost in machine.late_bar("changes tried", table):
        plan = original.changed(changes, cost)
        if slow := _why_slow(plan, changes):
            rows[plan.name] = {"costs": f"slow here: {slow}"}
            continue
        try:
            saved = original.peak_bytes - plan.peak_bytes
            row = {"saves MiB": saved / MIB, "needs GiB": plan.needed_gib, "costs": cost}
            if NOT_COMPILED in plan.prediction.method:
                row["costs"] += "; its bytes as if not compiled: the compiler does not plan it"
            if original.card.gpu:
                row["adds ms"] = plan.step_ms - original.step_ms
            rows[plan.name] = row
        except (ConfigError, PrecisionUnsupported) as problem:
            rows[plan.name] = {"costs": f"not possible here: {str(problem).partition(': ')[2]}"}
    columns = ["saves MiB", *["adds ms"] * bool(original.card.gpu), "needs GiB", "costs"]
    table = pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis("change")
    # stable: of equal savings the cheaper change, which stands first in the table, stays first
    table = table.sort_values("saves MiB", ascending=False, kind="stable")
    table.attrs = {"device": original.card.name, "peak_bytes": original.peak_bytes}
    table.attrs["method"] = original.prediction.method
    table.attrs["needed_gib"] = original.needed_gib
    if original.card.gpu:
        table.attrs["step_ms"] = original.step_ms
    return table


# ---- The largest sizes that fit


def largest_micro_batch(
    config: Config,
    budget_gib: float,
    device: Device = "a100",
    limit: int = 4096,
) -> int:
    """Return how many sequences (at most `limit`) fit in a step of one micro-batch.

    0 if not even one does.
    """
    run = resolve(config, machine.card_of(device))
    few, more = FEW_SEQUENCES
    has_others = run.config.loss_chunk_tokens or COMPILE_MODES[run.config.compile].is_on

    @cache
    def of(size: int) -> Prediction:
        return predicted(with_shape(run.config, size), run.card)

    def fits(size: int) -> bool:
        # few sequences tell about all, but where other operations run: in chunks, or compiled
        if size <= more or has_others or run.card.gpu is None:
            return of(size).fits(budget_gib)
        requests = with_more_sequences(of(few).requests, of(more).requests, size - few)
        return replace(of(few), requests=requests).fits(budget_gib)

    return boundary(fits, 0, limit + 1)[0]  # both ends are known without a trial


def size_that_fits(config: Config, limit: int = 8) -> Changes:
    """Return the overrides with which one micro-batch fits the GPU here; none on a CPU.

    `micro_batch_size` is at most `limit`. Where not one sequence fits, it is 1, and `model` is not
    the config's but the largest smaller one of which one sequence fits, or the smallest of all.
    """
    card = machine.card(choose_device())
    if card.gpu is None:
        return {}
    names = list(MODELS)  # from the smallest to the largest
    for model in reversed(names[: names.index(config.model) + 1]):
        smaller = config.model_copy(update={"model": model})
        size = largest_micro_batch(smaller, card.memory_gib, card, limit)
        if size:
            break
    size = max(size, 1)
    tokens = size * config.seq_len
    return {"model": model, "micro_batch_size": size, "tokens_per_step": tokens}


def fitting(*names: str, **overrides: Any) -> list[Config]:
    """Return the configs of some names or files; where memory is short, in smaller micro-batches.

    All get the size with which the first one's step fits the memory that is free here, by the
    ledger, and at least 1. `tokens_per_step` stays, so they accumulate. They remain comparable with
    each other and with other machines.
    """
    configs = [load_config(name, **overrides) for name in names]
    original = Forecast(configs[0], machine.card(choose_device()))
    largest = original.run.config.micro_batch_size
    sequences = original.run.config.tokens_per_step // original.run.config.seq_len
    for size in reversed(range(1, largest + 1)):
        plan = original.changed({"micro_batch_size": size}, "")
        if sequences % size == 0 and (size == 1 or plan.fits(original.card.memory_gib)):
            break
    if size == largest:
        return configs
    overrides |= {"note": f"micro-batch reduced to {size} to fit memory", "micro_batch_size": size}
    return [
        load_config(config_name, **overrides, name=config.name)
        for config_name, config in zip(names, configs, strict=True)
    ]


# ---- Before a run and after it: is there room, and what would make some?


def require_host_memory(config: Config) -> None:
    """Raise torch.OutOfMemoryError if a config, resolved for a CPU, has no room.

    Linux would kill the whole process. (CUDA's allocator says no in time.)
    """
    needed = Forecast(config, CPU).needed_gib * GIB
    if needed <= machine.free_bytes(ON_CPU):
        return
    # Asked twice: what earlier code has left may be enough, and to collect it takes a moment.
    free_memory()
    free = machine.free_bytes(ON_CPU)
    if needed > free:
        asked = f"Tried to allocate {readable_size(needed)} (predicted, not tried)"
        raise torch.OutOfMemoryError(f"{asked}, of which {readable_size(free)} is free")


def suggest_changes(config: Config, device: torch.device) -> str:
    """Return in words the changes with which a config runs in what is free now, all predicted."""
    card = machine.card(device)
    context_gib = CONTEXT_GIB if card.gpu else 0
    budget = card.memory_gib
    if card.gpu and config.memory_limit_gib:
        budget = min(budget, config.memory_limit_gib + context_gib)
    try:
        # a hint that comes at once
        plan = Forecast(config, card).way_out(budget, may_compile=False)
        is_enough = plan.fits(budget)
        needed = readable_size((plan.needed_gib - context_gib) * GIB)
    except Exception as error:  # a hint must not cost what it is a hint for
        reason = f"the ledger cannot tell: {type(error).__name__}"
        return f"Ways out: a smaller micro_batch_size or seq_len ({reason})"
    free = readable_size((budget - context_gib) * GIB)
    if not is_enough:
        smallest = plan.name or "as it is. Take a smaller model"
        return f"No change fits {free} free; the smallest needs {needed}: {smallest}"
    if plan.changes:
        return f"{free} are free now. Cheapest way out (predicted): {plan.name}"
    return (
        f"Alone {config.name} needs {needed} (predicted), and {free} are free now. So this was "
        "more than that run, or other tensors were alive beside it. Delete what you no longer "
        "need (in a notebook: restart the kernel), or make what ran smaller"
    )
