"""Real gradients for the exhibit `loss_scale`: how many of each size, and the largest of a run."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from labutils.memory.tensors import flat_gradient
from labutils.techniques.loss import count_targets, lm_loss_sum
from labutils.techniques.numerics import FP16
from labutils.training.train import train
from labutils.workload.data import batches, sequences
from labutils.workload.gpt2 import build_model

MODEL, WARM_UP_STEPS, WALKED_STEPS = "gpt2-nano", 12, 30
# Where a new part of an octave [2^e, 2^(e+1)) begins, as a multiple of 2^e: behind its first
# number, where rounding goes up to the smallest normal number, and where it goes beyond the
# largest. Multiplied by any power of two, all numbers of one part become the same kind of FP16.
PARTS = (1.0, 2 - FP16.eps, 2 - FP16.eps / 2)


@lru_cache(maxsize=1)
def gradients() -> torch.Tensor:
    """Return the gradients of the small GPT-2 after 12 steps, float32, on the CPU: a vector.

    Like those of notebook 01, section 7, but of weights, and in float32.
    """
    with torch.random.fork_rng(devices=[]):
        model = build_model(MODEL)
        blocks = sequences(128)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        stream = batches(blocks, 4, seed=0)
        train(model, stream, lm_loss_sum, optimizer, steps=WARM_UP_STEPS, progress=False)
        batch = next(batches(blocks, 4, seed=1))
        (lm_loss_sum(model, batch) / count_targets(batch)).backward()
    return flat_gradient(model)


@lru_cache(maxsize=1)
def largest_gradients() -> list[float]:
    """Return the largest absolute weight gradient of each of 30 float32 steps on the CPU.

    The run is that of notebook 01, section 7, in float32: no step is skipped.
    """
    found: list[float] = []
    with torch.random.fork_rng(devices=[]):
        model = build_model(MODEL)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def note(*_: Any) -> None:
            found.append(flat_gradient(model).abs().max().item())

        optimizer.register_step_pre_hook(note)
        stream = batches(sequences(64), 1, seed=0)
        train(model, stream, lm_loss_sum, optimizer, steps=WALKED_STEPS, progress=False)
    return found


def counted(values: torch.Tensor) -> list[list[int]]:
    """Return [e, n, n, n, n] for each octave [2^e, 2^(e+1)) with absolute values in it.

    The four counts are those of its parts: exactly 2^e, and between the bounds of PARTS. Zeros are
    left out. With these counts the shares of `fp16_fate` are exact at every power of two.
    Raises ValueError if a value is inf or NaN, or if none is left.
    """
    sizes = values.detach().flatten().float().abs().cpu().double()
    sizes = sizes[sizes != 0]
    if not len(sizes) or not sizes.isfinite().all():
        raise ValueError("gradients must be finite, and one of them not zero")
    half, exponent = torch.frexp(sizes)  # half is 0.5 to 1
    fraction = 2 * half
    part = torch.bucketize(fraction, torch.tensor(PARTS[1:], dtype=torch.float64), right=True) + 1
    part[fraction == 1] = 0
    octave = exponent - 1
    rows = []
    for e in range(int(octave.min()), int(octave.max()) + 1):
        counts = torch.bincount(part[octave == e], minlength=4).tolist()
        if sum(counts):
            rows.append([e, *counts])
    return rows
