"""Do 16 bits train as stably as 32? The arms of a trial over seeds, one run, and the record.

All arms of a seed begin with the same weights and see the same batches, so they are pairs. The rate
is constant after the warm-up: a short run of 16 steps or more is the beginning of a longer one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

from labutils.config.choices import PRECISIONS
from labutils.config.reader import load_config
from labutils.config.schema import Config
from labutils.files import REFERENCE_DIR
from labutils.training.convergence import read_record
from labutils.training.loop import train
from labutils.training.planned import rate_of
from labutils.training.records import RunRecord
from labutils.workload.build import Workload, build_data, build_workload

RECORD = REFERENCE_DIR / "stability.csv"
STEPS, EVERY, WARMUP_STEPS = 64, 8, 8
GROWTH_INTERVAL = 8  # torch's is 2000: a short run then meets what a long one meets
BASE = next(iter(PRECISIONS))


def _arms() -> dict[str, tuple[str, str, str]]:
    """Return {arm: (precision, optimizer, words)}: all precisions that every device computes.

    Where weights have 16 bits there are two, which differ in how weights and moments are rounded.
    """
    arms = {}
    for row in PRECISIONS.values():
        words = row.name.removeprefix("pure_").upper()
        if row.not_on_cpu:
            continue
        if row.autocast:
            words += " autocast, scaler" if row.loss_scale else " autocast"
        if not row.is_16bit or row.autocast:
            arms[row.name] = (row.name, "adamw", words)
        else:
            arms[row.name] = (row.name, "adamw", f"pure {words}, to nearest")
            arms[f"{row.name}_sr"] = (row.name, "adamw_bf16", f"pure {words}, stochastic")
    return arms


ARMS = _arms()
# Nats per token: half a per cent of the perplexity. At the small rate one step of FP32 gains more.
WORTH_TELLING = 0.005
ROUNDED_TO_NEAREST = list(ARMS)[-2]
RATES = {"small": 1e-4, "usual": 1e-3, "far too high": 3.0}


def config_of(arm: str, rate: str, seed: int, steps: int = STEPS, **changes: Any) -> Config:
    """Return the config of one run: GPT-2 nano, 4 sequences of 32 tokens a step, no dropout.

    `changes` override it.
    """
    precision, optimizer, _ = ARMS[arm]
    options = {
        "name": arm,
        "seed": seed,
        "model": "gpt2-nano",
        "seq_len": 32,
        "micro_batch_size": 4,
        "tokens_per_step": 128,
        "steps": steps,
        "learning_rate": RATES[rate],
        "lr_schedule": "constant",
        "lr_warmup_steps": min(WARMUP_STEPS, steps - 1),
        "precision": precision,
        "optimizer": optimizer,
        "growth_interval": GROWTH_INTERVAL,
        "dropout": 0.0,  # stochastic rounding draws from the same generator
    }
    return load_config("accumulation", **(options | changes))


def run_config(
    config: Config, device: torch.device, change: Callable[[nn.Module], object] | None = None
) -> tuple[Workload, RunRecord]:
    """Train a config with all its steps, even where its precision is slow; the record is unsaved.

    `change(model)` is called before. Raises PrecisionUnsupported.
    """
    config = config.on(device.type)
    work = build_workload(config, device, build_data(config))
    if change:
        change(work.model)
    record = train(
        work.model,
        work.data.batches,
        work.loss_fn,
        work.optimizer,
        steps=config.steps,
        precision=config.precision,
        scaler=work.scaler,
        max_grad_norm=config.max_grad_norm,
        learning_rate_at=rate_of(config),
        progress=False,
    )
    return work, record


def run_one(
    arm: str,
    rate: str,
    seed: int,
    device: torch.device,
    steps: int = STEPS,
    change: Callable[[nn.Module], object] | None = None,
) -> pd.DataFrame:
    """Train one run; return a row after each EVERY steps. `change(model)` is called before.

    `loss` is the mean over those steps, in nats per token: NaN if one of them was not finite, and
    in all rows after that. `skipped` counts the scaler's skips since the start. Raises ValueError
    if `steps` is no multiple of EVERY, KeyError for an unknown arm or rate, PrecisionUnsupported.
    """
    if steps <= 0 or steps % EVERY:
        raise ValueError(f"{steps} steps are no multiple of {EVERY}")
    _, record = run_config(config_of(arm, rate, seed, steps), device, change)
    return rows_of(arm, rate, seed, record.series.loss, record.series.skipped, steps)


def rows_of(
    arm: str, rate: str, seed: int, losses: list[float], skipped: list[bool], steps: int
) -> pd.DataFrame:
    """Return the rows of one run from its series, which may have ended early."""
    rows, mean = [], 0.0
    for end in range(EVERY, steps + 1, EVERY):
        window = losses[end - EVERY : end]
        is_whole = len(window) == EVERY and math.isfinite(mean)
        mean = statistics.fmean(window) if is_whole else math.nan
        mean = mean if math.isfinite(mean) else math.nan
        facts = {"rate": rate, "arm": arm, "seed": seed, "step": end}
        rows.append(facts | {"loss": mean, "skipped": sum(skipped[:end])})
    return pd.DataFrame(rows)


def column(rows: pd.DataFrame, arm: str, rate: str, step: int, name: str = "loss") -> list[float]:
    """Return a column of some rows after so many steps, in order of seeds.

    Raises ValueError if there is none.
    """
    found = rows[(rows.arm == arm) & (rows.rate == rate) & (rows.step == step)]
    if found.empty:
        raise ValueError(f"no {arm!r} at the {rate} rate after {step} steps")
    return found.sort_values("seed")[name].tolist()


def read(path: Path = RECORD) -> tuple[dict[str, str], pd.DataFrame]:
    """Return what the record was made with, and its rows: see `run_one`."""
    record = read_record(path)
    return record.facts, record.losses
