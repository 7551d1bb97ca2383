"""Make the records of long runs: `python -m benchmarks.records convergence rates stability`.

Each is a CSV in labutils/reference/, below lines that say what it was made with.

convergence: the ARMS below with ten seeds each, on the same tokens: about twenty minutes on one
thread of a CPU. rates: batches of 8 and of 32 at every rate of LEARNING_RATES, with seed 0.
Held-out losses are on all held-out text.
stability: six arms at three rates with ten seeds each, a decaying rate and torch's own growth
interval: half an hour to three hours on one thread, most of them in FP16. Each of its runs is kept
in runs/ when it ends, so it continues where it was stopped.
unscaled: section 7 of notebook 01 for longer, with five seeds: FP16 without a scaler, and FP32
whose queries and keys learn nothing. About four minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm import tqdm

from labutils import machine
from labutils.config.reader import load_config
from labutils.config.schema import Config
from labutils.files import REFERENCE_DIR, code_version, commit, new_id, runs_dir, write_atomically
from labutils.machine import choose_device
from labutils.techniques.loss import lm_loss_sum
from labutils.training.run import rate_of
from labutils.training.train import Series, train
from labutils.workload.build import build, build_workload
from labutils.workload.data import batches, build_data, load_corpus, sequences
from labutils.workload.gpt2 import build_model

SEEDS, TOKENS, EVERY_TOKENS = 10, 98_304, 8_192
LEARNING_RATES = (3.5e-4, 5e-4, 7e-4, 1e-3, 1.4e-3, 2e-3, 2.8e-3)
FILES = {"convergence": "convergence", "rates": "convergence_rates", "stability": "stability"}
FILES["unscaled"] = "unscaled"
RULES = {
    "convergence": "rate times the square root of (batch / 8); constant after 2048 tokens",
    "rates": "the same rates for both batches, seed 0; constant after 2048 tokens",
}


def facts_of(what: str, corpus: str) -> dict[str, str]:
    """Return what a record is made with, but for what it says of its own arms."""
    facts = machine.environment(choose_device())
    facts.pop("device_type")
    facts |= {"commit": commit(), "corpus": corpus, "created": new_id()[1]}
    facts["threads"] = str(torch.get_num_threads())
    facts["made by"] = f"python -m benchmarks.records {what}"
    return facts


def text_of(facts: dict[str, str], rows: pd.DataFrame) -> str:
    """Return the file: what the runs were made with, then their rows."""
    head = "".join(f"# {key}: {value}\n" for key, value in facts.items())
    return head + rows.to_csv(index=False, lineterminator="\n", na_rep="nan")


# ---- Convergence

# All runs have a constant rate after the warm-up. So a short run is the beginning of a longer one
# with the same seed, and the two can be compared after equally many tokens.
SEQ_LEN, WARMUP_TOKENS = 32, 2048
# {arm: (micro-batches in an optimizer step, sequences in each, learning rate)}. The rate of batch_8
# is the best of those in the record `convergence_rates`; the others follow the rule rate × √κ, or
# keep the rate. The last one is batch_32 in one part: the two differ by rounding alone.
ARMS = {
    "batch_8": (1, 8, 1e-3),
    "batch_16": (2, 8, 1e-3 * 2**0.5),
    "batch_32": (4, 8, 2e-3),
    "batch_32_same_rate": (4, 8, 1e-3),
    "batch_32_at_once": (1, 32, 2e-3),
}


def config_of(arm: str, seed: int, tokens: int, **changes: Any) -> Config:
    """Return the config of one run, of GPT-2 nano on any device; `changes` override it.

    `tokens` are a multiple of 1024, the tokens of the largest optimizer step.
    """
    grad_accum_steps, micro_batch_size, rate = ARMS[arm]
    tokens_per_step = grad_accum_steps * micro_batch_size * SEQ_LEN
    options = {
        "name": arm,
        "seed": seed,
        "model": "gpt2-nano",
        "seq_len": SEQ_LEN,
        "micro_batch_size": micro_batch_size,
        "tokens_per_step": tokens_per_step,
        "steps": tokens // tokens_per_step,
        "learning_rate": rate,
        "lr_schedule": "constant",
        "lr_warmup_steps": WARMUP_TOKENS // tokens_per_step,
    }
    return load_config("accumulation", **(options | changes))


def run_arm(arm: str, seed: int, tokens: int, device: torch.device, **changes: Any) -> Series:
    """Train the config of an arm; its held-out losses are on all held-out text.

    An ordinary run (`build_data`) evaluates on a few of these sequences.
    """
    config = config_of(arm, seed, tokens, **changes)
    work = build(config, device)
    _, held_out = work.data.corpus.split(SEQ_LEN)
    return train(
        work.model,
        work.data.batches,
        work.loss_fn,
        work.optimizer,
        steps=config.steps,
        grad_accum_steps=config.grad_accum_steps,
        max_grad_norm=config.max_grad_norm,
        learning_rate_at=rate_of(config),
        held_out=[{"input_ids": ids, "labels": ids} for ids in held_out.split(32)],
        eval_every=config.eval_every,
        progress=False,
    )


def plan_of(what: str, seeds: int) -> list[tuple[str, int, dict[str, object]]]:
    """Return every run of the record: (arm, seed, changes of its config).

    All arms, or, for `rates`, two batches at every rate.
    """
    if what == "rates":
        pairs = itertools.product(("batch_8", "batch_32"), LEARNING_RATES)
        return [(arm, 0, {"learning_rate": rate}) for arm, rate in pairs]
    return [(arm, seed, {}) for seed, arm in itertools.product(range(seeds), ARMS)]


def held_out_rows(config: Config, series: Series) -> list[dict[str, object]]:
    """Return a row for each held-out loss of a run."""
    arm = {"arm": config.name, "sequences": config.tokens_per_step // SEQ_LEN}
    arm |= {"learning_rate": round(config.learning_rate, 6), "seed": config.seed}
    rows = []
    for steps, loss in series.held_out:
        tokens = steps * config.tokens_per_step
        rows.append(arm | {"tokens": tokens, "held_out_loss": round(loss, 5)})
    return rows


def convergence_text(what: str, options: argparse.Namespace) -> str:
    """Train what the record of convergence, or of rates, holds; return its text."""
    rows = []
    for arm, seed, changes in tqdm(plan_of(what, options.seeds), file=sys.stderr, unit="run"):
        config = config_of(arm, seed, options.tokens, **changes)
        changes["eval_every"] = options.every_tokens // config.tokens_per_step
        series = run_arm(arm, seed, options.tokens, choose_device(), **changes)
        rows += held_out_rows(config, series)
    corpus = build_data(config_of("batch_8", 0, TOKENS).on("cpu")).corpus
    n_sequences = len(corpus.split(SEQ_LEN)[1])
    facts = facts_of(what, corpus.digest) | {"rule": RULES[what]}
    n_targets = n_sequences * (SEQ_LEN - 1)
    facts["held-out text"] = f"all {n_sequences} held-out sequences, {n_targets} targets"
    return text_of(facts, pd.DataFrame(rows))


# ---- Stability

EVERY, WARMUP_STEPS, COLUMNS = 8, 8, ["rate", "arm", "seed", "step", "loss", "skipped"]
STABILITY_STEPS = 192
RATES = {"small": 1e-4, "usual": 1e-3, "far too high": 3.0}
PURE_FP16 = "pure_fp16"  # no config's precision: FP16 weights and moments without autocast
STABILITY_ARMS = {name: {"precision": name} for name in ("fp32", "fp16", "bf16", "pure_bf16")}
STABILITY_ARMS["pure_bf16_sr"] = {"precision": "pure_bf16", "optimizer": "adamw_bf16"}
STABILITY_ARMS[PURE_FP16] = {"precision": "fp32"}


def stability_rows(rate: str, arm: str, seed: int, steps: int) -> pd.DataFrame:
    """Return a row after each EVERY steps of a run; one kept in runs/ is not trained again.

    `loss` is the mean over those steps: NaN if one was not finite, and in all rows after that.
    `skipped` counts the scaler's skips so far. The file's name has a hash of config and code.
    """
    config = load_config("accumulation", **stability_options(rate, arm, seed, steps)).on("cpu")
    digest = hashlib.sha256((config.model_dump_json() + code_version()).encode()).hexdigest()[:12]
    path = runs_dir() / "stability" / f"{arm}-{seed}-{digest}.csv"
    if not path.exists():
        work = build_workload(config, choose_device(), build_data(config))
        if arm == PURE_FP16:
            work.model.half()  # AdamW keeps these parameters; their moments are FP16, too
        options = {"steps": steps, "precision": config.precision, "scaler": work.scaler}
        options |= {"max_grad_norm": config.max_grad_norm, "learning_rate_at": rate_of(config)}
        series = Series()
        options |= {"progress": False, "series": series}
        with suppress(FloatingPointError):  # a run that diverges ends early
            train(work.model, work.data.batches, work.loss_fn, work.optimizer, **options)
        rows = windows(series.loss, series.skipped, steps)
        rows = rows.assign(rate=rate, arm=arm, seed=seed)[COLUMNS]
        write_atomically(path, text_of({}, rows.round({"loss": 4})).encode())
    return pd.read_csv(path)


def stability_options(rate: str, arm: str, seed: int, steps: int) -> dict[str, object]:
    """Return the config of one run: GPT-2 nano, 4 sequences of 32 tokens a step, no dropout."""
    options = {"name": arm, "seed": seed, "model": "gpt2-nano", "steps": steps, "dropout": 0.0}
    options |= {"seq_len": 32, "micro_batch_size": 4, "tokens_per_step": 128}
    options |= {"learning_rate": RATES[rate], "lr_schedule": "cosine", "growth_interval": 2000}
    return options | {"lr_warmup_steps": WARMUP_STEPS} | STABILITY_ARMS[arm]


def windows(losses: list[float], skipped: list[bool], steps: int) -> pd.DataFrame:
    """Return mean loss and skips so far after each EVERY steps of a run that may have ended early."""
    series = pd.DataFrame({"loss": losses, "skipped": skipped}).reindex(range(steps))
    by_window = series.replace(math.inf, math.nan).groupby(series.index // EVERY)
    means = by_window.loss.mean().where(by_window.loss.count() == EVERY)
    skips = by_window.skipped.sum().astype(int).cumsum()
    means = means.where(means.notna().cummin())
    return pd.DataFrame({"step": EVERY * (means.index + 1), "loss": means, "skipped": skips})


def stability_text(options: argparse.Namespace) -> str:
    """Train what the record of stability holds; return its text."""
    first = stability_options("usual", PURE_FP16, 0, options.steps)
    corpus = build_data(load_config("accumulation", **first).on("cpu")).corpus
    facts = facts_of("stability", corpus.digest)
    rates = ", ".join(f"{name} {rate:g}" for name, rate in RATES.items())
    facts["rates"] = f"{rates}; {first['lr_schedule']} after {WARMUP_STEPS} steps"
    facts["scaler"] = f"from 65536, growth interval {first['growth_interval']} steps"
    facts["loss"] = f"mean training loss of the last {EVERY} steps, nats per token"
    plan = list(itertools.product(range(options.seeds), RATES, STABILITY_ARMS))
    bar = tqdm(plan, file=sys.stderr, unit="run")
    tables = [stability_rows(rate, arm, seed, options.steps) for seed, rate, arm in bar]
    return text_of(facts, pd.concat(tables))


# ---- Unscaled

UNSCALED_SEEDS, UNSCALED_STEPS, UNSCALED_EVERY = 5, 200, 10
UNSCALED_ARMS = "fp32", "fp16", "fp32 without query and key"


def unscaled_rows(arm: str, seed: int) -> list[dict[str, object]]:
    """Return a row after each UNSCALED_EVERY steps: 2 sequences of 32 tokens a step, rate 2e-3."""
    model = build_model("gpt2-nano", seed=seed)
    if arm.endswith("key"):
        for block in model.transformer.h:
            for parameter in block.attn.c_attn.parameters():  # (…, query and key and value)
                parameter.register_hook(lambda g: torch.cat([0 * g[..., :256], g[..., 256:]], -1))
    losses = train(
        model,
        batches(sequences(32), 2, seed=seed),
        lm_loss_sum,
        torch.optim.AdamW(model.parameters(), lr=2e-3),
        steps=UNSCALED_STEPS,
        precision=arm.split()[0],
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        progress=False,
    ).loss
    rows = []
    for step in range(UNSCALED_EVERY, len(losses) + 1, UNSCALED_EVERY):
        mean = sum(losses[step - UNSCALED_EVERY : step]) / UNSCALED_EVERY
        rows.append({"arm": arm, "seed": seed, "step": step, "loss": round(mean, 4)})
    return rows


def unscaled_text(_: argparse.Namespace) -> str:
    """Train what the record of FP16 without a scaler holds; return its text."""
    rows: list[dict[str, object]] = []
    for seed in tqdm(range(UNSCALED_SEEDS), file=sys.stderr, unit="seed"):
        for arm in UNSCALED_ARMS:
            rows += unscaled_rows(arm, seed)
    facts = facts_of("unscaled", load_corpus().digest)
    facts["loss"] = f"mean training loss of the last {UNSCALED_EVERY} steps, nats per token"
    return text_of(facts, pd.DataFrame(rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the records that are named."""
    parser = argparse.ArgumentParser(description="Make the records of long runs.")
    parser.add_argument("record", nargs="+", choices=FILES)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--every-tokens", type=int, default=EVERY_TOKENS)
    parser.add_argument("--steps", type=int, default=STABILITY_STEPS)
    parser.add_argument("--to", type=Path, default=REFERENCE_DIR, metavar="FOLDER")
    options = parser.parse_args(arguments)
    for what in options.record:
        make = MAKERS.get(what) or partial(convergence_text, what)
        path = options.to / f"{FILES[what]}.csv"
        write_atomically(path, make(options).encode())
        print(f"wrote {path}")


MAKERS = {"stability": stability_text, "unscaled": unscaled_text}

if __name__ == "__main__":
    main()
