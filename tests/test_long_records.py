"""The record of stability: what its runs are, that it continues, and that the shipped one is whole."""

from __future__ import annotations

import math

import labutils as lab
from benchmarks import records


def test_the_arms_of_a_seed_differ_in_precision_and_rounding_alone():
    configs = []
    for arm in records.STABILITY_ARMS:
        options = records.stability_options("usual", arm, 3, 16)
        config = lab.load_config("accumulation", **options)
        assert config.on("cpu") == config.on("cuda")  # the record is of this model on any device
        configs.append(config.model_dump())
    for config in configs:
        for key in ("name", "note", "precision", "optimizer"):
            config.pop(key)
    assert all(config == configs[0] for config in configs)
    assert configs[0]["growth_interval"] == 2000 and configs[0]["lr_schedule"] == "cosine"
    assert records.SEEDS >= 10 and records.PURE_FP16 in records.STABILITY_ARMS


def test_rows_have_the_mean_of_their_steps_and_the_skips_so_far():
    losses = [float(i) for i in range(16)]
    skipped = [True, *[False] * 11, True, True, False, False]
    rows = records.windows(losses, skipped, 24)
    assert rows.loss.tolist()[:2] == [3.5, 11.5] and rows.step.tolist() == [8, 16, 24]
    assert math.isnan(rows.loss[2])  # the run ended early
    assert rows.skipped.tolist() == [1, 3, 3]
    part = records.windows([*[1.0] * 7, math.inf, *[1.0] * 4], [False] * 12, 16).loss
    assert part.isna().all()  # one loss that is not finite, and a window that is not whole


def test_the_command_writes_what_can_be_read_and_continues(runs, tmp_path, monkeypatch):
    arms = ("fp32", records.PURE_FP16)
    few = {arm: records.STABILITY_ARMS[arm] for arm in arms}
    monkeypatch.setattr(records, "STABILITY_ARMS", few)
    monkeypatch.setattr(records, "RATES", {"usual": 1e-3})
    options = ["stability", "--seeds", "2", "--steps", "8", "--to", str(tmp_path)]
    records.main(options)
    written = (tmp_path / "stability.csv").read_bytes()
    made = lab.convergence.read_record(tmp_path / "stability.csv")
    assert {
        "device",
        "torch",
        "python",
        "commit",
        "corpus",
        "threads",
        "rates",
    } <= made.facts.keys()
    assert made.losses.arm.tolist() == [*arms, *arms] and made.losses.seed.tolist() == [0, 0, 1, 1]
    losses = made.losses.groupby("arm").loss.mean()
    assert losses["fp32"] != losses[records.PURE_FP16]
    monkeypatch.setattr(records, "train", None)  # nothing is trained twice
    records.main(options)
    again = (tmp_path / "stability.csv").read_bytes()
    assert again.partition(b"rate,arm")[2] == written.partition(b"rate,arm")[2]


def test_the_shipped_record_is_whole_and_names_its_hardware():
    record = lab.convergence.read_record("stability")
    facts, rows = record.facts, record.losses
    assert facts["device"] and facts["torch"] and facts["threads"] == "1"
    assert facts["commit"] != "unknown" and not facts["commit"].endswith("+")
    counts = rows.groupby(["rate", "arm", "step"]).seed.nunique()
    assert counts.min() == counts.max() == rows.seed.nunique() >= 8
    assert set(rows[~rows.arm.str.contains("fp16")].skipped) == {0}


def test_the_shipped_record_says_what_the_notebook_says_of_it():
    rows = lab.convergence.read_record("stability").losses
    ends = rows[rows.step == rows.step.max()]
    verdicts = {}
    for rate in ("small", "usual"):
        losses = ends[ends.rate == rate].pivot(index="seed", columns="arm", values="loss")
        assert losses.pop(records.PURE_FP16).isna().all()
        for arm in losses:
            pair = losses["fp32"].tolist(), losses[arm].tolist()
            verdicts[rate, arm] = lab.paired_difference(*pair, worth_telling=0.005).verdict
    told = {key for key, verdict in verdicts.items() if verdict != "cannot tell here"}
    assert told == {("small", "pure_bf16"), ("usual", "pure_bf16")}
    finite = ends[(ends.rate == "far too high") & ends.loss.notna()]
    assert set(finite.arm) == {"fp16"} and set(finite.skipped) == {166}
