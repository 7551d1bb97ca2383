"""What `predict` prints: a text, or the facts of `--json`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labutils.config.card import CONTEXT_GIB, Card
from labutils.config.schema import Config

if TYPE_CHECKING:
    from labutils.memory.ledger import MemoryLedger
    from labutils.prediction.fit import Plan
    from labutils.prediction.time import TimeLedger

ALLOCATOR_KEYS = (
    "reserved_bytes",
    "reserved_expandable_bytes",
    "needed_bytes",
    "needed_expandable_bytes",
)


TIME_KEYS = (
    "step_ms",
    "low_ms",
    "high_ms",
    "tokens_per_s",
    "shares",
    "launch_bound",
    "phases_ms",
    "operations",
)


@dataclass(frozen=True)
class Answer:
    """What is predicted for a config on a device, and whether it fits a budget, if there is one."""

    config: Config
    card: Card
    ledger: MemoryLedger
    time: TimeLedger
    needed_gib: float
    budget_gib: float | None
    note: str  # what the card does instead, if it lacks something
    plan: Plan | None  # changes with which it fits, or comes nearest; None if it fits as it is

    @property
    def fits(self) -> bool:
        """Whether the config fits as it is."""
        return self.budget_gib is None or self.needed_gib <= self.budget_gib


def facts_of(answer: Answer) -> dict[str, Any]:
    """Return what `--json` prints."""
    ledger = answer.ledger
    facts = {
        "peak_bytes": ledger.peak_bytes,
        "peak_phase": ledger.peak_phase,
        "categories": ledger.categories,
        "phases": ledger.phases,
        "method": ledger.method,
        "device": answer.card.name,
        "fits": answer.fits,
        "needed_gib": answer.needed_gib,
        "budget_gib": answer.budget_gib,
    }
    for key in ALLOCATOR_KEYS:
        facts[key] = getattr(ledger, key)
    for key in TIME_KEYS:
        facts[key] = getattr(answer.time, key)
    facts["note"] = answer.note
    if answer.plan:
        facts["fit"] = {
            "fits": answer.plan.fits(answer.budget_gib),
            "changes": answer.plan.changes,
            "costs": answer.plan.costs,
            "step_ms": answer.plan.step_ms,
            "time_cost": answer.plan.time_cost,
            "needed_gib": answer.plan.needed_gib,
        }
    return facts


def text_of(answer: Answer) -> str:
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
    lines.append("\n" + _time_text(answer.time))
    if answer.note:
        lines.append(answer.note)
    return "\n".join(lines)


def _time_text(time: TimeLedger) -> str:
    """Return a table of where the milliseconds of a step go, and the step with its band."""
    import pandas as pd

    rows = {}
    for name, share in time.shares.items():
        rows[name] = {"ms": share * time.step_ms, "%": 100 * share}
    table = pd.DataFrame(rows).T.map("{:.1f}".format)
    between = f"between {time.low_ms:.0f} and {time.high_ms:.0f}"
    lines = [
        f"Milliseconds of one optimizer step, {time.method}:",
        table.to_string(),
        f"step {time.step_ms:.1f} ms, {between} ({time.why_band})",
        f"{time.tokens_per_s:,.0f} tokens per second",
    ]
    if time.launch_bound:
        lines.append("The card waits for its host: fewer and larger operations would be faster")
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
        if answer.card.gpu:
            reason += f" and {CONTEXT_GIB} for the CUDA context"
    verdict = "fits" if answer.fits else "does NOT fit"
    return f"{verdict} {answer.budget_gib:g} GiB: {reason}"


def _plan_text(plan: Plan, budget_gib: float) -> str:
    if plan.fits(budget_gib):
        step = f"a step then takes {plan.step_ms:.0f} ms, {100 * plan.time_cost:+.0f} %"
        lines = [f"It fits in {plan.needed_gib:.2f} GiB ({step}, both predicted), if you change:"]
    else:
        lines = [f"No known change makes it fit; the smallest needs {plan.needed_gib:.2f} GiB:"]
    for cost in plan.costs:
        lines.append(f"  {cost}")
    return "\n".join(lines)
