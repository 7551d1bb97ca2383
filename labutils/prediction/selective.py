"""What a policy of selective checkpointing keeps, and what it computes again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from labutils.prediction.memory import predict_module
from labutils.prediction.time import predict_module_time


class WithPolicy(nn.Module):
    """A block that is checkpointed as a policy says; without one it keeps everything.

    `policy` is a function of (context, operation, its arguments) that returns a
    `CheckpointPolicy`: see `torch.utils.checkpoint.create_selective_checkpoint_contexts`.
    """

    def __init__(self, block: nn.Module, policy: Callable | None = None) -> None:
        super().__init__()
        self.block, self.policy = block, policy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.policy is None:
            return _first(self.block(x))
        contexts = partial(create_selective_checkpoint_contexts, self.policy)
        return _first(checkpoint(self.block, x, use_reentrant=False, context_fn=contexts))


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output  # older transformers: a tuple


def policy_cost(
    block: nn.Module, x: torch.Tensor, policy: Callable | None = None
) -> tuple[float, float]:
    """Return what a checkpointed block keeps, and which work it repeats; both are predicted.

    The first number is in units of the bytes of its input `x`, by the ledger of a CPU. The second
    is FLOPs of matrix multiplications and attention that are computed again, as a fraction of those
    of one step without checkpoints; so it does not depend on a device. Weights are not counted.
    """
    plain, work = _work(block, x, None), _work(block, x, policy)
    args = WithPolicy(block, policy), x, half_of_squares, torch.optim.SGD
    kept = predict_module(*args, device="cpu").phases["loss"]["activations"]
    return kept / x.nbytes, work / plain - 1


def _work(block: nn.Module, x: torch.Tensor, policy: Callable | None) -> float:
    args = WithPolicy(block, policy), x, half_of_squares, torch.optim.SGD
    operations = predict_module_time(*args, device="a100").operations
    return sum(one["gflop"] for one in operations.values())


def half_of_squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return half of the sum of squares of a module's output: a loss for one module."""
    return model(x).square().sum() / 2
