"""The same tokens in batches of 8, 16 and 32 sequences: what notebook 02 and its record train.

All runs have a constant rate after the warm-up. So a short run is the beginning of a longer one
with the same seed, and the two can be compared after equally many tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import torch

from labutils.config.reader import load_config
from labutils.config.schema import Config
from labutils.files import REFERENCE_DIR
from labutils.training.runs import rate_of
from labutils.training.train import Series, train
from labutils.workload.build import build

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


def run(arm: str, seed: int, tokens: int, device: torch.device, **changes: Any) -> Series:
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


def read_record(name: str, folder: Path = REFERENCE_DIR) -> pd.DataFrame:
    """Return recorded long runs, a row for each arm, seed and point; `attrs` has their facts.

    These records ship: "convergence", "convergence_rates" and "stability". Their first lines are
    facts, `# key: value`: the machine, the versions, the rules.
    """
    path = folder / f"{name}.csv"
    table = pd.read_csv(path, comment="#")
    lines = path.read_text(encoding="utf-8").splitlines()
    facts = [line[2:].split(": ", 1) for line in lines if line.startswith("# ")]
    table.attrs.update(facts)
    return table
