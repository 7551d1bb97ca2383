"""The small network on which the reader's training steps are tried, on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

Rows = tuple[torch.Tensor, torch.Tensor]  # x (n, 4) and y (n, 1)


@dataclass(frozen=True)
class Toy:
    """A network 4 → 8 → 1 without biases, 16 rows of data, SGD, and a gradient scaler."""

    model: nn.Sequential
    x: torch.Tensor
    y: torch.Tensor
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler

    def weights(self) -> torch.Tensor:
        """Return a copy of all weights as one vector."""
        return nn.utils.parameters_to_vector(self.model.parameters()).detach()


def make_toy(learning_rate: float = 1.0, loss_scale: float = 1.0) -> Toy:
    """Return a new network. Its weights and data are the same each time."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 1, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    x = torch.randn(16, 4, generator=generator)
    y = torch.randn(16, 1, generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale, growth_interval=1000)
    return Toy(model, x, y, optimizer, scaler)


def toy_with(weights: torch.Tensor) -> Toy:
    """Return a network with these weights."""
    toy = make_toy()
    nn.utils.vector_to_parameters(weights, toy.model.parameters())
    return toy


def gradient(weights: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the float32 gradient of the mean squared error at these weights, as one vector."""
    model = toy_with(weights).model
    nn.functional.mse_loss(model(x), y).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def clipped(vector: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the vector, shortened to `max_norm` if it is longer."""
    return vector * min(1.0, max_norm / vector.norm().item())
