"""Answers to the exercises of notebook 04, right and wrong.

This folder can be removed without breaking the course.
"""

import gc  # noqa: F401  a wrong answer calls it

import torch
import torch.nn.functional as F

import labutils as lab
from tests.solutions.answers import Solution, broken

NOTEBOOK = "04-Memory_Profiling.ipynb"
SECRETS = r"\b4198|\b17 sequences"  # what neither hints nor the notebook may say

SMI_MIB = (3.6 + 0.5) * 1024  # reserved segments and the context
N_LARGE = 774_030_080
PLANNED_GIB = (
    lab.predict_memory(
        lab.load_config(
            "fp32",
            model="gpt2-large",
            seq_len=1024,
            micro_batch_size=8,
            tokens_per_step=8192,
            dropout=0.0,
            activation="gelu_tanh",
            gradient_checkpointing="block",
        ),
        "t4",
    ).peak_bytes
    / 2**30
)
GRADIENTS_GIB = 4 * N_LARGE / 2**30
# weights and moments, the inputs of 36 blocks, one block computed again, three numbers per logit
PLANNED_BY_HAND = (12 * N_LARGE + 4 * 8192 * (1280 * (36 + 16) + 3 * 50_257)) / 2**30
LARGEST_BATCH = 17  # 500 without any sequence, and 200 for each


def repair(model, batches, held_out, optimizer):
    losses, curve, outputs = [], [], []
    hook = model[0].register_forward_hook(lambda *three: outputs.append(three[2].max().item()))
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        with torch.no_grad():
            curve.append(F.mse_loss(model(held_out[0]), held_out[1]))
    hook.remove()
    return losses, curve, max(outputs)


def leaking(model, batches, held_out, optimizer):
    losses, curve, outputs = [], [], []
    model[0].register_forward_hook(lambda layer, given, output: outputs.append(output))
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss)
        curve.append(F.mse_loss(model(held_out[0]), held_out[1]))
    return losses, curve, torch.cat(outputs).max()


def detached_only(model, batches, held_out, optimizer):
    losses, curve, outputs = [], [], []
    hook = model[0].register_forward_hook(lambda *three: outputs.append(three[2].detach()))
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        curve.append(F.mse_loss(model(held_out[0]), held_out[1]).detach())
    hook.remove()
    return losses, curve, torch.cat(outputs).max()


LAST = "        curve.append(F.mse_loss(model(held_out[0]), held_out[1]))\n"
NO_GRAD = "        with torch.no_grad():\n    "
HOOKED = "outputs.append(three[2].max().item())"
CURVE = "curve.append(F.mse_loss(model(held_out[0]), held_out[1]))"
WRONG_REPAIRS = [
    (leaking, "still have a graph, and no backward"),
    (broken(leaking, (LAST, LAST + "        del loss\n")), "removes a name"),
    (broken(leaking, (LAST, LAST + "        gc.collect()\n")), "what nobody holds"),
    (broken(leaking, (LAST, LAST + "        torch.cuda.empty_cache()\n")), "what nobody holds"),
    (detached_only, "the tensor itself stays"),
    (broken(repair, (NO_GRAD, "")), "no backward pass frees"),
    (
        broken(
            repair,
            (HOOKED, "outputs.append(three[2])"),
            ("max(outputs)", "torch.cat(outputs).max()"),
        ),
        "holds whole",
    ),
    (broken(repair, ("    hook.remove()\n", "")), "still registered"),
    (broken(repair, ("loss.item()", "loss")), "Keep numbers"),
    (broken(repair, (CURVE, "pass")), "the held-out losses are to be 8"),
    (broken(repair, ("        optimizer.step()\n", "")), "are others than before"),
    (broken(repair, ("return losses, curve, max(outputs)", "return losses")), "three things"),
    (broken(repair, ("max(outputs)", "outputs[0]")), "largest output"),
    (broken(repair, (CURVE, CURVE + "\n            loss.backward()")), "it raised RuntimeError"),
]

SOLUTIONS = [
    Solution(
        "nvidia_smi",
        given=(3.0, 3.6, 0.5),
        right=[SMI_MIB, 4198, 4198.4, 4199],
        wrong=[
            (3686.4, "context"),
            (3072, "tensors alone"),
            (3584, "cached"),
            (7270.4, "within"),
            (4100, "unit"),
            (4.1, "unit"),
            (9, "driver"),
        ],
    ),
    Solution(
        "history",
        right=[(912, "optimizer", 44.2), (900, "the optimizer", 44)],
        wrong=[
            ((167, "optimizer", 44.2), "first step"),
            ((1495, "optimizer", 44.2), "orange block"),
            ((912, "moving the model", 44.2), "before the first step"),
            ((912, "cuBLAS's workspaces", 44.2), "leaves them out"),
            ((912, "forward", 44.2), "backward has used"),
            ((912, "backward", 44.2), "zero_grad"),
            ((912, "nobody", 44.2), "name of the legend"),
            ((912, "optimizer", 74), "subtract"),
        ],
    ),
    Solution(
        "leak",
        right=[3, 6],
        wrong=[
            (1, "no leak"),
            (2, "Who"),
            (4, "a name"),
            (5, "its own graph"),
            (7, "number of a line"),
        ],
    ),
    Solution("repair", right=[repair], wrong=WRONG_REPAIRS),
    Solution(
        "largest_batch",
        given=({2: 900, 6: 1700}, 4096),
        right=[LARGEST_BATCH],
        wrong=[
            (9, "through zero"),
            (14, "through zero"),
            (20, "before the first"),
            (17.98, "whole"),
            (18, "over"),
            (16, "one more"),
        ],
    ),
    Solution(
        "products_in_backward",
        right=[34],
        wrong=[
            (35, "in forward"),
            (17, "needs two"),
            (16, "needs two"),
            (32, "the head has two"),
            (33, "the head has two"),
            (5, "filter"),
        ],
    ),
    Solution(
        "useful_del",
        right=["A", "a"],
        wrong=[("B", "has passed"), ("C", "has passed"), ("D", "gone anyway"), ("E", "A, B, C")],
    ),
    Solution(
        "planned_peak",
        given=(PLANNED_GIB, N_LARGE),
        right=[PLANNED_BY_HAND, PLANNED_GIB, 0.9 * PLANNED_GIB],
        wrong=[
            (PLANNED_BY_HAND - GRADIENTS_GIB, "4 bytes per parameter are missing"),
            (PLANNED_BY_HAND + GRADIENTS_GIB, "no weight has a gradient yet"),
            (1e4, "in GiB"),
            (2.0, "add weights"),
        ],
    ),
]
