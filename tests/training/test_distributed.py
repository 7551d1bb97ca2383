"""Two and four real processes on the CPU, started by torchrun; nothing is mocked."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import labutils as lab
from labutils.training.records import find_runs
from tests.helpers import REPO, slow

pytestmark = pytest.mark.processes

SMALL = {
    "seq_len": 32,
    "micro_batch_size": 2,
    "tokens_per_step": 512,
    "steps": 4,
    "lr_warmup_steps": 0,
}


def torchrun(n: int, *command: str) -> subprocess.CompletedProcess:
    run = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={n}",
        *command,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    return subprocess.run(
        run, cwd=REPO, capture_output=True, text=True, timeout=240, env=environment
    )


def overrides(**changes) -> list[str]:
    return [f"--set={key}={value}" for key, value in (SMALL | changes).items()]


@pytest.mark.parametrize(
    ("n", "changes"), [(2, {"loss_chunk_tokens": 16}), pytest.param(4, {}, marks=slow)]
)
def test_processes_together_train_like_one_with_the_same_global_batch(runs, n, changes):
    changes |= {"dropout": 0.0, "name": "together"}
    answer = torchrun(n, "-m", "labutils", "run", "fp32", *overrides(**changes))
    assert answer.returncode == 0, answer.stderr[-2000:]
    (together,) = find_runs()[0]
    assert f"{n} processes, gradients in float32: 4.5 MiB once a step" in answer.stdout
    assert answer.stdout.count("saved together") == 1
    assert together.environment["processes"] == str(n)
    alone = lab.run_experiment(lab.load_config("fp32", **SMALL, **changes), progress=False)
    assert alone.id != together.id
    assert together.tokens_per_step == alone.tokens_per_step == 512
    assert together.series.loss == pytest.approx(alone.series.loss, rel=2e-6)
    assert together.series.grad_norm == pytest.approx(alone.series.grad_norm, rel=1e-4)


def test_a_batch_that_cannot_be_shared_is_refused(runs):
    answer = torchrun(2, "-m", "labutils", "run", "fp32", *overrides(tokens_per_step=64 * 3))
    assert answer.returncode != 0
    assert "which 2 processes cannot share equally" in answer.stderr
    assert find_runs()[0] == []


def test_a_failed_process_ends_the_run_with_its_own_error(runs, tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(
        "import os\nimport torch\nimport labutils as lab\n"
        "from labutils.training import distributed\nfrom labutils.workload import build\n"
        "def broken(*_, **__):\n    raise RuntimeError('the second process has had enough; the first said ' + said)\n"
        "distributed.join(torch.device('cpu'))\n"
        "said = distributed.from_first(f'rank {distributed.rank()}')\n"
        "if os.environ['RANK'] == '1':\n    build.lm_loss_sum = broken\n"
        f"lab.run_experiment(lab.load_config('fp32', **{SMALL}), progress=False)\n"
    )
    answer = torchrun(2, str(script))
    assert answer.returncode != 0
    assert "the second process has had enough; the first said rank 0" in answer.stderr
    assert find_runs()[0] == []
