"""What the exhibit `ledger` shows: its part of the table, packed, and the config that it writes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import yaml

from labutils.config.cards import CARDS as ALL_CARDS
from labutils.config.choices import ATTENTION, WITH_BF16
from labutils.exhibits.ledger_switches import (
    BASE,
    BATCHES,
    CARDS,
    FIXED,
    GRID,
    SHAPE,
    SWITCHES,
    UNIT,
    VARYING,
    Piece,
    Setting,
    experiment,
    key_of,
    read,
    settings,
)
from labutils.plotting.style import CATEGORY_LOOKS
from labutils.prediction.trace import CATEGORIES

LABELS = {
    "model": "model",
    "seq_len": "length in tokens",
    "precision": "precision",
    "attention": "attention",
    "gradient_checkpointing": "checkpointing",
    "loss_chunk_tokens": "loss in chunks",
    "optimizer": "optimizer",
}
TEXTS = {
    ("attention", "auto"): f"auto ({ATTENTION['auto'].help})",
    ("loss_chunk_tokens", 0): "no, all logits at once",
    ("loss_chunk_tokens", 512): "of 512 tokens",
    ("gradient_checkpointing", "block"): "every block",
}
# As cards are sold, and one of them: torch sees less than that.
SOLD = {"8 GB": "rtx4060", "16 GB": "t4", "24 GB": "rtx4090", "80 GB": "a100"}
START = {"model": "gpt2", "seq_len": 1024, "precision": WITH_BF16.name}
START |= {"attention": "auto", "gradient_checkpointing": "none"}
START |= {"loss_chunk_tokens": 0, "optimizer": "adamw"}


def chosen(models: Iterable[str], start: Setting) -> tuple[dict[str, tuple], Setting]:
    """Return the switches with their values, and the setting to begin with.

    Raises ValueError for a model, a switch or a value that the table does not have.
    """
    values = SWITCHES | {"model": tuple(models)}
    for model in values["model"]:
        _require("model", model, SWITCHES["model"])
    begin = START | {"model": values["model"][0]} | start
    for switch, value in begin.items():
        _require("switch", switch, tuple(SWITCHES))
        _require(switch, value, values[switch])
    return values, begin


def _require(what: str, value: Any, known: tuple) -> None:
    if value not in known:
        raise ValueError(f"{what} {value!r} is not in the table, which has {known}")


def peaks_at(setting: Setting, batch: int) -> dict[str, dict[str, int]]:
    """Return the bytes by category at each phase's peak, from the table."""
    table = _table()
    stands = table["standing"][key_of(setting["model"], setting["precision"], setting["optimizer"])]
    found = {}
    for phase, listed in table["phases"][_key(setting)].items():
        piece = [one for one in listed if one[0] <= batch][-1]
        n = len(VARYING)
        found[phase] = [
            a + batch * b for a, b in zip(piece[1 : n + 1], piece[n + 1 :], strict=True)
        ]
    found["optimizer"] = stands["optimizer"]
    phases = {}
    for phase, varying in found.items():
        units = dict(zip((*FIXED, *VARYING), (*stands["fixed"], *varying), strict=True))
        phases[phase] = {category: UNIT * units[category] for category in CATEGORIES}
    return phases


def page_data(models: Iterable[str], batch: int, start: Setting) -> dict[str, Any]:
    """Return what the page's script gets.

    Of equal lists of pieces one is kept, in `lists`, as `_text` writes it. `phases` has three
    numbers of lists for each of `settings`, `grid` for each batch size of GRID what the smallest
    card has and the milliseconds, 0 where there are none.
    """
    values, begin = chosen(models, start)
    table = _table()
    lists: dict[str, int] = {}  # its text: its number
    phases, grid, bands = [], [], []
    for setting in settings(values["model"]):
        for listed in table["phases"][_key(setting)].values():
            phases.append(lists.setdefault(_text(listed), len(lists)))
        for needed, *times in table["grid"][_key(setting)]:
            steps = [time or (0, 0, 0) for time in times]
            grid += [needed, *[_short(ms) for ms, _, _ in steps]]
            bands.append(tuple((below, above) for _, below, above in steps))
    widths = list(dict.fromkeys(bands))
    standing = {}
    for key, row in table["standing"].items():
        if key.split("/")[0] in values["model"]:
            standing[key] = row
    return {
        "unit": UNIT,
        "batches": BATCHES,
        "switches": [_switch(name, values[name]) for name in SWITCHES],
        "shape": SHAPE,
        "start": begin | {"batch": batch},
        "categories": [[name, *CATEGORY_LOOKS[name]] for name in CATEGORIES],
        "order": [*FIXED, *VARYING],
        "standing": standing,
        "lists": list(lists),
        "phases": phases,
        "points": GRID,
        "known_with": START["optimizer"],
        "cards": [[name, ALL_CARDS[name].memory_gib] for name in CARDS],
        "grid": grid,
        "widths": widths,
        "bands": [widths.index(row) for row in bands],
        "lines": [[sold, ALL_CARDS[card].memory_gib, card] for sold, card in SOLD.items()],
        "base": BASE,
        "config": config_lines(begin),
        "others": [name for name in SWITCHES["model"] if name not in values["model"]],
    }


def config_lines(setting: Setting) -> list[list[str]]:
    """Return [key, text] for each line of the YAML file of a setting; the page changes some."""
    config = experiment(setting | {"name": "ledger", "note": "from the exhibit ledger"})
    found = []
    for key, value in config.model_dump().items():
        text = yaml.safe_dump({key: value}, sort_keys=False).rstrip()
        found.append([key, text])
    return found


def _switch(name: str, values: tuple) -> list:
    options = [[value, TEXTS.get((name, value), str(value))] for value in values]
    return [name, LABELS[name], options]


def _text(pieces: list[Piece]) -> str:
    """Return pieces in few characters: numbers in base 36, nothing for 0, no zeros at the end."""
    texts = []
    for piece in pieces:
        numbers = [np.base_repr(number, 36).lower() if number else "" for number in piece]
        texts.append(",".join(numbers).rstrip(","))
    return ";".join(texts)


def _short(milliseconds: float) -> float | int:
    rounded = float(f"{milliseconds:.3g}")
    return int(rounded) if rounded == int(rounded) else rounded


def _key(setting: Setting) -> str:
    return key_of(*[setting[switch] for switch in SHAPE])


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    return read()
