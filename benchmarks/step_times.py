"""Time training steps on this machine's NVIDIA GPU: `python -m benchmarks.step_times NEW.csv`.

A step is one of `lab.train`, from a batch in the host's memory to updated weights. Its time lies
between two events in the card's stream, so the host need not wait. A row has the median of STEPS
steps after WARM others, the quickest, and the peaks of bytes allocated and reserved.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import pairwise

import torch

from benchmarks.cuda_rows import make_rows, peaks
from labutils.config.choices import MODELS, PRECISIONS
from labutils.config.schema import Config
from labutils.machine import choose_device
from labutils.prediction.published import config_of_row
from labutils.techniques import precision
from labutils.training.train import train
from labutils.workload.build import build_experiment_model, build_loss, build_optimizer

WARM, STEPS = 4, 12


class TimedBatches:
    """Batches of random tokens: whoever takes a step's first one marks that the last step ends."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.marks: list[torch.cuda.Event] = []

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        c = self.config
        ids = torch.randint(0, MODELS[c.model].vocabulary, (c.micro_batch_size, c.seq_len))
        while True:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
            for _ in range(c.grad_accum_steps):
                yield {"input_ids": ids, "labels": ids}

    def step_ms(self) -> list[float]:
        """Return the milliseconds of the steps after the warm-up."""
        timed = self.marks[WARM : WARM + STEPS + 1]
        return [a.elapsed_time(b) for a, b in pairwise(timed)]


def figures_of(config: str) -> dict[str, float]:
    """Train a row's steps; return its times in milliseconds, and peaks in bytes."""
    c, device = config_of_row(config), choose_device()
    model, batches = build_experiment_model(c, device), TimedBatches(c)
    with precision.tf32(PRECISIONS[c.precision].tf32):
        train(
            model,
            iter(batches),
            build_loss(c, device, c.grad_accum_steps > 1),
            build_optimizer(model, c),
            steps=WARM + STEPS + 1,
            grad_accum_steps=c.grad_accum_steps,
            precision=c.precision,
            scaler=precision.grad_scaler(c.precision, device),
            max_grad_norm=c.max_grad_norm,
            progress=False,
        )
    torch.cuda.synchronize()
    ms = batches.step_ms()
    return {"ms": round(statistics.median(ms), 2), "quickest_ms": round(min(ms), 2)} | peaks()


if __name__ == "__main__":
    make_rows("h100_steps.csv", ["config"], figures_of)
