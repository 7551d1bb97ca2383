"""Answers to the exercises of notebook 03, right and wrong."""

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from tests.solutions.answers import Solution, broken

NOTEBOOK = "03-Gradient_Checkpointing.ipynb"
SECRETS = r"\b24 (times|runs)|\b20 segments"  # not in hints, nor in the notebook


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fn, *inputs):
        kind, ctx.fn, ctx.state = inputs[0].device.type, fn, torch.get_rng_state()
        ctx.gpu_state = torch.cuda.get_rng_state() if kind == "cuda" else None
        dtype, is_on = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        ctx.autocast = torch.autocast(kind, dtype, is_on)
        ctx.save_for_backward(*inputs)
        return fn(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        again = [one.detach().requires_grad_(one.requires_grad) for one in ctx.saved_tensors]
        gpus = [one.device for one in again[:1] if one.is_cuda]
        with torch.random.fork_rng(gpus), torch.enable_grad(), ctx.autocast:
            torch.set_rng_state(ctx.state)
            if gpus:
                torch.cuda.set_rng_state(ctx.gpu_state)
            output = ctx.fn(*again)
        output.backward(gradient)
        return None, *[one.grad for one in again]


FORK = "torch.random.fork_rng(gpus), torch.enable_grad()"
NO_AUTOCAST = (", ctx.autocast:", ":")
# torch's own decorators note the autocast of forward, and switch it on in backward
BY_DECORATORS = [
    ("    def forward", "    @torch.amp.custom_fwd(device_type='cpu')\n    def forward"),
    ("    def backward", "    @torch.amp.custom_bwd(device_type='cpu')\n    def backward"),
    ("ctx.save_for_backward(", "ctx.x = inputs[0]; ctx.save_for_backward("),
    NO_AUTOCAST,
]
FORWARD = "return fn(*inputs)"
DETACH = "one.detach().requires_grad_(one.requires_grad)"
RETURN = "return None, *[one.grad for one in again]"
SAVE = "ctx.save_for_backward(*inputs)"
KEPT_TWICE = (SAVE, SAVE[:-1] + ", inputs[0].exp())")
ALL_BUT_LAST = ("ctx.saved_tensors]", "ctx.saved_tensors[:4]]")


def residual(block, hidden, decay):
    return hidden + decay * block(hidden)


def run_twice(net, x):
    with torch.no_grad():
        hidden = net.stem(x)
        for part in (*net.blocks, net.mix):
            part(hidden)
    return net.plain(x)


def mended_forward(net, x):
    hidden, decay = checkpoint(net.stem, x, use_reentrant=False), torch.ones(1)
    for block in net.blocks:
        hidden = checkpoint(residual, block, hidden, decay, use_reentrant=False)
        decay = decay / 2
    return net.head(checkpoint(net.mix, net.norm(hidden), use_reentrant=False))


STEM = "checkpoint(net.stem, x, use_reentrant=False)"
BLOCK = "checkpoint(residual, block, hidden, decay, use_reentrant=False)"
CAPTURED = "checkpoint(lambda h, b=block: h + decay * b(h), hidden, use_reentrant=False)"
MIX = "checkpoint(net.mix, net.norm(hidden), use_reentrant=False)"
WITH_NORM = "checkpoint(lambda h: net.mix(net.norm(h)), hidden, use_reentrant=False)"
FIRST_BLOCK_ONLY = f"{BLOCK} if decay == 1 else residual(block, hidden, decay)"
# normalises twice, but only the first run updates the statistics
NORM_PAUSED = f"""    net.norm.momentum = 0.1
    output = net.head({WITH_NORM})
    net.norm.momentum = 0.0
    return output"""

SOLUTIONS = {
    "own_checkpoint": Solution(
        right=[
            Own.apply,
            broken(Own.apply, (SAVE, "ctx.inputs = inputs"), ("saved_tensors", "inputs")),
            broken(Own.apply, *BY_DECORATORS),
        ],
        wrong={
            "write its name alone": "my_function",
            "without quotes and without ()": 5,
            "it is its `.apply`": torch.autograd.Function,
            "`return` missing?": lambda *_: None,
            "it raised AttributeError: 'NoneType'": lambda *_: None.sum(),
            "fn ran once": lambda fn, *inputs: fn(*inputs),
            "of your own": partial(checkpoint, use_reentrant=True),
            "autograd.Function of your own": partial(checkpoint, use_reentrant=False),
        },
        broken={
            "drew other masks": [("            torch.set_rng_state(ctx.state)\n", "")],
            "drawn after backward": [(FORK, "torch.enable_grad()")],
            "Are the inputs detached": [(DETACH, "one")],
            "first_input gets no gradient": [(DETACH, "one.detach()")],
            "a mask of booleans": [(DETACH, "one.detach().requires_grad_()")],
            "Is autograd switched on": [(FORK, "torch.random.fork_rng(gpus)")],
            "one gradient for each argument": [(RETURN, "return tuple(one.grad for one in again)")],
            "it returns a single None": [(RETURN, RETURN[7:])],
            "second_input gets": [(RETURN, "return None, again[0].grad, *3 * [None]")],
            "gradient of first_input is wrong": [("(gradient)\n", "(2 * gradient)\n")],
            "not that of fn": [(FORWARD, FORWARD + " + 1")],
            "256 bytes more than the inputs": [KEPT_TWICE, ALL_BUT_LAST],
            "bytes more than the inputs are": [(FORWARD, "ctx.y = fn(*inputs); return ctx.y")],
            "bytes more than the inputs are kept": [(SAVE, SAVE + "; ctx.z = [inputs[0].exp()]")],
            "computed in another precision": [NO_AUTOCAST],
            "to BF16, to FP16, and without": [("ctx.autocast:", "torch.autocast('cpu'):")],
            "One of them needs none": [("(one.requires_grad)", "(one.is_floating_point())")],
        },
    ),
    "mended_forward": Solution(
        right=[
            mended_forward,
            broken(mended_forward, (f"    return net.head({MIX})", NORM_PAUSED)),
        ],
        wrong={
            "stem, blocks.0, blocks.1, blocks.2, mix": lambda net, x: net.plain(x),
            "as much is kept": run_twice,
        },
        broken={
            "Who switched autograd off": [(STEM, STEM.replace("False", "True"))],
            "gradient of blocks.0.0.weight is wrong": [(BLOCK, CAPTURED)],
            "by the time that a second run": [("decay = decay / 2", "decay.div_(2)")],
            "counter says 2": [(MIX, WITH_NORM)],
            "counter says 1": [("    return", "    net.norm.momentum = 0.0\n    return")],
            "no longer checkpointed: blocks.1, blocks.2.": [(BLOCK, FIRST_BLOCK_ONLY)],
            "no longer checkpointed: stem.": [(STEM, "net.stem(x)")],
            "not that of the network": [("decay = decay / 2", "pass")],
        },
    ),
}
