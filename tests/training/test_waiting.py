from __future__ import annotations

import itertools
import time

import pytest
import torch

from labutils.training.waiting import waits
from labutils.workload.slow_source import SlowSource

CPU = torch.device("cpu")


def test_waiting_and_computing_are_told_apart():
    def slow_batches():
        for number in itertools.count():
            time.sleep(0.02)
            yield number

    seen = []
    waiting, computing = waits(slow_batches(), seen.append, 3, CPU)
    assert seen == [0, 1, 2, 3]  # the first is not timed
    assert len(waiting) == len(computing) == 3
    assert min(waiting) >= 19 and min(computing) < 19


def test_a_slow_step_is_no_waiting():
    waiting, computing = waits(itertools.count(), lambda _: time.sleep(0.02), 2, CPU)
    assert min(computing) >= 19 and min(waiting) < 19


def test_batches_that_end_are_not_taken_for_more():
    with pytest.raises(StopIteration):
        waits(iter([1, 2]), lambda _: None, 2, CPU)


def test_a_slow_source_sleeps_and_gives_its_rows():
    blocks = torch.arange(6).reshape(3, 2)
    source = SlowSource(blocks, ms=20)
    begin = time.perf_counter()
    row = source[1]
    assert time.perf_counter() - begin >= 0.019
    assert len(source) == 3
    assert row["input_ids"].tolist() == row["labels"].tolist() == [2, 3]
