"""Techniques side by side: each alone and in pairs, all on top of the same start."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Any

import torch

from labutils.config.choices import SIXTEEN_BIT, WITH_BF16, WITHOUT_BF16
from labutils.config.reader import load_config
from labutils.config.schema import ConfigError
from labutils.machine import here
from labutils.prediction.memory import predict_memory
from labutils.training import ladder
from labutils.training.ladder import Row

AS_IT_IS = "as it is"
BOTH = " + "


def pairs(
    changes: Mapping[str, Mapping[str, Any]], alone: Collection[str] = ()
) -> dict[str, dict[str, Any]]:
    """Return {name: keys of a config}: the start, each change alone, and each pair of changes.

    Those named in `alone` are in no pair.
    """
    found = {AS_IT_IS: {}} | {name: dict(change) for name, change in changes.items()}
    paired = [name for name in changes if name not in alone]
    for one, other in itertools.combinations(paired, 2):
        found[one + BOTH + other] = {**changes[one], **changes[other]}
    return found


def plan(
    base: str,
    start: Mapping[str, Any],
    changes: Mapping[str, Mapping[str, Any]],
    device: torch.device | str,
) -> tuple[dict[str, Row], dict[str, str]]:
    """Return (rows, {name: why this combination cannot be} of the others).

    Each row has its change only, on top of the start, and is compared with AS_IT_IS. `device` is
    one of this machine, or a key of CARDS. The precision "16bit" becomes one that is fast there. A
    precision that this machine emulates runs few steps: see `ladder.plan`.
    """
    rows: dict[str, Row] = {}
    refused: dict[str, str] = {}
    for i, (name, change) in enumerate(changes.items()):
        keys = {**start, **_of_16_bits(change, device), "name": f"side_{i}"}
        local = device if isinstance(device, torch.device) else None
        is_here, is_slow, note = ladder.possible(keys, local)
        if is_slow:
            keys |= {"steps": ladder.SLOW_STEPS, "lr_warmup_steps": 1}
        try:
            config = load_config(base, **keys)
        except ConfigError as problem:
            refused[name] = str(problem).rpartition(": ")[2]
            continue
        rows[name] = Row(config, None if name == AS_IT_IS else AS_IT_IS, is_here, note)
    return rows, refused


def _of_16_bits(change: Mapping[str, Any], device: torch.device | str) -> dict[str, Any]:
    if change.get("precision") != SIXTEEN_BIT.name:
        return dict(change)
    answer = here.card_of(device).support(WITH_BF16.name)
    fast = WITH_BF16 if answer.ok and not answer.slow else WITHOUT_BF16
    return {**change, "precision": fast.name}


def predict(rows: Mapping[str, Row], device: torch.device | str) -> None:
    """Fill in each row's ledger."""
    for row in rows.values():
        if row.is_here:
            row.ledger = predict_memory(row.config, device)
