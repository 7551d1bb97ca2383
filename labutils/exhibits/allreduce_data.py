"""The exhibit `allreduce`: what workers send to average their gradients, and how it is rounded."""

from __future__ import annotations

import base64
from functools import lru_cache

import torch

from labutils.config.choices import MODELS
from labutils.exhibits.exhibit import Exhibit, described, make_exhibit
from labutils.plotting import curves
from labutils.prediction.arithmetic import n_parameters
from labutils.techniques.loss import count_targets, lm_loss_sum
from labutils.techniques.numerics import BF16, FP16, FP32
from labutils.training.gradients import window_gradient
from labutils.workload.data import batches, sequences
from labutils.workload.gpt2 import build_model

WORKERS = (2, 4, 8, 16, 32, 64)
N_ELEMENTS = 64
EXCHANGED = (FP32, BF16, FP16)


def allreduce() -> Exhibit:
    """Return an exhibit: what workers send to average gradients, and how the mean is rounded.

    The first call takes gradients of 64 sequences: seconds.
    """
    values = gradients()
    lost = {}
    for power in range(-24, 1, 2):
        sent = (values * 2.0**power).half() / max(WORKERS)
        lost[power] = 100 * (sent == 0).double().mean().item()
    return make_exhibit(
        "allreduce",
        "The exchange of gradients",
        "Choose workers, a model, a format, a link. See the bytes, the least time, the rounding.",
        {
            "formats": [described(fmt) for fmt in EXCHANGED],
            "workers": WORKERS,
            "elements": N_ELEMENTS,
            "gradients": base64.b64encode(values.numpy().astype("<f4").tobytes()).decode(),
            "models": {name: n_parameters(name) for name in MODELS},
        },
        curves(
            {"FP16": lost}, "gradients multiplied by 2 to the power", "% that 64 workers send as 0"
        ),
        f"64 workers send {lost[0]:.0f} % of these gradients as 0 in FP16, and "
        f"{lost[-10]:.0f} % if they are 1024 times smaller",
    )


@lru_cache(maxsize=1)
def gradients() -> torch.Tensor:
    """Return 64 elements of 64 workers' gradients, `(64, 64)`, float32, on the CPU.

    Each worker has one sequence of 32 tokens and the small GPT-2 before training. Elements that are
    0 for a worker are not taken: they say nothing about rounding.
    """
    with torch.random.fork_rng(devices=[]):
        model = build_model("gpt2-nano", dropout=0.0)
        stream = batches(sequences(32), 1, seed=0)
        rows = [window_gradient(model, [next(stream)], _mean_loss) for _ in range(max(WORKERS))]
    sampled = torch.stack([row[::97] for row in rows])  # every 97th: from all layers
    nonzero = sampled[:, (sampled != 0).all(0)]
    return nonzero[:, :: nonzero.shape[1] // N_ELEMENTS][:, :N_ELEMENTS].clone()


def _mean_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return lm_loss_sum(model, batch) / count_targets(batch)
