"""The capstone: does a reader's config fit the budget, and does it still learn?

The trial is made elsewhere (`labutils.training.capstone`), so that this folder needs no ledger.
"""

from __future__ import annotations

from typing import Protocol

from labutils.checks.core import exercise, first_problem

MOST_STALLED = 0.1  # of the weights
BATCHES = ("activations", "logits and loss", "temporaries", "activations and temporaries")


class Trial(Protocol):
    """What a trial of a config tells: see `labutils.training.capstone.Trial`."""

    config: object
    is_autocast: bool
    changed_task: tuple[str, ...]
    needed_gib: float
    kept_gib: float
    largest: tuple[str, str, float]
    step_ms: float
    limit_ms: float
    budget_gib: float
    stalled: float
    loss: float | None
    target_loss: float | None
    twin_note: str


@exercise(
    hints=(
        "Begin with what does not depend on the batch: weights, gradients, moments. How many bytes "
        "per parameter may they take?",
        "Which techniques make moments or gradients smaller? Section 2 has them. Then look at the "
        "category at the peak.",
        "If a step is too slow: what gives time back without costing memory? If the loss is too "
        "high: which numbers got fewer bits, and how are they rounded?",
    )
)
def capstone(trial: Trial | None) -> str | None:
    """Check a trial of the capstone: task unchanged, bytes, time, loss, in this order."""
    return first_problem(
        lambda: _task(trial), lambda: _memory(trial), lambda: _time(trial), lambda: _loss(trial)
    )


def _task(trial: Trial) -> str | None:
    if trial.changed_task:
        keys = ", ".join(trial.changed_task)
        return f"you changed the task itself: {keys}. Those lines must stay as they were."
    return None


def _memory(trial: Trial) -> str | None:
    needed, budget = trial.needed_gib, trial.budget_gib
    if needed <= budget:
        return None
    over = f"it needs {needed:.2f} GiB; the budget is {budget:g}. "
    if trial.kept_gib > budget:
        words = [
            f"Weights, gradients, moments and the context alone take {trial.kept_gib:.2f} GiB, "
            "whatever the batch."
        ]
        if trial.config.micro_batch_size * trial.config.seq_len < trial.config.tokens_per_step:
            words.append("Accumulation does not lower this floor.")
        if trial.config.gradient_checkpointing != "none":
            words.append("Checkpointing does not lower it: it saves activations.")
        if trial.is_autocast:
            words.append("Autocast does not lower it: its weights stay float32.")
        return over + " ".join(words)
    category, phase, n_gib = trial.largest
    where = f"The largest part of the peak, in the {phase} phase, is {category}: {n_gib:.2f} GiB. "
    if category in BATCHES:
        return over + where + "That grows with the micro-batch."
    return over + where + "Its bytes per parameter decide; or look for what stands beside it."


def _time(trial: Trial) -> str | None:
    if trial.step_ms <= trial.limit_ms:
        return None
    words = [
        f"it fits, but a step takes {trial.step_ms:,.0f} ms, predicted; the limit is "
        f"{trial.limit_ms:,.0f}."
    ]
    if trial.config.gradient_checkpointing != "none":
        words.append("Checkpointing runs each forward pass a second time.")
    if trial.config.micro_batch_size == 1:
        words.append("The smallest micro-batch keeps a card less busy than a larger one.")
    words.append("What makes the matrix multiplications faster?")
    return " ".join(words)


def _loss(trial: Trial) -> str | None:
    if trial.stalled > MOST_STALLED:
        return (
            f"it fits and is fast. But an update of the size of the learning rate leaves "
            f"{100 * trial.stalled:.0f} % of the 16-bit weights where they are, and this optimizer "
            f"rounds to nearest.{_measured(trial)} Which optimizer rounds stochastically?"
        )
    if trial.loss is None or trial.target_loss is None:
        return f"it fits, but the twin did not finish: {trial.twin_note}"
    if trial.loss <= trial.target_loss:
        return None
    if trial.config.optimizer == "sgd":
        return f"it fits, but SGD does not learn this at AdamW's rate.{_measured(trial)}"
    return f"it fits, but it learns less than the plain run.{_measured(trial)}"


def _measured(trial: Trial) -> str:
    if trial.loss is None or trial.target_loss is None:
        return ""
    return f" The twin reached {trial.loss:.3f}; the loss to reach is {trial.target_loss:.3f}."
