"""One arm in one process: `python -m labutils.tools.bench.worker ARM CONFIG_JSON WARMUP BLOCKS
STEPS`.

It says a line of JSON for each thing that happened, and before each timed block waits for a line on
stdin, so that the arms take turns.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from labutils.config.schema import Config
from labutils.machine.gpu import choose_device
from labutils.machine.here import environment, matmul_rate
from labutils.memory.cpu_recorder import peak_allocated
from labutils.techniques import precision
from labutils.tools.bench import arms
from labutils.tools.bench.arms import ARMS, Batch
from labutils.training.speed import flops_per_token, peak_rate
from labutils.workload import data
from labutils.workload.build import build_corpus, float32_model

PEAK_STEPS = 2


class Clock:
    """Yields micro-batches and times them:

    Warm-up, blocks of steps on command, a few steps for the peak on a CPU.
    """

    def __init__(self, config: Config, where: torch.device, channel: Any) -> None:
        self.config, self.where, self.channel, self.peak_bytes = config, where, channel, 0

    def say(self, **facts: Any) -> None:
        print(json.dumps(facts), file=self.channel, flush=True)

    def batches(self, warmup: int, blocks: int, steps: int) -> Iterator[Batch]:
        """Yield `warmup` batches, then `steps` for each block.

        A request for the next batch ends the step before.
        """
        tokens = self.config.micro_batch_size * self.config.seq_len
        corpus = build_corpus(self.config)
        stream = data.batches(
            corpus.split(self.config.seq_len)[0], self.config.micro_batch_size, self.config.seed
        )
        begun = time.perf_counter()
        yield from (next(stream) for _ in range(warmup))
        self.synchronize()
        self.say(warm_s=time.perf_counter() - begun)
        for _ in range(blocks):
            self.wait()
            start = time.perf_counter()
            yield from (next(stream) for _ in range(steps))
            self.synchronize()
            self.say(tokens_per_s=tokens * steps / (time.perf_counter() - start))
        self.wait()  # what follows must not disturb the others' blocks
        with peak_allocated(self.where) as peak:
            yield from (next(stream) for _ in range(PEAK_STEPS))
        self.peak_bytes = peak.n_bytes

    def wait(self) -> None:
        if not sys.stdin.readline():
            raise SystemExit("the benchmark is gone")

    def synchronize(self) -> None:
        if self.where.type == "cuda":
            torch.cuda.synchronize()


def main(arm: str, config_json: str, *numbers: str) -> None:
    """Run one arm and say how it went. What it prints itself goes to stderr."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    where, config = choose_device(), Config.model_validate_json(config_json)
    warmup, blocks, steps = map(int, numbers)
    config = config.model_copy(update={"steps": warmup + blocks * steps + PEAK_STEPS + 1})
    clock = Clock(
        config, where, channel
    )  # one step more than there are batches: the end must be asked for
    with precision.tf32(config.precision == "tf32"):  # for all arms alike
        losses = ARMS[arm](config, clock.batches(warmup, blocks, steps), where)
    facts = {"losses": losses, "peak_bytes": clock.peak_bytes, "compiled": arms.compiled_how}
    if where.type == "cuda":
        facts["reserved_bytes"] = torch.cuda.max_memory_reserved()
    if arm == "ours":
        model = float32_model(config)
        flops, source = peak_rate(config.precision, where)
        dtype, n = (
            precision.products_dtype(config.precision),
            8192 if where.type == "cuda" else 1024,
        )
        with precision.tf32(config.precision == "tf32"):
            product = matmul_rate(dtype, where, n)
        facts |= {
            "flops_per_token": flops_per_token(model, config.seq_len),
            "peak_flops": flops,
            "peak": source,
        }
        facts |= {
            "product_flops": product,
            "product": f"a {n}² product in {dtype}".replace("torch.", ""),
        }
    clock.say(**facts, environment=environment(where))


if __name__ == "__main__":
    main(*sys.argv[1:])
