"""Make the records of long runs: `python -m benchmarks.records convergence rates stability`.

Each is a CSV in labutils/reference/, below lines that say what it was made with.

convergence: four arms with eight seeds each, and the batch of 32 at once, on the same tokens: about
twenty minutes on one thread of a CPU. rates: batches of 8 and of 32 at every rate of
`convergence.RATES`, with seed 0. Held-out losses are on all held-out text.
stability: five arms at three rates with eight seeds each: about 15 minutes on one thread, most of
them in FP16. Each of its runs is kept in runs/ when it ends, so it continues where it was stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

from labutils.files import REFERENCE_DIR, code_version, commit, new_id, runs_dir, write_atomically
from labutils.machine import here
from labutils.machine.gpu import choose_device
from labutils.techniques.loss import count_targets
from labutils.training import convergence, stability
from labutils.training.records import RunRecord
from labutils.workload.build import build_corpus

SEEDS, TOKENS, EVERY_TOKENS = 8, 98_304, 8_192
Plan = list[tuple[str, int, dict[str, object]]]  # (arm, seed, changes of its config)
TARGETS = {
    "convergence": convergence.RECORD,
    "rates": convergence.RATES_RECORD,
    "stability": stability.RECORD,
}
RULES = {
    "convergence": "rate times the square root of (batch / 8); constant after 2048 tokens",
    "rates": "the same rates for both batches, seed 0; constant after 2048 tokens",
}


def facts_of(what: str, corpus: str) -> dict[str, str]:
    """Return what a record is made with, but for what it says of its own arms."""
    facts = here.environment(choose_device())
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


def plan_of(what: str, seeds: int) -> Plan:
    """Return every run of the record: all arms, or, for `rates`, two batches at every rate."""
    plan: Plan = []
    if what == "rates":
        for arm in ("batch_8", "batch_32"):
            plan += [(arm, 0, {"learning_rate": rate}) for rate in convergence.RATES]
        return plan
    for seed in range(seeds):
        plan += [(arm, seed, {}) for arm in convergence.ARMS]
        plan.append((convergence.IDENTICAL[1], seed, {}))
    return plan


def held_out_rows(record: RunRecord) -> list[dict[str, object]]:
    """Return a row for each held-out loss of a run."""
    config = record.config
    arm = {
        "arm": record.name,
        "sequences": config["tokens_per_step"] // convergence.SEQ_LEN,
        "learning_rate": round(config["learning_rate"], 6),
        "seed": config["seed"],
    }
    rows = []
    for steps, loss in record.held_out:
        tokens = steps * config["tokens_per_step"]
        rows.append(arm | {"tokens": tokens, "held_out_loss": round(loss, 5)})
    return rows


def convergence_text(what: str, options: argparse.Namespace) -> str:
    """Train what the record of convergence, or of rates, holds; return its text."""
    rows = []
    for arm, seed, changes in tqdm(plan_of(what, options.seeds), file=sys.stderr, unit="run"):
        config = convergence.config_of(arm, seed, options.tokens)
        changes["eval_every"] = options.every_tokens // config.tokens_per_step
        record = convergence.run(arm, seed, options.tokens, choose_device(), **changes)
        rows += held_out_rows(record)
    corpus = build_corpus(convergence.config_of(convergence.SMALL, 0, TOKENS).on("cpu"))
    batches = convergence.held_out_batches(corpus)
    n_sequences = sum(len(batch["labels"]) for batch in batches)
    facts = facts_of(what, record.corpus) | {"rule": RULES[what]}
    n_targets = sum(map(count_targets, batches))
    facts["held-out text"] = f"all {n_sequences} held-out sequences, {n_targets} targets"
    return text_of(facts, pd.DataFrame(rows))


# ---- Stability


def stability_rows(rate: str, arm: str, seed: int, steps: int) -> pd.DataFrame:
    """Return the rows of a run; one that is kept in runs/ is not trained again.

    The name of its file has a hash of its config and of the code behind it.
    """
    config = stability.config_of(arm, rate, seed, steps).model_dump_json()
    digest = hashlib.sha256((config + code_version()).encode()).hexdigest()[:12]
    path = runs_dir() / "stability" / f"{arm}-{seed}-{digest}.csv"
    if not path.exists():
        rows = stability.run_one(arm, rate, seed, choose_device(), steps).round({"loss": 4})
        write_atomically(path, text_of({}, rows).encode())
    return pd.read_csv(path)


def stability_text(options: argparse.Namespace) -> str:
    """Train what the record of stability holds; return its text."""
    corpus = build_corpus(stability.config_of("fp32", "usual", 0).on("cpu"))
    facts = facts_of("stability", corpus.digest)
    rates = ", ".join(f"{name} {rate:g}" for name, rate in stability.RATES.items())
    facts["rates"] = f"{rates}; constant after {stability.WARMUP_STEPS} steps"
    facts["scaler"] = f"from 65536, growth interval {stability.GROWTH_INTERVAL} steps"
    facts["loss"] = f"mean training loss of the last {stability.EVERY} steps, nats per token"
    plan = itertools.product(range(options.seeds), stability.RATES, stability.ARMS)
    tables = []
    for seed, rate, arm in tqdm(list(plan), file=sys.stderr, unit="run"):
        tables.append(stability_rows(rate, arm, seed, options.steps))
    return text_of(facts, pd.concat(tables))


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the records that are named."""
    parser = argparse.ArgumentParser(description="Make the records of long runs.")
    parser.add_argument("record", nargs="+", choices=TARGETS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--every-tokens", type=int, default=EVERY_TOKENS)
    parser.add_argument("--steps", type=int, default=stability.STEPS)
    parser.add_argument("--to", type=Path, default=REFERENCE_DIR, metavar="FOLDER")
    options = parser.parse_args(arguments)
    for what in options.record:
        is_stability = what == "stability"
        text = stability_text(options) if is_stability else convergence_text(what, options)
        path = options.to / TARGETS[what].name
        write_atomically(path, text.encode())
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
