"""Two real processes on the CPU, started by Accelerate; nothing is mocked."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import labutils as lab
from labutils.training.runs import find_runs
from tests.helpers import REPO

pytestmark = pytest.mark.processes

SMALL = {"seq_len": 32, "micro_batch_size": 2, "tokens_per_step": 512, "steps": 4}
SMALL |= {"lr_warmup_steps": 0, "dropout": 0.0, "name": "together"}
# `--multi_gpu` stands for several processes, of a CPU too where there is no GPU
LAUNCH = "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1"
LAUNCH += " --mixed_precision no --dynamo_backend no -m labutils run"


def launched(config: str, **changes) -> subprocess.CompletedProcess:
    pytest.importorskip("accelerate")
    command = [sys.executable, *LAUNCH.split(), config]
    command += [f"--set={key}={value}" for key, value in (SMALL | changes).items()]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    options = {"capture_output": True, "text": True, "timeout": 600}
    return subprocess.run(command, cwd=REPO, env=environment, **options)


@pytest.mark.parametrize(("config", "rounding"), [("fp32", 2e-6), ("bf16", 1e-3)])
def test_two_processes_train_like_one(runs, config, rounding):
    answer = launched(config)
    assert answer.returncode == 0, answer.stderr[-2000:]
    (together,) = find_runs()[0]
    assert answer.stdout.count("saved together") == 1
    assert together.environment["processes"] == "2"
    alone = lab.run_experiment(lab.load_config(config, **SMALL), progress=False)
    assert alone.id != together.id
    assert together.tokens_per_step == alone.tokens_per_step == 512
    assert together.series.loss == pytest.approx(alone.series.loss, rel=rounding)
    assert together.series.grad_norm == pytest.approx(alone.series.grad_norm, rel=50 * rounding)


def test_a_step_that_cannot_be_shared_is_refused_before_training(runs):
    answer = launched("fp32", tokens_per_step=64 * 3)
    assert answer.returncode != 0
    assert "which 2 processes cannot share equally" in answer.stderr
    assert find_runs()[0] == []
