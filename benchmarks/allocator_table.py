"""What torch's CUDA allocator does with configs: `python -m benchmarks.allocator_table NEW.csv`.

Each row is three steps of `lab.train` from an empty allocator. It has the peaks of bytes allocated
and reserved, and the smallest cap of the allocator under which the steps complete. Reserved bytes
and caps are there for torch's default settings and for expandable segments. Only sizes count:
weights and text do not matter. A config is a shipped one with overrides.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch

from benchmarks.cuda_rows import make_rows
from labutils import machine
from labutils.config.choices import MODELS
from labutils.config.reader import load_config
from labutils.config.schema import Config
from labutils.memory.device_memory import expandable_segments, free_memory, memory_limit
from labutils.memory.errors import is_out_of_memory
from labutils.prediction.memory import STEPS
from labutils.techniques import precision
from labutils.training.train import train
from labutils.workload.build import build_loss, build_optimizer, float32_model

CUDA = torch.device("cuda")
FINENESS = 0.004  # of the smallest cap
MIB = 2**20


class Trials:
    """Runs of one config, each from an empty allocator; the weights are made once."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.model = float32_model(config)
        self.weights = [tensor.data for tensor in self._tensors()]

    def _tensors(self) -> list[torch.Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]

    def run(self, cap_bytes: float = 0, expandable: bool = False) -> dict[str, int] | None:
        """Return the allocator's statistics after STEPS steps, or None if memory ran out."""
        torch._C._cuda_clearCublasWorkspaces()
        free_memory()
        if torch.cuda.memory_reserved():
            raise RuntimeError(f"{torch.cuda.memory_reserved()} bytes are reserved before the run")
        with expandable_segments(expandable, CUDA), memory_limit(cap_bytes / 2**30, CUDA):
            completed = True
            try:
                self._train()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                completed = False
            statistics = torch.cuda.memory_stats()
            for tensor, weights in zip(self._tensors(), self.weights, strict=True):
                tensor.data = weights
            self.model.zero_grad(set_to_none=True)
            torch._C._cuda_clearCublasWorkspaces()
            free_memory()
        return statistics if completed else None

    def _train(self) -> None:
        c = self.config
        model = self.model.to(CUDA, torch.bfloat16 if c.precision == "pure_bf16" else torch.float32)
        train(
            model,
            self._batches(),
            build_loss(c, CUDA, c.grad_accum_steps > 1),
            build_optimizer(model, c),
            steps=STEPS,
            grad_accum_steps=c.grad_accum_steps,
            precision=c.precision,
            scaler=precision.grad_scaler(c.precision, CUDA, c.init_scale, c.growth_interval),
            max_grad_norm=c.max_grad_norm,
            progress=False,
        )

    def _batches(self) -> Iterator[dict[str, torch.Tensor]]:
        vocab = MODELS[self.config.model].vocabulary
        size = (self.config.micro_batch_size, self.config.seq_len)
        while True:
            ids = torch.randint(0, vocab, size)
            yield {"input_ids": ids, "labels": ids}

    def smallest_cap(self, fails: int, enough: int, expandable: bool = False) -> int:
        """Return the fewest bytes, in whole 2 MiB, under which the steps complete, to FINENESS."""
        fails, enough = fails // (2 * MIB) - 1, -(-enough // (2 * MIB))
        while enough - fails > max(1, FINENESS * enough):
            middle = (fails + enough) // 2
            if self.run(middle * 2 * MIB, expandable):
                enough = middle
            else:
                fails = middle
        return enough * 2 * MIB


def figures_of(config: str, overrides: str) -> dict[str, float] | str:
    """Return a config's figures in bytes, or why there are none."""
    resolved = load_config(config, **json.loads(overrides)).on("cuda")
    support = machine.support(resolved.precision, CUDA)
    if not support.ok:
        return support.reason
    trials = Trials(resolved)
    plain, expandable = trials.run(), trials.run(expandable=True)
    if not plain or not expandable:
        return "out of memory"
    requested = plain["requested_bytes.all.peak"]
    reserved, grown = plain["reserved_bytes.all.peak"], expandable["reserved_bytes.all.peak"]
    return {
        "allocated_bytes": plain["allocated_bytes.all.peak"],
        "requested_bytes": requested,
        "reserved_bytes": reserved,
        "reserved_expandable_bytes": grown,
        "smallest_cap_bytes": trials.smallest_cap(requested, reserved),
        "smallest_cap_expandable_bytes": trials.smallest_cap(requested, grown, expandable=True),
    }


if __name__ == "__main__":
    make_rows("allocator.csv", ["config", "overrides"], figures_of)
