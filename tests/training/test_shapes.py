from __future__ import annotations

import pytest
import torch

from labutils.training import shapes

CPU = torch.device("cpu")


def test_flop_and_bytes_of_a_product_by_hand():
    assert shapes.flops((1, 2, 3, 4)) == 2 * 2 * 3 * 4
    assert shapes.n_bytes((1, 2, 3, 4), torch.float32) == 4 * (2 * 4 + 4 * 3 + 2 * 3)
    assert shapes.n_bytes((5, 2, 3, 4), torch.bfloat16) == 5 * 2 * (2 * 4 + 4 * 3 + 2 * 3)


@pytest.mark.parametrize(("shape", "result"), [((1, 2, 3, 4), (2, 3)), ((5, 2, 3, 4), (5, 2, 3))])
def test_a_product_has_its_shape_and_draws_no_number_of_others(shape, result):
    before = torch.get_rng_state()
    call = shapes.product(shape, torch.bfloat16, CPU)
    assert call().shape == result and call().dtype == torch.bfloat16
    assert torch.equal(before, torch.get_rng_state())


def test_a_sweep_has_the_time_of_a_flop_in_each_round(monkeypatch):
    def milliseconds(calls, rounds, device, passes):
        # a product of 3×3 takes 27 ms, one of 5×5 twice as long for each FLOP
        return {key: [key[1] ** 3 * (2.0 if key[1] == 5 else 1.0)] * rounds for key in calls}

    monkeypatch.setattr(shapes, "alternate", milliseconds)
    found = shapes.sweep({"a": [3], "b": [3, 5]}, torch.float32, CPU, rounds=4)
    assert list(found) == ["a", "b", "a, again"]
    assert found["a"] == found["a, again"] == [pytest.approx(0.5e9)] * 4
    assert found["b"] == [pytest.approx(0.75e9)] * 4


def test_a_sweep_measures():
    found = shapes.sweep({"odd": [15], "of 8": [16]}, torch.float32, CPU, rounds=3)
    assert all(len(times) == 3 and min(times) > 0 for times in found.values())
