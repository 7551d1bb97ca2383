"""Every key of a config reaches the run it describes."""

from __future__ import annotations

import weakref

import pytest
import torch

import labutils as lab
from labutils.config import reader
from labutils.machine import here
from labutils.training import experiment, experiments
from labutils.training.experiment import run_experiment
from labutils.training.speed import UNTIMED_STEPS
from labutils.workload import build as workload_build
from labutils.workload.build import build_data, build_experiment_model, build_optimizer
from tests.helpers import CPU, rate_of, slow

TINY = {
    "name": "tiny",
    "steps": 3,
    "seq_len": 16,
    "micro_batch_size": 2,
    "tokens_per_step": 64,
    "lr_warmup_steps": 1,
}


def run(name="fp32", **changes):
    config = lab.load_config(name, **(TINY | changes))
    return lab.run_experiment(config, device=CPU, progress=False, rerun=True)


@pytest.fixture
def calls(monkeypatch, runs):
    """The arguments that `run_experiment` gives to `train` and to `measure_step`."""
    seen = {}
    for module, name in ((experiment, "train"), (experiment, "measure_step")):
        real = getattr(module, name)

        def spy(*args, _real=real, _name=name, **options):
            seen[_name] = args, options
            return _real(*args, **options)

        monkeypatch.setattr(module, name, spy)
    return seen


def test_values_of_the_config_reach_training_and_measurement(calls):
    values = {
        "init_scale": 512.0,
        "growth_interval": 7,
        "max_grad_norm": 0.5,
        "eval_every": 2,
        "dropout": 0.25,
    }
    values |= {"loss_chunk_tokens": 10, "gradient_checkpointing": "block"}
    run("fp16", **values, activation="gelu_tanh", seed=5, learning_rate=1e-3, lr_schedule="cosine")
    (model, _, loss_fn, optimizer), options = calls["train"]
    assert loss_fn.keywords == {"chunk_tokens": 10}
    assert model.transformer.h.policy.name == "block"
    assert (model.config.resid_pdrop, model.config.attn_pdrop, model.config.embd_pdrop) == (
        0.25,
    ) * 3
    assert model.config.activation_function == "gelu_pytorch_tanh"
    assert options["precision"] == "fp16"
    assert (options["steps"], options["grad_accum_steps"], options["eval_every"]) == (3, 2, 2)
    assert options["max_grad_norm"] == 0.5
    assert options["scaler"].is_enabled()
    assert options["scaler"].get_growth_interval() == 7
    assert options["learning_rate_at"](2) == rate_of(
        2, lab.load_config("fp16", **TINY, learning_rate=1e-3)
    )
    assert optimizer.defaults["fused"]
    (_, micro_batches, _, _), options = calls["measure_step"]
    assert len(micro_batches) == 2
    assert options["max_grad_norm"] == 0.5
    assert options["scaler"].get_scale() == 512.0
    assert options["precision"] == "fp16"


def test_run_equals_the_loop_written_out(runs):
    """Accumulation, schedule, clipping, seed and data of a run, against ten lines by hand."""
    record = run(dropout=0.0, learning_rate=1e-2, max_grad_norm=0.3)
    config = lab.load_config("fp32", **TINY, dropout=0.0, learning_rate=1e-2, max_grad_norm=0.3).on(
        "cpu"
    )
    batches = build_data(config)
    stream, corpus = batches.batches, batches.corpus
    model = build_experiment_model(config, CPU)
    optimizer = build_optimizer(model, config)
    for step in range(3):
        losses = [lab.lm_loss_sum(model, next(stream)) for _ in range(2)]
        loss = sum(losses) / (2 * 2 * 15)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        for group in optimizer.param_groups:
            group["lr"] = rate_of(step, config)
        optimizer.step()
        optimizer.zero_grad()
        assert record.series.loss[step] == pytest.approx(loss.item(), rel=1e-5)
        assert record.series.grad_norm[step] == pytest.approx(norm.item(), rel=1e-4)
    assert record.corpus == corpus.digest


def test_held_out_text_is_not_trained_on_and_does_not_depend_on_the_batch():
    found = []
    for size in (2, 4):
        config = lab.load_config("fp32", **(TINY | {"micro_batch_size": size})).on("cpu")
        batches = build_data(config)
        held_out, corpus = batches.held_out, batches.corpus
        train, _ = corpus.split(16)
        found.append(torch.cat([b["input_ids"] for b in held_out]))
        trained = {tuple(row) for row in train.tolist()}
        assert not any(tuple(row) in trained for row in found[-1].tolist())
    assert torch.equal(*found)


def test_slow_precision_runs_fewer_steps_and_the_record_says_so(runs, monkeypatch):
    monkeypatch.setattr(here, "cpu_slowdown", lambda dtype: 100.0)
    record = run("bf16", steps=9)
    assert (record.steps_planned, len(record.series.loss), record.config["steps"]) == (8, 8, 9)
    monkeypatch.setattr(here, "cpu_slowdown", lambda dtype: 1.0)
    assert len(run("bf16", steps=9).series.loss) == 9


def test_timing_leaves_the_first_steps_out_and_counts_tokens(runs):
    record = run(steps=6)
    timed = sorted(record.series.step_ms[UNTIMED_STEPS:])
    assert record.timing.median_step_ms == pytest.approx((timed[1] + timed[2]) / 2)
    assert record.timing.tokens_per_s == pytest.approx(64 / record.timing.median_step_ms * 1000)


def test_baseline_runs_twice_and_others_once(runs):
    records = lab.run_experiments([], progress=False)
    assert records == []
    tiny = [reader.CONFIGS_DIR / f"{name}_config.yaml" for name in ("fp32", "optimized")]
    made = []
    real = run_experiment

    def experiment_run(path, repeat):
        made.append((path.stem, repeat))
        return real(lab.load_config(path, **TINY), device=CPU, repeat=repeat, progress=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiments, "run_experiment", experiment_run)
        lab.run_experiments(tiny)
    assert made == [("fp32_config", 0), ("fp32_config", 1), ("optimized_config", 0)]


def test_running_out_of_memory_while_measuring_keeps_the_training(runs, monkeypatch):
    def fail(*_args, **_kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(experiment, "measure_step", fail)
    record = run()
    assert (record.outcome, len(record.series.loss)) == ("out_of_memory", 3)
    assert record.timing is not None


# beside the optimizers: whatever registers hooks, keeps tensors aside or replaces parts of the
# model
# One micro-batch and no clipping: a step in backward allows it.
ALONE = {"tokens_per_step": 32, "max_grad_norm": 0.0}
LEAN = {"gradient_checkpointing": "block", "loss_chunk_tokens": 8, "optimizer_in_backward": True}
SWITCHES = [
    {"precision": "fp16", "save_every": 1, "eval_every": 1, "max_grad_norm": 1.0},
    {"optimizer": "adamw_8bit", **LEAN},
    {"gradient_checkpointing": "offload"},
    pytest.param({"compile": "default"}, marks=slow),
]


@pytest.mark.parametrize("changes", SWITCHES, ids=str)
def test_nothing_of_the_model_outlives_its_run(changes, runs, monkeypatch):
    assert left_alive_by(run, monkeypatch, **(ALONE | changes)) == 0


def left_alive_by(call, monkeypatch, **changes):
    """Return how many parameters of the model that `call(**changes)` trains are alive after it."""
    references = []

    def build(*args):
        model = build_experiment_model(*args)
        references.extend(weakref.ref(p) for p in model.parameters())
        return model

    monkeypatch.setattr(workload_build, "build_experiment_model", build)
    call(**changes)
    lab.free_memory()
    assert len(references) > 20
    return sum(reference() is not None for reference in references)
