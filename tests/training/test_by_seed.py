"""Seeds of one experiment make one row."""

from __future__ import annotations

import labutils as lab
from labutils.training.records import RunRecord


def record(name: str, seed: int, loss: float, outcome: str = "completed") -> RunRecord:
    config = {"seed": seed, "micro_batch_size": 2, "seq_len": 64, "learning_rate": 1e-3}
    facts = {"id": f"{seed}", "created": "2026-01-01", "name": name, "outcome": outcome}
    facts |= {"config": config, "tokens_per_step": 512, "held_out": [(3, loss)]}
    return RunRecord(**facts, series={"loss": [7.0, 6.0, 5.0]})


def test_seeds_are_averaged_and_the_newest_record_of_a_seed_counts():
    runs = [record("a", 0, 9.0), record("a", 0, 2.0), record("a", 1, 3.0), record("b", 0, 1.0)]
    table = lab.seed_table(runs, ["b", "a"])
    assert list(table.index) == ["b", "a"]
    row = table.loc["a"]
    assert (row["window"], row["optimizer steps"], row["seeds"]) == ("4 × 2", 3, 2)
    assert row["held-out loss"] == "2.500 ± 0.707"
    assert table.loc["b"]["held-out loss"] == "1.000"
    assert row["tokens/s"] == ""  # these runs were not timed


def test_other_names_and_runs_that_failed_are_left_out():
    runs = [record("a", 0, 2.0, outcome="out_of_memory"), record("c", 0, 2.0)]
    assert lab.seed_table(runs, ["a"]).empty
