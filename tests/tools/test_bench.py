from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from itertools import islice

import pytest
import torch

import labutils as lab
from labutils.cli import main
from labutils.config.choices import MODELS
from labutils.tools.bench import arms, compare, process
from labutils.tools.bench import main as bench
from labutils.tools.bench.models import PlainGPT, hugging_face_model, initial_weights
from labutils.tools.bench.record_snapshot import record_snapshot
from tests.helpers import CPU, REPO

SMALL = {"seq_len": 32, "micro_batch_size": 2, "tokens_per_step": 64}


@pytest.fixture(scope="module")
def config():
    return lab.load_config(
        "optimized", **SMALL, lr_schedule="constant", lr_warmup_steps=0, steps=4
    ).on("cpu")


def stream(config):
    """Four micro-batches, then the end."""
    sequences, _ = lab.load_corpus(min_tokens=20_000).split(config.seq_len)
    return islice(lab.batches(sequences, config.micro_batch_size, 0), 4)


def test_the_plain_gpt_is_the_same_function_with_the_same_gradients(config):
    batch = next(stream(config))
    plain = PlainGPT(config)
    ours = lab.build_model(dropout=0.0, seed=config.seed, pad_vocab=True)
    targets = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    loss = plain(batch["input_ids"], targets)
    expected = lab.lm_loss_sum(ours, batch) / lab.count_targets(batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward(), expected.backward()
    torch.testing.assert_close(
        plain.tokens.weight.grad, ours.transformer.wte.weight.grad, rtol=1e-4, atol=1e-6
    )
    torch.testing.assert_close(
        plain.blocks[1].up.weight.grad,
        ours.transformer.h[1].mlp.c_fc.weight.grad.T,
        rtol=1e-4,
        atol=1e-6,
    )


def test_arms_without_dropout_train_alike(config):
    expected = arms.ours(config, stream(config), CPU).losses
    assert len(expected) == 4 and expected[-1] < expected[0]
    for arm in (arms.plain, arms.ours_bare):
        found = arm(config, stream(config), CPU).losses
        assert found == pytest.approx(expected, abs=0.01)  # other weight decay
    for arm in (arms.tutorial, arms.corrected):  # Hugging Face's defaults drop out a tenth
        found = arm(config, stream(config), CPU).losses
        assert found[0] == pytest.approx(expected[0], abs=0.05)


def test_an_unpadded_model_gets_the_first_rows_of_the_padded_weights(config, monkeypatch):
    row = replace(MODELS["gpt2-nano"], vocabulary=2040)
    monkeypatch.setitem(MODELS, "gpt2-nano", row)
    padded = initial_weights(config)["transformer.wte.weight"]
    assert len(padded) == 2048
    assert torch.equal(hugging_face_model(config, CPU).transformer.wte.weight, padded[:2040])


def test_every_arm_of_the_table_is_a_row_somewhere(config):
    """So an arm that is written down is never forgotten by the commands."""
    compared, ablated = bench.arm_rows(config), bench.ablation_rows(config, CPU)
    assert {row.arm for row in compared + ablated} == set(arms.ARMS)
    assert len({row.name for row in compared}) == len(compared)


def test_an_unknown_arm_is_refused_before_anything_runs(capsys):
    assert main(["bench", "--arms", "plain", "no_such_arm"]) == 1
    message = capsys.readouterr().err
    assert "no such arm: no_such_arm; there are: tutorial, corrected" in message


def test_quick_bench_from_the_command_line(runs, capsys):
    small = [f"--set={key}={value}" for key, value in SMALL.items()]
    assert main(["bench", "--quick", "--arms", "plain", *small, "--set=compile=off"]) == 0
    printed = capsys.readouterr().out
    assert "plain GPT, bare loop" in printed and "optimized config" in printed
    (path,) = runs.glob("bench-arms-quick-*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [row["arm"] for row in rows] == ["plain", "ours"]
    assert path.with_suffix(".png").stat().st_size > 10_000
    for row in rows:
        assert len(row["tokens_per_s"]) == bench.QUICK["blocks"] and min(row["tokens_per_s"]) > 0
        assert len(row["losses"]) == 2 + 2 * 4 + 2
        assert 2**20 < row["peak_bytes"] < 2**30
    n_params = sum(p.numel() for p in lab.build_model().parameters())
    assert rows[1]["peak_bytes"] > 12 * n_params  # weights and two moments
    assert rows[1]["environment"]["device"]


def test_an_arm_that_fails_is_a_row_with_its_reason(config):
    rows = [
        process.Row("bad", "no_such_arm", config),
        process.Row("left out", "trainer", config, failed="needs accelerate"),
        process.Row("ours", "ours", config),
    ]
    assert not compare.run(rows, warmup=1, blocks=1, steps=2, progress=False)
    assert "no_such_arm" in rows[0].failed and rows[1].failed == "needs accelerate"
    shown = compare.table(rows)["tokens/s"].tolist()
    assert shown[0].startswith("not run: KeyError") and shown[1] == "not run: needs accelerate"
    assert float(shown[2].replace(",", "")) > 0


def test_an_arm_that_does_not_answer_ends_and_its_row_says_so(config, monkeypatch):
    monkeypatch.setattr(process, "PATIENCE_S", 0.1)  # importing torch takes longer
    rows = [process.Row("ours", "ours", config)]
    compare.run(rows, warmup=1, blocks=1, steps=2, progress=False)
    assert rows[0].failed == "no answer for 0.1 s"


def test_ablation_changes_one_switch_a_row_and_leaves_out_what_the_device_lacks(config):
    def values(one):
        return one.model_dump(exclude={"when_cpu", "overrides"}).items()

    rows = bench.ablation_rows(config, CPU)
    assert rows[-1].config == config
    for row in rows[:-1]:
        if row.arm != "ours":  # the same config in another loop
            assert row.config == config and row.failed
            continue
        assert len(values(row.config) - values(config)) == 1, row.name
    assert "Ampere" in next(row.failed for row in rows if row.config.precision == "tf32")
    for changes in bench.ABLATIONS.values():
        assert set(changes) <= set(type(config).model_fields)


def test_shares_of_an_ablation_have_each_row_once(config):
    shared = []
    for k in (1, 2, 3):
        *rows, last = bench.ablation_rows(config, CPU, (k, 3))
        assert last.config == config
        shared += [row.name for row in rows]
    assert sorted(shared) == sorted(row.name for row in bench.ablation_rows(config, CPU)[:-1])


def test_scale_measures_and_predicts_the_same_peak(runs, capsys):
    assert main(["bench", "--scale", "depth"]) == 1
    assert "there are: batch, length, layers" in capsys.readouterr().err
    assert main(["bench", "--scale", "--quick"]) == 0
    (path,) = runs.glob("bench-scale-quick-*.json")
    points = json.loads(path.read_text())["points"]
    assert [(p["sweep"], p["value"]) for p in points] == [
        ("batch", 1),
        ("batch", 2),
        ("length", 32),
        ("length", 64),
    ]
    for point in points:
        assert point["predicted_bytes"] == pytest.approx(point["peak_bytes"], rel=0.005)
        assert point["ms"] > 0 and point["flops"] > 0
    assert path.with_suffix(".png").stat().st_size > 10_000


def test_the_snapshot_of_a_step_is_recorded_under_the_devices_name(tmp_path):
    path = record_snapshot(tmp_path, "gpt2-nano")
    assert path.name.startswith("snapshot-gpt2-nano-")
    found = lab.snapshot.load(path)
    assert sum(found.at_peak().values()) > 10 * 2**20


@pytest.mark.skipif(os.name == "nt" or not shutil.which("make"), reason="needs make and sh")
def test_make_gpu_records_only_what_has_not_ended_well(tmp_path):
    """With a stand-in for Python: what is run, what is left to run, where results land."""
    (tmp_path / "labutils" / "reference").mkdir(parents=True)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(REPO / name, tmp_path)
    for name in ("01-One.ipynb", "02-Two.ipynb"):
        (tmp_path / name).touch()
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    for stamp in ("installed", "installed-bench"):
        (tmp_path / ".venv" / stamp).touch()

    def make(fails: str) -> list[str]:
        (tmp_path / "log").write_text("")
        environment = {**os.environ, "FAILS": fails}
        del environment["LABUTILS_RUNS"]
        command = ["make", "-k", "-s", "gpu"]
        answer = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
        assert (answer.returncode == 0) == (fails == "nothing"), answer.stderr
        return (tmp_path / "log").read_text().splitlines()

    notebooks = ["01-One.ipynb", "02-Two.ipynb"]
    last_words = ["tests", *notebooks, "labutils/reference", "bench", "--ablate", "--scale"]
    assert make("choose_device") == []  # without a GPU
    assert make("labs 02") == last_words
    assert make("nothing") == ["02-Two.ipynb"]
    assert make("nothing") == []
    found = sorted(path.name for path in (tmp_path / "labutils" / "reference").iterdir())
    assert found == ["01-One.ipynb-1-2-3.json", "02-Two.ipynb-1-2-3.json", "bench", "ledger.csv"]


# Logs the last word of each command but the one that looks for a GPU, and leaves a record.
STAND_IN = """#!/bin/sh
for last; do :; done
case "$*" in *choose_device*) ;; *) echo "$last" >> log;; esac
case "$*" in *"$FAILS"*) exit 1;; esac
if [ -n "$LABUTILS_RUNS" ]; then
    mkdir -p "$LABUTILS_RUNS" && touch "$LABUTILS_RUNS/$last-1-2-3.json"
fi
"""


def test_any_batch_and_length_make_a_step_of_one_micro_batch():
    found = bench.benchmark_config(CPU, {"micro_batch_size": 3, "seq_len": 40, "compile": "off"})
    assert (found.tokens_per_step, found.compile, found.precision) == (120, "off", "fp32")
    assert bench.benchmark_config(CPU, {"precision": "16bit"}).precision == "bf16"


def test_the_trainer_learns_what_the_others_do(config):
    pytest.importorskip("accelerate")
    few = config.model_copy(update={"steps": 11})
    batches = lab.batches(lab.load_corpus(min_tokens=20_000).split(32)[0], 2, 0)
    found = arms.trainer(few, islice(batches, 10), CPU).losses
    batches = lab.batches(lab.load_corpus(min_tokens=20_000).split(32)[0], 2, 0)
    expected = arms.corrected(few, islice(batches, 10), CPU).losses
    assert found[-1] == pytest.approx(sum(expected[5:]) / 5, abs=0.05)  # dropout draws other masks
