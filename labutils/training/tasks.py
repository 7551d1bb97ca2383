"""Two small tasks that are no language model: whose line is this, and which shape is this?

Their data is on every machine, or made here. Both return a `Task` for `train`.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from labutils.techniques.precision import autocast
from labutils.training.loop import to_device, train

MODULES = ("argparse", "tarfile", "inspect", "_pydecimal")
LINE_BYTES, PAD = 48, 256  # a byte is a token; 256 is none of them
SHAPES = ("disc", "square", "ring")
BATCH = 32
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Task:
    """Examples with one label each: `x` and `labels` of training and test, on the CPU."""

    train: Batch
    test: Batch
    classes: tuple[str, ...]

    def batches(self, seed: int) -> Iterator[Batch]:
        """Yield training batches for ever, each epoch in a new seeded order."""
        generator = torch.Generator().manual_seed(seed)
        n = len(self.train["labels"])
        while True:
            for rows in torch.randperm(n, generator=generator).split(BATCH)[: n // BATCH]:
                yield {key: values[rows] for key, values in self.train.items()}


def lines_task(n_train: int = 400, n_test: int = 100) -> Task:
    """Return lines of four modules of the standard library; the class is the module.

    `x` is `(N, LINE_BYTES)` int64: bytes, padded with PAD. `n_train` and `n_test` are per class.
    Raises ValueError if a module has too few different lines.
    """
    by_class = []
    for module in MODULES:
        path = Path(sysconfig.get_path("stdlib"), f"{module}.py")
        lines = dict.fromkeys(map(str.strip, path.read_text(encoding="utf-8").splitlines()))
        long = [line for line in lines if len(line) >= 20]
        if len(long) < n_train + n_test:
            raise ValueError(f"{path.name} has {len(long)} different lines: take fewer")
        by_class.append(torch.stack([_bytes(line) for line in long]))
    return _split(by_class, n_train, n_test, MODULES)


def _bytes(line: str) -> torch.Tensor:
    codes = list(line.encode())[:LINE_BYTES]
    return torch.tensor(codes + [PAD] * (LINE_BYTES - len(codes)))


def shapes_task(n_train: int = 400, n_test: int = 200, noise: float = 0.35) -> Task:
    """Return noisy pictures of three shapes, made here; `x` is `(N, 1, 16, 16)` float32."""
    generator = torch.Generator().manual_seed(0)
    n = n_train + n_test
    grid = torch.arange(16.0)
    by_class = []
    for shape in SHAPES:
        centre = torch.rand(n, 2, generator=generator) * 6 + 5  # (N, 2)
        size = torch.rand(n, 1, 1, generator=generator) * 2 + 3
        dy = grid[None, :, None] - centre[:, :1, None]
        dx = grid[None, None, :] - centre[:, 1:, None]
        radius = (dx.square() + dy.square()).sqrt()
        inside = {
            "disc": radius < size,
            "square": torch.maximum(dx.abs(), dy.abs()) < 0.886 * size,  # a disc's area
            "ring": (radius < size) & (radius > 0.6 * size),
        }[shape]
        pictures = inside.float() + noise * torch.randn(n, 16, 16, generator=generator)
        by_class.append(pictures[:, None])
    return _split(by_class, n_train, n_test, SHAPES)


def _split(by_class: list, n_train: int, n_test: int, classes: tuple[str, ...]) -> Task:
    generator = torch.Generator().manual_seed(0)
    parts = {"train": [], "test": []}
    for label, rows in enumerate(by_class):
        order = torch.randperm(len(rows), generator=generator)
        parts["train"].append((rows[order[:n_train]], label))
        parts["test"].append((rows[order[n_train : n_train + n_test]], label))
    found = {}
    for name, pieces in parts.items():
        labels = torch.cat([torch.full((len(rows),), label) for rows, label in pieces])
        found[name] = {"x": torch.cat([rows for rows, _ in pieces]), "labels": labels}
    return Task(found["train"], found["test"], classes)


def loss_sum(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the cross-entropy, summed over a batch, of a model whose output is logits."""
    return F.cross_entropy(model(batch["x"]).float(), batch["labels"], reduction="sum")


def count(batch: Batch) -> int:
    """Return the number of examples in a batch."""
    return len(batch["labels"])


def accuracy(model: nn.Module, task: Task, precision: str) -> float:
    """Return the share of test examples, in per cent, that a model names right, in `eval()`."""
    device = next(model.parameters()).device
    model.eval()
    with torch.no_grad(), autocast(precision, device):
        logits = model(to_device(task.test["x"], device))
    model.train()
    right = logits.argmax(-1).cpu() == task.test["labels"]
    return 100 * right.float().mean().item()


def accuracy_of(
    make: Callable[[], nn.Module],
    task: Task,
    precision: str,
    seed: int,
    *,
    device: torch.device,
    steps: int = 100,
) -> float:
    """Train a new model with `labutils.train`; return its accuracy in per cent.

    The seed fixes the weights and the order of the batches.
    """
    torch.manual_seed(seed)
    model = make().to(device)
    train(
        model,
        task.batches(seed),
        loss_sum,
        torch.optim.AdamW(model.parameters(), lr=5e-3),
        steps=steps,
        count_targets=count,
        precision=precision,
        max_grad_norm=1.0,
        progress=False,
    )
    return accuracy(model, task, precision)
