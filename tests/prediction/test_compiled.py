"""A compiled step's bytes: planned without a card, and beside what steps took that were compiled."""

from functools import lru_cache

import pandas as pd
import pytest
import torch
import yaml
from torch import nn

import labutils as lab
from benchmarks.compiled_table import module_of
from labutils.course.cli import AS_EAGER, main
from labutils.files import REFERENCE_DIR
from labutils.prediction import compiled
from labutils.prediction.published import config_of_row
from labutils.techniques.compiling import CompiledLoss, with_own_code
from tests.helpers import CPU, predicted_on, slow, slowest

NAMES = {"NVIDIA H200": "h200", "Tesla T4": "t4", "NVIDIA GeForce RTX 4060": "rtx4060"}
NANO = "{model: gpt2-nano, seq_len: 256, micro_batch_size: 8, tokens_per_step: 2048, %s}"


@lru_cache
def table():
    """Return all compiled steps that were measured; those of the H100 stand elsewhere."""
    rows = pd.read_csv(REFERENCE_DIR / "compiled.csv", comment="#")
    rows["card"] = rows.card.map(NAMES)
    real = pd.read_csv(REFERENCE_DIR / "h100_steps.csv", comment="#")
    real = real[real.config.str.contains("compile: default")].rename(columns={"config": "step"})
    return pd.concat([rows, real.assign(card="h100", torch="2.11.0+cu130")]).reset_index()


def planned_ledger(card, step):
    """Return the predicted ledger of a row of the table."""
    row = yaml.safe_load(step)
    if "module" not in row:
        return lab.predict_memory(config_of_row(step), card)
    model, batch, loss_fn = module_of(row)
    how = {"precision": row["precision"], "grad_accum_steps": row.get("grad_accum_steps", 1)}
    parts = model, batch, torch.compile(loss_fn), torch.optim.AdamW
    return lab.predict_module(*parts, device=card, **how)


def test_the_table_has_what_it_says():
    rows = table()
    assert {"h200", "t4", "rtx4060", "h100"} == set(rows.card)
    assert len(rows[rows.torch.str.startswith("2.13")]) >= 16
    steps = " ".join(rows.step)
    models = "gpt2-medium", "llama, keys", "vit", "plain_gpt"
    techniques = "gradient_checkpointing: block", "loss_chunk_tokens", "dropout: 0.1"
    for part in (*models, *techniques, "tf32", "bf16", "fp16"):
        assert part in steps, part


@slowest
@pytest.mark.parametrize("card", ["h200", "t4", "rtx4060", "h100"])
def test_compiled_steps_take_what_is_predicted(card):
    rows = table()
    for row in rows[rows.card == card].drop_duplicates("step").itertuples():
        ledger = planned_ledger(card, row.step)
        allocated = ledger.peak_bytes / row.allocated_bytes - 1
        reserved = ledger.reserved_bytes / row.reserved_bytes - 1
        print(f"{card} {allocated:+.2%} {reserved:+.2%} {row.step}")
        assert "not compiled" not in ledger.method, (row.step, ledger.method)
        # on the H100 a benchmark chose padded products: 0.7 GB more for medium, see compiled.csv
        is_padded = card == "h100" and "pad_vocab" not in row.step
        assert abs(allocated) < (0.06 if is_padded else 0.005), row.step
        assert abs(reserved) < (0.12 if is_padded else 0.05), row.step


@slow
def test_a_compiled_step_of_gpt2_on_12_gb_gets_the_true_answer(capsys):
    big = ["bf16", "--set", "seq_len=1024", "micro_batch_size=16", "tokens_per_step=16384"]
    assert main(["predict", *big, "compile=default", "--gpu-memory-gib=12"]) == 0
    printed = capsys.readouterr().out
    assert "\nfits 12.0 GiB" in printed and AS_EAGER not in printed


@slow
@pytest.mark.parametrize("change", ["precision: fp32", "dropout: 0.1", "loss_chunk_tokens: 512"])
def test_a_cpus_compiled_peak_is_what_is_predicted(change, runs):
    config = config_of_row(NANO % f"{change}, compile: default").changed(steps=2, lr_warmup_steps=0)
    record = lab.run_experiment(config, progress=False)
    assert record.environment["torch.compile"] == "default"
    assert "not compiled" not in record.memory.method
    predicted = lab.predict_memory(config, "cpu")
    assert predicted.peak_bytes == pytest.approx(record.memory.peak_bytes, rel=0.01)
    eager = lab.predict_memory(config.changed(compile="off"), "cpu")
    # chunks take more where they are compiled, all else less
    assert abs(predicted.peak_bytes / eager.peak_bytes - 1) > 0.04


def small_step(**how):
    """Return the predicted ledger of a step of a small module, compiled in the way that is asked."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
    loss_fn = how.get("loss_fn", lambda model, batch: model(batch).float().pow(2).sum())
    model, loss_fn = how.get("model", lambda x: x)(model), how.get("loss", lambda x: x)(loss_fn)
    return lab.predict_module(model, torch.zeros(4096, 64), loss_fn, torch.optim.AdamW)


@slow
def test_what_torch_compile_has_made_is_planned_model_or_loss():
    eager, loss = small_step(), small_step(loss=torch.compile)
    assert small_step(model=torch.compile).peak_bytes < eager.peak_bytes
    assert loss.peak_bytes < eager.peak_bytes
    assert small_step(loss=torch.compile).phases == loss.phases  # nothing is left of the first


@slow
def test_a_cards_rules_are_forgotten_where_a_cpu_follows():
    config = config_of_row(NANO % "compile: default")
    assert "not compiled" not in lab.predict_memory(config, "t4").method
    after = lab.predict_memory(config, "cpu")
    eager = lab.predict_memory(config.changed(compile="off"), "cpu")
    assert "not compiled" not in after.method and after.peak_bytes < 0.9 * eager.peak_bytes


@slow
def test_the_largest_compiled_batch_fits_and_one_more_does_not():
    config = config_of_row(NANO % "precision: bf16, compile: default")
    size = lab.largest_micro_batch(config, 0.7, "a100", limit=63)
    assert 3 < size < 63
    for n_sequences, fits in ((size, True), (size + 1, False)):
        changes = {"micro_batch_size": n_sequences, "tokens_per_step": n_sequences * 256}
        assert predicted_on("a100", config.changed(**changes)).fits(0.7) == fits


@slow
def test_a_first_call_that_changes_the_model_does_not_count():
    def loss_fn(model, batch):
        model.calls = 1 + hasattr(model, "calls")
        return model(batch).float().pow(2).sum() * model.calls

    changing = small_step(loss_fn=loss_fn, loss=torch.compile)
    settled = small_step(loss_fn=lambda m, x: 2 * m(x).float().pow(2).sum(), loss=torch.compile)
    assert changing.peak_bytes == settled.peak_bytes


@slow
def test_a_step_that_is_compiled_again_each_time_counts_as_eager():
    def loss_fn(model, batch):
        model.calls = getattr(model, "calls", 0) + 1
        return model(batch).float().pow(2).sum() * model.calls

    ledger = small_step(loss_fn=loss_fn, loss=torch.compile)
    assert ledger.method.endswith(", not compiled: it is compiled again in each step")
    assert ledger.peak_bytes == small_step().peak_bytes


def test_what_the_compiler_refuses_counts_as_eager_and_says_why(monkeypatch, capsys):
    def refuse(*_, **__):
        raise RuntimeError("no such release\nmore")

    monkeypatch.setattr(compiled, "_plan", refuse)
    assert ", not compiled: " in small_step(loss=torch.compile).method
    fp32 = ["predict", "fp32", "--set=model=gpt2-nano", "--set=compile=default"]
    for gib, verdict in ((8, "fits 8.0 GiB"), (0.6, "may fit 0.6 GiB")):
        assert main([*fp32, f"--gpu-memory-gib={gib}"]) == 0
        printed, said = capsys.readouterr()
        assert f"\n{verdict}" in printed and AS_EAGER in printed and "looking" not in said
        assert "no such release" in printed and "more" not in printed.partition("release")[2][:9]
    assert main(["advise", *fp32[1:], "--gpu-memory-gib=0.55"]) == 0
    printed = capsys.readouterr().out
    assert " maybe " in printed and " no  " not in printed and AS_EAGER in printed


def test_more_than_eight_functions_are_compiled_in_one_process():
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return graph.forward

    def double(x):
        return 2 * x

    for size in range(1, 11):
        torch.compile(with_own_code(double), backend=backend, dynamic=False)(torch.ones(size))
    assert len(made) == 10


@slow
@pytest.mark.parametrize("policy", ["block", "every_2", "selective"])
def test_a_checkpointed_loss_is_compiled(policy):
    text = NANO % f"gradient_checkpointing: {policy}, compile: default"
    model = lab.build_model("gpt2-nano", gradient_checkpointing=policy)
    loss_fn = CompiledLoss(lab.lm_loss_sum, "default", CPU)
    ids = torch.zeros(2, 32, dtype=torch.int64)
    loss_fn(model, {"input_ids": ids, "labels": ids}).backward()
    assert loss_fn.report == "default"
    kept = lab.predict_memory(config_of_row(text), "a100")
    assert "not compiled" not in kept.method
    plain = lab.predict_memory(config_of_row(NANO % "compile: default"), "a100")
    assert kept.peak_bytes < plain.peak_bytes
