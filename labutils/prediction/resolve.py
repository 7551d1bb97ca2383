"""A config as it runs on a device."""

from __future__ import annotations

from labutils.config.schema import Config
from labutils.machine.gpu import card_named
from labutils.techniques import precision


def resolve(config: Config, device: str) -> Config:
    """Return a config as it runs on a device.

    Raises ConfigError or PrecisionUnsupported if it cannot.
    """
    resolved = config.on("cpu" if device == "cpu" else "cuda")
    if device == "cpu":
        resolved = resolved.model_copy(
            update={"precision": precision.without_choice(resolved.precision, True)}
        )
    if device != "cpu":
        card = card_named(device)
        has_bf16 = card.capability >= (8, 0)
        resolved = resolved.model_copy(
            update={"precision": precision.without_choice(resolved.precision, has_bf16)}
        )
        answer = precision.cuda_support(resolved.precision, card.capability, has_bf16)
        if not answer.ok:
            reason = f"precision {resolved.precision} cannot run on {device}: {answer.reason}"
            raise precision.PrecisionUnsupported(reason)
        if resolved.attention == "flash" and not card.flash:
            raise precision.PrecisionUnsupported(
                f"flash attention needs Ampere or later, not {device}; use auto"
            )
    return resolved
