"""The records of long runs: what their runs are, that they can be made, and what the shipped say."""

import math

import pytest

import labutils as lab
from benchmarks import records
from tests.helpers import CPU, code_of

FACTS = {"device", "torch", "python", "commit", "corpus", "threads"}


@pytest.mark.parametrize("name", [record.file for record in records.RECORDS.values()])
def test_a_shipped_record_names_its_hardware_and_is_whole(name):
    record = lab.read_record(name)
    assert record.attrs.keys() >= FACTS and record.attrs["threads"] == "1"
    assert record.attrs["commit"] != "unknown" and not record.attrs["commit"].endswith("+")
    keys = set(record) - {"seed", "loss", "held_out_loss", "skipped"}
    n_seeds = record.groupby(sorted(keys)).seed.nunique()
    assert n_seeds.min() == n_seeds.max() == record.seed.nunique() >= (1 if "rates" in name else 5)


def assert_only_these_differ(configs: list[lab.Config], *keys: str) -> None:
    """Also between devices: a record is of this model on any."""
    configs += [config.on(device) for config in configs for device in ("cpu", "cuda")]
    same = [config.model_dump(exclude={"name", "note", *keys}) for config in configs]
    assert all(values == same[0] for values in same)


# ---- Convergence


def test_arms_differ_in_batch_and_rate_and_see_the_same_tokens():
    configs = {arm: records.config_of(arm, 3, 4096) for arm in records.ARMS}
    differs = "micro_batch_size", "tokens_per_step", "steps", "learning_rate", "lr_warmup_steps"
    assert_only_these_differ(list(configs.values()), *differs)
    recorded = lab.read_record("convergence").groupby("arm").first()
    for arm, config in configs.items():
        assert config.steps * config.tokens_per_step == 4096
        assert config.lr_warmup_steps * config.tokens_per_step == 2048
        kappa = recorded.sequences[arm] / 8
        assert config.tokens_per_step == 32 * 8 * kappa
        rate = 1e-3 if arm == "batch_32_same_rate" else 1e-3 * kappa**0.5
        assert config.learning_rate == pytest.approx(rate)
        assert recorded.learning_rate[arm] == pytest.approx(rate, rel=1e-3)


def test_notebook_02_trains_runs_of_the_record():
    cell = code_of("02-Gradient_Accumulation.ipynb")["arms-of-learning"]
    exec(cell.partition("def ")[0], names := {})
    assert {*names["ARMS"].values()} <= {*records.ARMS.values()}


def test_a_run_evaluates_all_held_out_text_and_begins_as_a_longer_one(runs):
    rate = {"learning_rate": 1e-9, "lr_warmup_steps": 0}
    untrained = records.run_arm("batch_8", 0, 256, CPU, **rate).held_out[-1][1]
    held_out = lab.load_corpus().split(32)[1]
    model = lab.build_model("gpt2-nano", dropout=0.0)
    whole = lab.evaluate(model, [{"input_ids": held_out, "labels": held_out}], lab.lm_loss_sum)
    assert untrained == pytest.approx(whole, abs=1e-3)
    long = records.run_arm("batch_32", 1, 3072, CPU, eval_every=2)
    short = records.run_arm("batch_32", 1, 2048, CPU)
    assert long.loss[:2] == pytest.approx(short.loss)
    assert long.held_out[0] == pytest.approx(short.held_out[-1])


def test_the_shipped_rates_say_why_the_small_batch_has_its_rate():
    made = lab.read_record("convergence_rates")
    assert made.attrs.keys() >= {"rule", "held-out text"}
    for _, rows in made.groupby(["sequences", "tokens"]):
        assert tuple(rows.learning_rate) == records.LEARNING_RATES
        assert rows.held_out_loss.nunique() == len(rows)  # the rate was used
    rates = made.query("sequences == 8")
    for tokens in (8192, rates.tokens.max()):
        losses = rates[rates.tokens == tokens].set_index("learning_rate").held_out_loss
        assert losses.idxmin() == records.ARMS["batch_8"][2]


# ---- Stability


def test_the_arms_of_a_seed_differ_in_precision_and_rounding_alone():
    arms = [records.stability_options("usual", arm, 3, 16) for arm in records.STABILITY_ARMS]
    configs = [lab.load_config("accumulation", **options) for options in arms]
    assert_only_these_differ(configs, "precision", "optimizer")


def test_rows_have_the_mean_of_their_steps_and_the_skips_so_far():
    skipped = [True, *[False] * 11, True, True, False, False]
    rows = records.windows([float(i) for i in range(16)], skipped, 24, 8)
    assert rows.loss.tolist()[:2] == [3.5, 11.5] and rows.step.tolist() == [8, 16, 24]
    assert math.isnan(rows.loss[2])  # the run ended early
    assert rows.skipped.tolist() == [1, 3, 3]


def test_the_record_of_stability_continues_where_it_was_stopped(runs, tmp_path, monkeypatch):
    few = {arm: records.STABILITY_ARMS[arm] for arm in ("fp32", records.PURE_FP16)}
    monkeypatch.setattr(records, "STABILITY_ARMS", few)
    monkeypatch.setattr(records, "RATES", {"usual": 1e-3})
    options = ["stability", "--seeds", "2", "--steps", "8", "--to", str(tmp_path)]
    records.main(options)
    made = lab.read_record("stability", tmp_path)
    assert made.attrs.keys() >= FACTS | {"rates"} and made.seed.tolist() == [0, 0, 1, 1]
    assert made.arm.tolist() == [*few, *few]
    losses = made.pivot(index="seed", columns="arm", values="loss")
    assert losses["fp32"].notna().all()
    # the arm was trained as it says: in FP16 a loss overflows, or is rounded, by the CPU at hand
    assert (losses[records.PURE_FP16] != losses["fp32"]).all()
    monkeypatch.setattr(records, "train", None)  # nothing is trained twice
    records.main(options)
    assert made.equals(lab.read_record("stability", tmp_path))
