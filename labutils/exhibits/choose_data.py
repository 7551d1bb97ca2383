"""What the exhibit `choose` shows: its table, packed, and the words for each change.

`benchmarks.choose_table` makes the table.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from labutils.config.card import CPU
from labutils.config.cards import CARDS
from labutils.config.choices import MODELS, NO_AUTOCAST, PRECISIONS, WITHOUT_BF16
from labutils.config.reader import load_config
from labutils.config.schema import Config
from labutils.files import CONFIGS_DIR
from labutils.prediction.arithmetic import n_parameters
from labutils.prediction.search import reasons

TABLE = Path(__file__).with_name("choose.json")
BASE = NO_AUTOCAST[0]
NO_CARD = "none"
CHOSEN = ("rtx3060-laptop", "rtx4060", "t4", "p100", "l4", "rtx4090", "a100", "h100")
MODELS_ON_CARDS = [row.name for row in MODELS.values() if row.is_published]
Row = dict[str, dict[str, Any]]  # by symptom, and "base": "changes", "gib", "ms", "fits"
OWN_WORDS = {
    "activation": "the same function in one kernel",
    "gradient_checkpointing": "each block runs forward twice, and keeps only its input",
    "learning_rate": "half of it: see whether a smaller rate helps",
    "loss_chunk_tokens": "logits exist for so many tokens at a time",
    "pad_vocab": "a vocabulary that is a multiple of 64; GPUs multiply such matrices faster",
}
TIGHT = 0.93  # of the card's memory: a desktop or another program takes some
AUTOCAST = "matrix multiplications in 16 bits; weights stay in float32"
LINE = re.compile(r"(?P<indent> *)(?P<key>\w+): *(?P<value>[^#]*?) *(#.*)?$")


def read() -> dict[str, dict[str, Row]]:
    """Return {card: {model: its row}} as it is stored."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


def base_on_cpu() -> Config:
    """Return the shipped config in float32 with what `when_cpu` sets."""
    return load_config(BASE).on(CPU.device_type)


def page_data() -> dict[str, Any]:
    """Return what the page's script gets."""
    main_part, in_when_cpu = template()
    return packed() | {
        "template": main_part,
        "when_cpu": in_when_cpu,
        "cards": cards(),
        "models": models(),
        "no_card": NO_CARD,
        "base_precision": BASE,
        "scaled": WITHOUT_BF16.name,
        "tight": TIGHT,
        "job": job(),
    }


def packed() -> dict[str, Any]:
    """Return the table with equal changes and explanations written once."""
    changes: list[dict[str, Any]] = []
    words: list[dict[str, str]] = []
    grid: dict[str, Any] = {}
    for card, models in read().items():
        grid[card] = {}
        for model, found in models.items():
            base = base_on_cpu() if card == NO_CARD else load_config(BASE, model=model)
            short = grid[card][model] = {}
            for symptom, one in found.items():
                places = _place(changes, one["changes"]), _place(words, _why(base, one["changes"]))
                short[symptom] = [*places, one["gib"], one["ms"], int(one["fits"])]
    return {"grid": grid, "changes": changes, "words": words}


def _place(rows: list[Any], row: Any) -> int:
    if row not in rows:
        rows.append(row)
    return rows.index(row)


def _why(base: Config, changes: dict[str, Any]) -> dict[str, str]:
    """Return {key: what the change is, or what it costs besides time}."""
    words = dict(OWN_WORDS)
    for key, value in changes.items():
        if key not in words:
            words[key] = reasons({key: value})
    if PRECISIONS[changes.get("precision", base.precision)].autocast:
        words["precision"] = AUTOCAST
    if base.model_copy(update=changes).grad_accum_steps == 1:
        words["micro_batch_size"] = "all sequences at once, so nothing accumulates"
    return {key: words[key] for key in changes}


def cards() -> list[dict[str, Any]]:
    """Return name, memory, and what each card makes of the precisions with float32 weights."""
    found = []
    for name in CHOSEN:
        card, support = CARDS[name], {}
        for row in PRECISIONS.values():
            if row.weights == "float32":
                support[row.name] = card.support(row.name).reason
        found.append({"name": name, "gib": card.memory_gib, "support": support})
    return found


def models() -> dict[str, str]:
    """Return {model: its size in words}."""
    found = {}
    for row in MODELS.values():
        millions = n_parameters(row.name) / 1e6
        found[row.name] = f"{row.n_layer} layers, {millions:.0f} million parameters"
    return found


def job() -> str:
    """Return what all answers are about, as a sentence."""
    base = load_config(BASE)
    sequences = base.tokens_per_step // base.seq_len
    shape = f"a step of {sequences} sequences with {base.seq_len} tokens, and AdamW"
    return f"Predicted by labutils, not measured: {shape}. Without a GPU the step is smaller."


def needed() -> tuple[np.ndarray, list[str], list[str]]:
    """Return the GiB that the configs to begin with need (cards, models), and the names of both."""
    grid = read()
    del grid[NO_CARD]
    rows = []
    for found in grid.values():
        rows.append([found[model]["begin"]["gib"] for model in MODELS_ON_CARDS])
    return np.array(rows), list(grid), MODELS_ON_CARDS


def template() -> tuple[list[list[str]], list[list[str]]]:
    """Return [key, value as it is written] of the shipped config, and of its `when_cpu`."""
    text = (CONFIGS_DIR / f"{BASE}_config.yaml").read_text(encoding="utf-8")
    main_part, in_when_cpu = [], []
    for line in text.splitlines():
        found = LINE.match(line)
        if found and found["value"]:
            part = in_when_cpu if found["indent"] else main_part
            part.append([found["key"], found["value"]])
    return main_part, in_when_cpu
