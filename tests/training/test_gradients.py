"""The judge of notebook 02: a right gradient passes, each kind of wrong one is told."""

import pytest
import torch

import labutils as lab

RIGHT = torch.tensor([3.0, 4.0])


@pytest.mark.parametrize(
    ("gradient", "says"),
    [
        (RIGHT, "error 0.0e+00, 1.00 times as long, cosine 1.000"),
        (4 * RIGHT, "error 3.0e+00, 4.00 times as long, cosine 1.000"),
        (torch.tensor([-4.0, 3.0]), "error 1.4e+00, 1.00 times as long, cosine 0.000"),
    ],
)
def test_error_length_and_direction_are_told_apart(gradient, says):
    assert str(lab.compare_gradients(gradient, RIGHT)) == says


def test_a_window_pads_to_its_lengths_and_masks_the_rest():
    blocks = torch.arange(40).view(4, 10)
    first, second = lab.padded_window(blocks, [10, 3, 1, 7], micro_batch_size=2)
    assert (lab.count_targets(first), lab.count_targets(second)) == (9 + 2, 0 + 6)
    assert first["input_ids"].shape == (2, 10)
    assert first["attention_mask"].sum(1).tolist() == [10, 3]
    assert second["labels"][1].tolist() == [*range(30, 37), -100, -100, -100]
    with pytest.raises(ValueError, match="lengths"):
        lab.padded_window(blocks, [11], micro_batch_size=1)
