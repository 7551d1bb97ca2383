"""Two real processes run a file that a notebook has written."""

import pytest

import labutils as lab
from tests.helpers import slow

pytestmark = slow

WORKER = """
import torch
import torch.distributed as dist


def shared_sum(start):
    total = torch.tensor(start + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def fail():
    raise RuntimeError(f"process {dist.get_rank()} has had enough")
"""


@pytest.fixture
def worker(tmp_path):
    path = tmp_path / "worker.py"
    path.write_text(WORKER, encoding="utf-8")
    return path


def test_each_process_runs_the_file_and_its_result_comes_back(worker):
    assert lab.in_processes(2, worker, "shared_sum", 10) == [(0, 21), (1, 21)]
    worker.write_text(WORKER.replace("start +", "2 * start +"), encoding="utf-8")
    assert lab.in_processes(2, worker, "shared_sum", 10) == [(0, 41), (1, 41)]  # not the old file


def test_an_error_in_a_process_is_raised_here(worker):
    with pytest.raises(Exception, match="has had enough"):
        lab.in_processes(2, worker, "fail")
