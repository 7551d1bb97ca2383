"""The records of long runs: what their runs are, that they can be made, and what the shipped say."""

from __future__ import annotations

import math

import pytest

import labutils as lab
from benchmarks import records
from labutils.training import convergence
from tests.helpers import CPU

FACTS = {"device", "torch", "python", "commit", "corpus", "threads"}


def without(config: lab.Config, *keys: str) -> dict:
    assert config.on("cpu") == config.on("cuda")  # a record is of this model on any device
    return config.model_dump(exclude={"note", *keys})


@pytest.mark.parametrize("name", records.FILES.values())
def test_a_shipped_record_names_its_hardware_and_is_whole(name):
    record = lab.read_record(name)
    assert record.attrs.keys() >= FACTS and record.attrs["threads"] == "1"
    assert record.attrs["commit"] != "unknown" and not record.attrs["commit"].endswith("+")
    keys = set(record) - {"seed", "loss", "held_out_loss", "skipped"}
    n_seeds = record.groupby(sorted(keys)).seed.nunique()
    assert n_seeds.min() == n_seeds.max() == record.seed.nunique() >= (1 if "rates" in name else 5)


# ---- Convergence


def test_arms_differ_in_batch_and_rate_and_see_the_same_tokens():
    differs = "name", "micro_batch_size", "tokens_per_step", "steps", "learning_rate"
    configs = {arm: convergence.config_of(arm, 3, 4096) for arm in convergence.ARMS}
    same = [without(config, *differs, "lr_warmup_steps") for config in configs.values()]
    assert all(values == same[0] for values in same) and same[0]["seed"] == 3
    for config in configs.values():
        tokens = [
            steps * config.tokens_per_step for steps in (config.steps, config.lr_warmup_steps)
        ]
        assert tokens == [4096, 2048]
    recorded = lab.read_record("convergence").groupby("arm").first()
    for arm, kappa in {"batch_8": 1, "batch_16": 2, "batch_32": 4, "batch_32_at_once": 4}.items():
        assert configs[arm].tokens_per_step == 32 * recorded.sequences[arm] == 32 * 8 * kappa
        assert configs[arm].learning_rate == pytest.approx(1e-3 * kappa**0.5)
        assert configs[arm].learning_rate == pytest.approx(recorded.learning_rate[arm], rel=1e-3)
    assert configs["batch_32_same_rate"].learning_rate == 1e-3
    assert configs["batch_32_at_once"].grad_accum_steps == 1


def test_a_run_evaluates_all_held_out_text_and_begins_as_a_longer_one(runs):
    rate = {"learning_rate": 1e-9, "lr_warmup_steps": 0}
    untrained = convergence.run("batch_8", 0, 256, CPU, **rate).held_out[-1][1]
    held_out = lab.load_corpus().split(32)[1]
    batches = [{"input_ids": ids, "labels": ids} for ids in held_out.split(64)]
    model = lab.build_model("gpt2-nano", dropout=0.0)
    assert untrained == pytest.approx(lab.evaluate(model, batches, lab.lm_loss_sum), abs=1e-3)
    long = convergence.run("batch_32", 1, 4096, CPU, eval_every=3)
    short = convergence.run("batch_32", 1, 3072, CPU)
    assert long.loss[:3] == pytest.approx(short.loss)
    assert long.held_out[0] == pytest.approx(short.held_out[-1])


def test_the_command_writes_what_can_be_read_again(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "LEARNING_RATES", (1e-3, 2e-3))
    sizes = ["--seeds", "1", "--tokens", "2048", "--every-tokens", "1024"]
    records.main(["convergence", "rates", *sizes, "--to", str(tmp_path)])
    made = lab.read_record("convergence", tmp_path)
    assert set(made.tokens) == {1024, 2048} and set(made.arm) == set(convergence.ARMS)
    assert made.attrs.keys() >= FACTS | {"rule", "held-out text"}
    made = lab.read_record("convergence_rates", tmp_path)
    for _, rows in made.groupby(["sequences", "tokens"]):
        assert tuple(rows.learning_rate) == records.LEARNING_RATES
        assert rows.held_out_loss.nunique() == len(rows)  # the rate was used


def test_the_shipped_rates_say_why_the_small_batch_has_its_rate():
    rates = lab.read_record("convergence_rates")
    ends = rates[rates.tokens.isin([8192, rates.tokens.max()]) & (rates.sequences == 8)]
    assert set(ends.learning_rate) == set(records.LEARNING_RATES)
    for _, rows in ends.groupby("tokens"):
        assert rows.loc[rows.held_out_loss.idxmin()].learning_rate == convergence.ARMS["batch_8"][2]


# ---- Stability


def test_the_arms_of_a_seed_differ_in_precision_and_rounding_alone():
    differs, same = ("name", "precision", "optimizer"), []
    for arm in records.STABILITY_ARMS:
        options = records.stability_options("usual", arm, 3, 16)
        same.append(without(lab.load_config("accumulation", **options), *differs))
    assert all(values == same[0] for values in same)
    assert same[0]["growth_interval"] == 2000 and same[0]["lr_schedule"] == "cosine"


def test_rows_have_the_mean_of_their_steps_and_the_skips_so_far():
    skipped = [True, *[False] * 11, True, True, False, False]
    rows = records.windows([float(i) for i in range(16)], skipped, 24)
    assert rows.loss.tolist()[:2] == [3.5, 11.5] and rows.step.tolist() == [8, 16, 24]
    assert math.isnan(rows.loss[2])  # the run ended early
    assert rows.skipped.tolist() == [1, 3, 3]
    part = records.windows([*[1.0] * 7, math.inf, *[1.0] * 4], [False] * 12, 16).loss
    assert part.isna().all()  # one loss that is not finite, and a window that is not whole


def test_the_record_of_stability_continues_where_it_was_stopped(runs, tmp_path, monkeypatch):
    arms = ("fp32", records.PURE_FP16)
    few = {arm: records.STABILITY_ARMS[arm] for arm in arms}
    monkeypatch.setattr(records, "STABILITY_ARMS", few)
    monkeypatch.setattr(records, "RATES", {"usual": 1e-3})
    options = ["stability", "--seeds", "2", "--steps", "8", "--to", str(tmp_path)]
    records.main(options)
    made = lab.read_record("stability", tmp_path)
    assert made.attrs.keys() >= FACTS | {"rates"}
    assert made.arm.tolist() == [*arms, *arms] and made.seed.tolist() == [0, 0, 1, 1]
    losses = made.groupby("arm").loss.mean()
    assert losses["fp32"] != losses[records.PURE_FP16]
    monkeypatch.setattr(records, "train", None)  # nothing is trained twice
    records.main(options)
    assert made.equals(lab.read_record("stability", tmp_path))


def test_the_shipped_record_says_what_the_notebook_says_of_it():
    rows = lab.read_record("stability")
    assert set(rows[~rows.arm.str.contains("fp16")].skipped) == {0}
    ends = rows[rows.step == rows.step.max()]
    told = set()
    for rate in ("small", "usual"):
        losses = ends[ends.rate == rate].pivot(index="seed", columns="arm", values="loss")
        assert losses.pop(records.PURE_FP16).isna().all()
        for arm in losses:
            gap = lab.paired_difference(losses["fp32"], losses[arm], worth_telling=0.005)
            told |= {(rate, arm)} if gap.verdict != "cannot tell here" else set()
    assert told == {("small", "pure_bf16"), ("usual", "pure_bf16")}
    finite = ends[(ends.rate == "far too high") & ends.loss.notna()]
    assert set(finite.arm) == {"fp16"} and set(finite.skipped) == {166}
