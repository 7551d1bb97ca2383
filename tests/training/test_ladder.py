"""Rows: they are filled from runs, the first one twice, and a time is told from noise."""

from __future__ import annotations

import labutils as lab
from labutils.memory.ledger import MemoryLedger
from labutils.training import ladder
from labutils.training.records import RunRecord, Series, Timing

SMALL = {"seq_len": 16, "micro_batch_size": 2, "tokens_per_step": 32, "steps": 7, "dropout": 0.0}


def rows_of(peaks, times=()):
    """Return rows one above the other, with these peaks in MiB and milliseconds."""
    rows = {}
    above = None
    for i, peak in enumerate(peaks):
        ledger = MemoryLedger(phases={"backward": {"activations": int(peak * 2**20)}}, method="x")
        step_ms = times[i] if i < len(times) else []
        config = lab.load_config("fp32", **SMALL)
        rows[f"row {i}"] = ladder.Row(config, above, True, "", ledger, peak, step_ms, 7.0)
        above = f"row {i}"
    return rows


def test_rows_are_filled_from_runs_and_the_first_one_runs_twice(monkeypatch):
    repeats = []

    def run(config, *, repeat=0, rerun, progress):
        assert rerun  # no record of another hour
        repeats.append((config.name, repeat))
        memory = MemoryLedger(phases={"backward": {"activations": 2**20}}, method="x")
        series = Series(loss=[1.0] * 7, step_ms=[float(i) for i in range(7)])
        timing = Timing(median_step_ms=1, spread=0, tokens_per_s=1)
        return RunRecord(
            id="x",
            created="",
            name=config.name,
            memory=memory,
            series=series,
            timing=timing,
            held_out=[(7, 6.5)],
        )

    monkeypatch.setattr(ladder, "run_experiment", run)
    rows = {name: ladder.Row(lab.load_config("fp32", **SMALL, name=name)) for name in ("a", "b")}
    noise = ladder.run(rows)
    assert repeats == [("a", 0), ("a", 1), ("b", 0)]
    assert noise == ([2.0, 3.0, 4.0, 5.0, 6.0], [2.0, 3.0, 4.0, 5.0, 6.0])
    assert [row.measured_mib for row in rows.values()] == [1.0, 1.0]
    assert rows["b"].held_out == 6.5


def test_a_run_that_failed_leaves_its_reason(monkeypatch):
    failed = RunRecord(id="x", created="", name="x", outcome="out_of_memory", reason="too large")
    monkeypatch.setattr(ladder, "run_experiment", lambda *_, **__: failed)
    rows = {"start": ladder.Row(lab.load_config("fp32", **SMALL))}
    assert ladder.run(rows) == ()
    assert rows["start"].note == "out of memory: too large"
    assert rows["start"].measured_mib is None
