"""Exercises of notebook 03 that are code: an own checkpoint, and three silent bugs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from labutils.exercises.core import exercise
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

Gradients = Mapping[str, torch.Tensor | None]  # by part; None where a part has none


def wrong_gradient(gradients: Gradients, right: Gradients) -> str | None:
    for part, gradient in gradients.items():
        if gradient is None:
            return f"{part} gets no gradient, and nothing says so."
    for part, expected in right.items():
        error = ((gradients[part] - expected).norm() / expected.norm()).item()
        if error > EXACT:
            return f"the gradient of {part} is wrong: relative error {error:.2g}."
    return None


# ---- an own checkpoint


class Segment:
    """A function of two inputs and a mask, with weights and dropout, run through `apply`.

    `x` is no leaf, `y` is one, and `mask` is boolean. Between the two passes and after them random
    numbers are drawn, as other layers would.
    """

    def __init__(self, apply: Callable, dropout: float) -> None:
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.dropout, self.runs = dropout, 0
        leaf = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
        y = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
        x, mask = 3 * leaf, torch.rand(8, 4) > 0.25
        with saved_for_backward(self.linear) as kept:
            output = apply(self.function, x, y, mask)
        torch.rand(3)
        (output * torch.arange(4.0)).sum().backward()
        self.random_after = torch.rand(3)
        self.output = output
        self.spare_bytes = x.nbytes + y.nbytes + mask.nbytes - kept.total()
        self.gradients = {
            "the first input": leaf.grad,
            "the second input": y.grad,
            "the weights inside": self.linear.weight.grad,
        }

    def function(self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        hidden = nn.functional.dropout(torch.tanh(self.linear(x)) * y, self.dropout)
        return torch.where(mask, hidden, 0.0).exp()

    def comes_from_own_function(self) -> bool:
        node = self.output.grad_fn
        return isinstance(node, BackwardCFunction) and not node.name().startswith(TORCH_OWN)


def plain(function: Callable, *inputs: torch.Tensor) -> torch.Tensor:
    return function(*inputs)


@exercise(
    "Start from `ByHand`. What stands there for one input is now a list, in the same order.",
    "A detached copy should require a gradient where the input itself did, and only there.",
    "Which random numbers come after your backward pass? They must be those of a run without "
    "checkpoints.",
)
def own_checkpoint(answer: Callable | None) -> str | None:
    """Check `answer(fn, *inputs)`: the value and the gradients of `fn(*inputs)`, with less kept."""
    if not callable(answer):
        return "the answer is a function: answer(fn, *inputs) returns the value of fn(*inputs)."
    try:
        return problem_without_dropout(answer) or problem_with_dropout(answer)
    except RuntimeError as error:
        for words, meaning in MISTAKES.items():
            if words in str(error):
                return f"{meaning} (torch: {str(error).splitlines()[0]})"
        raise


def problem_without_dropout(answer: Callable) -> str | None:
    right, segment = Segment(plain, dropout=0.0), Segment(answer, dropout=0.0)
    if not torch.equal(segment.output, right.output):
        return "the output is not that of fn(*inputs)."
    if segment.runs == 1:
        return "fn ran once, in the forward pass: nothing is computed again, so all is kept."
    if not segment.comes_from_own_function():
        return "the output does not come from an autograd.Function of your own."
    if segment.spare_bytes < 0:
        return f"{-segment.spare_bytes} bytes more than the inputs are kept. Keep the inputs only."
    return wrong_gradient(segment.gradients, right.gradients)


def problem_with_dropout(answer: Callable) -> str | None:
    right, segment = Segment(plain, dropout=0.5), Segment(answer, dropout=0.5)
    if wrong_gradient(segment.gradients, right.gradients):
        return (
            "right without dropout, wrong with it: the second run drew other masks. What belongs "
            "to a checkpoint beside the input?"
        )
    if not torch.equal(segment.random_after, right.random_after):
        return (
            "right gradients, but the random numbers drawn after backward are not those of a run "
            "without checkpoints. Put the state of the generator back."
        )
    return None


# ---- a checkpointed network with three bugs

PARTS = {  # in the order in which a wrong gradient shows its cause, with a layer that each runs
    "blocks": "blocks.0.0",
    "stem": "stem",
    "mix": "mix.0",
    "norm": "norm",
    "head": "head",
}


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


class NetTrial:
    """One step of `forward(net, x)` on a new network, the same one each time."""

    def __init__(self, forward: Callable[[BugNet, torch.Tensor], torch.Tensor]) -> None:
        torch.manual_seed(0)
        net = BugNet().double()
        self.runs: Counter = Counter()
        for part, layer in PARTS.items():
            # before it runs: a second run may stop inside
            net.get_submodule(layer).register_forward_pre_hook(
                lambda *_, part=part: self.runs.update([part])
            )
        self.output = forward(net, torch.randn(16, 4, dtype=torch.float64))
        self.output.square().sum().backward()
        self.gradients = {}
        for part in PARTS:
            gradients = [parameter.grad for parameter in net.get_submodule(part).parameters()]
            is_whole = all(gradient is not None for gradient in gradients)
            self.gradients[part] = nn.utils.parameters_to_vector(gradients) if is_whole else None
        self.norm_updates = int(net.norm.num_batches_tracked)


@exercise(
    "One parameter gets no gradient at all. Which argument of `checkpoint` has to do with it?",
    "The second run of a segment reads everything afresh. Which tensor has changed by then, and "
    "in which line?",
    "BatchNorm changes its running mean whenever it runs. How often does it run now?",
)
def mended_forward(answer: Callable | None) -> str | None:
    """Check `answer(net, x)`: a checkpointed forward pass that trains as the plain one does."""
    if not callable(answer):
        return "the answer is a function: answer(net, x) returns the output of the network."
    right, trial = NetTrial(BugNet.plain), NetTrial(answer)
    if not torch.allclose(trial.output, right.output, rtol=EXACT):
        return "the output is not that of the network without checkpoints."
    if problem := wrong_gradient(trial.gradients, right.gradients):
        return (
            f"{problem} Who switched autograd off, or changed the numbers that the second run of "
            "a block sees?"
        )
    if trial.norm_updates != right.norm_updates:
        return (
            f"the statistics of BatchNorm are updated {trial.norm_updates} times in one step. "
            "So the evaluation changes, although each gradient is right."
        )
    missing = [part for part in ("stem", "blocks", "mix") if trial.runs[part] <= right.runs[part]]
    if missing:
        return f"right, but no longer checkpointed: {', '.join(missing)}."
    return None
