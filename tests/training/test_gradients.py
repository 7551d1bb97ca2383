"""The judge of notebook 02: a right gradient passes, each kind of wrong one is told."""

from __future__ import annotations

import pytest
import torch

import labutils as lab
from tests.helpers import regression_batches, squared_error_sum, two_layers

RIGHT = torch.tensor([3.0, 4.0])


def test_an_equal_gradient_has_no_error():
    found = lab.compare_gradients(RIGHT, RIGHT.clone())
    assert (found.error, found.length) == (0, 1)
    assert found.cosine == pytest.approx(1)


def test_length_and_direction_are_told_apart():
    longer = lab.compare_gradients(4 * RIGHT, RIGHT)
    assert (longer.error, longer.length) == (3, 4) and longer.cosine == pytest.approx(1)
    turned = lab.compare_gradients(torch.tensor([-4.0, 3.0]), RIGHT)
    assert turned.length == 1 and turned.cosine == pytest.approx(0, abs=1e-6)
    assert turned.error == pytest.approx(2**0.5)
    assert str(longer) == "error 3.0e+00, 4.00 times as long, cosine 1.000"


def test_what_cannot_be_compared_is_refused_in_words():
    with pytest.raises(ValueError, match="one shape"):
        lab.compare_gradients(torch.ones(3), RIGHT)
    with pytest.raises(ValueError, match="is 0"):
        lab.compare_gradients(RIGHT, torch.zeros(2))


def test_gradients_from_before_do_not_count():
    net, (batch,) = two_layers(), regression_batches(1)
    first = lab.window_gradient(net, [batch], squared_error_sum)
    assert torch.equal(lab.window_gradient(net, [batch], squared_error_sum), first)


def test_a_window_pads_to_its_lengths_and_masks_the_rest():
    blocks = torch.arange(40).view(4, 10)
    window = lab.padded_window(blocks, [10, 3, 1, 7], micro_batch_size=2)
    assert [tuple(b["input_ids"].shape) for b in window] == [(2, 10), (2, 10)]
    assert [lab.count_targets(b) for b in window] == [9 + 2, 0 + 6]
    first, second = window
    assert first["attention_mask"].sum(1).tolist() == [10, 3]
    assert second["labels"][1].tolist() == [*range(30, 37), -100, -100, -100]


@pytest.mark.parametrize("lengths", [[11], [0], [5] * 5])
def test_a_window_longer_than_its_text_is_refused(lengths):
    with pytest.raises(ValueError, match="lengths"):
        lab.padded_window(torch.arange(40).view(4, 10), lengths, micro_batch_size=1)
