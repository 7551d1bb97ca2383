"""Exercises of notebook 03 that are code: an own checkpoint, three silent bugs, a policy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from labutils.checks.checkpoint_trials import BugNet, Trial, errors_of, run_net, run_segment
from labutils.checks.core import exercise

EXACT = 1e-9  # relative; the trials count in float64
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


@exercise(
    hints=(
        "Start from `ByHand`. What stands there for one input is now a list, in the same order.",
        "A detached copy should require a gradient where the input itself did, and only there.",
        "Which random numbers come after your backward pass? They must be those of a run without "
        "checkpoints.",
    )
)
def own_checkpoint(answer: Callable | None) -> str | None:
    """Check `answer(fn, *inputs)`: the value and the gradients of `fn(*inputs)`, with less kept."""
    if not callable(answer):
        return "the answer is a function: answer(fn, *inputs) returns the value of fn(*inputs)."
    try:
        return _problem_of_checkpoint(answer)
    except RuntimeError as error:
        for words, meaning in MISTAKES.items():
            if words in str(error):
                return f"{meaning} (torch: {str(error).splitlines()[0]})"
        raise


def _problem_of_checkpoint(answer: Callable) -> str | None:
    plain, found = run_segment(_plain, 0.0), run_segment(answer, 0.0)
    if not torch.equal(found.output, plain.output):
        return "the output is not that of fn(*inputs)."
    if found.runs == 1:
        return "fn ran once, in the forward pass: nothing is computed again, so all is kept."
    if not found.is_own_function:
        return "the output does not come from an autograd.Function of your own."
    if found.kept_bytes > found.input_bytes:
        return (
            f"{found.kept_bytes} bytes are kept for inputs of {found.input_bytes} bytes. Keep the "
            "inputs only."
        )
    if problem := _wrong_gradient(found, plain):
        return problem
    plain, found = run_segment(_plain, 0.5), run_segment(answer, 0.5)
    if _wrong_gradient(found, plain):
        return (
            "right without dropout, wrong with it: the second run drew other masks. What belongs "
            "to a checkpoint beside the input?"
        )
    if not torch.equal(found.random_after, plain.random_after):
        return (
            "right gradients, but the random numbers drawn after backward are not those of a run "
            "without checkpoints. Put the state of the generator back."
        )
    return _gradcheck(answer)


def _plain(fn: Callable, *inputs: torch.Tensor) -> torch.Tensor:
    return fn(*inputs)


def _wrong_gradient(found: Trial, plain: Trial) -> str | None:
    for name, right in plain.gradients.items():
        gradient = found.gradients[name]
        if gradient is None:
            return f"{name} gets no gradient."
        error = ((gradient - right).norm() / right.norm()).item()
        if error > EXACT:
            return f"the gradient of {name} is wrong: relative error {error:.2g}."
    return None


def _gradcheck(answer: Callable) -> str | None:
    """Compare with differences of values, for another direction than ones in each output."""
    torch.manual_seed(3)
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    is_right = torch.autograd.gradcheck(
        lambda x, y: answer(lambda x, y: x.tanh() * y, x, y), (x, y), raise_exception=False
    )
    return None if is_right else "torch.autograd.gradcheck finds another gradient."


@exercise(
    hints=(
        "One parameter gets no gradient at all. Which argument of `checkpoint` has to do with it?",
        "The second run of a segment reads everything afresh. Which tensor has changed by then, "
        "and in which line?",
        "BatchNorm changes its running mean whenever it runs. How often does it run now?",
    )
)
def mended_forward(answer: Callable | None) -> str | None:
    """Check `answer(net, x)`: a checkpointed forward pass that trains as the plain one does."""
    if not callable(answer):
        return "the answer is a function: answer(net, x) returns the output of the network."
    plain, found = run_net(BugNet.plain), run_net(answer)
    errors = errors_of(found, plain)
    if errors["output"] > EXACT:
        return "the output is not that of the network without checkpoints."
    for part in ("stem", "blocks", "norm", "mix", "head"):
        if part in found.without_gradient:
            return (
                f"the weights of {part} get no gradient, and nothing says so. Who switched it off?"
            )
    for part in ("blocks", "stem", "mix", "norm", "head"):
        if errors[part] > EXACT:
            return (
                f"the gradient of {part} is wrong: relative error {errors[part]:.2g}. Does the "
                "second run of each block see the same numbers as the first?"
            )
    if found.norm_updates != plain.norm_updates:
        return (
            f"the statistics of BatchNorm are updated {found.norm_updates} times in one step. "
            "So the evaluation changes, although each gradient is right."
        )
    missing = [part for part in ("stem", "blocks", "mix") if found.runs[part] <= plain.runs[part]]
    if missing:
        return f"right, but no longer checkpointed: {', '.join(missing)}."
    return None


@exercise(
    hints=(
        "Divide the FLOPs of each matmul by the bytes of its result. Which result saves most "
        "work for each byte that it keeps?",
        "One matmul of the block is never computed again, whatever you keep. Which one comes last?",
        "Look at the shapes: `args[1]` and `args[2]` of `addmm` are the input and the weights.",
    )
)
def budget_policy(
    cost_of: Callable[[Callable], tuple[float, float]], budget: float, answer: Callable | None
) -> str | None:
    """Check a policy of selective checkpointing: it fits `budget`, and repeats least work.

    `cost_of(policy)` returns what is kept, in units of the block's input, and the FLOPs that are
    computed again, as a fraction of a step's.
    """
    if not callable(answer):
        return (
            "the answer is a function: answer(ctx, op, *args, **kwargs) returns a CheckpointPolicy."
        )
    kept, again = cost_of(answer)
    if kept > budget:
        return f"it keeps {kept:.2f} times the input; the budget is {budget:g}."
    least = _least_again(cost_of, budget)
    if again <= least + 1e-6:
        return None
    return (
        f"it fits, with {kept:.2f} times the input, and repeats {100 * again:.1f} % of a step. "
        f"With the same budget {100 * least:.1f} % is possible."
    )


def _least_again(cost_of: Callable, budget: float) -> float:
    """Return the least work again of all sets of products that fit; single costs add up."""
    products: list[tuple] = []

    def note(_: Any, op: Any, *args: Any, **__: Any) -> CheckpointPolicy:
        key = _product(op, args)
        if key and key not in products:
            products.append(key)
        return CheckpointPolicy.PREFER_RECOMPUTE

    nothing = cost_of(note)
    alone = {}
    for product in products:
        kept, again = cost_of(_keeping(product))
        alone[product] = kept - nothing[0], nothing[1] - again
    least = nothing[1]
    for n in range(1, len(products) + 1):
        for some in itertools.combinations(alone.values(), n):
            if nothing[0] + sum(kept for kept, _ in some) <= budget:
                least = min(least, nothing[1] - sum(saved for _, saved in some))
    return least


def _product(op: Any, args: Sequence[Any]) -> tuple | None:
    """Return what tells one product of a block from the others; None for other operations."""
    name = str(op)
    if "scaled_dot_product" in name:
        return ("attention",)
    if "mm." not in name:
        return None
    return tuple(tuple(one.shape) for one in args if isinstance(one, torch.Tensor))


def _keeping(product: tuple) -> Callable:
    def policy(_: Any, op: Any, *args: Any, **__: Any) -> CheckpointPolicy:
        is_it = _product(op, args) == product
        return CheckpointPolicy.MUST_SAVE if is_it else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
