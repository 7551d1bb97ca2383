"""Five precisions over paired seeds: runs, the record, and whether a rerun agrees with it."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from labutils.tools.bench import stability_record
from labutils.training import stability
from labutils.training.noise import PairedDifference, paired_difference
from tests.helpers import CPU, committed


def difference(base: list[float], other: list[float]) -> PairedDifference:
    return paired_difference(base, other, worth_telling=stability.WORTH_TELLING)


def test_the_arms_of_a_seed_differ_in_precision_and_rounding_alone():
    configs = [stability.config_of(arm, "usual", 3).model_dump() for arm in stability.ARMS]
    for config in configs:
        for key in ("name", "note", "precision", "optimizer"):
            config.pop(key)
    assert all(config == configs[0] for config in configs)
    for arm in stability.ARMS:
        config = stability.config_of(arm, "usual", 0)
        assert config.on("cpu") == config.on("cuda")  # the record is of this model on any device


def test_a_run_is_repeated_exactly_and_a_short_one_begins_a_longer_one(runs):
    long = stability.run_one("pure_bf16_sr", "small", 1, CPU, 24)
    short = stability.run_one("pure_bf16_sr", "small", 1, CPU, 16)
    assert long[:2].equals(short)
    other = stability.run_one("pure_bf16_sr", "small", 2, CPU, 16)
    assert other.loss[0] != short.loss[0]
    assert long.loss[1] < long.loss[0]


def test_a_rate_that_is_far_too_high_ends_in_rows_without_a_loss(runs):
    rows = stability.run_one("fp32", "far too high", 0, CPU, 32)
    finite = [math.isfinite(loss) for loss in rows.loss]
    assert finite[0] and not finite[-1]
    assert finite == sorted(finite, reverse=True)  # no loss is finite after one that was not
    assert list(rows.step) == [8, 16, 24, 32]


def test_a_run_has_the_rate_and_the_scaler_of_its_config():
    config = stability.config_of("fp16", "usual", 0, 16)
    work, record = stability.run_config(config, CPU)
    warmup, rate = stability.WARMUP_STEPS, stability.RATES["usual"]
    expected = [rate * min(1, (step + 1) / warmup) for step in range(16)]
    assert record.series.learning_rate == pytest.approx(expected)
    assert record.series.loss_scale[stability.GROWTH_INTERVAL] == 2 * config.init_scale
    assert work.scaler.get_growth_interval() == stability.GROWTH_INTERVAL


def test_steps_that_are_no_multiple_are_refused():
    with pytest.raises(ValueError, match="no multiple of 8"):
        stability.run_one("fp32", "small", 0, CPU, 12)
    with pytest.raises(ValueError, match="no multiple of 8"):
        stability.run_one("fp32", "small", 0, CPU, 0)


def test_rows_have_the_mean_of_their_steps_and_the_skips_so_far():
    losses = [float(i) for i in range(16)]
    skipped = [True, *[False] * 11, True, True, False, False]
    rows = stability.rows_of("fp16", "usual", 0, losses, skipped, 24)
    assert rows.loss.tolist()[:2] == [3.5, 11.5]
    assert math.isnan(rows.loss[2])  # the run ended early
    assert rows.skipped.tolist() == [1, 3, 3]
    hole = [1.0] * 8 + [math.inf] * 8 + [1.0] * 8
    found = stability.rows_of("fp32", "usual", 0, hole, [False] * 24, 24).loss
    assert found[0] == 1.0 and math.isnan(found[1]) and math.isnan(found[2])


def test_a_change_before_the_run_changes_it(runs):
    def shrink(model):
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(0.9)

    plain = stability.run_one("fp32", "small", 0, CPU, 8)
    assert stability.run_one("fp32", "small", 0, CPU, 8, shrink).loss[0] != plain.loss[0]


def test_the_command_writes_what_can_be_read_and_continues(runs, tmp_path, monkeypatch):
    path = tmp_path / "record.csv"
    monkeypatch.setattr(stability, "ARMS", {"fp32": stability.ARMS["fp32"]})
    options = ["--seeds", "2", "--steps", "8", "--to", str(path)]
    stability_record.main(options)
    facts, rows = stability.read(path)
    assert {"device", "torch", "python", "commit", "corpus", "threads", "rates"} <= facts.keys()
    assert len(stability.column(rows, "fp32", "usual", 8)) == 2
    with pytest.raises(ValueError, match="after 9 steps"):
        stability.column(rows, "fp32", "usual", 9)
    monkeypatch.setattr(stability, "run_one", None)  # nothing is trained twice
    stability_record.main(options)
    assert stability.read(path)[1].equals(rows)


def test_the_shipped_record_is_whole_and_names_its_hardware():
    facts, rows = stability.read()
    assert stability.RECORD.stat().st_size <= 60_000
    assert facts["device"] and facts["torch"] and facts["threads"] == "1"
    assert facts["commit"] != "unknown" and not facts["commit"].endswith("+")
    steps = sorted(rows.step.unique())
    assert steps == list(range(stability.EVERY, stability.STEPS + 1, stability.EVERY))
    for rate in stability.RATES:
        for arm in stability.ARMS:
            for step in steps:
                assert len(stability.column(rows, arm, rate, step)) >= 8
    assert set(rows[rows.arm != "fp16"].skipped) == {0}
    for rate, value in stability.RATES.items():
        assert f"{rate} {value:g}" in facts["rates"]


def test_the_shipped_record_says_what_the_notebook_says_of_it():
    _, rows = stability.read()
    verdicts = {}
    for arm in stability.ARMS:
        pair = [stability.column(rows, name, "small", stability.STEPS) for name in ("fp32", arm)]
        verdicts[arm] = difference(*pair).verdict
    assert verdicts["bf16"] == verdicts["pure_bf16_sr"] == "cannot tell here"
    assert verdicts["pure_bf16"] == verdicts["fp16"] == "larger"
    skipped = stability.column(rows, "fp16", "far too high", stability.STEPS, "skipped")
    assert statistics.fmean(skipped) > stability.STEPS / 2


def test_the_rerun_of_the_notebook_agrees_with_the_shipped_record(runs):
    """Versions and texts differ between machines; the paired difference does not."""
    n_steps, seeds = 24, range(4)
    assert "STEPS, SEEDS = 24, range(4)" in committed("further/stability.ipynb")
    _, recorded = stability.read()
    found = {arm: [] for arm in ("fp32", "pure_bf16", "pure_bf16_sr")}
    for arm, losses in found.items():
        for seed in seeds:
            rows = stability.run_one(arm, "small", seed, CPU, n_steps)
            losses += stability.column(rows, arm, "small", n_steps)
    reruns, records = {}, {}
    for arm in ("pure_bf16", "pure_bf16_sr"):
        pair = [stability.column(recorded, name, "small", n_steps) for name in ("fp32", arm)]
        reruns[arm] = difference(found["fp32"], found[arm])
        records[arm] = difference(*pair)
        assert reruns[arm].verdict == records[arm].verdict
        assert reruns[arm].mean == pytest.approx(records[arm].mean, abs=stability.WORTH_TELLING / 2)
    # the test can fail: the two precisions do not have the same verdict, nor has the opposite sign
    assert reruns["pure_bf16"].verdict == "larger" != reruns["pure_bf16_sr"].verdict
    assert difference(found["pure_bf16"], found["fp32"]).verdict == "smaller"
