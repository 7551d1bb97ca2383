"""Two tasks that are no language model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from labutils.training import tasks
from tests.helpers import CPU


def small_cnn() -> nn.Module:
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 3))


def test_lines_are_those_of_their_module_and_none_is_in_both_halves():
    task = tasks.lines_task(n_train=50, n_test=20)
    assert task.train["x"].shape == (200, tasks.LINE_BYTES) and len(task.test["labels"]) == 80
    assert task.train["labels"].bincount().tolist() == [50] * 4
    rows = {half: set(map(tuple, getattr(task, half)["x"].tolist())) for half in ("train", "test")}
    assert not rows["train"] & rows["test"]
    first = [code for code in task.train["x"][0].tolist() if code != tasks.PAD]
    path = tasks.Path(tasks.sysconfig.get_path("stdlib"), f"{tasks.MODULES[0]}.py")
    assert bytes(first) in path.read_bytes()


def test_too_few_lines_are_refused():
    with pytest.raises(ValueError, match="different lines: take fewer"):
        tasks.lines_task(n_train=100_000)


def test_shapes_differ_in_shape_and_not_in_brightness():
    task = tasks.shapes_task(n_train=300, n_test=10, noise=0.0)
    means = []
    for label in range(3):
        pictures = task.train["x"][task.train["labels"] == label]
        means.append(pictures.mean(0))
    assert task.train["x"].shape == (900, 1, 16, 16)
    disc, square, ring = (mean.sum().item() for mean in means)
    assert square == pytest.approx(disc, rel=0.1)  # of one area
    assert ring < 0.8 * disc
    again = tasks.shapes_task(n_train=300, n_test=10, noise=0.0)
    assert torch.equal(task.train["x"], again.train["x"])


def test_accuracy_is_the_share_of_right_names_and_training_raises_it():
    task = tasks.shapes_task(n_train=200, n_test=100)

    class Knows(nn.Module):
        def __init__(self, shift: int) -> None:
            super().__init__()
            self.shift, self.weight = shift, nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            names = (task.test["labels"] + self.shift) % 3
            return torch.nn.functional.one_hot(names, 3).float()

    assert tasks.accuracy(Knows(0), task, "fp32") == 100
    assert tasks.accuracy(Knows(1), task, "fp32") == 0
    untrained = tasks.accuracy_of(small_cnn, task, "fp32", 0, device=CPU, steps=1)
    trained = tasks.accuracy_of(small_cnn, task, "bf16", 0, device=CPU, steps=80)
    assert trained > max(60, untrained + 10)


def test_a_seed_fixes_weights_and_batches():
    task = tasks.shapes_task(n_train=64, n_test=100)
    found = [tasks.accuracy_of(small_cnn, task, "fp32", 3, device=CPU, steps=5) for _ in range(2)]
    assert found[0] == found[1]
    first, other = next(task.batches(0)), next(task.batches(1))
    assert not torch.equal(first["x"], other["x"])
