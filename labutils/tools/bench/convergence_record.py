"""Make reference/convergence.csv: `python -m labutils.tools.bench.convergence_record`.

Four arms with eight seeds each, and the batch of 32 at once, train GPT-2 nano on the same tokens:
about twenty minutes on one thread of a CPU. With `--rates`, make reference/convergence_rates.csv
instead: batches of 8 and of 32 at every rate of `convergence.RATES`, with seed 0. Held-out losses
are on all held-out text.
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
from labutils.techniques.loss import count_targets
from labutils.training import convergence
from labutils.training.records import RunRecord
from labutils.workload.build import build_corpus

SEEDS, TOKENS, EVERY_TOKENS = 8, 98_304, 8_192
NOT_FACTS = ("device_type",)
Plan = list[tuple[str, int, dict[str, object]]]  # (arm, seed, changes of its config)
RULE = "rate times the square root of (batch / 8); constant after 2048 tokens"
SAME_RATES = "the same rates for both batches, seed 0; constant after 2048 tokens"


def all_arms(seeds: int) -> Plan:
    """Return every run of the record."""
    plan: Plan = []
    for seed in range(seeds):
        plan += [(arm, seed, {}) for arm in convergence.ARMS]
        plan.append((convergence.IDENTICAL[0], seed, convergence.AT_ONCE))
    return plan


def all_rates() -> Plan:
    """Return every run that compares rates."""
    return [
        (arm, 0, {"learning_rate": rate})
        for arm in ("batch_8", "batch_32")
        for rate in convergence.RATES
    ]


def run_all(plan: Plan, tokens: int, every_tokens: int) -> list[RunRecord]:
    """Train every run of the plan on this machine, and return the records."""
    records = []
    for arm, seed, changes in tqdm(plan, file=sys.stderr, unit="run"):
        config = convergence.config_of(arm, seed, tokens, **changes)
        every = {"eval_every": every_tokens // config.tokens_per_step}
        records.append(convergence.run(config.model_copy(update=every), choose_device()))
    return records


def rows_of(records: list[RunRecord]) -> pd.DataFrame:
    """Return a row for each held-out loss of the records."""
    rows = []
    for record in records:
        n_sequences = record.config["tokens_per_step"] // convergence.SEQ_LEN
        for steps, loss in record.held_out:
            rows.append(
                {
                    "arm": record.name,
                    "sequences": n_sequences,
                    "learning_rate": round(record.config["learning_rate"], 6),
                    "seed": record.config["seed"],
                    "tokens": steps * record.config["tokens_per_step"],
                    "held_out_loss": round(loss, 5),
                }
            )
    return pd.DataFrame(rows)


def held_out_fact() -> str:
    """Return on how much text the losses of the record rest."""
    corpus = build_corpus(convergence.config_of(convergence.SMALL, 0, TOKENS).on("cpu"))
    batches = convergence.held_out_batches(corpus)
    n_sequences = sum(len(batch["labels"]) for batch in batches)
    n_targets = sum(map(count_targets, batches))
    return f"all {n_sequences} held-out sequences, {n_targets} targets"


def text_of(records: list[RunRecord], command: str, rule: str) -> str:
    """Return the file: what the runs were made with, then their losses."""
    first = records[0]
    facts = {key: value for key, value in first.environment.items() if key not in NOT_FACTS}
    facts |= {"corpus": first.corpus, "created": first.created}
    facts["threads"] = str(torch.get_num_threads())
    facts["made by"] = command
    facts["rule"] = rule
    facts["held-out text"] = held_out_fact()
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
