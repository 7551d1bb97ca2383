"""Which changes would save most memory in *this* run, and which nothing:

Each is tried on the ledger.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from labutils.config.schema import Config, ConfigError
from labutils.machine.gpu import card_named
from labutils.memory.ledger import MIB
from labutils.prediction.changes import CHUNK_TOKENS, FREE, costs, time_cost
from labutils.prediction.memory import predict_memory
from labutils.prediction.resolve import resolve
from labutils.prediction.traces import CPU
from labutils.techniques import precision

NOTHING = 0.005  # of the peak: less is called nothing


@dataclass(frozen=True)
class Advice:
    """One change: the bytes of the peak it saves by itself (predicted), what it costs, and where
    the peak is then.
    """

    changes: dict[str, Any]
    saved_bytes: int
    time_cost: float  # as a fraction of the step's FLOPs, see `solver.time_cost`
    cost: str
    peak_phase: str

    @property
    def name(self) -> str:
        """The change as it would stand in a config."""
        return ", ".join(f"{key}: {value}" for key, value in self.changes.items())


@dataclass(frozen=True)
class Advices:
    """What was tried on a config:

    The changes that help, best first, those that do nothing, those that cannot be.
    """

    config: Config
    peak_bytes: int
    peak_phase: str
    helpful: list[Advice]
    useless: list[Advice]
    impossible: dict[str, str]
    best_three_peak_bytes: int  # with the first three together: savings do not add up

    def __str__(self) -> str:
        lines = [
            f"{self.config.name}: predicted peak {self.peak_bytes / MIB:,.0f} MiB, in the {self.peak_phase} phase"
        ]
        for i, one in enumerate(self.helpful[:3], start=1):
            lines.append(
                f"{i}. {one.name}: saves {one.saved_bytes / MIB:,.0f} MiB; costs {one.cost}"
            )
        if self.helpful:
            lines.append(
                f"   the best together: a peak of {self.best_three_peak_bytes / MIB:,.0f} MiB"
            )
        if self.useless:
            lines.append("would do nothing here: " + "; ".join(one.name for one in self.useless))
        return "\n".join(
            lines + [f"not possible here: {name}: {why}" for name, why in self.impossible.items()]
        )


def advise(run: Any, device: str = "a100") -> Advices:
    """Return what single changes would do to the predicted peak of a config, or of the config of a
    record.

    `device` as for `predict_memory`. Changes that need no other model or length are tried: those that change nothing
    that is computed, lower precision, smaller batches at equal tokens per step, recomputation, the
    loss in chunks, smaller or earlier optimizer steps. Raises what `predict_memory` raises, for the
    config as it is.
    """
    config = run if isinstance(run, Config) else Config.model_validate(run.config)
    resolved = resolve(config, device)
    now = predict_memory(resolved, device)
    tried, impossible = [], {}
    for changes in _candidates(resolved, device):
        name = ", ".join(f"{key}: {value}" for key, value in changes.items())
        if device == "cpu" and (slow := _slow_here(changes)):
            impossible[name] = slow
            continue
        try:
            ledger = predict_memory(resolved.model_copy(update=changes), device)
        except (ConfigError, precision.PrecisionUnsupported) as problem:
            impossible[name] = str(problem).partition(": ")[2]
            continue
        saved = now.peak_bytes - ledger.peak_bytes
        cost = "; ".join(line.partition(": costs ")[2] for line in costs(resolved, changes))
        tried.append(Advice(changes, saved, time_cost(resolved, changes), cost, ledger.peak_phase))
    tried.sort(key=lambda one: (-one.saved_bytes, one.time_cost))
    helpful = [one for one in tried if one.saved_bytes > NOTHING * now.peak_bytes]
    together: dict[str, Any] = {}
    best = now.peak_bytes
    for one in helpful[:3]:  # one after the other: some exclude each other
        with suppress(ConfigError):
            peak = predict_memory(
                resolved.model_copy(update=together | one.changes), device
            ).peak_bytes
            if peak < best:
                together, best = together | one.changes, peak
    return Advices(
        config=resolved,
        peak_bytes=now.peak_bytes,
        peak_phase=now.peak_phase,
        helpful=helpful,
        useless=[one for one in tried if one not in helpful],
        impossible=impossible,
        best_three_peak_bytes=best,
    )


def _slow_here(changes: dict[str, Any]) -> str:
    answer = precision.support(changes.get("precision", "fp32"), CPU)
    return answer.reason if answer.slow else ""


def _candidates(config: Config, device: str) -> list[dict[str, Any]]:
    """Return the changes worth a try; each is one decision, though some need two keys."""
    found: list[dict[str, Any]] = [{key: value} for key, (value, _) in FREE.items()]
    found += [{"attention": "auto"}] if config.attention in ("eager", "math") else []
    if config.precision in ("fp32", "tf32"):
        has_bf16 = device == "cpu" or card_named(device).flash
        found.append({"precision": "bf16" if has_bf16 else "fp16"})
    smaller = max(
        (n for n in range(1, config.micro_batch_size) if config.micro_batch_size % n == 0),
        default=0,
    )
    if smaller and not config.optimizer_in_backward:
        found.append({"micro_batch_size": smaller})
    elif smaller:  # it cannot accumulate
        found.append({"tokens_per_step": smaller * config.seq_len, "micro_batch_size": smaller})
    elif config.optimizer_in_backward:
        found.append({"tokens_per_step": config.seq_len // 2, "seq_len": config.seq_len // 2})
    found.append({"gradient_checkpointing": "block"})
    found.append(
        {
            "loss_chunk_tokens": min(
                CHUNK_TOKENS, max(2, config.micro_batch_size * config.seq_len // 4)
            )
        }
    )
    found += [{"optimizer": "adamw_8bit"}] if config.optimizer.startswith("adamw") else []
    found.append(
        {"optimizer_in_backward": True} | ({"max_grad_norm": 0.0} if config.max_grad_norm else {})
    )
    return [
        changes
        for changes in found
        if any(getattr(config, key) != value for key, value in changes.items())
    ]
