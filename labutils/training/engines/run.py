"""A config through an engine, to a saved record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from labutils.config.choices import COMPILE_MODES, PRECISIONS
from labutils.config.reader import load_config
from labutils.config.resolve import resolve
from labutils.config.schema import Config, ConfigError
from labutils.files import code_version, new_id
from labutils.machine import here
from labutils.machine.gpu import choose_device
from labutils.memory.device_memory import free_memory
from labutils.techniques.precision import tf32
from labutils.training import accelerated
from labutils.training.engines import with_accelerate, with_fabric, with_trainer
from labutils.training.engines.parts import Parts, require
from labutils.training.records import RunRecord, find_equal
from labutils.training.runs import announce, flops_per_token, planned_record, rate_of, timing_of
from labutils.training.train import evaluate
from labutils.workload.build import build_data, build_workload

ENGINES = {
    "trainer": (with_trainer.train, "transformers"),
    "accelerate": (with_accelerate.train, "accelerate"),
    "fabric": (with_fabric.train, "lightning"),
}


def run_engine(
    config: Config | str,
    engine: str,
    *,
    device: torch.device | None = None,
    rerun: bool = False,
    progress: bool = True,
    callbacks: Sequence[Any] = (),
) -> RunRecord:
    """Train the experiment of a config with a framework; save and return its record.

    The record's name is that of the config and the engine, and its environment names the version.
    It has no memory ledger. A completed equal run is returned instead, unless `rerun=True`.
    `callbacks` are a Trainer's own, for the engine `trainer`; they force a rerun.
    Raises ValueError for an unknown engine, FrameworkMissing, and what `run_experiment` raises;
    ConfigError too for what an engine cannot do.
    """
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}; there are: {', '.join(ENGINES)}, plain")
    train, package = ENGINES[engine]
    require("accelerate" if engine == "trainer" else package)
    config = config if isinstance(config, Config) else load_config(config)
    device = device or choose_device()
    run = resolve(config, here.card(device), to_train=True)
    run = replace(run, config=_for_engine(run.config, engine, progress))
    data = build_data(run.config)
    planned = _planned(config, run, device, data, engine, package)
    known = None if rerun or callbacks else find_equal(planned)
    if known:
        if progress:
            print(f"{known.name}: reusing run {known.id} (rerun=True forces)")
        return known
    if progress:
        announce(config, run, device)
    record = _train(run, device, data, train, planned, callbacks)
    path = record.save()
    if progress:
        print(f"{record.name}: saved {path.name}")
    return record


def _planned(config, run, device, data, engine, package) -> RunRecord:
    planned = planned_record(config, run, device, data)
    version = f"{engine} ({package} {require(package).__version__})"
    name = f"{config.name}_{engine}"
    environment = planned.environment | {"engine": version}
    changed = {"name": name, "environment": environment, "code": code_version()}
    return planned.model_copy(update=changed)


def _train(run, device, data, train, planned, callbacks) -> RunRecord:
    config = run.config
    plain_blocks = config.model_copy(update={"gradient_checkpointing": "none"})
    work = build_workload(plain_blocks, device, data)
    parts = Parts(
        config,
        work.model,
        work.optimizer,
        work.loss_fn,
        work.scaler,
        data.batches,
        run.steps,
        rate_of(config),
        device,
        callbacks,
    )
    with tf32(PRECISIONS[config.precision].tf32):
        series = train(parts)
        held_out = evaluate(work.model, data.held_out, work.loss_fn, precision=config.precision)
    flops = flops_per_token(work.model, config.seq_len)
    run_id, created = new_id()
    found = {
        "id": run_id,
        "created": created,
        "series": series,
        "held_out": [(run.steps, held_out)],
        "timing": timing_of(series.step_ms, flops, config, device),
        "epochs": run.steps * config.grad_accum_steps / data.micro_batches_per_epoch,
        "tokens_per_step": config.grad_accum_steps * config.micro_batch_size * (config.seq_len - 1),
    }
    free_memory()
    return planned.model_copy(update=found)


def _for_engine(config: Config, engine: str, progress: bool) -> Config:
    """Return the config as an engine can train it. Raises ConfigError for what it cannot do."""
    refused = {
        "gradient_checkpointing": config.gradient_checkpointing not in ("none", "block"),
        "compile": COMPILE_MODES[config.compile].is_on,
        "optimizer_in_backward": config.optimizer_in_backward,
        "loss_chunk_tokens": config.loss_chunk_tokens > 0,
        "save_every": config.save_every > 0,
        "eval_every": config.eval_every > 0,
    }
    found = [
        f"`{key}: {getattr(config, key)}`" for key, is_refused in refused.items() if is_refused
    ]
    if found:
        raise ConfigError(f"{config.name}: --engine {engine} does not take {', '.join(found)}")
    if accelerated.world_size() > 1:
        raise ConfigError(f"{config.name}: --engine {engine} trains in a single process only")
    clips = config.max_grad_norm > 0 and PRECISIONS[config.precision].loss_scale
    if engine == "fabric" and clips and config.optimizer_impl == "fused":
        if progress:
            print(
                f"{config.name}: optimizer_impl = foreach (not fused: Fabric refuses to clip the "
                "scaled gradients of a fused optimizer)"
            )
        return config.model_copy(update={"optimizer_impl": "foreach"})
    return config
