"""Small networks on which a reader's checkpoints are tried, and what each trial finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks

TORCH_OWN = "CheckpointFunction"  # the name of the Function inside torch's older implementation


@dataclass(frozen=True)
class Trial:
    """What one run of a segment gave: gradients by name, how often it ran, and what it kept."""

    output: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    runs: int
    kept_bytes: int
    input_bytes: int
    is_own_function: bool
    random_after: torch.Tensor


def run_segment(apply: Callable, dropout: float) -> Trial:
    """Run `apply(fn, x, y, mask)` forward and backward, the same numbers each time.

    `x` is no leaf, `y` is one, and `mask` is boolean. Between the two passes and after them random
    numbers are drawn, as other layers would.
    """
    torch.manual_seed(0)
    linear = nn.Linear(4, 4, dtype=torch.float64)
    leaf = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    y = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(8, 4) > 0.25
    runs = []

    def fn(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        hidden = nn.functional.dropout(torch.tanh(linear(x)) * y, dropout)
        return torch.where(mask, hidden, torch.zeros_like(hidden)).exp()

    x = 3 * leaf
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = apply(fn, x, y, mask)
    torch.rand(3)
    (output * torch.arange(4.0)).sum().backward()
    node = output.grad_fn
    gradients = {"the first input": leaf.grad, "the second input": y.grad}
    gradients["the weights inside"] = linear.weight.grad
    return Trial(
        output.detach(),
        gradients,
        len(runs),
        sum(kept.values()),
        x.nbytes + y.nbytes + mask.nbytes,
        isinstance(node, BackwardCFunction) and not node.name().startswith(TORCH_OWN),
        torch.rand(3),
    )


class BugNet(nn.Module):
    """A network with a part for each bug: stem, three blocks, BatchNorm, mix, head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)
        )
        self.norm = nn.BatchNorm1d(8)
        self.mix = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 1)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """Run without checkpoints: each block counts half as much as the one before."""
        hidden, decay = self.stem(x), 1.0
        for block in self.blocks:
            hidden = hidden + decay * block(hidden)
            decay = decay / 2
        return self.head(self.mix(self.norm(hidden)))


@dataclass(frozen=True)
class NetTrial:
    """What one step of a `BugNet` gave, by part."""

    output: torch.Tensor
    gradients: dict[str, torch.Tensor]
    without_gradient: set[str]
    runs: dict[str, int]
    norm_updates: int


def run_net(forward: Callable[[BugNet, torch.Tensor], torch.Tensor]) -> NetTrial:
    """Run `forward(net, x)` and a backward pass on a new network, the same one each time."""
    torch.manual_seed(0)
    net = BugNet().double()
    x = torch.randn(16, 4, dtype=torch.float64)
    runs = dict.fromkeys(("stem", "blocks", "norm", "mix", "head"), 0)

    def counting(part: str) -> Callable:
        def count(*_: object) -> None:
            runs[part] += 1

        return count

    for part, module in net.named_children():
        counted = module[0] if part == "blocks" else module
        counted = counted[0] if isinstance(counted, nn.Sequential) else counted
        counted.register_forward_pre_hook(counting(part))  # a second run may stop inside
    output = forward(net, x)
    output.square().sum().backward()
    gradients, without = {}, set()
    for part, module in net.named_children():
        flat = []
        for parameter in module.parameters():
            if parameter.grad is None:
                without.add(part)
            else:
                flat.append(parameter.grad.flatten())
        gradients[part] = torch.cat(flat) if flat else torch.zeros(0)
    updates = int(net.norm.num_batches_tracked)
    return NetTrial(output.detach(), gradients, without, runs, updates)


def errors_of(found: NetTrial, plain: NetTrial) -> dict[str, float]:
    """Return {part: relative error of its gradient}, and that of the output; inf if it has none."""
    errors = {"output": _error(found.output, plain.output)}
    for part, gradient in plain.gradients.items():
        errors[part] = _error(found.gradients[part], gradient)
    return errors


def _error(found: torch.Tensor, right: torch.Tensor) -> float:
    if found.shape != right.shape:
        return float("inf")
    return ((found - right).norm() / right.norm()).item()
