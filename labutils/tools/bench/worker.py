"""One arm in one process.

    python -m labutils.tools.bench.worker ARM CONFIG_JSON WARMUP BLOCKS STEPS

It sends a line of JSON for each thing that happened. Before each timed block it waits for a line on
stdin, so that the arms take turns.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any, TextIO

import torch

from labutils.config.choices import PRECISIONS
from labutils.config.schema import Config
from labutils.machine.gpu import choose_device
from labutils.machine.here import environment, matmul_rate
from labutils.memory.cpu_recorder import peak_allocated
from labutils.techniques import precision
from labutils.tools.bench.arms import ARMS, OURS, Batch
from labutils.training.speed import flops_per_token, peak_rate
from labutils.workload import data
from labutils.workload.build import build_corpus, float32_model

PEAK_STEPS = 2


class TimedStream:
    """Micro-batches for an arm, and the time between them.

    First those of the warm-up, then blocks of steps on command, then a few for the peak on a CPU.
    """

    def __init__(self, config: Config, device: torch.device, channel: TextIO) -> None:
        self.config, self.device, self.channel = config, device, channel
        self.peak_bytes = 0

    def send(self, **facts: Any) -> None:
        """Send a line of JSON to the process that started this one."""
        print(json.dumps(facts), file=self.channel, flush=True)

    def batches(self, warmup: int, blocks: int, steps: int) -> Iterator[Batch]:
        """Yield `warmup` batches, then `steps` for each block.

        A request for the next batch ends the step before.
        """
        seq_len, micro_batch_size = self.config.seq_len, self.config.micro_batch_size
        sequences, _ = build_corpus(self.config).split(seq_len)
        stream = data.batches(sequences, micro_batch_size, self.config.seed)
        start = time.perf_counter()
        yield from islice(stream, warmup)
        self._synchronize()
        self.send(warm_s=time.perf_counter() - start)
        for _ in range(blocks):
            self._wait()
            start = time.perf_counter()
            yield from islice(stream, steps)
            self._synchronize()
            seconds = time.perf_counter() - start
            self.send(tokens_per_s=micro_batch_size * seq_len * steps / seconds)
        self._wait()  # what follows must not disturb the others' blocks
        with peak_allocated(self.device) as peak:
            yield from islice(stream, PEAK_STEPS)
        self.peak_bytes = peak.n_bytes

    def _wait(self) -> None:
        if not sys.stdin.readline():
            raise SystemExit("the benchmark has ended")

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def main(arm: str, config_json: str, *numbers: str) -> None:
    """Run one arm and report how it went. What it prints itself goes to stderr."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    device, config = choose_device(), Config.model_validate_json(config_json)
    warmup, blocks, steps = map(int, numbers)
    # One step more than there are batches: the end must be asked for.
    config = config.model_copy(update={"steps": warmup + blocks * steps + PEAK_STEPS + 1})
    stream = TimedStream(config, device, channel)
    with precision.tf32(PRECISIONS[config.precision].tf32):  # for all arms alike
        result = ARMS[arm].train(config, stream.batches(warmup, blocks, steps), device)
    facts: dict[str, Any] = {
        "losses": result.losses,
        "peak_bytes": stream.peak_bytes,
        "compiled": result.compiled,
    }
    if device.type == "cuda":
        facts["reserved_bytes"] = torch.cuda.max_memory_reserved()
    if arm == OURS.name:
        facts |= _rates(config, device)
    stream.send(**facts, environment=environment(device))


def _rates(config: Config, device: torch.device) -> dict[str, Any]:
    """Return the FLOPs of a token, and two denominators of the utilisation with their sources."""
    peak_flops, source = peak_rate(config.precision, device)
    dtype, n = precision.products_dtype(config.precision), 8192 if device.type == "cuda" else 1024
    with precision.tf32(PRECISIONS[config.precision].tf32):
        product_flops = matmul_rate(dtype, device, n)
    return {
        "flops_per_token": flops_per_token(float32_model(config), config.seq_len),
        "peak_flops": peak_flops,
        "peak": source,
        "product_flops": product_flops,
        "product": f"a {n}² product in {dtype}".replace("torch.", ""),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
