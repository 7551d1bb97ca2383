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
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

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
from labutils.workload.build import Workload, build
from labutils.workload.data import batches, load_corpus, sequences
from labutils.workload.gpt2 import build_model

LEARNING_RATES = (3.5e-4, 5e-4, 7e-4, 1e-3, 1.4e-3, 2e-3, 2.8e-3)


def text_of(facts: dict[str, str], rows: pd.DataFrame) -> str:
    """Return the file: what the runs were made with, then their rows."""
    head = "".join(f"# {key}: {value}\n" for key, value in facts.items())
    return head + rows.to_csv(index=False, lineterminator="\n", na_rep="nan")


def trained(config: Config, work: Workload, **options: Any) -> Series:
    """Train what a config says; return what each step gave."""
    return train(
        work.model,
        work.data.batches,
        work.loss_fn,
        work.optimizer,
        steps=config.steps,
        grad_accum_steps=config.grad_accum_steps,
        precision=config.precision,
        scaler=work.scaler,
        max_grad_norm=config.max_grad_norm,
        learning_rate_at=rate_of(config),
        progress=False,
        **options,
    )


# ---- Convergence

# All runs have a constant rate after the warm-up. So a short run is the beginning of a longer one
# with the same seed, and the two can be compared after equally many tokens.
SEQ_LEN, WARMUP_TOKENS = 32, 2048
CONSTANT = f"constant after {WARMUP_TOKENS} tokens"
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
    held_out = load_corpus().split(SEQ_LEN)[1].split(32)
    held_out = [{"input_ids": ids, "labels": ids} for ids in held_out]
    return trained(config, build(config, device), held_out=held_out, eval_every=config.eval_every)


def convergence_rows(
    options: argparse.Namespace, seed: int, arm: str, **changes: Any
) -> pd.DataFrame:
    """Return a row for each held-out loss of a run."""
    config = config_of(arm, seed, options.tokens, **changes)
    changes["eval_every"] = options.every_tokens // config.tokens_per_step
    series = run_arm(arm, seed, options.tokens, choose_device(), **changes)
    row = {"arm": arm, "sequences": config.tokens_per_step // SEQ_LEN}
    row |= {"learning_rate": round(config.learning_rate, 6), "seed": seed}
    return pd.DataFrame(
        row | {"tokens": steps * config.tokens_per_step, "held_out_loss": round(loss, 5)}
        for steps, loss in series.held_out
    )


def held_out_text() -> dict[str, str]:
    """Return on what the held-out losses are."""
    n_sequences = len(load_corpus().split(SEQ_LEN)[1])
    n_targets = n_sequences * (SEQ_LEN - 1)
    return {"held-out text": f"all {n_sequences} held-out sequences, {n_targets} targets"}


# ---- Stability

EVERY, WARMUP_STEPS, COLUMNS = 8, 8, ["rate", "arm", "seed", "step", "loss", "skipped"]
GROWTH_INTERVAL = 2000
RATES = {"small": 1e-4, "usual": 1e-3, "far too high": 3.0}
PURE_FP16 = "pure_fp16"  # no config's precision: FP16 weights and moments without autocast
STABILITY_ARMS = {name: {"precision": name} for name in ("fp32", "fp16", "bf16", "pure_bf16")}
STABILITY_ARMS["pure_bf16_sr"] = {"precision": "pure_bf16", "optimizer": "adamw_bf16"}
STABILITY_ARMS[PURE_FP16] = {"precision": "fp32"}


def stability_rows(options: argparse.Namespace, seed: int, rate: str, arm: str) -> pd.DataFrame:
    """Return a row after each EVERY steps of a run; one kept in runs/ is not trained again.

    `loss` is the mean over those steps: NaN if one was not finite, and in all rows after that.
    `skipped` counts the scaler's skips so far. The file's name has a hash of config and code.
    """
    changes = stability_options(rate, arm, seed, options.steps)
    config = load_config("accumulation", **changes).on("cpu")
    digest = hashlib.sha256((config.model_dump_json() + code_version()).encode()).hexdigest()[:12]
    path = runs_dir() / "stability" / f"{arm}-{seed}-{digest}.csv"
    if not path.exists():
        work, series = build(config, choose_device()), Series()
        if arm == PURE_FP16:
            work.model.half()  # AdamW keeps these parameters; their moments are FP16, too
        with suppress(FloatingPointError):  # a run that diverges ends early
            trained(config, work, series=series)
        rows = windows(series.loss, series.skipped, config.steps, EVERY)
        rows = rows.assign(rate=rate, arm=arm, seed=seed)[COLUMNS]
        write_atomically(path, text_of({}, rows.round({"loss": 4})).encode())
    return pd.read_csv(path)


def stability_options(rate: str, arm: str, seed: int, steps: int) -> dict[str, object]:
    """Return the config of one run: GPT-2 nano, 4 sequences of 32 tokens a step, no dropout."""
    options = {"name": arm, "seed": seed, "model": "gpt2-nano", "steps": steps, "dropout": 0.0}
    options |= {"seq_len": 32, "micro_batch_size": 4, "tokens_per_step": 128}
    options |= {"learning_rate": RATES[rate], "lr_schedule": "cosine"}
    options |= {"lr_warmup_steps": WARMUP_STEPS, "growth_interval": GROWTH_INTERVAL}
    return options | STABILITY_ARMS[arm]


def windows(losses: list[float], skipped: list[bool], steps: int, every: int) -> pd.DataFrame:
    """Return mean loss and skips so far after each `every` steps of a run that may have ended early."""
    series = pd.DataFrame({"loss": losses, "skipped": skipped}).reindex(range(steps))
    by_window = series.replace(math.inf, math.nan).groupby(series.index // every)
    means = by_window.loss.mean().where(by_window.loss.count() == every)
    skips = by_window.skipped.sum().astype(int).cumsum()
    means = means.where(means.notna().cummin())
    return pd.DataFrame({"step": every * (means.index + 1), "loss": means, "skipped": skips})


# ---- Unscaled

UNSCALED_SEEDS, UNSCALED_STEPS, UNSCALED_EVERY = 5, 200, 10
UNSCALED_ARMS = "fp32", "fp16", "fp32 without query and key"


def unscaled_rows(_: argparse.Namespace, seed: int, arm: str) -> pd.DataFrame:
    """Return a row after each UNSCALED_EVERY steps: 2 sequences of 32 tokens a step, rate 2e-3."""
    model = build_model("gpt2-nano", seed=seed)
    if arm.endswith("key"):
        for block in model.transformer.h:
            for parameter in block.attn.c_attn.parameters():  # (…, query and key and value)
                parameter.register_hook(lambda g: torch.cat([0 * g[..., :256], g[..., 256:]], -1))
    series = train(
        model,
        batches(sequences(32), 2, seed=seed),
        lm_loss_sum,
        torch.optim.AdamW(model.parameters(), lr=2e-3),
        steps=UNSCALED_STEPS,
        precision=arm.split()[0],
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        progress=False,
    )
    rows = windows(series.loss, series.skipped, UNSCALED_STEPS, UNSCALED_EVERY)
    return rows.assign(arm=arm, seed=seed)[["arm", "seed", "step", "loss"]].round({"loss": 4})


# ---- All of them


class Record(NamedTuple):
    """How a record is made."""

    file: str
    runs: Callable[[argparse.Namespace], Iterable[tuple]]  # what differs between them
    rows: Callable[..., pd.DataFrame]  # of one run, from the options and its part of `runs`
    facts: Callable[[], dict[str, str]]  # beside those of the machine


def mean_of(steps: int) -> str:
    """Return what a column of losses has."""
    return f"mean training loss of the last {steps} steps, nats per token"


RECORDS = {
    "convergence": Record(
        "convergence",
        lambda options: product(range(options.seeds), ARMS),
        convergence_rows,
        lambda: (
            {"rule": f"rate times the square root of (batch / 8); {CONSTANT}"} | held_out_text()
        ),
    ),
    "rates": Record(
        "convergence_rates",
        lambda _: product(("batch_8", "batch_32"), LEARNING_RATES),
        lambda options, arm, rate: convergence_rows(options, 0, arm, learning_rate=rate),
        lambda: {"rule": f"the same rates for both batches, seed 0; {CONSTANT}"} | held_out_text(),
    ),
    "stability": Record(
        "stability",
        lambda options: product(range(options.seeds), RATES, STABILITY_ARMS),
        stability_rows,
        lambda: {
            "rates": ", ".join(f"{name} {rate:g}" for name, rate in RATES.items())
            + f"; cosine after {WARMUP_STEPS} steps",
            "scaler": f"from 65536, growth interval {GROWTH_INTERVAL} steps",
            "loss": mean_of(EVERY),
        },
    ),
    "unscaled": Record(
        "unscaled",
        lambda _: product(range(UNSCALED_SEEDS), UNSCALED_ARMS),
        unscaled_rows,
        lambda: {"loss": mean_of(UNSCALED_EVERY)},
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the records that are named."""
    parser = argparse.ArgumentParser(description="Make the records of long runs.")
    parser.add_argument("record", nargs="+", choices=RECORDS)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=98_304)
    parser.add_argument("--every-tokens", type=int, default=8_192)
    parser.add_argument("--steps", type=int, default=192, help="of stability")
    parser.add_argument("--to", type=Path, default=REFERENCE_DIR, metavar="FOLDER")
    options = parser.parse_args(arguments)
    for what in options.record:
        record = RECORDS[what]
        runs = tqdm(list(record.runs(options)), what, file=sys.stderr, unit="run")
        rows = pd.concat([record.rows(options, *run) for run in runs])
        facts = machine.environment(choose_device())
        facts.pop("device_type")
        facts |= {"commit": commit(), "corpus": load_corpus().digest, "created": new_id()[1]}
        facts["threads"] = str(torch.get_num_threads())
        facts["made by"] = f"python -m benchmarks.records {what}"
        path = options.to / f"{record.file}.csv"
        write_atomically(path, text_of(facts | record.facts(), rows).encode())
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
