"""From a config to a record: every key reaches the run, and every end keeps what there is."""

from __future__ import annotations

import weakref

import pytest
import torch

import labutils as lab
from labutils import machine
from labutils.training import records
from labutils.training import runs as module
from labutils.training.records import load_record
from labutils.workload import build as workload_build
from labutils.workload import data
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


def run(name="fp32", rerun=True, **changes):
    config = lab.load_config(name, **(TINY | changes))
    return lab.run_experiment(config, device=CPU, progress=False, rerun=rerun)


@pytest.fixture(autouse=True)
def own_folder(runs):
    """Every test begins without records."""


@pytest.fixture
def calls(monkeypatch):
    """The arguments that a run gives to `train` and to `measure_step`."""
    seen = {}
    for name in ("train", "measure_step"):
        real = getattr(module, name)

        def spy(*args, _real=real, _name=name, **options):
            seen[_name] = args, options
            return _real(*args, **options)

        monkeypatch.setattr(module, name, spy)
    return seen


def fails(error):
    """Return a function that raises an error, whatever its arguments are."""

    def call(*_args, **_kwargs):
        raise error

    return call


# ---- What is run


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
    rates = model.config.resid_pdrop, model.config.attn_pdrop, model.config.embd_pdrop
    assert rates == (0.25,) * 3
    assert model.config.activation_function == "gelu_pytorch_tanh"
    assert options["precision"] == "fp16"
    assert (options["steps"], options["grad_accum_steps"], options["eval_every"]) == (3, 2, 2)
    assert options["max_grad_norm"] == 0.5
    assert options["scaler"].is_enabled()
    assert options["scaler"].get_growth_interval() == 7
    right = rate_of(2, lab.load_config("fp16", **TINY, learning_rate=1e-3))
    assert options["learning_rate_at"](2) == right
    assert optimizer.defaults["fused"]
    (_, micro_batches, _, _), options = calls["measure_step"]
    assert len(micro_batches) == 2
    assert options["max_grad_norm"] == 0.5
    assert options["scaler"].get_scale() == 512.0
    assert options["precision"] == "fp16"


def test_run_equals_the_loop_written_out():
    """Accumulation, schedule, clipping, seed and data of a run, against ten lines by hand."""
    values = {"dropout": 0.0, "learning_rate": 1e-2, "max_grad_norm": 0.3}
    record = run(**values)
    config = lab.load_config("fp32", **TINY, **values).on("cpu")
    whole = build_data(config)
    model = build_experiment_model(config, CPU)
    optimizer = build_optimizer(model, config)
    for step in range(3):
        losses = [lab.lm_loss_sum(model, next(whole.batches)) for _ in range(2)]
        loss = sum(losses) / (2 * 2 * 15)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        for group in optimizer.param_groups:
            group["lr"] = rate_of(step, config)
        optimizer.step()
        optimizer.zero_grad()
        assert record.series.loss[step] == pytest.approx(loss.item(), rel=1e-5)
        assert record.series.grad_norm[step] == pytest.approx(norm.item(), rel=1e-4)
    assert record.corpus == whole.corpus.digest


def test_held_out_text_is_not_trained_on_and_does_not_depend_on_the_batch():
    held_out = []
    for size in (2, 4):
        config = lab.load_config("fp32", **(TINY | {"micro_batch_size": size})).on("cpu")
        whole = build_data(config)
        train, _ = whole.corpus.split(16)
        held_out.append(torch.cat([batch["input_ids"] for batch in whole.held_out]))
        trained = {tuple(row) for row in train.tolist()}
        assert not any(tuple(row) in trained for row in held_out[-1].tolist())
    assert torch.equal(*held_out)


def test_slow_precision_runs_fewer_steps_and_the_record_says_so(monkeypatch):
    monkeypatch.setattr(machine, "cpu_slowdown", lambda dtype: 100.0)
    record = run("bf16", steps=9)
    assert (record.steps_planned, len(record.series.loss), record.config["steps"]) == (8, 8, 9)
    monkeypatch.setattr(machine, "cpu_slowdown", lambda dtype: 1.0)
    assert len(run("bf16", steps=9).series.loss) == 9


# ---- What is kept of it


def test_a_run_saves_what_it_was_and_what_it_gave(runs):
    record = run(steps=6, save_every=4)
    loaded = load_record(runs / f"tiny-{record.id}.json")
    assert not list(runs.glob("*.state"))  # of a completed run
    assert loaded == record
    assert (loaded.config["steps"], loaded.config["model"]) == (6, "gpt2-nano")
    series = loaded.series
    assert len(series.loss) == len(series.grad_norm) == len(series.step_ms) == 6
    assert loaded.held_out[-1][0] == 6
    assert loaded.memory.peak_bytes > 16e6
    assert 0 < loaded.epochs < 1
    assert {"device", "torch", "transformers", "python", "commit"} <= set(loaded.environment)
    timed = sorted(series.step_ms[2:])  # the first two are left out
    assert loaded.timing.median_step_ms == pytest.approx((timed[1] + timed[2]) / 2)
    assert loaded.timing.tokens_per_s == pytest.approx(64 / loaded.timing.median_step_ms * 1000)
    per_token = module.flops_per_token(lab.build_model("gpt2-nano"), 16)
    rate, source = module.peak_rate("fp32", CPU)
    assert loaded.timing.mfu == pytest.approx(per_token * loaded.timing.tokens_per_s / rate)
    assert loaded.timing.mfu_denominator == source


def test_an_equal_run_is_reused_and_rerun_forces(runs, capsys):
    config = lab.load_config("fp32", **TINY)
    first = lab.run_experiment(config)
    assert lab.run_experiment(config).id == first.id
    assert "reusing" in capsys.readouterr().out
    again = lab.run_experiment(config, rerun=True)
    assert again.id != first.id
    assert again.series.loss == first.series.loss
    assert len(list(runs.glob("tiny-*.json"))) == 2


@pytest.mark.parametrize("change", [{"seed": 1}, {"steps": 4}, {"weight_decay": 0.0}], ids=str)
def test_a_different_run_is_not_reused_and_gives_other_losses(change):
    first, other = run(), run(rerun=False, **change)
    assert first.id != other.id and first.series.loss != other.series.loss


def test_only_records_of_its_name_are_read_before_a_run(monkeypatch):
    first = run()
    first.model_copy(update={"name": "other"}).save()
    paths = []

    def reading(path):
        paths.append(path.name)
        return load_record(path)

    monkeypatch.setattr(records, "load_record", reading)
    assert run(rerun=False).id == first.id
    assert paths == [f"tiny-{first.id}.json"]


def test_a_precision_that_the_device_lacks_is_a_row_with_its_reason():
    rows = lab.run_experiments(["fp32", "tf32"], progress=False)
    table = lab.compare(rows)
    assert table.loc["fp32", "outcome"] == "completed"
    assert table.loc["tf32", "outcome"].startswith("unsupported: TF32")
    assert lab.readable(table).loc["tf32", "step_ms"] == "–"


def test_a_run_says_what_is_not_from_its_file_and_a_quiet_one_says_nothing(capsys):
    config = lab.load_config("fp32", **TINY)
    lab.run_experiment(config, device=CPU, progress=False)
    assert capsys.readouterr().out == ""
    lab.run_experiment(config, device=CPU, rerun=True)
    printed = capsys.readouterr().out
    assert "tiny: override: " in printed and "steps 3" in printed
    assert "tiny: saved tiny-" in printed


# ---- How it can end


def test_no_room_before_the_first_step_is_an_outcome_with_ways_out(monkeypatch):
    message = "CUDA out of memory. Tried to allocate 20.00 GiB."
    monkeypatch.setattr(module, "train", fails(torch.OutOfMemoryError(message)))
    record = run()
    assert record.outcome == "out_of_memory"
    assert record.reason.startswith("asked for 20.00 GiB more. Alone tiny needs ")
    assert load_record(record.id) == record


def test_running_out_of_memory_while_measuring_keeps_the_training(monkeypatch):
    error = torch.OutOfMemoryError("CUDA out of memory.")
    monkeypatch.setattr(module, "measure_step", fails(error))
    record = run()
    assert (record.outcome, len(record.series.loss)) == ("out_of_memory", 3)
    assert record.reason.startswith("after training, while memory was measured")
    assert record.timing is not None


def test_ctrl_c_saves_a_partial_record(monkeypatch):
    real = data.batches

    def few(blocks, micro_batch_size, seed):
        for i, batch in enumerate(real(blocks, micro_batch_size, seed)):
            if i == 4 and seed == 7:  # the training batches; the held-out ones have another seed
                raise KeyboardInterrupt
            yield batch

    monkeypatch.setattr(data, "batches", few)
    record = run(seed=7)
    assert (record.outcome, len(record.series.loss), record.memory) == ("interrupted", 2, None)
    assert load_record(record.id).series.loss == record.series.loss


def test_ctrl_c_in_a_notebook_saves_the_record_and_stops_run_all(monkeypatch):
    monkeypatch.setattr(module, "measure_step", fails(KeyboardInterrupt()))
    monkeypatch.setattr(module, "in_notebook", lambda: True)
    with pytest.raises(KeyboardInterrupt, match="stopped"):
        run()
    (saved,), _ = lab.find_runs()
    assert saved.outcome == "interrupted" and len(saved.series.loss) == 3


# Whatever registers hooks, keeps tensors aside or replaces parts of the model.
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
def test_nothing_of_the_model_outlives_its_run(changes, monkeypatch):
    references = []

    def build(*args):
        model = build_experiment_model(*args)
        references.extend(weakref.ref(p) for p in model.parameters())
        return model

    monkeypatch.setattr(workload_build, "build_experiment_model", build)
    run(**(ALONE | changes))
    lab.free_memory()
    assert len(references) > 20
    assert not [reference for reference in references if reference() is not None]
