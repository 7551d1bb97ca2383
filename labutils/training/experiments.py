"""Several experiments in a row: the first one twice, for its spread."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from labutils.config.card import PrecisionUnsupported
from labutils.config.reader import load_config
from labutils.config.schema import Config
from labutils.files import new_id
from labutils.training.experiment import run_experiment
from labutils.training.records import RunRecord


def run_experiments(
    configs: Iterable[Config | str], *, baseline_repeats: int = 2, **options: Any
) -> list[RunRecord]:
    """Run configs (or YAML files) and return their records.

    The first one, the baseline, runs `baseline_repeats` times. A precision that this device lacks
    gives an unsaved record with `outcome` "unsupported" and the reason.
    """
    records = []
    for position, config in enumerate(configs):
        for repeat in range(1 if position else baseline_repeats):
            try:
                records.append(run_experiment(config, repeat=repeat, **options))
            except PrecisionUnsupported as problem:
                records.append(_unsupported(config, problem, options.get("progress", True)))
    return records


def _unsupported(config: Config | str, problem: PrecisionUnsupported, progress: bool) -> RunRecord:
    config = config if isinstance(config, Config) else load_config(config)
    reason = str(problem).partition(": ")[2]
    if progress:
        print(f"{config.name}: not on this device: {reason}")
    run_id, created = new_id()
    return RunRecord(
        id=run_id,
        created=created,
        name=config.name,
        note=config.note,
        outcome="unsupported",
        reason=reason,
    )
