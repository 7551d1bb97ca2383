"""The ladder: which rows are there, what a row is compared with, and what counts as nothing."""

from __future__ import annotations

import pytest
import torch

import labutils as lab
from labutils.config.card import Support
from labutils.machine import here
from labutils.memory.ledger import MemoryLedger
from labutils.training import ladder
from labutils.training.records import RunRecord, Series, Timing
from tests.helpers import CPU

SMALL = {"seq_len": 16, "micro_batch_size": 2, "tokens_per_step": 32, "steps": 7, "dropout": 0.0}
CHANGES = {
    "start": {},
    "tf32": {"precision": "tf32"},
    "slow": {"precision": "bf16"},
    "compiled": {"compile": "default"},
    "tanh": {"activation": "gelu_tanh"},
}


@pytest.fixture
def slow_bf16(monkeypatch):
    """TF32 is missing, BF16 is emulated, whatever this CPU can do."""

    def support(precision, device):
        return Support(precision != "tf32", precision == "bf16", f"about {precision}")

    monkeypatch.setattr(here, "support", support)


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


def test_a_row_that_is_not_here_or_slow_is_no_part_of_those_below(slow_bf16):
    rows = ladder.plan("fp32", SMALL, CHANGES, CPU)
    assert [row.is_here for row in rows.values()] == [True, False, True, False, True]
    assert rows["slow"].config.precision == "bf16"
    assert rows["slow"].config.steps == ladder.SLOW_STEPS
    assert rows["slow"].note == "about bf16"
    last = rows["tanh"]
    assert (last.config.precision, last.config.compile, last.above) == ("fp32", "off", "start")


def test_without_a_device_every_row_builds_on_the_one_above():
    rows = ladder.plan("fp32", SMALL, CHANGES)
    assert all(row.is_here for row in rows.values())
    assert [row.above for row in rows.values()] == [None, *list(CHANGES)[:-1]]
    last = rows["tanh"].config
    assert (last.precision, last.compile, last.activation) == ("bf16", "default", "gelu_tanh")


def test_a_row_has_the_ledger_of_its_config():
    rows = ladder.plan("fp32", SMALL, {"start": {}, "tanh": {"activation": "gelu_tanh"}}, CPU)
    ladder.predict(rows, CPU)
    for row in rows.values():
        assert row.ledger.peak_bytes == lab.predict_memory(row.config, CPU).peak_bytes


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
    rows = ladder.plan("fp32", SMALL, {"start": {}, "tanh": {"activation": "gelu_tanh"}}, CPU)
    noise = ladder.run(rows)
    assert repeats == [("ladder_0", 0), ("ladder_0", 1), ("ladder_1", 0)]
    assert noise == ([2.0, 3.0, 4.0, 5.0, 6.0], [2.0, 3.0, 4.0, 5.0, 6.0])
    assert [row.measured_mib for row in rows.values()] == [1.0, 1.0]
    assert rows["tanh"].held_out == 6.5


def test_a_run_that_failed_leaves_its_reason(monkeypatch):
    failed = RunRecord(id="x", created="", name="x", outcome="out_of_memory", reason="too large")
    monkeypatch.setattr(ladder, "run_experiment", lambda *_, **__: failed)
    rows = ladder.plan("fp32", SMALL, {"start": {}}, CPU)
    assert ladder.run(rows) == ()
    assert rows["start"].note == "out of memory: too large"
    assert rows["start"].measured_mib is None


def test_a_row_without_effect_is_named():
    rows = rows_of([100.0, 99.9, 90.0])
    assert ladder.without_effect(rows) == ["row 1"]
    assert ladder.saved_mib(rows, "row 2") == pytest.approx(9.9)
    assert ladder.saved_mib(rows, "row 0") is None


def test_only_rows_that_should_learn_the_same_are_compared():
    rows = rows_of([1.0, 1.0, 1.0])
    rows["row 2"].config = rows["row 2"].config.model_copy(update={"dropout": 0.1})
    assert ladder.comparable(rows, "cuda") == [["row 0", "row 1"], ["row 2"]]


def test_the_table_has_dashes_for_what_is_not_known():
    rows = rows_of([8.0, 4.0], [[10.0] * 5, [5.0] * 5])
    rows["row 1"].held_out = None
    table = ladder.table(rows, rows)
    assert list(table["ms"]) == ["10", "5"]
    assert list(table["saves"]) == ["–", "+4.0"]
    assert list(table["held-out"]) == ["7.0000", "–"]


def test_a_stopwatch_times_what_happens_between_two_batches():
    step_ms: list[float] = []
    seen = []
    for batch in ladder.stopwatch([1, 2, 3], step_ms):
        seen.append(batch)
        torch.ones(10).sum()
    assert seen == [1, 2, 3]
    assert len(step_ms) == 3 and min(step_ms) > 0
