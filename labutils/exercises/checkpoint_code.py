"""Exercises of notebook 03 that are code: an own checkpoint, and three silent bugs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from labutils.exercises.core import Problem, exercise
from labutils.memory.tensors import saved_for_backward

EXACT = 1e-9  # relative; the trials count in float64
TORCH_OWN = "CheckpointFunction"  # the name of the Function inside torch's older implementation
MISTAKES = {  # words of an error that torch raises, and what they mean here
    "incorrect number of gradients": (
        "backward returns one gradient for each argument of forward: None for the function, then "
        "one for each input."
    ),
    "does not require grad": (
        "the second run left no graph. Is autograd switched on in backward, and do the detached "
        "inputs require gradients?"
    ),
    "second time": "backward went on into the graph outside. Are the inputs detached?",
    "only Tensors of floating point": (
        "not every input can require a gradient: one is a mask of booleans. Ask each input."
    ),
}


@dataclass
class Trial:
    """One forward and backward pass through a network."""

    net: nn.Module
    output: torch.Tensor
    runs: Counter  # by layer
    kept_bytes: int  # between the passes; neither weights nor inputs that are leaves count
    random_after: torch.Tensor  # numbers drawn after the backward pass


def run(make_net: Callable[[], nn.Module], forward: Callable[[Any], torch.Tensor]) -> Trial:
    """Run `forward(net)` and backward on a new float64 network, the same one each time.

    Between the two passes and after them random numbers are drawn, as other layers would.
    """
    torch.manual_seed(0)
    net, runs = make_net().double(), Counter()
    for name, layer in net.named_modules():
        # before it runs: a second run may stop inside
        layer.register_forward_pre_hook(lambda *_, name=name: runs.update([name]))
    with saved_for_backward(net) as kept:
        output = forward(net)
    torch.rand(3)
    output.square().sum().backward()
    return Trial(net, output, runs, kept.total(), torch.rand(3))


def wrong_gradient(trial: Trial, right: Trial) -> Problem:
    for name, parameter in right.net.named_parameters():
        gradient = trial.net.get_parameter(name).grad
        if gradient is None:
            return f"{name} gets no gradient, and nothing says so."
        error = ((gradient - parameter.grad).norm() / parameter.grad.norm()).item()
        if error > EXACT:
            return f"the gradient of {name} is wrong: relative error {error:.2g}."
    return None


# ---- an own checkpoint


class Segment(nn.Module):
    """A function of two inputs and a mask, with weights and dropout; the inputs are with it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first_input = nn.Parameter(torch.randn(8, 4))
        self.second_input = nn.Parameter(torch.randn(8, 4))
        self.mask = torch.rand(8, 4) > 0.25
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, self.dropout(torch.tanh(self.linear(x)) * y), 0.0).exp()


def run_segment(apply: Callable, dropout: float) -> Trial:
    """Run `apply(fn, x, y, mask)`: x is no leaf, y is one, and mask is boolean."""
    return run(
        lambda: Segment(dropout),
        lambda net: apply(net, 3 * net.first_input, net.second_input, net.mask),
    )


def plain(function: Callable, *inputs: torch.Tensor) -> torch.Tensor:
    return function(*inputs)


@exercise(
    "Start from `ByHand`. What stands there for one input is now a list, in the same order.",
    "A detached copy should require a gradient where the input itself did, and only there.",
    "Which random numbers come after your backward pass? They must be those of a run without "
    "checkpoints.",
)
def own_checkpoint(answer: Callable) -> Problem:
    """Check `answer(fn, *inputs)`: the value and the gradients of `fn(*inputs)`, with less kept."""
    try:
        trial, with_dropout = run_segment(answer, 0.0), run_segment(answer, 0.5)
    except RuntimeError as error:
        for words, meaning in MISTAKES.items():
            if words in str(error):
                return f"{meaning} (torch: {str(error).splitlines()[0]})"
        raise
    right, right_with_dropout = run_segment(plain, 0.0), run_segment(plain, 0.5)
    if not torch.equal(trial.output, right.output):
        return "the output is not that of fn(*inputs)."
    if trial.runs["linear"] == 1:
        return "fn ran once, in the forward pass: nothing is computed again, so all is kept."
    node = trial.output.grad_fn
    if not isinstance(node, BackwardCFunction) or node.name().startswith(TORCH_OWN):
        return "the output does not come from an autograd.Function of your own."
    spare_bytes = 8 * 32 + 32 - trial.kept_bytes  # x in float64 and the mask; y is a leaf
    if spare_bytes < 0:
        return f"{-spare_bytes} bytes more than the inputs are kept. Keep the inputs only."
    if problem := wrong_gradient(trial, right):
        return problem
    if wrong_gradient(with_dropout, right_with_dropout):
        return (
            "right without dropout, wrong with it: the second run drew other masks. What belongs "
            "to a checkpoint beside the input?"
        )
    if not torch.equal(with_dropout.random_after, right_with_dropout.random_after):
        return (
            "right gradients, but the random numbers drawn after backward are not those of a run "
            "without checkpoints. Put the state of the generator back."
        )
    return None


# ---- a checkpointed network with three bugs


class BugNet(nn.Module):
    """A network with a part for each bug: stem, three blocks, BatchNorm, mix, head.

    The parts are in the order in which a wrong gradient shows its cause.
    """

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
        self.blocks, self.stem, self.mix = nn.ModuleList(layers[:3]), nn.Linear(4, 8), layers[3]
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 1)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """Run without checkpoints: each block counts half as much as the one before."""
        hidden = self.stem(x)
        for i, block in enumerate(self.blocks):
            hidden = hidden + block(hidden) / 2**i
        return self.head(self.mix(self.norm(hidden)))


@exercise(
    "One parameter gets no gradient at all. Which argument of `checkpoint` has to do with it?",
    "The second run of a segment reads everything afresh. Which tensor has changed by then, and "
    "in which line?",
    "BatchNorm changes its running mean whenever it runs. How often does it run now?",
)
def mended_forward(answer: Callable) -> Problem:
    """Check `answer(net, x)`: a checkpointed forward pass that trains as the plain one does."""
    x = torch.arange(64, dtype=torch.float64).sin().view(16, 4)
    right, trial = run(BugNet, lambda net: net.plain(x)), run(BugNet, lambda net: answer(net, x))
    if not torch.allclose(trial.output, right.output, rtol=EXACT):
        return "the output is not that of the network without checkpoints."
    if problem := wrong_gradient(trial, right):
        return (
            f"{problem} Who switched autograd off, or changed the numbers that the second run of "
            "a block sees?"
        )
    n_updates = int(trial.net.norm.num_batches_tracked)
    if n_updates != 1:
        return (
            f"the statistics of BatchNorm are updated {n_updates} times in one step. So the "
            "evaluation changes, although each gradient is right."
        )
    layers = {"stem": "stem", "blocks": "blocks.0.0", "mix": "mix.0"}
    missing = [part for part, layer in layers.items() if trial.runs[layer] == 1]
    return f"right, but no longer checkpointed: {', '.join(missing)}." if missing else None
