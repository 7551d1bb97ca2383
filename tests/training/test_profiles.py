"""Profiles of any call: operations once each, and the share of matrix products."""

import pytest
import torch

from labutils.training import profiles
from tests.helpers import CPU


@pytest.mark.parametrize("stacks", [False, True])
def test_operations_are_counted_and_annotations_left_out(stacks):
    x = torch.ones(64, 64)
    profiled = profiles.record(lambda: torch.tanh(x @ x) * 2, CPU, 3, stacks=stacks)
    own = profiles.own_ms(profiled, CPU)
    assert own["tanh"][1] == own["mm"][1] == 3
    assert not [name for name in own if "(" in name or name.startswith(("ProfilerStep", "<"))]
    times = [ms for ms, _ in own.values()]
    assert times == sorted(times, reverse=True)


def test_matrix_products_are_a_part_of_all_operations():
    x = torch.ones(64, 64)
    in_products, in_all = profiles.product_ms(lambda: torch.tanh(x @ x), CPU)
    assert 0 < in_products < in_all
    assert profiles.product_ms(lambda: torch.tanh(x), CPU)[0] == 0
