"""Answers to the exercises of notebook 03, right and wrong.

This folder can be removed without breaking the course.
"""

from functools import partial

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from labutils import build_model, policy_cost
from tests.solutions.answers import Solution, broken

NOTEBOOK = "03-Gradient_Checkpointing.ipynb"
SECRETS = r"\[0, 4, 5\]|\b24 (times|runs)|\b30 segments"  # not in hints, nor in the notebook

SWIGLU_KEPT = 14  # norm's input and output, and four tensors of width 3h
BLOCK_RUNS = 24  # twelve in the forward pass, and every one again
SEGMENTS = 20  # √(4 · 100), five layers each
KEPT_MIB = [2, 2, 2, 2, 40, 2, 2, 2, 2, 2, 2, 2]
STARTS = [0, 4, 5]  # the huge layer alone
BUDGET = 7.1  # times the input of the block


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fn, *inputs):
        ctx.fn, ctx.state = fn, torch.get_rng_state()
        ctx.save_for_backward(*inputs)
        return fn(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        again = [one.detach().requires_grad_(one.requires_grad) for one in ctx.saved_tensors]
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            ctx.fn(*again).backward(gradient)
        return None, *[one.grad for one in again]


def applied(*changes):
    """Return the checkpoint of `Own` with lines replaced."""
    return broken(Own, *changes).apply


FORK = "torch.random.fork_rng(devices=[]), torch.enable_grad()"
DETACH = "one.detach().requires_grad_(one.requires_grad)"
RETURN = "return None, *[one.grad for one in again]"

WRONG_CHECKPOINTS = [
    (applied(("            torch.set_rng_state(ctx.state)\n", "")), "drew other masks"),
    (applied((FORK, "torch.enable_grad()")), "drawn after backward"),
    (applied((DETACH, "one")), "Are the inputs detached"),
    (applied((DETACH, "one.detach()")), "the first input gets no gradient"),
    (applied((DETACH, "one.detach().requires_grad_()")), "a mask of booleans"),
    (applied((FORK, "torch.random.fork_rng(devices=[])")), "Is autograd switched on"),
    (
        applied((RETURN, "return tuple(one.grad for one in again)")),
        "one gradient for each argument",
    ),
    (
        applied((RETURN, "return None, again[0].grad, None, None")),
        "the second input gets no gradient",
    ),
    (applied(("backward(gradient)", "sum().backward()")), "the first input is wrong"),
    (applied(("return fn(*inputs)", "return fn(*inputs) + 1")), "not that of fn"),
    (lambda fn, *inputs: fn(*inputs), "fn ran once"),
    (partial(checkpoint, use_reentrant=True), "of your own"),
    (partial(checkpoint, use_reentrant=False), "of your own"),
    (3, "is a function"),
]


def residual(block, hidden, decay):
    return hidden + decay * block(hidden)


def mended_forward(net, x):
    hidden, decay = checkpoint(net.stem, x, use_reentrant=False), torch.ones(1)
    for block in net.blocks:
        hidden = checkpoint(residual, block, hidden, decay, use_reentrant=False)
        decay = decay / 2
    return net.head(checkpoint(net.mix, net.norm(hidden), use_reentrant=False))


def mended(*changes):
    return broken(mended_forward, *changes)


STEM = "checkpoint(net.stem, x, use_reentrant=False)"
BLOCK = "checkpoint(residual, block, hidden, decay, use_reentrant=False)"
CAPTURED = "checkpoint(lambda h, b=block: h + decay * b(h), hidden, use_reentrant=False)"
MIX = "checkpoint(net.mix, net.norm(hidden), use_reentrant=False)"
WITH_NORM = "checkpoint(lambda h: net.mix(net.norm(h)), hidden, use_reentrant=False)"

WRONG_FORWARDS = [
    (mended((STEM, STEM.replace("False", "True"))), "stem get no gradient"),
    (mended((BLOCK, CAPTURED), ("decay = decay / 2", "decay /= 2")), "gradient of blocks is wrong"),
    (mended((BLOCK, CAPTURED)), "gradient of blocks is wrong"),
    (mended((MIX, WITH_NORM)), "updated 2 times"),
    (mended((STEM, "net.stem(x)")), "no longer checkpointed: stem"),
    (lambda net, x: net.plain(x), "no longer checkpointed: stem, blocks, mix"),
    (mended(("decay = decay / 2", "pass")), "not that of the network"),
    ("x", "is a function"),
]

block = build_model("gpt2-nano", dropout=0.0, activation="gelu_tanh").transformer.h[0]
block_x = torch.randn(4, 256, 128)
KEEP, AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


def is_product(op):
    return "mm." in str(op) or "scaled_dot_product" in str(op)


def budget_policy(ctx, op, *args, **kwargs):
    if "scaled_dot_product" in str(op):
        return KEEP
    if "addmm" in str(op) and args[2].shape in ((128, 128), (128, 512)):
        return KEEP
    return AGAIN


def keeping(*shapes, attention=False):
    def policy(ctx, op, *args, **kwargs):
        is_kept = "addmm" in str(op) and tuple(args[2].shape) in shapes
        return KEEP if is_kept or (attention and "scaled_dot" in str(op)) else AGAIN

    return policy


QKV, PROJ, UP, DOWN = (128, 384), (128, 128), (128, 512), (512, 128)
WRONG_POLICIES = [
    (keeping(QKV, PROJ, UP, DOWN, attention=True), "it keeps 11.03 times"),
    (keeping(QKV, PROJ, UP, attention=True), "it keeps 10.03 times"),
    (keeping(), "is possible"),
    (keeping(UP, PROJ, DOWN), "is possible"),
    (keeping(QKV, PROJ, attention=True), "is possible"),
    (7, "is a function"),
]

SOLUTIONS = [
    Solution("own_checkpoint", right=[Own.apply], wrong=WRONG_CHECKPOINTS),
    Solution("mended_forward", right=[mended_forward], wrong=WRONG_FORWARDS),
    Solution(
        "budget_policy",
        given=(partial(policy_cost, block, block_x), BUDGET),
        right=[budget_policy, keeping(PROJ, UP, attention=True)],
        wrong=WRONG_POLICIES,
    ),
    Solution(
        "swiglu_kept",
        given=(3,),
        right=[SWIGLU_KEPT],
        wrong=[
            (11, "what the multiplication reads"),
            (8, "the count for GELU"),
            (17, "counted twice"),
            (13, "the norm keeps its input"),
            (12, "the norm keeps its input"),
            (15, "the sum keeps nothing"),
            (10, "second half of GPT-2"),
            (16, "operation by operation"),
            ("x", "operation by operation"),
        ],
    ),
    Solution(
        "block_runs",
        given=(12, 3),
        right=[BLOCK_RUNS],
        wrong=[
            (12, "without checkpointing"),
            (16, "not one block of each"),
            (21, "wherever it stands"),
            (20, "what goes in"),
            (36, "is not one"),
            (2, "more blocks"),
            (7, "block by block"),
            ("x", "block by block"),
        ],
    ),
    Solution(
        "best_segments",
        given=(100, 4),
        right=[SEGMENTS],
        wrong=[
            (10, "keeps as much as its input"),
            (100, "one checkpoint per layer"),
            (1, "one segment"),
            (5, "the other way"),
            (50, "too many segments"),
            (15, "too few segments"),
            (20.5, "whole number"),
            (0, "between 1 and 100"),
            ("x", "whole number"),
        ],
    ),
    Solution(
        "segment_lengths",
        given=(24, 16),
        right=[[2] * 4 + [1] * 16, (2, 2, 2, 2, *[1] * 16)],
        wrong=[
            ([1] * 24, "one checkpoint per layer"),
            ([2] * 12, "equally long"),
            ([1] * 16 + [2] * 4, "another order"),
            ([3] + [1] * 21, "than the number of inputs"),
            ([24], "equally long"),
            ([2] * 4, "8 layers together"),
            ([0, 24], "whole numbers above 0"),
            (20, "whole numbers above 0"),
        ],
    ),
    Solution(
        "placement",
        given=(KEPT_MIB, 1),
        right=[STARTS, [0.0, 4.0, 5.0]],
        wrong=[
            ([0, 3, 6, 9], "equally long"),
            ([0, 4], "equally long"),
            ([0], "One segment"),
            (list(range(12)), "at each layer"),
            ([0, 2, 4, 5, 8], "so many segments"),
            ([4, 5], "starts at layer 0"),
            ([0, 12], "from 0 to 11"),
            (5, "is a list of layer numbers"),
        ],
    ),
]
