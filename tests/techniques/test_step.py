"""In every precision, windows of padded, unequal micro-batches, the last one short, equal full
batches.

The gradients are compared, not the losses: at the first step every bug leaves the loss alone.
"""

import pytest
import torch

import labutils as lab
from labutils.techniques.precision import grad_scaler
from labutils.techniques.step import take_step
from labutils.training import train as module
from tests.helpers import CPU
from tests.solutions.answers import Change, broken

# 6 micro-batches of 2 sequences: a window of 4, and a last window of 2
LENGTHS = [24, 4, 9, 3, 16, 20, 5, 2, 24, 7, 3, 12]
IDS = torch.randint(2048, (12, 24), generator=torch.Generator().manual_seed(0))
CLIP = 2.0  # below the norm of these gradients, so that clipping acts
# Rounding only: a sum in another order is off by some eps of the dtype that products run in, more
# where terms cancel.
TOLERANCE = {"fp32": 1e-5, "fp16": 3e-3, "bf16": 2.4e-2}


def micro_batches() -> list[dict[str, torch.Tensor]]:
    return lab.padded_window(IDS, LENGTHS, 2)


def full_batches() -> list[dict[str, torch.Tensor]]:
    """The two windows as one batch each."""
    first = lab.padded_window(IDS[:8], LENGTHS[:8], 8)
    return first + lab.padded_window(IDS[8:], LENGTHS[8:], 4)


def run(
    batches, precision: str = "fp32", grad_accum_steps: int = 1, clip: float = CLIP
) -> tuple[list[torch.Tensor], list[float]]:
    """Return the gradient and the loss of each optimizer step of a run at a rate of 0, so that all
    steps see the same weights.
    """
    model = lab.build_model("gpt2-nano", dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gradients = []
    optimizer.register_step_pre_hook(lambda *_: gradients.append(lab.flat_gradient(model)))
    how = {"steps": 2, "grad_accum_steps": grad_accum_steps, "max_grad_norm": clip}
    how |= {"scaler": grad_scaler(precision, CPU, init_scale=2.0**10), "progress": False}
    series = lab.train(model, batches, lab.lm_loss_sum, optimizer, precision=precision, **how)
    return gradients, series.loss


def largest_error(gradients: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    if len(gradients) != len(expected):
        return float("inf")
    pairs = zip(gradients, expected, strict=True)
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


@pytest.mark.parametrize("precision", TOLERANCE)
def test_accumulated_windows_equal_full_batches(precision):
    gradients, losses = run(micro_batches(), precision, 4)
    expected_gradients, expected_losses = run(full_batches(), precision)
    assert largest_error(gradients, expected_gradients) < TOLERANCE[precision]
    assert gradients[0].norm().item() == pytest.approx(CLIP, rel=1e-2)  # clipping did act
    assert losses == pytest.approx(expected_losses, rel=TOLERANCE[precision])


OWN_TARGETS = '(micro_batch["labels"][:, 1:] != -100).sum()'
ALL_LABELS = 'sum((batch["labels"] != -100).sum() for batch in window)'
LOOP, DIVISION = "    for micro_batch in window:\n", "/ n_targets"
AS_IF_FULL = "/ n_targets / 4 * len(window)"
LISTED = "    window = list(window)\n"
LAST_OF_LOOP = "        del loss"
UNSCALE, STEP, UPDATE = "scaler.unscale_(optimizer)", "scaler.step(optimizer)", "scaler.update()"
CLEAR = "optimizer.zero_grad(set_to_none=True)"
CLIPPING = "clip(list(model.parameters()), max_grad_norm)"


def with_list(*lines: str) -> Change:
    """Return the change after which the window is a list, with lines that use it."""
    return LOOP, LISTED + "".join(f"    {line}\n" for line in lines) + LOOP


def after_each(*lines: str) -> Change:
    """Return the change that also runs lines for each micro-batch."""
    return LAST_OF_LOOP, "".join(f"        {line}\n" for line in lines) + LAST_OF_LOOP


BUGS = {  # the clipping's norm and the precision of the run, and what the step says instead
    "mean of means": (CLIP, "fp32", with_list(), (DIVISION, f"/ {OWN_TARGETS} / len(window)")),
    "windows of i % n == 0": (CLIP, "fp32", with_list("window = window[: len(window) % 4 or 1]")),
    "last window dropped": (CLIP, "fp32", with_list("if len(window) < 4:", "    return None")),
    "gradients not cleared": (CLIP, "fp32", (CLEAR, "pass")),
    "cleared per micro-batch": (CLIP, "fp32", ('phase("forward")', CLEAR)),
    "clipped per micro-batch": (CLIP, "fp32", after_each(CLIPPING)),
    # only the gradient's length is wrong, which clipping would hide
    "no division": (1e9, "fp32", (DIVISION, f"/ {OWN_TARGETS}")),
    "short window divided as if full": (1e9, "fp32", with_list(), (DIVISION, AS_IF_FULL)),
    "unshifted labels counted": (1e9, "fp32", with_list(f"n_targets = {ALL_LABELS}")),
    "unscaled per micro-batch": (
        CLIP,
        "fp16",
        (UNSCALE, "pass"),
        (STEP, "optimizer.step()"),
        (UPDATE, "pass"),
        after_each(UNSCALE, UPDATE),
    ),
    # the scaler's step then unscales what is clipped
    "clipped before unscaling": (CLIP, "fp16", (UNSCALE, "pass")),
}
FAR_OUTSIDE = {"fp32": 1000 * TOLERANCE["fp32"], "fp16": 20 * TOLERANCE["fp16"]}


@pytest.mark.parametrize("bug", BUGS)
def test_each_classic_bug_in_the_step_is_caught(bug, monkeypatch):
    """Far outside the tolerance, not just outside."""
    clip, precision, *changes = BUGS[bug]
    right, _ = run(full_batches(), precision, 1, clip)
    monkeypatch.setattr(module, "take_step", broken(take_step, *changes))
    wrong, _ = run(micro_batches(), precision, 4, clip)
    assert largest_error(wrong, right) > FAR_OUTSIDE[precision]
