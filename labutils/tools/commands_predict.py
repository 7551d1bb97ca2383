"""Commands that predict: predict, advise.

Each takes the parsed options and returns an exit code. What needs torch is imported late.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labutils.config.card import CONTEXT_GIB
from labutils.config.reader import find_config, load_config, parse_overrides
from labutils.config.schema import Config

if TYPE_CHECKING:
    from labutils.memory.ledger import MemoryLedger
    from labutils.prediction.fit import Plan

ALLOCATOR_KEYS = (
    "reserved_bytes",
    "reserved_expandable_bytes",
    "needed_bytes",
    "needed_expandable_bytes",
)


@dataclass(frozen=True)
class Answer:
    """What is predicted for a config on a device, and whether it fits a budget, if there is one."""

    config: Config
    device: str
    ledger: MemoryLedger
    needed_gib: float
    budget_gib: float | None
    plan: Plan | None  # changes with which it fits, or comes nearest; None if it fits as it is

    @property
    def fits(self) -> bool:
        """Whether the config fits as it is."""
        return self.budget_gib is None or self.needed_gib <= self.budget_gib


def predict(options: argparse.Namespace) -> int:
    """Print the predicted memory of a config, and the changes that make it fit."""
    config = load_config(options.config, **parse_overrides(options.pairs))
    from labutils.config.card import PrecisionUnsupported

    try:
        answer = _answer(config, options.device, options.gpu_memory_gib)
    except (PrecisionUnsupported, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(_facts(answer), indent=1) if options.json else _text(answer))
    return 0


def _answer(config: Config, device: str, budget_gib: float | None) -> Answer:
    from labutils.machine.here import card_of
    from labutils.prediction.fit import fit
    from labutils.prediction.memory import needed_gib, predict_memory

    ledger = predict_memory(config, device)
    if budget_gib is None and device != "cpu":
        budget_gib = card_of(device).memory_gib
        if config.memory_limit_gib:  # the limit leaves the context out
            budget_gib = config.memory_limit_gib + CONTEXT_GIB
    needed = needed_gib(ledger, device)
    plan = None
    if budget_gib is not None and needed > budget_gib:
        plan = fit(config, budget_gib, device)
    return Answer(config, device, ledger, needed, budget_gib, plan)


def _facts(answer: Answer) -> dict[str, Any]:
    """Return what `--json` prints."""
    ledger = answer.ledger
    facts = {
        "peak_bytes": ledger.peak_bytes,
        "peak_phase": ledger.peak_phase,
        "categories": ledger.categories,
        "phases": ledger.phases,
        "method": ledger.method,
        "device": answer.device,
        "fits": answer.fits,
        "needed_gib": answer.needed_gib,
        "budget_gib": answer.budget_gib,
    }
    for key in ALLOCATOR_KEYS:
        facts[key] = getattr(ledger, key)
    if answer.plan:
        facts["fit"] = {
            "fits": answer.plan.fits(answer.budget_gib),
            "changes": answer.plan.changes,
            "costs": answer.plan.costs,
            "time_cost": answer.plan.time_cost,
            "needed_gib": answer.plan.needed_gib,
        }
    return facts


def _text(answer: Answer) -> str:
    import pandas as pd

    ledger = answer.ledger
    table = pd.DataFrame(ledger.phases) / 2**20
    table.loc["total"] = table.sum()
    peak_gib = ledger.peak_bytes / 2**30
    lines = [
        f"{answer.config.name}: MiB allocated at each phase's peak, {ledger.method}",
        table.round(1).to_string(),
        f"\npeak {peak_gib:.2f} GiB allocated, in the {ledger.peak_phase} phase",
    ]
    if ledger.needed_bytes is not None:
        lines.append(_allocator_text(ledger, answer.config.expandable_segments))
    if answer.budget_gib is not None:
        lines.append(_verdict(answer))
    if answer.plan:
        lines.append(_plan_text(answer.plan, answer.budget_gib))
    return "\n".join(lines)


def _allocator_text(ledger: MemoryLedger, expandable: bool) -> str:
    """Return a table of what torch's allocator takes from the card for a predicted ledger."""
    import pandas as pd

    # A config with expandable segments never runs without them, so that figure is not predicted.
    default = math.nan if expandable else ledger.needed_bytes
    rows = {
        "default": (ledger.reserved_bytes, default),
        "expandable_segments": (ledger.reserved_expandable_bytes, ledger.needed_expandable_bytes),
    }
    table = pd.DataFrame(rows, index=["reserved in three steps", "smallest card"]).T / 2**30
    return (
        "GiB that torch's allocator takes from the card, predicted by its rules.\n"
        f"The smallest card has room for a CUDA context of {CONTEXT_GIB} GiB, which is assumed.\n"
        f"{table.round(2).to_string(na_rep='not asked')}"
    )


def _verdict(answer: Answer) -> str:
    if answer.ledger.needed_bytes is not None:
        reason = f"the smallest card has {answer.needed_gib:.2f} GiB"
    else:
        reason = f"it needs {answer.needed_gib:.2f} GiB, with a tenth for what no tensor can use"
        if answer.device != "cpu":
            reason += f" and {CONTEXT_GIB} for the CUDA context"
    verdict = "fits" if answer.fits else "does NOT fit"
    return f"{verdict} {answer.budget_gib:g} GiB: {reason}"


def _plan_text(plan: Plan, budget_gib: float) -> str:
    if plan.fits(budget_gib):
        percent = f"{100 * plan.time_cost:.0f} %"
        lines = [
            f"It fits in {plan.needed_gib:.2f} GiB, with about {percent} more time a step "
            "(predicted), if you change:"
        ]
    else:
        lines = [f"No known change makes it fit; the smallest needs {plan.needed_gib:.2f} GiB:"]
    for cost in plan.costs:
        lines.append(f"  {cost}")
    return "\n".join(lines)


def advise(options: argparse.Namespace) -> int:
    """Print which changes would save most memory, in a config or in a recorded run."""
    from labutils.config.card import PrecisionUnsupported
    from labutils.prediction.advise import advise as advise_on
    from labutils.training.records import load_record

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
