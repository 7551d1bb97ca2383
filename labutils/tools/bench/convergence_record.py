"""Make reference/convergence.csv: `python -m labutils.tools.bench.convergence_record`.

Four arms with eight seeds each train GPT-2 nano on the same tokens: about eight minutes on one
thread of a CPU. With `--rates`, make reference/convergence_rates.csv instead: batches of 8 and of
32 at every rate of `convergence.RATES`, with seed 0. Runs that are in runs/ already are not trained
again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

from labutils.files import write_atomically
from labutils.machine.gpu import choose_device
from labutils.training import convergence
from labutils.training.experiment import run_experiment
from labutils.training.records import RunRecord

SEEDS, TOKENS, EVERY_TOKENS = 8, 98_304, 8_192
NOT_FACTS = ("device_type",)
RULE = "rate times the square root of (batch / 8); constant after 2048 tokens"
SAME_RATES = "the same rates for both batches, seed 0; constant after 2048 tokens"


def all_arms(seeds: int) -> list[tuple[str, int, float]]:
    """Return (arm, seed, learning rate) of every run of the record."""
    arms = convergence.ARMS.items()
    return [(arm, seed, rate) for seed in range(seeds) for arm, (_, rate) in arms]


def all_rates() -> list[tuple[str, int, float]]:
    """Return (arm, seed, learning rate) of every run that compares rates."""
    return [(arm, 0, rate) for arm in ("batch_8", "batch_32") for rate in convergence.RATES]


def run_all(plan: list[tuple[str, int, float]], tokens: int, every_tokens: int) -> list[RunRecord]:
    """Train every (arm, seed, learning rate) on this machine, and return the records."""
    records = []
    for arm, seed, rate in tqdm(plan, file=sys.stderr, unit="run"):
        config = convergence.config_of(arm, seed, tokens, learning_rate=rate)
        every = {"eval_every": every_tokens // config.tokens_per_step}
        config = config.model_copy(update=every)
        records.append(run_experiment(config, device=choose_device(), progress=False))
    return records


def rows_of(records: list[RunRecord]) -> pd.DataFrame:
    """Return a row for each held-out loss of the records."""
    rows = []
    for record in records:
        n_sequences, _ = convergence.ARMS[record.name]
        for steps, loss in record.held_out:
            rows.append(
                {
                    "arm": record.name,
                    "sequences": n_sequences,
                    "learning_rate": round(record.config["learning_rate"], 6),
                    "seed": record.config["seed"],
                    "tokens": steps * record.tokens_per_step,
                    "held_out_loss": round(loss, 5),
                }
            )
    return pd.DataFrame(rows)


def text_of(records: list[RunRecord], command: str, rule: str) -> str:
    """Return the file: what the runs were made with, then their losses."""
    first = records[0]
    facts = {key: value for key, value in first.environment.items() if key not in NOT_FACTS}
    facts |= {"corpus": first.corpus, "created": first.created}
    facts["threads"] = str(torch.get_num_threads())
    facts["made by"] = command
    facts["rule"] = rule
    lines = [f"# {key}: {value}" for key, value in facts.items()]
    return "\n".join(lines) + "\n" + rows_of(records).to_csv(index=False, lineterminator="\n")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--every-tokens", type=int, default=EVERY_TOKENS)
    parser.add_argument("--rates", action="store_true", help="compare rates, with seed 0 alone")
    parser.add_argument("--to", type=Path)
    options = parser.parse_args(arguments)
    plan, to, rule = all_arms(options.seeds), convergence.RECORD, RULE
    command = "python -m labutils.tools.bench.convergence_record"
    if options.rates:
        plan, to, rule = all_rates(), convergence.RATES_RECORD, SAME_RATES
        command += " --rates"
    to = options.to or to
    records = run_all(plan, options.tokens, options.every_tokens)
    write_atomically(to, text_of(records, command, rule).encode())
    print(f"wrote {to}")


if __name__ == "__main__":
    main()
