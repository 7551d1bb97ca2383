"""Records of several seeds in one table: a row for each experiment."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import pandas as pd

from labutils.training.records import RunRecord


def seed_table(runs: Iterable[RunRecord], names: Sequence[str]) -> pd.DataFrame:
    """Return a row for each of the named experiments, of what its completed runs have recorded.

    Rates are tokens per second, memory MiB at the peak, losses nats per token: means over the
    seeds ± the standard deviation between them. Of a seed that ran more than once the last record
    in `runs` counts. An experiment without a record has no row.
    """
    by_name: dict[str, dict[int, RunRecord]] = {name: {} for name in names}
    for run in runs:
        if run.outcome == "completed" and run.name in by_name:
            by_name[run.name][run.config["seed"]] = run
    rows = {}
    for name, by_seed in by_name.items():
        if by_seed:
            rows[name] = _row(list(by_seed.values()))
    return pd.DataFrame(rows).T


def _row(runs: list[RunRecord]) -> dict[str, object]:
    last = runs[-1]
    micro_batch_size = last.config["micro_batch_size"]
    n_micro_batches = last.tokens_per_step // last.config["seq_len"] // micro_batch_size
    speeds = [run.timing.tokens_per_s for run in runs if run.timing]
    peaks = [run.memory.peak_mib for run in runs if run.memory]
    return {
        "window": f"{n_micro_batches} × {micro_batch_size}",
        "optimizer steps": len(last.series.loss),
        "rate": f"{last.config['learning_rate']:.3g}",
        "seeds": len(runs),
        "tokens/s": _mean_and_spread(speeds, 0),
        "peak, MiB": _mean_and_spread(peaks, 1),
        "held-out loss": _mean_and_spread([run.held_out[-1][1] for run in runs], 3),
    }


def _mean_and_spread(values: list[float], digits: int) -> str:
    if not values:
        return ""
    mean = f"{statistics.mean(values):,.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(values):,.{digits}f}"
