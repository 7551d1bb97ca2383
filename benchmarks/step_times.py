"""Time training steps on this machine's NVIDIA GPU, for comparing predictions with.

    python -m benchmarks.step_times NEW.csv                     # those of reference/h100_steps.csv
    python -m benchmarks.step_times NEW.csv --of OTHER.csv --profile KERNELS.json

A step is one of `lab.train`, from a batch in the host's memory to updated weights. Its time lies
between two events in the card's stream, so the host need not wait. A row has the median of STEPS
steps after WARM others, the quickest, and the peaks of bytes allocated and reserved. With
`--profile` two more steps run under torch's profiler: for each operation and shape, or kernel,
milliseconds on the card. Let nothing else run beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from datetime import date
from itertools import pairwise
from pathlib import Path

import pandas as pd
import torch
from torch.profiler import profile

from labutils.config.choices import MODELS, PRECISIONS
from labutils.config.schema import Config
from labutils.files import REFERENCE_DIR
from labutils.machine import choose_device, environment
from labutils.memory.device_memory import free_memory
from labutils.prediction.published import config_of_row
from labutils.techniques import precision
from labutils.training.train import train
from labutils.workload.build import build_experiment_model, build_loss, build_optimizer

WARM, STEPS, PROFILED = 4, 12, 2


class TimedBatches:
    """Batches of random tokens: whoever takes a step's first one marks that the last step ends."""

    def __init__(self, config: Config, profiler: profile | None) -> None:
        self.config, self.profiler = config, profiler
        self.marks: list[torch.cuda.Event] = []

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        c = self.config
        ids = torch.randint(0, MODELS[c.model].vocabulary, (c.micro_batch_size, c.seq_len))
        while True:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
            if self.profiler and len(self.marks) == WARM + STEPS + 1:
                torch.cuda.synchronize()
                self.profiler.start()
            for _ in range(c.grad_accum_steps):
                yield {"input_ids": ids, "labels": ids}

    def step_ms(self) -> list[float]:
        """Return the milliseconds of the steps after the warm-up."""
        timed = self.marks[WARM : WARM + STEPS + 1]
        return [a.elapsed_time(b) for a, b in pairwise(timed)]


def figures_of(config: Config, device: torch.device, profiler: profile | None) -> dict[str, float]:
    """Train a config's steps; return its times in milliseconds, and peaks in bytes."""
    free_memory()
    torch.cuda.reset_peak_memory_stats()
    model, batches = build_experiment_model(config, device), TimedBatches(config, profiler)
    with precision.tf32(PRECISIONS[config.precision].tf32):
        train(
            model,
            iter(batches),
            build_loss(config, device, config.grad_accum_steps > 1),
            build_optimizer(model, config),
            steps=WARM + STEPS + PROFILED,
            grad_accum_steps=config.grad_accum_steps,
            precision=config.precision,
            scaler=precision.grad_scaler(config.precision, device),
            max_grad_norm=config.max_grad_norm,
            progress=False,
        )
    torch.cuda.synchronize()
    if profiler:
        profiler.stop()
    ms = batches.step_ms()
    return {
        "ms": round(statistics.median(ms), 2),
        "quickest_ms": round(min(ms), 2),
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def kernels_of(profiler: profile) -> list[tuple[str, str, float]]:
    """Return (operation or kernel, shapes of its inputs, milliseconds in a step), longest first."""
    found = [
        (row.key, str(row.input_shapes), row.self_device_time_total / 1000 / PROFILED)
        for row in profiler.key_averages(group_by_input_shape=True)
    ]
    return sorted((row for row in found if row[2]), key=lambda row: -row[2])


def main(arguments: list[str] | None = None) -> None:
    """Time the configs of one table, and write the rows of another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("new", type=Path)
    parser.add_argument("--of", type=Path, default=REFERENCE_DIR / "h100_steps.csv")
    parser.add_argument("--profile", type=Path, help="write kernels' times into this file")
    options = parser.parse_args(arguments)
    device = choose_device()
    if device.type != "cuda":
        raise SystemExit("no CUDA GPU is here")
    rows, kernels = [], {}
    facts = environment(device)
    head = (
        f"# {facts['device']}, driver {facts['driver']}, torch {facts['torch']}, {date.today()}\n"
    )
    for text in pd.read_csv(options.of, comment="#").config:
        profiler = profile(record_shapes=True) if options.profile else None
        rows.append({"config": text} | figures_of(config_of_row(text), device, profiler))
        print(rows[-1], flush=True)
        options.new.write_text(head + pd.DataFrame(rows).to_csv(index=False, lineterminator="\n"))
        if profiler:
            kernels[text] = kernels_of(profiler)
            options.profile.write_text(json.dumps(kernels, indent=1))


if __name__ == "__main__":
    main()
