"""Commands that predict: predict, advise.

Each takes the parsed options and returns an exit code. What needs torch is imported late.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from labutils.config.card import CONTEXT_GIB, Card
from labutils.config.reader import find_config, load_config, parse_overrides
from labutils.config.schema import Config, ConfigError
from labutils.tools.predicted_text import Answer, facts_of, text_of

if TYPE_CHECKING:
    from labutils.prediction.time import TimeLedger


def predict(options: argparse.Namespace) -> int:
    """Print the predicted memory and time of a config, and the changes that make it fit."""
    config = load_config(options.config, **parse_overrides(options.pairs))
    from labutils.config.card import PrecisionUnsupported

    try:
        card = _card(options)
        answer = _answer(config, card, options.gpu_memory_gib)
    except (PrecisionUnsupported, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(facts_of(answer), indent=1) if options.json else text_of(answer))
    return 0


def _card(options: argparse.Namespace) -> Card:
    """Return the card that is meant: a file's, or one by name."""
    if options.card:
        from labutils.config.card_file import load_card

        return load_card(options.card)
    from labutils.machine.here import card_of

    return card_of(options.device)


def _answer(config: Config, card: Card, budget_gib: float | None) -> Answer:
    from labutils.prediction.fit import fit
    from labutils.prediction.memory import needed_gib, predict_memory
    from labutils.prediction.time import predict_time

    ledger = predict_memory(config, card)
    if budget_gib is None and card.gpu:
        budget_gib = card.memory_gib
        if config.memory_limit_gib:  # the limit leaves the context out
            budget_gib = config.memory_limit_gib + CONTEXT_GIB
    needed = needed_gib(ledger, card)
    time = predict_time(config, card)
    plan = None
    if budget_gib is not None and needed > budget_gib:
        plan = fit(config, budget_gib, card)
    return Answer(config, card, ledger, time, needed, budget_gib, _note(config, card, time), plan)


def _note(config: Config, card: Card, time: TimeLedger) -> str:
    """Return what happens where the card lacks the precision; empty if it does not."""
    from labutils.config.choices import WITHOUT_BF16
    from labutils.config.resolve import precision_on
    from labutils.prediction.time import predict_time

    precision = precision_on(config.precision, card)
    if card.gpu is None or card.support(precision).ok:
        return ""
    note = f"{card.name} has no hardware for {precision}, which would be emulated"
    instead = config.model_copy(update={"precision": WITHOUT_BF16.name})
    with suppress(ConfigError):  # it may ask for what FP16 cannot do
        times = time.step_ms / predict_time(instead, card).step_ms
        note += f". A step takes {times:.1f} times as long as in {WITHOUT_BF16.name}"
    return note


def advise(options: argparse.Namespace) -> int:
    """Print which changes would save most memory, in a config or in a recorded run."""
    from labutils.config.card import PrecisionUnsupported
    from labutils.prediction.advise import advise as advise_on
    from labutils.training.records import load_record

    print("predicts one change after the other; this takes some seconds", file=sys.stderr)
    try:
        if find_config(options.run).suffix in (".yaml", ".yml"):
            config = load_config(options.run, **parse_overrides(options.pairs))
            print(advise_on(config, options.device or "a100"))
            return 0
        record = load_record(options.run)
        on_cpu = record.memory is not None and record.memory.method.startswith("CPU")
        print(advise_on(record, options.device or ("cpu" if on_cpu else "a100")))
    except (PrecisionUnsupported, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    if record.memory:
        peak_mib = record.memory.peak_bytes / 2**20
        print(f"measured in that run: {peak_mib:,.0f} MiB, {record.memory.method}")
    return 0
