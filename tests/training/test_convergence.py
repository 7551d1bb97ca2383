"""Batches of 8, 16 and 32 at equal tokens: the runs, the record, and whether two agree."""

from __future__ import annotations

import pandas as pd
import pytest

import labutils as lab
from benchmarks import records
from tests.helpers import CPU


def test_arms_differ_in_batch_and_rate_and_see_the_same_tokens():
    configs = {arm: lab.convergence.config_of(arm, 3, 4096) for arm in lab.convergence.ARMS}
    assert {config.steps * config.tokens_per_step for config in configs.values()} == {4096}
    assert {config.lr_warmup_steps * config.tokens_per_step for config in configs.values()} == {
        2048
    }
    assert {config.seed for config in configs.values()} == {3}
    sizes = [config.tokens_per_step // config.seq_len for config in configs.values()]
    assert sizes == [8, 16, 32, 32]
    base = configs["batch_8"].learning_rate
    for arm in ("batch_16", "batch_32"):
        kappa = configs[arm].tokens_per_step / configs["batch_8"].tokens_per_step
        assert configs[arm].learning_rate == pytest.approx(base * kappa**0.5)
    assert configs["batch_32_same_rate"].learning_rate == base
    at_once = lab.convergence.config_of(lab.convergence.IDENTICAL[1], 3, 4096)
    assert at_once.grad_accum_steps == 1 and configs["batch_32"].grad_accum_steps == 4
    assert at_once.tokens_per_step == configs["batch_32"].tokens_per_step
    for config in configs.values():
        assert config.on("cpu") == config.on("cuda")  # the record is of this model on any device


def test_tokens_that_are_no_whole_steps_are_refused():
    with pytest.raises(ValueError, match="no whole number"):
        lab.convergence.config_of("batch_32", 0, 1025)


def test_held_out_losses_are_on_all_held_out_text(runs):
    config = lab.convergence.config_of("batch_8", 0, 2048)
    corpus = lab.build(config, CPU).data.corpus
    batches = lab.convergence.held_out_batches(corpus)
    assert sum(len(batch["labels"]) for batch in batches) == len(corpus.split(32)[1]) > 300
    rate = {"learning_rate": 1e-9, "lr_warmup_steps": 0}
    untrained = lab.convergence.run("batch_8", 0, 256, CPU, **rate)
    model = lab.build_model("gpt2-nano", dropout=0.0)
    expected = lab.evaluate(model, batches, lab.lm_loss_sum)
    assert untrained.held_out[-1][1] == pytest.approx(expected, abs=1e-3)


def test_a_short_run_is_the_beginning_of_a_longer_one(runs):
    long = lab.convergence.run("batch_32", 1, 4096, CPU, eval_every=3)
    found = [long, lab.convergence.run("batch_32", 1, 3072, CPU)]
    assert found[0].series.loss[:3] == pytest.approx(found[1].series.loss)
    assert found[0].held_out[0] == pytest.approx(found[1].held_out[-1])


def test_the_command_writes_what_can_be_read_again(runs, tmp_path):
    sizes = ["--seeds", "1", "--tokens", "2048", "--every-tokens", "1024"]
    records.main(["convergence", "rates", *sizes, "--to", str(tmp_path)])
    made = lab.convergence.read_record(tmp_path / "convergence.csv")
    assert made.points() == [1024, 2048]
    expected = {"device", "torch", "python", "commit", "corpus", "threads", "rule", "held-out text"}
    assert expected <= made.facts.keys()
    assert set(made.losses.arm) == {*lab.convergence.ARMS, lab.convergence.IDENTICAL[1]}
    with pytest.raises(ValueError, match="no 'batch_8' after 7 tokens"):
        made.at("batch_8", 7)
    made = lab.convergence.read_record(tmp_path / "convergence_rates.csv")
    for _, rows in made.losses.groupby(["sequences", "tokens"]):
        assert tuple(rows.learning_rate) == lab.convergence.RATES
        assert rows.held_out_loss.nunique() == len(rows)  # the rate was used


def test_the_shipped_rates_say_why_the_small_batch_has_its_rate():
    shipped = lab.convergence.read_record("convergence_rates")
    for (sequences, _), rows in shipped.losses.groupby(["sequences", "tokens"]):
        assert sorted(rows.learning_rate) == list(lab.convergence.RATES)
        assert sequences in (8, 32)
    ends = shipped.losses[shipped.losses.tokens.isin([8192, shipped.points()[-1]])]
    for _, rows in ends[ends.sequences == 8].groupby("tokens"):
        best = rows.loc[rows.held_out_loss.idxmin()].learning_rate
        assert best == lab.convergence.ARMS[lab.convergence.SMALL][1]
    assert not shipped.facts["commit"].endswith("+")


def test_seeds_are_paired_whatever_the_order_of_the_rows():
    rows = [("batch_8", 1, 5.0), ("batch_8", 0, 6.0), ("batch_16", 0, 6.5), ("batch_16", 1, 5.25)]
    table = pd.DataFrame(rows, columns=["arm", "seed", "held_out_loss"]).assign(tokens=8)
    made = lab.convergence.LongRecord({}, table)
    found, back = made.against("batch_16", 8), made.against("batch_8", 8, "batch_16")
    assert (found.mean, back.mean) == (0.375, -0.375)
    assert (found.low, found.high) == (-back.high, -back.low)


def test_the_shipped_record_has_three_batches_and_five_seeds_on_named_hardware():
    shipped = lab.convergence.read_record()
    for arm in lab.convergence.ARMS:
        for tokens in shipped.points():
            assert len(shipped.at(arm, tokens)) >= 5
    facts = shipped.facts
    assert facts["device"] and facts["torch"] and facts["python"] and facts["threads"] == "1"
    assert facts["commit"] != "unknown" and not facts["commit"].endswith("+")
    rates = shipped.losses.groupby("arm").learning_rate.first()
    for arm, (_, rate) in lab.convergence.ARMS.items():
        assert rates[arm] == pytest.approx(rate, rel=1e-3)
