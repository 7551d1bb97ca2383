"""Exercises of notebook 03 that are code: an own checkpoint, and three silent bugs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves  # private: tensors in any nest of containers

from labutils.course.exercises.core import Problem, exercise
from labutils.memory.tensors import saved_for_backward

EXACT = 1e-9  # relative; most trials count in float64, which autocast leaves alone
# dropout, dtype, autocast's dtype or None for none, and where; with dropout also on a card
TRIALS = (
    (0.0, torch.float64),
    (0.5, torch.float64),
    (0.5, torch.float64, torch.bfloat16, "cuda" if torch.cuda.is_available() else "cpu"),
    (0.0, torch.float32),
    (0.0, torch.float32, torch.float16),
    (0.0, torch.float32, None),
)
TORCH_OWN = "CheckpointFunction"  # the name of the Function inside torch's older implementation
MISTAKES = {  # words of an error that torch raises, and what they mean here
    "incorrect number of gradients": (
        "backward returns one gradient for each argument of forward: None for the function, then "
        "one for each input. If backward has no `return`, it returns a single None."
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
    kept_bytes: int  # between the passes, without weights; of attributes only what is floating
    random_after: torch.Tensor  # numbers drawn after the backward pass


def run(
    make_net: Callable[[], nn.Module],
    forward: Callable[[Any], torch.Tensor],
    cast: Any = torch.bfloat16,
    device: str = "cpu",
) -> Trial:
    """Run `forward(net)` under autocast, and backward, on a new network, the same one each time.

    Between the two passes and after them random numbers are drawn, as other layers would.
    """
    torch.manual_seed(0)
    net, runs = make_net().to(device), Counter()
    for name, layer in net.named_modules():
        # before it runs: a second run may stop inside
        layer.register_forward_pre_hook(lambda *_, name=name: runs.update([name]))
    with saved_for_backward(net) as kept:
        with torch.autocast(device, cast or torch.bfloat16, cast is not None):
            output = forward(net)
        for value in tree_leaves(getattr(output.grad_fn, "__dict__", {})):  # of `ctx`
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value.detach().requires_grad_().sin()  # keeps its input, so this is counted
    torch.rand(3, device=device)
    output.square().sum().backward()
    return Trial(net, output, runs, kept.total(), torch.rand(3, device=device))


def wrong_gradient(trial: Trial, right: Trial, tolerance: float = EXACT) -> Problem:
    for name, parameter in right.net.named_parameters():
        gradient = trial.net.get_parameter(name).grad
        if gradient is None:
            return f"{name} gets no gradient, and no error says so."
        error = ((gradient - parameter.grad).norm() / parameter.grad.norm()).item()
        if error > tolerance:
            return f"the gradient of {name} is wrong: relative error {error:.2g}."
    return None


# ---- an own checkpoint


class Segment(nn.Module):
    """A function with weights and dropout; its four inputs are with it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first_input = nn.Parameter(torch.randn(8, 4))
        self.second_input = nn.Parameter(torch.randn(8, 4))
        self.register_buffer("mask", torch.rand(8, 4) > 0.25)
        self.register_buffer("offset", torch.randn(8, 4))  # needs no gradient
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(dropout)

    def forward(self, x, y, mask, offset) -> torch.Tensor:
        self.is_gradient_spare = offset.requires_grad  # in the last run
        hidden = self.dropout(torch.tanh(self.linear(x)) * y + offset)
        return torch.where(mask, hidden, 0.0).exp()


def run_segment(apply: Callable, dropout: float, dtype: torch.dtype, *where: Any) -> Trial:
    """Run `apply(fn, x, y, mask, offset)`: x is no leaf, y is one, and mask is boolean."""
    return run(
        lambda: Segment(dropout).to(dtype),
        lambda net: apply(net, 3 * net.first_input, net.second_input, net.mask, net.offset),
        *where,
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
        trial, *others = (run_segment(answer, *each) for each in TRIALS)
    except RuntimeError as error:
        for words, meaning in MISTAKES.items():
            if words in str(error):
                return f"{meaning} (torch: {str(error).splitlines()[0]})"
        raise
    right, *rights = (run_segment(plain, *each) for each in TRIALS)
    if not torch.equal(trial.output, right.output):
        return "the output is not that of fn(*inputs)."
    if trial.runs["linear"] == 1:
        return "fn ran once, in the forward pass: nothing is computed again, so all is kept."
    node = trial.output.grad_fn
    if not isinstance(node, BackwardCFunction) or node.name().startswith(TORCH_OWN):
        return "the output does not come from an autograd.Function of your own."
    spare_bytes = 544 - trial.kept_bytes  # x and offset, 8 × 4 float64 each, and the mask
    if spare_bytes < 0:
        return f"{-spare_bytes} bytes more than the inputs are kept. Keep the inputs only."
    if problem := wrong_gradient(trial, right):
        return problem
    if any(map(wrong_gradient, others[:2], rights)):
        return (
            "right without dropout, wrong with it: the second run drew other masks. What belongs "
            "to a checkpoint beside the input?"
        )
    # right ones are 0 off, as torch's checkpoint is; a second run without autocast by 1.7e-3
    if any(map(wrong_gradient, others[2:], rights[2:], 3 * [1e-4])):
        return (
            "the second run computed in another precision than the first, which ran under "
            "autocast to BF16, to FP16, and without. What does `ByHand` note besides the "
            "generators?"
        )
    if trial.net.is_gradient_spare:
        return (
            "right, but in the second run each float input requires a gradient. One of them needs "
            "none, so its gradient is computed for nothing. Ask each input for its requires_grad."
        )
    if not torch.equal(others[1].random_after, rights[1].random_after):
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
        self.double()

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """Run without checkpoints: each block counts half as much as the one before."""
        hidden = self.stem(x)
        for i, block in enumerate(self.blocks):
            hidden = hidden + block(hidden) / 2**i
        return self.head(self.mix(self.norm(hidden)))


@exercise(
    "One parameter gets no gradient at all. Which argument of `checkpoint` has to do with it?",
    "The second run of a segment reads everything afresh, also a name from outside the function. "
    "What has changed by then?",
    "BatchNorm changes its running mean whenever it runs. How often does it run now?",
)
def mended_forward(answer: Callable) -> Problem:
    """Check `answer(net, x)`: a checkpointed forward pass that trains as the plain one does."""
    x = torch.arange(64, dtype=torch.float64).sin().view(16, 4)
    right, trial = run(BugNet, lambda net: net.plain(x)), run(BugNet, lambda net: answer(net, x))
    if not torch.allclose(trial.output, right.output, rtol=EXACT):
        return "the output is not that of the network without checkpoints."
    if problem := wrong_gradient(trial, right):
        cause = "Has something changed by the time that a second run, or backward, reads it?"
        if "no gradient" in problem:
            cause = "Who switched autograd off, or detached?"
        return f"{problem} {cause}"
    layers = ["stem", "blocks.0.0", "blocks.1.0", "blocks.2.0", "mix.0"]
    missing = [layer.removesuffix(".0") for layer in layers if trial.runs[layer] == 1]
    evaluated, expected = (each.net.eval().plain(x) for each in (trial, right))
    if not torch.allclose(evaluated, expected, rtol=EXACT):
        return (
            "the gradients are right, but the evaluation changes: one step has to update "
            "BatchNorm's running mean and variance once. Its counter says "
            f"{trial.net.norm.num_batches_tracked}."
        )
    if missing:
        return f"right, but no longer checkpointed: {', '.join(missing)}."
    if trial.kept_bytes >= right.kept_bytes:
        return "right, and all parts run twice, but as much is kept as without checkpoints."
    return None
