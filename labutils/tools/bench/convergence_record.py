"""Make reference/convergence.csv: `python -m labutils.tools.bench.convergence_record`.

Four arms with eight seeds each train GPT-2 nano on the same tokens: about eight minutes on one
thread of a CPU. Runs that are in runs/ already are not trained again.
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


def run_all(seeds: int, tokens: int, every_tokens: int) -> list[RunRecord]:
    """Train every arm with every seed on this machine, and return the records."""
    plan = [(arm, seed) for seed in range(seeds) for arm in convergence.ARMS]
    records = []
    for arm, seed in tqdm(plan, file=sys.stderr, unit="run"):
        config = convergence.config_of(arm, seed, tokens)
        every = {"eval_every": every_tokens // config.tokens_per_step}
        config = config.model_copy(update=every)
        records.append(run_experiment(config, device=choose_device(), progress=False))
    return records


def rows_of(records: list[RunRecord]) -> pd.DataFrame:
    """Return a row for each held-out loss of the records."""
    rows = []
    for record in records:
        n_sequences, rate = convergence.ARMS[record.name]
        for steps, loss in record.held_out:
            rows.append(
                {
                    "arm": record.name,
                    "sequences": n_sequences,
                    "learning_rate": round(rate, 6),
                    "seed": record.config["seed"],
                    "tokens": steps * record.tokens_per_step,
                    "held_out_loss": round(loss, 5),
                }
            )
    return pd.DataFrame(rows)


def text_of(records: list[RunRecord]) -> str:
    """Return the file: what the runs were made with, then their losses."""
    first = records[0]
    facts = {key: value for key, value in first.environment.items() if key not in NOT_FACTS}
    facts |= {"corpus": first.corpus, "created": first.created}
    facts["threads"] = str(torch.get_num_threads())
    facts["made by"] = "python -m labutils.tools.bench.convergence_record"
    facts["rule"] = "rate times the square root of (batch / 8); constant after 2048 tokens"
    lines = [f"# {key}: {value}" for key, value in facts.items()]
    return "\n".join(lines) + "\n" + rows_of(records).to_csv(index=False, lineterminator="\n")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--every-tokens", type=int, default=EVERY_TOKENS)
    parser.add_argument("--to", type=Path, default=convergence.RECORD)
    options = parser.parse_args(arguments)
    records = run_all(options.seeds, options.tokens, options.every_tokens)
    write_atomically(options.to, text_of(records).encode())
    print(f"wrote {options.to}")


if __name__ == "__main__":
    main()
