"""From a config to a saved record.

Taught in 01, section 2.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache, partial

import torch
from torch import nn

from labutils import machine
from labutils.config.choices import COMPILE_MODES, PRECISIONS
from labutils.config.reader import card_named, load_config
from labutils.config.schema import Config, Run, resolve
from labutils.files import code_version, commit, new_id
from labutils.machine import in_notebook
from labutils.memory.device_memory import (
    expandable_segments,
    free_memory,
    memory_limit,
    without_expandable_segments,
)
from labutils.memory.errors import is_out_of_memory, short_message
from labutils.memory.ledger import NOT_COMPILED
from labutils.memory.measure import measure_step
from labutils.techniques.precision import tf32
from labutils.techniques.schedule import learning_rate_at
from labutils.training.record import PLANNED, Outcome, RunRecord, Timing, find_equal
from labutils.training.train import to_device, train
from labutils.workload.build import Data, build_data, build_workload

UNTIMED_STEPS = 2  # the first steps allocate optimizer state and choose kernels


def run_config(
    config: Config | str,
    device: torch.device,
    *,
    rerun: bool,
    progress: bool,
    require_memory: Callable[[Config], None],
    ways_out: Callable[[Config, torch.device], str],
) -> RunRecord:
    """Train a config (or a YAML file's), measure one more step, save and return the record.

    See `lab.run_experiment`. `require_memory` raises torch.OutOfMemoryError if a config, resolved
    for a CPU, has no room there. `ways_out` returns what to change in a config that has run out of
    memory.
    """
    config = config if isinstance(config, Config) else load_config(config)
    # Once, and before anything is allocated: all that follows asks this run, so that training,
    # record and announcement cannot differ about, say, which 16 bits were meant.
    run = resolve(config, machine.card(device), to_train=True)
    data = build_data(run.config)
    record = planned_record(run, device, data)
    # Equal code on an equal device gives equal losses, so nobody waits for them a second time:
    # Run All of a notebook that was stopped goes on where it was.
    known = None if rerun else find_equal(record)
    if known:
        if progress:
            print(
                f"{known.name}: reusing run {known.id} "
                "(equal config, code, corpus and device; rerun=True forces)"
            )
        return known
    path = record.save()  # that nothing can be written is better known now than after an hour
    try:
        if progress:
            announce(run, device)
        # Both are settings of the process, not of a run: they are taken back whatever happens.
        with (
            expandable_segments(run.config.expandable_segments, device),
            memory_limit(run.config.memory_limit_gib, device),
        ):
            # CUDA's allocator raises, and the next cell runs. Linux would kill the whole kernel.
            if device.type == "cpu":
                require_memory(run.config)
            _train_and_measure(run, device, data, record, progress)
    # Also Ctrl-C: the steps until then are a result, and a class ends before all runs do.
    except BaseException as error:
        record.outcome, reason = _outcome_of(error)
        n_done = len(record.series.loss)
        record.reason = f"after {n_done} of {run.steps} steps: {reason}" if n_done else reason
        # A fault of the code is no outcome to compare: the traceback has to be seen.
        if record.outcome == "failed":
            record.save()
            raise
    free_memory()
    if record.outcome == "out_of_memory":
        # here: in the handler the traceback still keeps tensors alive
        with suppress(KeyboardInterrupt):  # while they are looked for: the record must be saved
            record.reason += f". {ways_out(config, device)}"
    micro_batches = len(record.series.loss) * run.config.grad_accum_steps
    record.epochs = micro_batches / data.micro_batches_per_epoch
    record.save()
    if record.outcome != "completed":
        print(record)
    if progress:
        print(f"{record.name}: saved {path.name}")
    if record.outcome == "interrupted" and in_notebook():
        raise KeyboardInterrupt(record.reason)  # it stops this cell, and Run All
    return record


def _outcome_of(error: BaseException) -> tuple[Outcome, str]:
    """Return how a run has ended, and why."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "stopped (Ctrl-C or SIGTERM)"
    if isinstance(error, FloatingPointError):
        return "non_finite", str(error)
    if is_out_of_memory(error):
        return "out_of_memory", short_message(error)
    return "failed", f"{type(error).__name__}: {error}"


def planned_record(run: Run, device: torch.device, data: Data) -> RunRecord:
    """Return the record that a run will fill; until then it says that the run has not ended."""
    run_id, created = new_id()
    return RunRecord(
        id=run_id,
        created=created,
        name=run.config.name,
        note=run.config.note,
        config=run.config.model_dump(exclude={"when_cpu", "overrides"}),
        environment=machine.environment(device) | {"commit": commit()},
        corpus=data.corpus.digest,
        code=code_version(),
        outcome="interrupted",
        reason=PLANNED,
        steps_planned=run.steps,
        tokens_per_step=run.config.tokens_per_step,
    )


def announce(run: Run, device: torch.device) -> None:
    """Print each value that is not of the main part of the file."""
    config, lines = run.config, list(run.changes)
    missing = without_expandable_segments()
    if config.expandable_segments and missing and device.type == "cuda":
        lines.append(
            f"expandable_segments: {missing}, so torch's default allocator runs: "
            "it needs more memory"
        )
    if run.steps != config.steps:
        lines.append(f"steps = {run.steps} (not {config.steps}: {run.reason})")
    if COMPILE_MODES[config.compile].is_on:
        mode = f"compile: {config.compile}"
        lines.append(f"the first step compiles the model ({mode}); that takes a while")
    for line in lines:
        print(f"{config.name}: {line}")


def rate_of(config: Config) -> Callable[[int], float]:
    """Return the learning rate of each step, counted from 0."""
    return partial(
        learning_rate_at,
        highest=config.learning_rate,
        schedule=config.lr_schedule,
        warmup_steps=config.lr_warmup_steps,
        steps=config.steps,
    )


def _train_and_measure(
    run: Run, device: torch.device, data: Data, record: RunRecord, progress: bool
) -> None:
    """Train, then measure one more step; fill the record as soon as something is there.

    Everything allocated dies with this frame.
    """
    config = run.config
    work = build_workload(config, device, data)
    options = {"precision": config.precision, "scaler": work.scaler}
    options["max_grad_norm"] = config.max_grad_norm
    try:
        train(
            work.model,
            data.batches,
            work.loss_fn,
            work.optimizer,
            steps=run.steps,
            grad_accum_steps=config.grad_accum_steps,
            learning_rate_at=rate_of(config),
            held_out=data.held_out,
            eval_every=config.eval_every,
            series=record.series,
            progress=progress,
            name=record.name,
            **options,
        )
    finally:
        record.timing = timing_of(record.series.step_ms, work.model, config, device)
    record.outcome, record.reason = "completed", ""
    # Not inside training: to measure takes time, and a step's time would then have that in it.
    loss_fn, compiled = work.loss_fn, ""
    if COMPILE_MODES[config.compile].is_on:
        mode = record.environment["torch.compile"] = loss_fn.report
        # a CUDA graph allocates nothing when it runs
        is_graph = device.type == "cuda" and mode in COMPILE_MODES
        is_graph = is_graph and COMPILE_MODES[mode].spares_launches
        if is_graph or mode not in COMPILE_MODES:  # or why it ran eagerly
            loss_fn, compiled = loss_fn.eager, NOT_COMPILED
    window = [to_device(next(data.batches), device) for _ in range(config.grad_accum_steps)]
    try:
        ledger = measure_step(work.model, window, loss_fn, work.optimizer, **options)
    except OSError as error:  # what the profiler writes
        record.reason = f"memory could not be measured: {error}"
        return
    record.memory = ledger.model_copy(update={"method": ledger.method + compiled})


# ---- Speed


def datasheet_tflops(product: str) -> Mapping[str, float]:
    """Return {kind of product: dense TFLOP/s} of a card by the name that torch gives it.

    It is {} if `cards.csv` lacks the card. A slice of a card or a variant (MIG, NVL, most laptops)
    has another name, so it has no datasheet.
    """
    try:
        speed = card_named(product).speed
    except ValueError:
        return {}
    return speed.tflops if speed else {}


@lru_cache(maxsize=8)
def peak_rate(precision: str, device: torch.device) -> tuple[float, str]:
    """Return (FLOP/s, where it is from): the denominator of an MFU, which says nothing without it.

    A datasheet's dense peak if the card is known, else a product measured here. On a CPU the
    float32 product's, or that of the precision's own dtype where it is faster: a 16-bit product
    without hardware is nobody's peak.
    """
    # Large enough for a card's peak; on a CPU a product of this size would take seconds.
    row, n, how = PRECISIONS[precision], 4096, ""
    kind = row.products
    if device.type == "cuda":
        tflops = datasheet_tflops(torch.cuda.get_device_name(device)).get(row.kind)
        if tflops:
            return tflops * 1e12, f"{tflops:g} TFLOP/s, datasheet, dense"
    else:
        n, how = 512, f", one thread's rate × {torch.get_num_threads()}"
        if machine.cpu_slowdown(kind) > 1:
            kind = "float32"
    with tf32(row.tf32):
        rate = machine.matmul_rate(getattr(torch, kind), device, n)
    return rate, f"{rate / 1e12:.2g} TFLOP/s, a {kind} {n}² product measured here{how}"


def flops_per_token(model: nn.Module, seq_len: int) -> float:
    """Return the model FLOPs of one training step (forward and backward) per token: 6·N + 12·L·d·T.

    N counts parameters without position embeddings. Kaplan et al. 2020 (2001.08361), PaLM appendix
    B (2204.02311). Recomputation is not counted, nor is what the optimizer does.
    """
    config = model.config
    n_params = sum(p.numel() for p in model.parameters()) - model.transformer.wpe.weight.numel()
    return 6.0 * n_params + 12.0 * config.n_layer * config.n_embd * seq_len


def timing_of(
    step_ms: list[float], model: nn.Module, config: Config, device: torch.device
) -> Timing | None:
    """Return median and rates of the steps after the first UNTIMED_STEPS (or of what there is)."""
    # of a run that was stopped at once its only step is better than nothing
    timed = step_ms[UNTIMED_STEPS:] or step_ms[-1:]
    if not timed:
        return None
    # One step that waited for another program would move a mean.
    median = statistics.median(timed)
    tokens_per_s = config.tokens_per_step / median * 1000
    flops_per_s = flops_per_token(model, config.seq_len) * tokens_per_s
    rate, source = peak_rate(config.precision, device)
    return Timing(
        median_step_ms=median,
        tokens_per_s=tokens_per_s,
        mfu=flops_per_s / rate,
        mfu_denominator=source,
    )
