"""One config, four engines: equal losses; the frameworks take the steps, and nothing of ours."""

from __future__ import annotations

import ast
import math
import sys

import pytest

import labutils as lab
from labutils.config import resolve
from labutils.config.schema import ConfigError
from labutils.techniques.loss import IGNORED
from labutils.training import runs as experiment
from labutils.training import train as loop
from labutils.training.engines import run
from labutils.training.engines.parts import FrameworkMissing
from labutils.training.engines.run import ENGINES, run_engine
from labutils.workload import build
from tests.helpers import CPU, REPO

# Of losses near 7, over 20 steps. FP32: sums in another order. FP16 and BF16: a product rounds to
# 11 or 8 bits, and one that falls on the other side changes the weights a little.
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3, "fp16": 1e-3}
SMALL = {"seq_len": 16, "micro_batch_size": 1, "dropout": 0.1, "lr_warmup_steps": 2, "steps": 20}
PACKAGES = {"trainer": "accelerate", "accelerate": "accelerate", "fabric": "lightning"}


@pytest.fixture(params=ENGINES)
def engine(request, runs):
    pytest.importorskip(PACKAGES[request.param], reason="the extra `frameworks` is not installed")
    return request.param


@pytest.fixture
def all_steps(monkeypatch):
    """A slow precision would train fewer."""
    monkeypatch.setattr(resolve, "SLOW_STEPS_DIVISOR", 1)


def small(precision: str = "fp32", **changes):
    return lab.load_config(precision, **({"tokens_per_step": 48} | SMALL | changes))


def plain(config):
    return lab.run_experiment(config, device=CPU, progress=False)


def through(engine, config):
    return run_engine(config, engine, device=CPU, progress=False)


@pytest.mark.parametrize(
    ("precision", "checkpointing"),
    [("fp32", "none"), ("fp32", "block"), ("bf16", "block"), ("fp16", "block")],
)
def test_an_engine_gives_the_losses_of_the_plain_loop(engine, all_steps, precision, checkpointing):
    config = small(precision, gradient_checkpointing=checkpointing)
    ours, theirs = plain(config).series, through(engine, config).series
    assert len(theirs.loss) == 20
    assert theirs.loss == pytest.approx(ours.loss, abs=TOLERANCE[precision])
    assert theirs.grad_norm == pytest.approx(ours.grad_norm, rel=10 * TOLERANCE[precision])
    assert theirs.learning_rate == pytest.approx(ours.learning_rate)
    assert theirs.loss_scale == ours.loss_scale
    assert theirs.loss[-1] < theirs.loss[0] - 0.1  # something was learned


def test_without_accumulation_and_clipping_too(engine):
    config = small(tokens_per_step=16, max_grad_norm=0.0, steps=5)
    ours, theirs = plain(config), through(engine, config)
    assert theirs.series.loss == pytest.approx(ours.series.loss, abs=TOLERANCE["fp32"])
    assert all(map(math.isnan, theirs.series.grad_norm))
    assert theirs.held_out[0][1] == pytest.approx(ours.held_out[0][1], abs=TOLERANCE["fp32"])


def test_a_micro_batch_of_two_is_trained_as_one(engine):
    config = small(micro_batch_size=2, tokens_per_step=64, steps=5)
    ours, theirs = plain(config).series, through(engine, config).series
    assert theirs.loss == pytest.approx(ours.loss, abs=TOLERANCE["fp32"])
    assert theirs.grad_norm == pytest.approx(ours.grad_norm, rel=10 * TOLERANCE["fp32"])


def with_unequal_micro_batches(config):
    """Return a config's data with labels of every second micro-batch left out, but for a few."""
    made = build.build_data(config)
    full = made.batches

    def unequal():
        for i, batch in enumerate(full):
            labels = batch["labels"].clone()
            labels[:, 4 if i % 2 else config.seq_len :] = IGNORED
            yield batch | {"labels": labels}

    made.batches = unequal()
    return made


def test_a_loss_is_divided_once_by_the_targets_of_the_window(engine, monkeypatch):
    """Equal micro-batches would not tell this from a mean of means."""
    for module in (experiment, run):
        monkeypatch.setattr(module, "build_data", with_unequal_micro_batches)
    config = small(steps=5)
    ours, theirs = plain(config).series, through(engine, config).series
    assert theirs.loss == pytest.approx(ours.loss, abs=TOLERANCE["fp32"])
    assert theirs.grad_norm == pytest.approx(ours.grad_norm, rel=10 * TOLERANCE["fp32"])


def test_checkpointing_computes_each_block_twice(engine, monkeypatch):
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    calls, forward = [], GPT2MLP.forward

    def counted(self, x):
        if self.training:  # not while the held-out loss is measured
            calls.append(self)
        return forward(self, x)

    monkeypatch.setattr(GPT2MLP, "forward", counted)
    found = {}
    for checkpointing in ("none", "block"):
        calls.clear()
        through(engine, small(gradient_checkpointing=checkpointing, steps=2))
        found[checkpointing] = len(calls)
    assert found["block"] == 2 * found["none"] > 0


def test_skipped_steps_fall_on_the_same_steps_and_leave_the_schedule_alone(engine, all_steps):
    config = small("fp16", init_scale=2.0**40, tokens_per_step=16, steps=12)
    ours, theirs = plain(config).series, through(engine, config).series
    assert sum(ours.skipped) > 2
    assert theirs.skipped == ours.skipped and theirs.loss_scale == ours.loss_scale
    assert theirs.learning_rate == pytest.approx(ours.learning_rate)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_an_engine_multiplies_in_the_precision_it_is_asked_for(engine, monkeypatch, precision):
    """On a CPU Accelerate and Trainer would train FP16 in FP32, and Fabric in BF16."""
    from transformers.pytorch_utils import Conv1D

    dtypes, forward = set(), Conv1D.forward

    def noted(self, x):
        out = forward(self, x)
        dtypes.add(str(out.dtype))
        return out

    monkeypatch.setattr(Conv1D, "forward", noted)
    through(engine, small(precision, steps=8, tokens_per_step=16))
    assert dtypes == {{"bf16": "torch.bfloat16", "fp16": "torch.float16"}[precision]}


def test_no_engine_calls_our_loop_or_our_step(engine, monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("an engine called our own step")

    monkeypatch.setattr(loop, "take_step", forbidden)
    monkeypatch.setattr(loop, "train", forbidden)
    through(engine, small(steps=2))
    for path in (REPO / "labutils" / "training" / "engines").glob("with_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert node.module not in ("labutils.training.train", "labutils.techniques.step")


def test_the_framework_itself_goes_back_once_for_each_micro_batch(engine, monkeypatch):
    import accelerate
    import lightning
    import transformers

    owners = {
        "trainer": (transformers.Trainer, "training_step"),
        "accelerate": (accelerate.Accelerator, "backward"),
        "fabric": (lightning.fabric.Fabric, "backward"),
    }
    owner, name = owners[engine]
    real, calls = getattr(owner, name), []

    def counted(self, *args, **kwargs):
        calls.append(name)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    through(engine, small(steps=2))
    assert len(calls) == 2 * 3


def test_the_record_names_engine_and_version_and_is_found_again(engine, capsys):
    config = small(steps=2, name="fp32")
    first = through(engine, config)
    assert first.name == f"fp32_{engine}"
    assert first.environment["engine"].startswith(f"{engine} (")
    assert run_engine(config, engine, device=CPU).id == first.id
    assert "reusing" in capsys.readouterr().out


def test_an_unknown_engine_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="unknown engine 'horovod'; there are: trainer"):
        run_engine(small(), "horovod")


@pytest.mark.parametrize(
    "change", [{"loss_chunk_tokens": 8}, {"gradient_checkpointing": "every_2"}]
)
def test_what_an_engine_cannot_do_is_refused(engine, change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        through(engine, small(**change))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_missing_framework_is_named_with_the_command_that_installs_it(engine, monkeypatch, runs):
    monkeypatch.setitem(sys.modules, PACKAGES[engine], None)
    with pytest.raises(FrameworkMissing, match=r"pip install .*\.\[frameworks\]"):
        through(engine, small())


def test_fabric_gets_an_optimizer_whose_scaled_gradients_it_clips(runs, capsys):
    pytest.importorskip("lightning", reason="the extra `frameworks` is not installed")
    run_engine(small("fp16", steps=8, tokens_per_step=16), "fabric", device=CPU)
    assert "optimizer_impl = foreach" in capsys.readouterr().out
