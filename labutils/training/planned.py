"""What a run will be: its record before it begins, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from labutils.config.resolve import Run
from labutils.config.schema import Config, ConfigError
from labutils.files import code_version, commit
from labutils.machine import here
from labutils.memory.device_memory import without_expandable_segments
from labutils.techniques.schedule import learning_rate_at
from labutils.training import accelerated
from labutils.training.records import RunRecord
from labutils.training.resume import Saver
from labutils.workload.build import Data


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


def planned_record(
    config: Config, run: Run, device: torch.device, data: Data, repeat: int
) -> RunRecord:
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
        repeat=repeat,
        steps_planned=run.steps,
        tokens_per_step=run.config.tokens_per_step,
    )


def _environment(config: Config, device: torch.device) -> dict[str, str]:
    """Return what a record says about the machine, and about how it was limited."""
    found = here.environment(device)
    if device.type == "cuda" and config.memory_limit_gib:
        limit = f"{config.memory_limit_gib:g} GiB"
        found["memory limit"] = f"{limit}, emulated: of the allocator, without the context"
    if device.type == "cuda" and config.expandable_segments:
        missing = without_expandable_segments()
        default = f"default; expandable segments: {missing}"
        found["allocator"] = default if missing else "expandable segments"
    if accelerated.world_size() > 1:
        found["processes"] = str(accelerated.world_size())
    return found


def announce(config: Config, run: Run, device: torch.device) -> None:
    """Print each value that does not come from the main part of the file."""
    for line in config.changes(device.type):
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
