"""The same tokens in batches of 8, 16 and 32 sequences: what is run, and the record of a long run.

All runs have a constant rate after the warm-up. So a short run is the beginning of a longer one
with the same seed, and the two can be compared after equally many tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from labutils.config.reader import load_config
from labutils.config.schema import Config
from labutils.files import REFERENCE_DIR
from labutils.training.noise import PairedDifference, paired_difference
from labutils.training.runs import rate_of
from labutils.training.train import Training, train
from labutils.workload.build import build_data, build_workload
from labutils.workload.data import Corpus

SMALL, SEQ_LEN, WARMUP_TOKENS = "batch_8", 32, 2048
WORTH_TELLING = 0.02  # nats per token of a held-out loss
RATES = (3.5e-4, 5e-4, 7e-4, 1e-3, 1.4e-3, 2e-3, 2.8e-3)
# {arm: (sequences in an optimizer step, learning rate)}. The rate of SMALL is the best of RATES
# with seed 0 (RATES_RECORD); the others follow the rule rate × √κ, or keep the rate.
ARMS = {
    "batch_8": (8, 1e-3),
    "batch_16": (16, 1e-3 * 2**0.5),
    "batch_32": (32, 2e-3),
    "batch_32_same_rate": (32, 1e-3),
}
# The equal pair: the same batch of 32, in four parts and at once. They differ by rounding alone.
IDENTICAL = ("batch_32", "batch_32_at_once")
AT_ONCE = {"name": IDENTICAL[1], "micro_batch_size": 32}  # changes of `config_of(IDENTICAL[0])`


def config_of(arm: str, seed: int, tokens: int, **changes: Any) -> Config:
    """Return the config of one run: GPT-2 nano on any device, micro-batches of 8 sequences of 32.

    `changes` override it. The arm may also be the second of IDENTICAL. Raises ValueError if
    `tokens` is no whole number of optimizer steps.
    """
    if arm == IDENTICAL[1]:
        return config_of(IDENTICAL[0], seed, tokens, **(AT_ONCE | changes))
    n_sequences, rate = ARMS[arm]
    tokens_per_step = n_sequences * SEQ_LEN
    if tokens <= 0 or tokens % tokens_per_step:
        raise ValueError(f"{tokens} tokens are no whole number of steps of {tokens_per_step}")
    options = {
        "name": arm,
        "seed": seed,
        "model": "gpt2-nano",
        "seq_len": SEQ_LEN,
        "micro_batch_size": 8,
        "tokens_per_step": tokens_per_step,
        "steps": tokens // tokens_per_step,
        "learning_rate": rate,
        "lr_schedule": "constant",
        "lr_warmup_steps": WARMUP_TOKENS // tokens_per_step,
    }
    return load_config("accumulation", **(options | changes))


def held_out_batches(corpus: Corpus) -> list[dict[str, torch.Tensor]]:
    """Return all held-out sequences of a text, in batches of 32: the same for every arm and seed.

    A sequence has SEQ_LEN - 1 targets. An ordinary run (`build_data`) evaluates on a few of them.
    """
    _, held_out = corpus.split(SEQ_LEN)
    return [{"input_ids": ids, "labels": ids} for ids in held_out.split(32)]


def run(arm: str, seed: int, tokens: int, device: torch.device, **changes: Any) -> Training:
    """Train the config of an arm (see `config_of`), and return what came of it.

    Its held-out losses are on all held-out text.
    """
    config = config_of(arm, seed, tokens, **changes).on(device.type)
    data = build_data(config)
    work = build_workload(config, device, data)
    return train(
        work.model,
        data.batches,
        work.loss_fn,
        work.optimizer,
        steps=config.steps,
        grad_accum_steps=config.grad_accum_steps,
        max_grad_norm=config.max_grad_norm,
        learning_rate_at=rate_of(config),
        held_out=held_out_batches(data.corpus),
        eval_every=config.eval_every,
        name=config.name,
        progress=False,
    )


@dataclass(frozen=True)
class LongRecord:
    """Held-out losses of long runs, with the machine and the versions that gave them.

    `losses` has a row for each arm, seed and number of tokens; its `held_out_loss` is in nats per
    token.
    """

    facts: dict[str, str]
    losses: pd.DataFrame

    def points(self) -> list[int]:
        """Return after how many tokens the losses were taken, in order."""
        return sorted(int(tokens) for tokens in self.losses.tokens.unique())

    def at(self, arm: str, tokens: int) -> list[float]:
        """Return the losses of an arm after so many tokens, in order of seeds.

        Raises ValueError if there is none.
        """
        rows = self.losses[(self.losses.arm == arm) & (self.losses.tokens == tokens)]
        if rows.empty:
            raise ValueError(f"the record has no {arm!r} after {tokens} tokens: {self.points()}")
        return rows.sort_values("seed").held_out_loss.tolist()

    def above(self, arm: str, base: str = SMALL) -> dict[int, list[float]]:
        """Return {tokens: by how much the arm's losses exceed those of `base`, seed by seed}."""
        found = {}
        for tokens in self.points():
            pairs = zip(self.at(base, tokens), self.at(arm, tokens), strict=True)
            found[tokens] = [other - loss for loss, other in pairs]
        return found

    def against(self, arm: str, tokens: int, base: str = SMALL) -> PairedDifference:
        """Return by how much the arm's losses exceed those of `base`, seed by seed.

        The equal pairs are those of IDENTICAL, if the record has both.
        """
        pair, identical = (self.at(base, tokens), self.at(arm, tokens)), ()
        if set(IDENTICAL) <= set(self.losses.arm):
            identical = [self.at(name, tokens) for name in IDENTICAL]
        return paired_difference(*pair, identical, worth_telling=WORTH_TELLING)


def read_record(source: str | Path = "convergence") -> LongRecord:
    """Return the recorded long runs: facts in lines of `# key: value`, then a table.

    `source` is a path, or the name of a record that ships: "convergence", "convergence_rates" or
    "stability".
    """
    path = source if isinstance(source, Path) else REFERENCE_DIR / f"{source}.csv"
    facts = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            key, _, value = line[2:].partition(": ")
            facts[key] = value
    return LongRecord(facts, pd.read_csv(path, comment="#"))
