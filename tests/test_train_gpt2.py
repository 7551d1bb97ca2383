"""further/train_gpt2.py, the one script without labutils, against `labutils run`."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys

import pytest
import torch

import labutils as lab
from tests.helpers import CPU, REPO, write_small_text

SCRIPT = REPO / "further" / "train_gpt2.py"
STEPS = {"steps": 4, "lr_warmup_steps": 1}
CHAPTERS = ["assignment", "calls", "class"]
TINY = {"model": "gpt2-nano", "seq_len": 64, "micro_batch_size": 2, "tokens_per_step": 256}


@pytest.fixture
def little_text(monkeypatch):
    """Python's language reference cut to 3 chapters: both then read on in its library."""
    from pydoc_data import topics

    monkeypatch.setattr(topics, "topics", {name: topics.topics[name] for name in CHAPTERS})


def losses_of_script(name, changes, monkeypatch):
    """Run the script in this process; return every step's loss. Both forms of `--set` are used."""
    first, *pairs = [f"{key}={value}" for key, value in changes.items()]
    pairs = ["--set", *pairs] if pairs else []
    config = REPO / "configs" / f"{name}_config.yaml"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(config), *pairs, "--set", first])
    return runpy.run_path(str(SCRIPT))["losses"].tolist()


def losses_of_both(name, changes, monkeypatch, device=CPU):
    """Return every step's loss of `labutils run`, and of the script."""
    config = lab.load_config(name, **changes)
    record = lab.run_experiment(config, device=device, rerun=True, progress=False)
    assert record.outcome == "completed"
    return record.series.loss, losses_of_script(name, changes, monkeypatch)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("fp32", {}),
        ("fp16", TINY | {"init_scale": 1e12}),  # the first steps overflow, and are skipped
        ("bf16", {}),
        ("accumulation", {}),
        ("checkpointing", {}),
        ("checkpointing", {"gradient_checkpointing": "block", "dropout": 0.1, "seed": 1}),
        ("optimized", {"loss_chunk_tokens": 0}),
    ],
)
def test_the_script_has_the_losses_of_a_run_bit_for_bit(
    name, changes, little_text, runs, monkeypatch
):
    expected, losses = losses_of_both(name, STEPS | changes, monkeypatch)
    assert losses == expected


def test_the_loss_in_chunks_agrees_to_rounding(little_text, runs, monkeypatch):
    expected, losses = losses_of_both("optimized", STEPS, monkeypatch)
    assert losses == pytest.approx(expected, rel=1e-5)


def test_a_text_of_ones_own_is_read_again_in_a_new_order(runs, tmp_path, monkeypatch):
    # more than an epoch
    changes = TINY | {"lr_warmup_steps": 1, "steps": 12, "corpus": str(write_small_text(tmp_path))}
    expected, losses = losses_of_both("fp32", changes, monkeypatch)
    assert losses == expected


@pytest.mark.parametrize(
    "pair",
    [
        "optimizer=sgd",
        "gradient_checkpointing=offload",
        "weights=pretrained",
        "compile=reduce-overhead",
    ],
)
def test_what_the_script_cannot_do_is_refused(pair, monkeypatch, capsys):
    key, value = pair.split("=")
    with pytest.raises(SystemExit):
        losses_of_script("fp32", {key: value}, monkeypatch)
    assert f"{key} is {value!r}" in capsys.readouterr().err


def test_a_warm_up_longer_than_the_run_is_refused_in_the_words_of_labutils(monkeypatch, capsys):
    with pytest.raises(lab.ConfigError) as caught:
        lab.load_config("fp32", steps=4)
    with pytest.raises(SystemExit):
        losses_of_script("fp32", {"steps": 4}, monkeypatch)
    words = "5 are more than the 4 steps; 0 is no warm-up"
    assert words in str(caught.value) and words in capsys.readouterr().err


def test_the_script_is_short_and_needs_no_labutils(tmp_path):
    text = SCRIPT.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 230
    assert not re.search(r"(import|from) labutils", text)
    config = REPO / "configs" / "fp32_config.yaml"
    command = [sys.executable, str(SCRIPT), str(config), "--set", "steps=2", "lr_warmup_steps=0"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    answer = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert answer.stderr == ""
    assert "held-out loss" in answer.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp32", "tf32", "fp16", "bf16"])
def test_the_script_has_the_losses_of_a_run_on_a_gpu(name, runs, monkeypatch):
    cuda = torch.device("cuda")
    if not lab.support(name, cuda).ok:
        pytest.skip(lab.support(name, cuda).reason)
    expected, losses = losses_of_both(name, TINY | STEPS, monkeypatch, cuda)
    assert losses == pytest.approx(expected, rel=2e-3)  # some kernels add up in no fixed order
