"""From a config to a saved record: build what it trains, train it, measure it, save what came."""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from labutils.config.choices import COMPILE_MODES
from labutils.config.reader import load_config
from labutils.config.resolve import Run, resolve
from labutils.config.schema import Config
from labutils.files import new_id, require_room
from labutils.machine import here
from labutils.machine.gpu import choose_device
from labutils.machine.host import in_notebook
from labutils.memory.device_memory import expandable_segments, free_memory, memory_limit
from labutils.memory.errors import is_out_of_memory, short_message
from labutils.memory.measure import measure_step
from labutils.prediction.out_of_memory import require_host_memory, suggest_changes
from labutils.training import accelerated
from labutils.training.loop import to_device, train
from labutils.training.planned import (
    announce,
    announce_state,
    planned_record,
    rate_of,
    require_equal_shares,
)
from labutils.training.records import RunRecord, find_equal
from labutils.training.resume import Saver
from labutils.training.speed import flops_per_token, timing_of
from labutils.workload.build import Data, Workload, build_data, build_workload

NOT_SAVED = "not saved"  # how a record's reason begins that is in memory only


def run_experiment(
    config: Config | str,
    *,
    device: torch.device | None = None,
    repeat: int = 0,
    rerun: bool = False,
    resume: bool = False,
    progress: bool = True,
) -> RunRecord:
    """Train the experiment of a config (or of a YAML file), and save and return its record.

    A completed run with equal config, code, corpus, device and `repeat` is returned instead, unless
    `rerun=True`. A slow precision runs fewer steps. After training, one untimed step measures
    memory. `resume=True` continues from the state that an unfinished run with `save_every` has left
    in runs/, or begins if there is none; on a CPU its losses are bit-identical.

    Raises ConfigError, DataError, PrecisionUnsupported or WeightsUnavailable, before training. Out
    of memory and Ctrl-C are outcomes in the record, and what was allocated is free again. In a
    notebook KeyboardInterrupt is raised again when the record is saved. Raises
    OSError before training if runs/ cannot be written; should that fail after it, the record is
    returned all the same, and says so. Raises RecordError if a state is damaged, or belongs to
    another experiment of that name.
    """
    config = config if isinstance(config, Config) else load_config(config)
    device = accelerated.own_device(device or choose_device())
    progress = progress and accelerated.rank() == 0
    saver = Saver(config.name, repeat, config.save_every)
    if resume:
        saver.read()
    run = resolve(config, here.card(device), to_train=True)
    run = replace(run, steps=accelerated.from_first(run.steps))
    require_equal_shares(run.config, resume)
    data = build_data(run.config)
    planned = planned_record(config, run, device, data, repeat)
    saver.plan(planned)
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
        resumed = planned.environment | {"resumed": f"after step {saver.done}"}
        planned = planned.model_copy(update={"environment": resumed})
    if progress:
        announce(config, run, device)
        announce_state(run.config, saver, resume)
    record = _train_safely(config, run, device, data, saver, planned, progress)
    if accelerated.rank():
        return record
    saved = _save(record, saver, progress)
    if saved.outcome == "interrupted" and in_notebook():
        raise KeyboardInterrupt(saved.reason)  # it stops this cell, and Run All
    return saved


def _train_safely(
    config: Config,
    run: Run,
    device: torch.device,
    data: Data,
    saver: Saver,
    planned: RunRecord,
    progress: bool,
) -> RunRecord:
    """Train and measure; running out of memory becomes an outcome with its ways out."""
    try:
        with (
            expandable_segments(run.config.expandable_segments, device),
            memory_limit(run.config.memory_limit_gib, device),
        ):
            if device.type == "cpu":
                require_host_memory(run.config)
            results = _train_and_measure(run, device, data, saver, progress)
    except (RuntimeError, MemoryError) as error:
        # of several processes one that goes on alone would be waited for
        if not is_out_of_memory(error) or accelerated.world_size() > 1:
            raise
        results = {"outcome": "out_of_memory", "reason": short_message(error)}
    free_memory()
    if results["outcome"] == "out_of_memory":
        # here: in the handler the traceback still keeps tensors alive
        with suppress(KeyboardInterrupt):  # while they are looked for: the record must be saved
            results["reason"] += f". {suggest_changes(config, device)}"
    run_id, created = new_id()
    results |= {"id": run_id, "created": created}
    results["environment"] = planned.environment | results.get("environment", {})
    record = planned.model_copy(update=results)
    micro_batches = len(record.series.loss) * run.config.grad_accum_steps
    epochs = micro_batches / data.micro_batches_per_epoch
    return record.model_copy(update={"epochs": epochs})


def _train_and_measure(
    run: Run, device: torch.device, data: Data, saver: Saver, progress: bool
) -> dict[str, Any]:
    """Train, then measure one more step; return what this adds to the planned record.

    Everything allocated dies with this frame.
    """
    config, n = run.config, accelerated.world_size()
    work = build_workload(config, device, data, n)
    if n > 1:
        data.batches = itertools.islice(data.batches, accelerated.rank(), None, n)
        # masks of their own; the weights are made already
        torch.manual_seed(config.seed + accelerated.rank())
    if COMPILE_MODES[config.compile].is_on and progress:
        mode = f"compile: {config.compile}"
        print(f"{config.name}: the first step compiles the model ({mode}); that takes a while")
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
    results = {
        "series": training.series,
        "held_out": training.held_out,
        "outcome": training.outcome,
        "reason": training.reason,
        "timing": timing_of(training.series.step_ms, flops, config, device),
    }
    if COMPILE_MODES[config.compile].is_on:
        results["environment"] = {"torch.compile": work.loss_fn.report}
    if training.outcome == "completed":
        results |= _measured(work, config, device, n)
    return results


def _measured(
    work: Workload, config: Config, device: torch.device, n_processes: int
) -> dict[str, Any]:
    """Return what one more step adds to a record: its ledger, or why there is none."""
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
    except KeyboardInterrupt:
        reason = "stopped (Ctrl-C or SIGTERM) after training, while memory was measured"
        return {"outcome": "interrupted", "reason": reason}
    except OSError as error:
        return {"reason": f"memory could not be measured: {error}"}
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = f"after training, while memory was measured: {short_message(error)}"
        return {"outcome": "out_of_memory", "reason": reason}
    if COMPILE_MODES[config.compile].is_on:
        ledger = ledger.model_copy(update={"method": f"{ledger.method}, not compiled"})
    return {"memory": ledger}


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
