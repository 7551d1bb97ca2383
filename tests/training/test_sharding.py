"""Two real processes share one training: bytes, losses, and checkpoints for other numbers."""

from __future__ import annotations

import pytest
import torch

import labutils as lab
from labutils.training import sharding
from tests.helpers import slow

pytestmark = pytest.mark.processes

LIKE_ONE = {"rel": 1e-5}  # float32, ten operations deep: only the order of additions differs


@pytest.fixture(scope="module")
def steps() -> list[torch.Tensor]:
    return list(lab.sequences(64)[:12].split(4))


@pytest.fixture(scope="module")
def alone(steps) -> sharding.SharedRun:
    return sharding.train_shared(sharding.ONE, steps)


@pytest.fixture(scope="module")
def shared(steps) -> dict[str, sharding.SharedRun]:
    return lab.processes.in_processes(2, sharding.train_in_process, sharding.WAYS, steps)


@pytest.mark.parametrize("way", sharding.WAYS)
def test_shared_training_has_the_losses_of_one_process(alone, shared, way):
    assert shared[way].losses == pytest.approx(alone.losses, **LIKE_ONE)
    assert alone.losses[-1] < alone.losses[0]


@pytest.mark.parametrize("way", sharding.WAYS)
def test_each_process_holds_what_is_predicted(alone, shared, way):
    shapes = [p.shape for p in lab.build_model("gpt2-nano").parameters()]
    n = sum(shape.numel() for shape in shapes)
    rows = 16 * sharding.row_parts(shapes, 2)[0]
    whole = sharding.greedy_parts([shape.numel() for shape in shapes], 2)
    expected = {sharding.DDP: 16 * n, sharding.ZERO_1: 8 * n + 8 * max(whole)}
    for parts in shared[way].standing:
        assert sum(parts.values()) == pytest.approx(expected.get(way, rows), rel=0.02)
    assert sum(alone.standing[0].values()) == pytest.approx(16 * n, rel=0.02)


def test_the_peak_of_each_process_is_predicted(alone, shared, steps):
    """Activations are those of one process with its tokens; FSDP2 gathers the root, or all."""
    model = lab.build_model("gpt2-nano", dropout=0.0)
    n_bytes = sum(p.nbytes for p in model.parameters())
    blocks = sum(p.nbytes for p in model.transformer.h.parameters())
    whole = sharding.greedy_parts([p.numel() for p in model.parameters()], 2)
    kept = {
        sharding.DDP: 4 * n_bytes,
        sharding.ZERO_1: 2 * n_bytes + 8 * max(whole),
        sharding.FSDP: 1.5 * n_bytes + n_bytes - blocks,
        sharding.FSDP_KEEPS: 1.5 * n_bytes + n_bytes,
    }
    grows = {}
    for n in (4, 2):
        batch = {"input_ids": steps[0][:n], "labels": steps[0][:n]}
        one = lab.predict_module(model, batch, lab.lm_loss_sum, torch.optim.AdamW, device="cpu")
        grows[n] = one.peak_bytes - 3 * n_bytes
    assert alone.peaks == [pytest.approx(3 * n_bytes + grows[4], rel=0.02)]
    for way, run in shared.items():
        assert run.peaks == pytest.approx([kept[way] + grows[2]] * 2, rel=0.02), way


def test_a_checkpoint_of_two_processes_is_read_by_another_number(alone, steps, tmp_path):
    start = lab.processes.in_processes
    before = start(2, sharding.save_in_process, steps[:2], tmp_path)
    assert before == pytest.approx(alone.losses[:2], **LIKE_ONE)
    after = start(1, sharding.resume_in_process, steps[2:], tmp_path)
    assert after == pytest.approx(alone.losses[2:], **LIKE_ONE)


@slow
def test_four_processes_read_it_too(alone, steps, tmp_path):
    lab.processes.in_processes(2, sharding.save_in_process, steps[:2], tmp_path)
    after = lab.processes.in_processes(4, sharding.resume_in_process, steps[2:], tmp_path)
    assert after == pytest.approx(alone.losses[2:], **LIKE_ONE)


def test_parts_hold_everything():
    assert sharding.greedy_parts([5, 4, 3, 3], 2) == [8, 7]
    assert sharding.row_parts([(5, 2), (4,)], 2) == [6 + 2, 6 + 2]  # three rows of two, two


def test_an_unknown_way_is_refused():
    with pytest.raises(Exception, match="none of one process, DDP"):  # as its process raised it
        lab.processes.in_processes(1, sharding.train_in_process, ("ZeRO-9",), [])
