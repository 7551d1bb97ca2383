"""Answers to the exercises of notebook 04, right and wrong."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from tests.solutions.answers import VALUES, Solution, broken, given

NOTEBOOK = "04-Memory_Profiling.ipynb"
SECRETS = r"\b4198|\b17 sequences"  # what neither hints nor the notebook may say

_, PLANNED = given(NOTEBOOK, "planned")(8, gradient_checkpointing="block")
# weights and moments, the inputs of 36 blocks, three numbers per logit
PLANNED_BYTES = 12 * 774_030_080, 4 * 8192 * 1280 * 36, 4 * 8192 * 3 * 50_257


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


HOOKED = "outputs.append(three[2].max().item())"
NO_GRAD = "        with torch.no_grad():\n    "
KEPT_MAXIMUM = "outputs.__setitem__(slice(None), [max([*outputs, three[2].max()])])"
CURVE = "curve.append(F.mse_loss(model(held_out[0]), held_out[1]))"
WHOLE_OUTPUTS = (HOOKED, "outputs.append(three[2])")
DETACHED_OUTPUTS = (HOOKED, "outputs.append(three[2].detach())")
OF_ALL = ("max(outputs)", "torch.cat(outputs).max()")
OWN_SGD = ("optimizer.step()", "[p.data.sub_(0.1 * p.grad) for p in model.parameters()]")
AS_LIST = ("return losses, curve, max(outputs)", "return [losses, curve, max(outputs)]")
IN_NUMPY = [
    ("loss.item()", "loss.detach().numpy()"),
    ("return losses, curve", "return losses, torch.tensor(curve).double().numpy()"),
]

SOLUTIONS = {
    "repair": Solution(
        right=[repair, broken(repair, AS_LIST), broken(repair, *IN_NUMPY)],
        broken={
            "KiB a step. Lists of numbers": [
                (HOOKED, "outputs.append(three[2].tolist())"),
                ("max(outputs)", "max(map(max, sum(outputs, [])))"),
            ],
            "or NumPy arrays, hold": [
                (HOOKED, "outputs.append(three[2].detach().numpy().copy())"),
                ("max(outputs)", "max(each.max() for each in outputs)"),
            ],
            "a graph, and no backward pass frees": [(NO_GRAD, "")],
            "holds tensors, whole": [WHOLE_OUTPUTS, OF_ALL],
            "the tensor itself stays": [DETACHED_OUTPUTS, OF_ALL],
            "still registered": [("    hook.remove()\n", "")],
            "Keep numbers": [("loss.item()", "loss")],
            "or the largest output. Keep": [
                (HOOKED, KEPT_MAXIMUM),
                (NO_GRAD, ""),
                (CURVE, CURVE.replace("held_out[1])", "held_out[1]).item()")),
            ],
            "the held-out losses are to be 8": [(CURVE, "pass")],
            "the losses are others than before": [("        optimizer.step()\n", "")],
            "stepped 0 times": [OWN_SGD],
            "three things": [("return losses, curve, max(outputs)", "return losses")],
            "largest output": [("max(outputs)", "outputs[0]")],
            "of held-out data": [(HOOKED, f"{HOOKED} if torch.is_grad_enabled() else None")],
        },
    ),
    "planned_peak": replace(
        VALUES["planned_peak"],
        given=(PLANNED,),
        right=[[n_bytes / 2**30 for n_bytes in PLANNED_BYTES], *VALUES["planned_peak"].right],
    ),
}
