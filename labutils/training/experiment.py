"""From a config to a saved record:

A thin layer that builds the model, data and optimizer and calls `train`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from labutils.config.reader import load_config
from labutils.config.schema import Config, ConfigError
from labutils.files import commit, new_id, require_room
from labutils.machine.gpu import choose_device
from labutils.machine.here import environment
from labutils.memory.device_memory import (
    expandable_segments,
    free_memory,
    memory_limit,
    without_expandable_segments,
)
from labutils.memory.errors import is_out_of_memory, short_message
from labutils.memory.measure import measure_step
from labutils.prediction.out_of_memory import require_host_memory, spare_host_memory, ways_out
from labutils.techniques import compiling, precision
from labutils.techniques.schedule import learning_rate_at
from labutils.training import distributed
from labutils.training import saved_state as resuming
from labutils.training.code_version import code_version
from labutils.training.loop import to_device, train
from labutils.training.records import RunRecord, find_equal, state_files
from labutils.training.speed import flops_per_token, timing_of
from labutils.workload.build import (
    build_batches,
    build_experiment_model,
    build_loss,
    build_optimizer,
)

NOT_SAVED = "not saved"  # how a record's reason begins that is in memory only


def run_experiment(
    config: Config | str,
    *,
    where: torch.device | None = None,
    repeat: int = 0,
    rerun: bool = False,
    resume: bool = False,
    progress: bool = True,
) -> RunRecord:
    """Train the experiment of a config (or of a YAML file) and save and return its record.

    A completed run with equal config, code, corpus, device and `repeat` is returned instead, unless
    `rerun=True`. A slow precision (see `precision.support`) runs fewer steps. After training, one untimed step
    measures memory. `resume=True` continues from the state that an unfinished run with `save_every`
    has left in runs/ (to losses that are bit-identical on a CPU), or begins if there is none.
    Raises ConfigError, DataError, PrecisionUnsupported or WeightsUnavailable, before training. Out
    of memory and Ctrl-C are outcomes in the record, and what was allocated is free again. Raises
    OSError before training if runs/ cannot be written; should that fail after it, the record is
    returned all the same, and says so. Raises RecordError if a state is damaged, or belongs to
    another experiment of that name.
    """
    config = config if isinstance(config, Config) else load_config(config)
    where = distributed.join(where or choose_device())
    progress = progress and distributed.rank() == 0
    resolved = config.on(where.type)
    name = precision.without_choice(resolved.precision, precision.support("bf16", where).ok)
    resolved = resolved.model_copy(update={"precision": name})
    answer = precision.require(resolved.precision, where)
    steps = distributed.from_first(precision.steps_for(resolved.steps, answer))
    if resolved.grad_accum_steps % distributed.world_size():
        raise ConfigError(
            f"{config.name}: `tokens_per_step`: {resolved.tokens_per_step} tokens are {resolved.grad_accum_steps} "
            f"micro-batches, which {distributed.world_size()} processes cannot share equally"
        )
    if distributed.world_size() > 1 and (resume or resolved.save_every):
        raise ConfigError(
            f"{config.name}: `save_every`: states are saved in a single process only; set it to 0"
        )
    is_short = spare_host_memory(resolved, where)  # before the environment is asked, which says so
    stream, held_out, corpus, per_epoch = build_batches(resolved)
    identity = dict(
        name=config.name,
        note=config.note,
        config=resolved.model_dump(exclude={"when_cpu", "overrides"}),
        corpus=corpus.digest,
        repeat=repeat,
        tokens_per_step=resolved.tokens_per_step,
    )
    empty = RunRecord(
        id="",
        created="",
        environment={**_environment(resolved, where), "commit": commit()},
        code=code_version(),
        steps_planned=steps,
        **identity,
    )
    saver = resuming.Saver(empty, resolved.save_every, new_id()[0])
    if (
        not rerun
        and not (resume and saver.left)
        and (known := distributed.from_first(find_equal(empty)))
    ):
        if progress:
            print(
                f"{known.name}: reusing run {known.id} (equal config, code, corpus and device; rerun=True forces)"
            )
        return known
    if not distributed.rank():
        require_room()  # better now than after hours
    if resume:
        done = saver.find()
        resumed = {"resumed": f"after step {done}"} if done else {}
        empty = empty.model_copy(update={"environment": empty.environment | resumed})
    if progress:
        _announce(config, where, steps, resolved.steps, answer.reason)
        if is_short and "malloc" in empty.environment:  # only glibc can
            print(
                f"{config.name}: memory is short, so freed blocks go back to the system at once: steps take longer"
            )
        if resume:
            none = "begins at step 0: it has no saved state"
            none += "; `python -m labutils runs` lists those of other runs" if state_files() else ""
            print(f"{config.name}: " + (f"continues after step {done}" if done else none))
            if done and not resolved.save_every:
                print(f"{config.name}: save_every is 0, so no further state will be saved")
        elif saver.left:
            print(
                f"{config.name}: begins at step 0; an unfinished run has left a state: --resume would continue it"
            )
    try:
        with (
            expandable_segments(resolved.expandable_segments, where),
            memory_limit(resolved.memory_limit_gib, where),
        ):
            if is_short:
                require_host_memory(resolved, where)
            record = _train_and_measure(resolved, where, steps, stream, held_out, saver, progress)
        record = record.model_copy(update={"environment": record.environment | empty.environment})
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error) or distributed.world_size() > 1:
            raise  # of several processes one that goes on alone would be waited for
        run_id, created = new_id()
        failed = {
            "id": run_id,
            "created": created,
            "outcome": "out_of_memory",
            "reason": short_message(error),
        }
        record = empty.model_copy(update=failed)
    free_memory()
    if (
        record.outcome == "out_of_memory"
    ):  # here: in the handler the traceback still keeps tensors alive
        with suppress(
            KeyboardInterrupt
        ):  # while they are looked for; the record must still be saved
            reason = f"{record.reason}. {ways_out(config, where)}"
            record = record.model_copy(update={"reason": reason})
    epochs = len(record.series.loss) * resolved.grad_accum_steps / per_epoch
    record = record.model_copy(update={**identity, "steps_planned": steps, "epochs": epochs})
    if distributed.rank():
        return record
    try:
        path = record.save()
    except OSError as error:
        print(
            f"{record.name}: NOT SAVED: {error}. The record is returned: make room, then record.save()"
        )
        return record.model_copy(update={"reason": f"{NOT_SAVED}: {error}"})
    if record.outcome != "completed":
        print(f"{record.name}: {record.outcome.replace('_', ' ')}: {record.reason}")
        if saver.done and record.outcome != "non_finite":  # which would come again
            print(
                f"{record.name}: the state after step {saver.done} is saved; continue with: {saver.command}"
            )
    else:
        saver.finish()
    if progress:
        print(f"{record.name}: saved {path.name}")
    return record


def _environment(config: Config, where: torch.device) -> dict[str, str]:
    limit = config.memory_limit_gib if where.type == "cuda" else 0
    emulated = (
        {"memory limit": f"{limit:g} GiB, emulated: of the allocator, without the context"}
        if limit
        else {}
    )
    if config.expandable_segments and where.type == "cuda":
        missing = without_expandable_segments()
        emulated["allocator"] = (
            f"default; expandable segments: {missing}" if missing else "expandable segments"
        )
    n = distributed.world_size()
    return environment(where) | emulated | ({"processes": str(n)} if n > 1 else {})


def _train_and_measure(
    config: Config,
    where: torch.device,
    steps: int,
    stream: Iterator[dict],
    held_out: list[dict],
    saver: resuming.Saver,
    progress: bool,
) -> RunRecord:
    """Train, then measure one more step; everything allocated dies with this frame."""
    model = build_experiment_model(config, where)
    saver.require_room(model)
    n = distributed.world_size()
    if n > 1:
        stream = itertools.islice(stream, distributed.rank(), None, n)
        torch.manual_seed(
            config.seed + distributed.rank()
        )  # masks of their own; the weights are made already
        if progress:
            print(f"{config.name}: {distributed.traffic(model)}")
    optimizer = build_optimizer(model, config)
    scaler = precision.grad_scaler(
        config.precision, where, config.init_scale, config.growth_interval
    )
    loss_fn = build_loss(config, where, accumulates=config.grad_accum_steps > n)
    if config.compile != compiling.OFF and progress:
        print(
            f"{config.name}: the first step compiles the model (compile: {config.compile}); that takes a while"
        )
    record = train(
        model,
        stream,
        loss_fn,
        optimizer,
        steps=steps,
        grad_accum_steps=config.grad_accum_steps // n,
        precision=config.precision,
        scaler=scaler,
        max_grad_norm=config.max_grad_norm,
        learning_rate_at=partial(learning_rate_at, config=config),
        held_out=held_out,
        eval_every=config.eval_every,
        saver=saver,
        name=config.name,
        progress=progress,
    )
    timing = timing_of(record.series.step_ms, flops_per_token(model, config.seq_len), config, where)
    record = record.model_copy(update={"timing": timing})
    if isinstance(loss_fn, compiling.CompiledLoss):
        record = record.model_copy(
            update={"environment": record.environment | {"torch.compile": loss_fn.report}}
        )
    if record.outcome != "completed":
        return record
    micro_batches = [to_device(next(stream), where) for _ in range(config.grad_accum_steps // n)]
    try:
        report = measure_step(
            model,
            micro_batches,
            getattr(loss_fn, "eager", loss_fn),  # compiled code has no hooks to tell phases by
            optimizer,
            precision=config.precision,
            scaler=scaler,
            max_grad_norm=config.max_grad_norm,
        )
    except KeyboardInterrupt:
        reason = "stopped (Ctrl-C or SIGTERM) after training, while memory was measured"
        return record.model_copy(update={"outcome": "interrupted", "reason": reason})
    except OSError as error:
        return record.model_copy(update={"reason": f"memory could not be measured: {error}"})
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = f"after training, while memory was measured: {short_message(error)}"
        return record.model_copy(update={"outcome": "out_of_memory", "reason": reason})
    if config.compile != compiling.OFF:
        report = report.model_copy(update={"method": f"{report.method}, not compiled"})
    return record.model_copy(update={"memory": report})


def run_experiments(
    configs: Iterable[Config | str], *, baseline_repeats: int = 2, **options: Any
) -> list[RunRecord]:
    """Run configs (or YAML files) and return their records; the first, the baseline, runs
    `baseline_repeats` times.

    A precision that this device lacks gives an unsaved record with `outcome` "unsupported" and the
    reason.
    """
    records = []
    for position, config in enumerate(configs):
        for repeat in range(1 if position else baseline_repeats):
            try:
                records.append(run_experiment(config, repeat=repeat, **options))
            except precision.PrecisionUnsupported as problem:
                config = config if isinstance(config, Config) else load_config(config)
                run_id, created = new_id()
                reason = str(problem).partition(": ")[2]
                records.append(
                    RunRecord(
                        id=run_id,
                        created=created,
                        name=config.name,
                        note=config.note,
                        outcome="unsupported",
                        reason=reason,
                    )
                )
                if options.get("progress", True):
                    print(f"{config.name}: not on this device: {reason}")
    return records


def _announce(config: Config, where: torch.device, steps: int, planned: int, reason: str) -> None:
    """Print each value that does not come from the main part of the file."""
    for line in config.changes(where.type):
        print(f"{config.name}: {line}")
    if config.memory_limit_gib and where.type != "cuda":
        print(f"{config.name}: memory_limit_gib is of CUDA's allocator: a CPU run ignores it")
    if (
        config.expandable_segments
        and where.type == "cuda"
        and (missing := without_expandable_segments())
    ):
        print(
            f"{config.name}: expandable_segments: {missing}, so torch's default allocator runs: it needs more memory"
        )
    if steps != planned:
        print(f"{config.name}: steps = {steps} (not {planned}: {reason})")
