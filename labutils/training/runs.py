"""From a config to a saved record: build what it trains, train it, measure it, save what came."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from labutils import machine
from labutils.config.card import CARDS
from labutils.config.choices import COMPILE_MODES, PRECISIONS
from labutils.config.schema import Config, ConfigError, Run, resolve
from labutils.files import code_version, commit, new_id, require_room
from labutils.machine import in_notebook
from labutils.memory.device_memory import (
    expandable_segments,
    free_memory,
    memory_limit,
    without_expandable_segments,
)
from labutils.memory.errors import is_out_of_memory, short_message
from labutils.memory.measure import measure_step
from labutils.techniques.precision import products_dtype, tf32
from labutils.techniques.schedule import learning_rate_at
from labutils.training import accelerated
from labutils.training.records import RunRecord, Timing, find_equal
from labutils.training.resume import Saver
from labutils.training.train import to_device, train
from labutils.workload.build import Data, Workload, build_data, build_workload

NOT_SAVED = "not saved"  # how a record's reason begins that is in memory only
UNTIMED_STEPS = 2  # the first steps allocate optimizer state and choose kernels


def run_config(
    config: Config,
    device: torch.device,
    *,
    rerun: bool,
    resume: bool,
    progress: bool,
    require_memory: Callable[[Config], None],
    ways_out: Callable[[Config, torch.device], str],
) -> RunRecord:
    """Train a config, measure one more step, save and return the record: see `lab.run_experiment`.

    `require_memory` raises torch.OutOfMemoryError if a config, resolved for a CPU, has no room
    there. `ways_out` returns what to change in a config that has run out of memory.
    """
    device = accelerated.own_device(device)
    progress = progress and accelerated.rank() == 0
    saver = Saver(config.name, config.save_every)
    if resume:
        saver.read()
    run = resolve(config, machine.card(device), to_train=True)
    run = replace(run, steps=accelerated.from_first(run.steps))
    require_equal_shares(run.config, resume)
    data = build_data(run.config)
    planned = planned_record(config, run, device, data)
    # A slow machine plans fewer steps, by a noisy probe.
    saver.plan(planned.model_copy(update={"steps_planned": 0}).identity)
    if not rerun and not saver.done:
        known = accelerated.from_first(find_equal(planned))
        if known:
            if progress:
                print(
                    f"{known.name}: reusing run {known.id} "
                    "(equal config, code, corpus and device; rerun=True forces)"
                )
            return known
    if not accelerated.rank():
        require_room()  # better now than after hours
    if saver.done:
        planned.environment["resumed"] = f"after step {saver.done}"
    if progress:
        announce(config, run, device)
        announce_state(run.config, saver, resume)
    results: dict[str, Any] = {}
    try:
        with (
            expandable_segments(run.config.expandable_segments, device),
            memory_limit(run.config.memory_limit_gib, device),
        ):
            if device.type == "cpu":
                require_memory(run.config)
            _train_and_measure(run, device, data, saver, progress, results)
    except KeyboardInterrupt:
        if not results:
            raise
        reason = "stopped (Ctrl-C or SIGTERM) after training, while memory was measured"
        results |= {"outcome": "interrupted", "reason": reason}
    except (RuntimeError, MemoryError) as error:
        # of several processes one that goes on alone would be waited for
        if not is_out_of_memory(error) or accelerated.world_size() > 1:
            raise
        when = "after training, while memory was measured: " if results else ""
        results |= {"outcome": "out_of_memory", "reason": when + short_message(error)}
    free_memory()
    if results["outcome"] == "out_of_memory":
        # here: in the handler the traceback still keeps tensors alive
        with suppress(KeyboardInterrupt):  # while they are looked for: the record must be saved
            results["reason"] += f". {ways_out(config, device)}"
    record = _finished(planned, results, run, data)
    if accelerated.rank():
        return record
    saved = _save(record, saver, progress)
    if saved.outcome == "interrupted" and in_notebook():
        raise KeyboardInterrupt(saved.reason)  # it stops this cell, and Run All
    return saved


def require_equal_shares(config: Config, resume: bool) -> None:
    """Raise ConfigError if the processes of a launch cannot share a step, or save its state."""
    n = accelerated.world_size()
    if config.grad_accum_steps % n:
        raise ConfigError(
            f"{config.name}: `tokens_per_step`: {config.tokens_per_step} tokens are "
            f"{config.grad_accum_steps} micro-batches, which {n} processes cannot share equally"
        )
    if n > 1 and (resume or config.save_every):
        raise ConfigError(
            f"{config.name}: `save_every`: states are saved in a single process only; set it to 0"
        )


def rate_of(config: Config) -> Callable[[int], float]:
    """Return the learning rate of each step, counted from 0."""
    return partial(
        learning_rate_at,
        highest=config.learning_rate,
        schedule=config.lr_schedule,
        warmup_steps=config.lr_warmup_steps,
        steps=config.steps,
    )


# ---- Before the run


def planned_record(config: Config, run: Run, device: torch.device, data: Data) -> RunRecord:
    """Return the record that a run will fill."""
    return RunRecord(
        id="",
        created="",
        name=config.name,
        note=config.note,
        config=run.config.model_dump(exclude={"when_cpu", "overrides"}),
        environment={**_environment(run.config, device), "commit": commit()},
        corpus=data.corpus.digest,
        code=code_version(),
        steps_planned=run.steps,
        tokens_per_step=run.config.tokens_per_step,
    )


def _environment(config: Config, device: torch.device) -> dict[str, str]:
    """Return what a record says about the machine, and about how it was limited."""
    facts = machine.environment(device)
    if device.type == "cuda" and config.memory_limit_gib:
        limit = f"{config.memory_limit_gib:g} GiB"
        facts["memory limit"] = f"{limit}, emulated: of the allocator, without the context"
    if device.type == "cuda" and config.expandable_segments:
        missing = without_expandable_segments()
        default = f"default; expandable segments: {missing}"
        facts["allocator"] = default if missing else "expandable segments"
    if accelerated.world_size() > 1:
        facts["processes"] = str(accelerated.world_size())
    return facts


def announce(config: Config, run: Run, device: torch.device) -> None:
    """Print each value that does not come from the main part of the file."""
    for line in run.changes:
        print(f"{config.name}: {line}")
    if config.memory_limit_gib and device.type != "cuda":
        print(f"{config.name}: memory_limit_gib is of CUDA's allocator: a CPU run ignores it")
    missing = device.type == "cuda" and without_expandable_segments()
    if config.expandable_segments and missing:
        print(
            f"{config.name}: expandable_segments: {missing}, so torch's default allocator runs: "
            "it needs more memory"
        )
    if run.steps != run.config.steps:
        print(f"{config.name}: steps = {run.steps} (not {run.config.steps}: {run.reason})")
    if COMPILE_MODES[run.config.compile].is_on:
        mode = f"compile: {run.config.compile}"
        print(f"{config.name}: the first step compiles the model ({mode}); that takes a while")


def announce_state(config: Config, saver: Saver, resume: bool) -> None:
    """Print where a run begins, if there is or could be a saved state."""
    name = config.name
    if resume and saver.done:
        print(f"{name}: continues after step {saver.done}")
        if not config.save_every:
            print(f"{name}: save_every is 0, so no further state will be saved")
    elif resume:
        print(f"{name}: begins at step 0: it has no saved state")
    elif saver.path.exists():
        print(f"{name}: begins at step 0: --resume would continue an unfinished run")


# ---- The run


def _train_and_measure(
    run: Run,
    device: torch.device,
    data: Data,
    saver: Saver,
    progress: bool,
    results: dict[str, Any],
) -> None:
    """Train, then measure one more step; add to `results` what each gives, as soon as it is there.

    Everything allocated dies with this frame.
    """
    config, n = run.config, accelerated.world_size()
    work = build_workload(config, device, data, n)
    if n > 1:
        data.batches = itertools.islice(data.batches, accelerated.rank(), None, n)
        # masks of their own; the weights are made already
        torch.manual_seed(config.seed + accelerated.rank())
    training = train(
        work.model,
        data.batches,
        work.loss_fn,
        work.optimizer,
        steps=run.steps,
        grad_accum_steps=config.grad_accum_steps // n,
        precision=config.precision,
        scaler=work.scaler,
        max_grad_norm=config.max_grad_norm,
        learning_rate_at=rate_of(config),
        held_out=data.held_out,
        eval_every=config.eval_every,
        saver=saver,
        name=config.name,
        progress=progress,
    )
    flops = flops_per_token(work.model, config.seq_len)
    results["series"] = training.series
    results["held_out"] = training.held_out
    results["outcome"], results["reason"] = training.outcome, training.reason
    results["timing"] = timing_of(training.series.step_ms, flops, config, device)
    if COMPILE_MODES[config.compile].is_on:
        results["environment"] = {"torch.compile": work.loss_fn.report}
    if training.outcome == "completed":
        _measure(work, config, device, n, results)


def _measure(
    work: Workload, config: Config, device: torch.device, n_processes: int, results: dict[str, Any]
) -> None:
    """Add the ledger of one more step to `results`, or why there is none."""
    micro_batches = []
    for _ in range(config.grad_accum_steps // n_processes):
        micro_batches.append(to_device(next(work.data.batches), device))
    # compiled code has no hooks to tell phases by
    loss_fn = getattr(work.loss_fn, "eager", work.loss_fn)
    try:
        ledger = measure_step(
            work.model,
            micro_batches,
            loss_fn,
            work.optimizer,
            precision=config.precision,
            scaler=work.scaler,
            max_grad_norm=config.max_grad_norm,
        )
    except OSError as error:
        results["reason"] = f"memory could not be measured: {error}"
        return
    if COMPILE_MODES[config.compile].is_on:
        ledger = ledger.model_copy(update={"method": f"{ledger.method}, not compiled"})
    results["memory"] = ledger


# ---- After the run


def _finished(planned: RunRecord, results: dict[str, Any], run: Run, data: Data) -> RunRecord:
    """Return the planned record with what the run gave."""
    run_id, created = new_id()
    environment = planned.environment | results.get("environment", {})
    results |= {"id": run_id, "created": created, "environment": environment}
    record = planned.model_copy(update=results)
    micro_batches = len(record.series.loss) * run.config.grad_accum_steps
    return record.model_copy(update={"epochs": micro_batches / data.micro_batches_per_epoch})


def _save(record: RunRecord, saver: Saver, progress: bool) -> RunRecord:
    """Save a record, say how its run ended, and return it."""
    try:
        path = record.save()
    except OSError as error:
        print(
            f"{record.name}: NOT SAVED: {error}. "
            "The record is returned: make room, then record.save()"
        )
        return record.model_copy(update={"reason": f"{NOT_SAVED}: {error}"})
    if record.outcome == "completed":
        saver.path.unlink(missing_ok=True)
    else:
        print(f"{record.name}: {record.outcome.replace('_', ' ')}: {record.reason}")
        if saver.done and record.outcome != "non_finite":  # which would come again
            state = f"the state after step {saver.done} is saved"
            print(f"{record.name}: {state}; the same command with --resume continues it")
    if progress:
        print(f"{record.name}: saved {path.name}")
    return record


# ---- Speed

# Part of a product's name: its row among the cards, which has the datasheet's dense peaks.
PRODUCTS_ON_SHEETS = {
    "V100-SXM2": "v100",
    "Tesla T4": "t4",
    "A100": "a100",
    "H100 80GB HBM3": "h100",
    "H100 PCIe": "h100-pcie",
    "H200": "h200",
}
NO_SHEET = {"MIG", "NVL", "Laptop"}  # a slice of a card, or a variant


def datasheet_tflops(card: str) -> dict[str, float]:
    """Return {kind of product: dense TFLOP/s} of a card by its full name; {} if it is unknown."""
    words = set(re.split(r"[ -]", card))
    for name, row in PRODUCTS_ON_SHEETS.items():
        if set(re.split(r"[ -]", name)) <= words and not words & NO_SHEET:
            return CARDS[row].speed.tflops
    return {}


@lru_cache(maxsize=8)
def peak_rate(precision: str, device: torch.device) -> tuple[float, str]:
    """Return (FLOP/s, where it is from): the denominator of an MFU, which says nothing without it.

    A datasheet's dense peak if the card is known, else a product measured here. On a CPU the
    float32 product's, or that of the precision's own dtype where it is faster: a 16-bit product
    without hardware is nobody's peak.
    """
    row = PRECISIONS[precision]
    if device.type == "cuda":
        peaks = datasheet_tflops(torch.cuda.get_device_name(device))
        if row.kind in peaks:
            tflops = peaks[row.kind]
            return tflops * 1e12, f"{tflops:g} TFLOP/s, datasheet, dense"
        with tf32(row.tf32):
            rate = machine.matmul_rate(products_dtype(precision), device, 4096)
        return rate, f"{rate / 1e12:.3g} TFLOP/s, a 4096² product measured here"
    rate, kind = machine.matmul_rate(torch.float32, device, 512), "float32"
    # without fast hardware a product of 512² takes a second
    if row.is_16bit and not machine.support(precision, device).slow:
        own = machine.matmul_rate(products_dtype(precision), device, 512)
        if own > rate:
            rate, kind = own, row.products
    how = f"one thread's rate × {torch.get_num_threads()}"
    return rate, f"{rate / 1e12:.2g} TFLOP/s, a {kind} 512² product measured here, {how}"


def flops_per_token(model: nn.Module, seq_len: int) -> float:
    """Return the model FLOPs of one training step (forward and backward) per token: 6·N + 12·L·d·T.

    N counts parameters without position embeddings. Kaplan et al. 2020 (2001.08361), PaLM appendix
    B (2204.02311). Recomputation is not counted, nor is what the optimizer does.
    """
    config = model.config
    n_params = sum(p.numel() for p in model.parameters()) - model.transformer.wpe.weight.numel()
    return 6.0 * n_params + 12.0 * config.n_layer * config.n_embd * seq_len


def timing_of(
    step_ms: list[float], flops_per_token: float, config: Config, device: torch.device
) -> Timing | None:
    """Return median and rates of the steps after the first UNTIMED_STEPS (or of what there is)."""
    timed = step_ms[min(UNTIMED_STEPS, max(0, len(step_ms) - 1)) :]
    if not timed:
        return None
    median = statistics.median(timed)
    tokens_per_s = config.tokens_per_step / median * 1000
    rate, denominator = peak_rate(config.precision, device)
    return Timing(
        median_step_ms=median,
        tokens_per_s=tokens_per_s,
        mfu=flops_per_token * tokens_per_s / rate / accelerated.world_size(),
        mfu_denominator=denominator,
    )
