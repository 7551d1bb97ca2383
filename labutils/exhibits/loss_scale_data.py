"""The exhibit `loss_scale`: real gradients, how many of each size, and the largest of a run."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from labutils.exhibits.exhibit import Exhibit, described, make_exhibit
from labutils.memory.tensors import flat_gradient
from labutils.plotting import curves
from labutils.techniques.loss import count_targets, lm_loss_sum
from labutils.techniques.numerics import FP16, fp16_fate
from labutils.training.train import train
from labutils.workload.data import batches, sequences
from labutils.workload.gpt2 import build_model

# Where a new part of an octave [2^e, 2^(e+1)) begins, as a multiple of 2^e: behind its first
# number, where rounding goes up to the smallest normal number, and where it goes beyond the
# largest. Multiplied by any power of two, all numbers of one part become the same kind of FP16.
PARTS = (1.0, 2 - FP16.eps, 2 - FP16.eps / 2)


def loss_scale() -> Exhibit:
    """Return an exhibit: what FP16 makes of gradients times a scale, and a scaler that walks.

    The gradients are those of the small GPT-2 after 12 steps (a run of seconds on the CPU, the
    first time). The scaler walks through another recorded run.
    """
    values = trained_gradients()
    fates = {k: fp16_fate(values, 2.0**k) for k in range(31)}
    lines = {}
    for fate in ("zero", "subnormal"):
        lines[fate] = {k: 100 * shares[fate] for k, shares in fates.items()}
    good = [k for k, shares in fates.items() if shares["zero"] < 1e-3 and not shares["inf"]]
    return make_exhibit(
        "loss_scale",
        "A loss scale, and the scaler that chooses it",
        "Drag the scale over real gradients. Then let the scaler walk, one step a click.",
        {
            "format": described(FP16),
            "parts": PARTS,
            "octaves": counted(values),
            "largest": largest_gradients(),
        },
        curves(lines, "loss scale: 2 to the power", "% of the gradients in FP16"),
        f"Scales from 2^{good[0]} to 2^{good[-1]} lose under 0.1 % of these gradients, none to inf",
    )


@lru_cache(maxsize=1)
def trained_gradients() -> torch.Tensor:
    """Return the gradients of the small GPT-2 after 12 steps, float32, on the CPU: a vector.

    Like those of notebook 01, section 7, but of weights, and in float32.
    """
    with torch.random.fork_rng(devices=[]):
        model = build_model("gpt2-nano")
        blocks = sequences(128)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        stream = batches(blocks, 4, seed=0)
        train(model, stream, lm_loss_sum, optimizer, steps=12, progress=False)
        batch = next(batches(blocks, 4, seed=1))
        (lm_loss_sum(model, batch) / count_targets(batch)).backward()
    return flat_gradient(model)


@lru_cache(maxsize=1)
def largest_gradients() -> list[float]:
    """Return the largest absolute weight gradient of each of 30 float32 steps on the CPU.

    The run is that of notebook 01, section 7, in float32: no step is skipped.
    """
    sizes: list[float] = []
    with torch.random.fork_rng(devices=[]):
        model = build_model("gpt2-nano")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def note(*_: Any) -> None:
            sizes.append(flat_gradient(model).abs().max().item())

        optimizer.register_step_pre_hook(note)
        stream = batches(sequences(64), 1, seed=0)
        train(model, stream, lm_loss_sum, optimizer, steps=30, progress=False)
    return sizes


def counted(values: torch.Tensor) -> list[list[int]]:
    """Return [e, n, n, n, n] for each octave [2^e, 2^(e+1)) with absolute values in it.

    The four counts are those of its parts: exactly 2^e, and between the bounds of PARTS. Zeros are
    left out. With these counts the shares of `fp16_fate` are exact at every power of two.
    """
    sizes = values[values != 0].abs().double()
    half, exponent = torch.frexp(sizes)  # half is 0.5 to 1
    octave, fraction = exponent - 1, 2 * half
    part = torch.bucketize(fraction, torch.tensor(PARTS[1:], dtype=torch.float64), right=True) + 1
    part[fraction == 1] = 0
    rows = []
    for e in octave.unique().tolist():
        rows.append([e, *torch.bincount(part[octave == e], minlength=4).tolist()])
    return rows
