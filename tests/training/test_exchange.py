"""The exchange of gradients: bytes, the order of additions, rounding, and two real processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import labutils as lab
from tests.helpers import slow

processes = pytest.mark.processes
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_parts(n_workers: int, n: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n_workers, n, generator=generator) * 1e-3


def test_a_ring_sends_twice_the_bytes_less_one_part_of_n():
    assert lab.exchange.ring_bytes(100, 1) == 0
    assert lab.exchange.ring_bytes(100, 2) == 100
    assert lab.exchange.ring_bytes(100, 4) == 150


@pytest.mark.parametrize("order", lab.exchange.ORDERS)
@pytest.mark.parametrize("n_workers", [1, 2, 3, 5, 8])
def test_every_worker_counts_once_in_both_orders(order, n_workers):
    parts = torch.arange(n_workers * 7.0).view(n_workers, 7)  # whole numbers: exact
    assert torch.equal(lab.exchange.summed(parts, order), parts.sum(0))


def test_the_orders_are_what_they_say():
    # In BF16 256 + 1 is 256, and 257 is lost; 1 + 1 + 256 is 258.
    parts = torch.tensor([[256.0, 256], [1, 1], [1, 1], [0, 0]]).bfloat16()
    assert lab.exchange.summed(parts, "ring").tolist() == [256, 258]  # part 1 begins at worker 1
    assert lab.exchange.summed(parts, "tree").tolist() == [256, 256]  # (256 + 1) + (1 + 0)
    parts = torch.tensor([[256.0], [0], [1], [1]]).bfloat16()
    assert lab.exchange.summed(parts, "ring").tolist() == [256]
    assert lab.exchange.summed(parts, "tree").tolist() == [258]
    with pytest.raises(ValueError, match="ring, tree"):
        lab.exchange.summed(parts, "star")


def test_the_mean_divides_before_it_adds():
    big = torch.full((4, 3), 40_000.0)
    assert lab.exchange.exchanged_mean(big, torch.float16).tolist() == [40_000] * 3
    assert lab.exchange.exchanged_mean(2 * big, torch.float16).isinf().all()
    small = torch.full((4, 3), 2.0**-25)
    assert not lab.exchange.exchanged_mean(small, torch.float16).any()


@pytest.mark.parametrize("order", lab.exchange.ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("true", [0.0, 1.0])
def test_the_predicted_error_is_near_that_of_random_gradients(order, dtype, true):
    n, size = 40_000, 64
    signal = random_parts(1, n, seed=1)
    parts = random_parts(size, n) + true * signal  # |G|² = `true`, S = 1, in units of n · 1e-6
    right = parts.double().mean(0)
    found = lab.exchange.exchanged_mean(2.0**12 * parts, dtype, order).double() / 2**12
    error = lab.compare_gradients(found, right).error
    eps, is_cast = torch.finfo(dtype).eps, dtype != torch.float32
    predicted = lab.exchange.predicted_error(size, eps, order, true, 1.0, is_cast)
    assert 0.9 < error / predicted < 1.35  # normal numbers: more of them have small mantissas


def test_a_ring_adds_one_by_one_and_a_tree_in_levels():
    law = lab.exchange.predicted_error
    unit = lab.exchange.ONE_ROUNDING_OF_NORM * 0.5
    assert law(4, 1.0, "ring", 0, 1, is_cast=False) == pytest.approx(unit * (9 / 4) ** 0.5)
    assert law(4, 1.0, "tree", 0, 1, is_cast=False) == pytest.approx(unit * 2**0.5)
    assert law(4, 1.0, "tree", 0, 1) == pytest.approx(unit * 3**0.5)
    assert law(1, 1.0, "ring", 1, 1) == pytest.approx(unit)


def nano_loss(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(32).view(2, 16)
    return lab.lm_loss_sum(model, {"input_ids": ids, "labels": ids})


def amp_loss(model: nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return nano_loss(model)


@pytest.mark.parametrize(
    ("weights", "loss_of", "compress", "sent", "size"),
    [
        (torch.float32, nano_loss, None, "float32", 4),
        (torch.float32, amp_loss, None, "float32", 4),
        (torch.float32, amp_loss, torch.bfloat16, "bfloat16", 2),
        (torch.float16, nano_loss, None, "float16", 2),
    ],
)
def test_what_is_handed_over_has_the_weights_dtype_unless_a_hook_casts(
    weights, loss_of, compress, sent, size
):
    model = lab.build_model("gpt2-nano", dropout=0.0).to(weights)
    by_dtype, ready = lab.exchange.handed_over(model, loss_of, compress, bucket_mib=1)
    assert by_dtype == {sent: size * lab.n_parameters("gpt2-nano")}
    assert ready == sorted(ready)
    assert ready[0] < 0.9 and ready[-1] == 1
    assert not dist.is_initialized()


def test_one_large_bucket_waits_for_all_gradients():
    model = lab.build_model("gpt2-nano", dropout=0.0)
    _, ready = lab.exchange.handed_over(model, nano_loss, bucket_mib=100)
    assert ready == [1]
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@processes
def test_two_processes_compute_what_is_simulated_and_time_both_ways():
    gradients = random_parts(2, 10_001)
    work = lab.processes.mean_and_times
    means, inside, late = lab.processes.in_processes(2, work, gradients, DTYPES, 2)
    for dtype, mean in zip(DTYPES, means, strict=True):
        assert torch.equal(mean, lab.exchange.exchanged_mean(gradients, dtype)), dtype
    assert len(inside) == len(late) == 2
    assert min(inside + late) > 0


@slow
@processes
def test_four_processes_add_in_the_order_of_a_ring():
    """Which part begins at which worker is Gloo's choice, so each order of a ring may be."""
    gradients = random_parts(4, 5_000)
    means = lab.processes.in_processes(4, lab.processes.mean_by_ddp, gradients, DTYPES)
    for dtype, mean in zip(DTYPES, means, strict=True):
        parts = gradients.to(dtype) / 4
        possible = []
        for way in (parts, parts.flip(0)):
            for start in range(4):
                a, b, c, d = way.roll(start, 0)
                possible.append((((a + b) + c) + d).float())
        assert (torch.stack(possible) == mean).any(0).all(), dtype


def fail(*_: object) -> None:
    raise RuntimeError(f"process {dist.get_rank()} has had enough")


@processes
def test_an_error_in_a_process_is_raised_here():
    with pytest.raises(Exception, match="has had enough"):
        lab.processes.in_processes(2, fail)
