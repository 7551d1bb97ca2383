"""From a config and a card to a run: every choice that a config leaves open is made here."""

from __future__ import annotations

from dataclasses import dataclass

from labutils.config.card import Card, PrecisionUnsupported
from labutils.config.choices import ATTENTION, PRECISIONS, SIXTEEN_BIT, WITH_BF16, WITHOUT_BF16
from labutils.config.schema import Config

SLOW_STEPS_DIVISOR = 8  # a slow precision trains this many times fewer steps
MIN_SLOW_STEPS = 8


@dataclass(frozen=True)
class Run:
    """A config as it runs on a card.

    `config` has a value for every key, `when_cpu` applied; its `steps` are as planned. `steps` are
    those that will be taken: fewer where the precision is slow, and `reason` says why. `changes`
    says what does not come from the main part of the file: a line for each source.
    """

    config: Config
    card: Card
    steps: int
    changes: list[str]
    reason: str = ""


def resolve(config: Config, card: Card, *, to_train: bool = False) -> Run:
    """Decide what a config leaves open: values for a CPU, the 16-bit precision, the steps.

    Raises ConfigError if its values do not agree on this kind of device, and PrecisionUnsupported
    if the card lacks what they ask for. What a card that is not here would emulate is allowed: it
    can be predicted. A CPU is asked only `to_train`: its products are timed, and the bytes of a
    step do not depend on them.
    """
    resolved, changes = config.on(card.device_type), config.changes(card.device_type)
    precision = precision_on(resolved.precision, card)
    resolved = resolved.model_copy(update={"precision": precision})
    if card.gpu is None and not to_train:
        return Run(resolved, card, resolved.steps, changes)
    is_only_predicted = not to_train and not card.is_here
    if is_only_predicted and PRECISIONS[precision].is_emulated:
        support = card.support(precision)
    else:
        support = card.require(precision)
    needed = ATTENTION[resolved.attention].since
    if card.gpu and card.gpu.capability < needed:
        kind = resolved.attention
        message = f"{kind} attention cannot run {card.place}: it needs Ampere or later; use auto"
        raise PrecisionUnsupported(message)
    steps = fewer_steps(resolved.steps) if support.slow else resolved.steps
    return Run(resolved, card, steps, changes, support.reason)


def precision_on(precision: str, card: Card) -> str:
    """Return the precision that a config's word means on a card: `16bit` is one of two."""
    if precision != SIXTEEN_BIT.name:
        return PRECISIONS[precision].name
    return WITH_BF16.name if card.has_bf16 else WITHOUT_BF16.name


def fewer_steps(steps: int) -> int:
    """Return an eighth of the steps, but at least eight.

    The batches stay as they are, so the losses can be compared one by one.
    """
    return min(steps, max(MIN_SLOW_STEPS, steps // SLOW_STEPS_DIVISOR))
