"""What torch's CUDA allocator does with many configs: the table for comparing predictions.

    python -m labutils.tools.bench.allocator_table OUT.csv                      # chosen configs
    python -m labutils.tools.bench.allocator_table OUT.csv --draw 20 --seed 1   # drawn at random

Each row is three steps of `lab.train` from an empty allocator. It has the peaks of bytes allocated
and reserved, and the smallest cap of the allocator under which the steps complete. Reserved bytes
and caps are there for torch's default settings and for expandable segments. Only sizes count:
weights and text do not matter. A config that has a row in OUT.csv is not run again.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from labutils.config.reader import load_config
from labutils.config.schema import Config
from labutils.machine import here
from labutils.memory.device_memory import expandable_segments, free_memory, memory_limit
from labutils.prediction.memory import BatchSizes
from labutils.prediction.replay import STEPS
from labutils.techniques import precision
from labutils.tools.bench.allocator_configs import configs, drawn
from labutils.training.loop import train
from labutils.workload.build import build_loss, build_optimizer, float32_model
from labutils.workload.gpt2 import vocab_size

CUDA = torch.device("cuda")
FINENESS = 0.004  # of the smallest cap
MIB = 2**20
FIELDS = (
    "label",
    "config",
    "overrides",
    "card",
    "torch",
    "allocated_bytes",
    "requested_bytes",
    "reserved_bytes",
    "reserved_expandable_bytes",
    "smallest_cap_bytes",
    "smallest_cap_expandable_bytes",
)


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
            try:
                completed = self._train()
            except torch.OutOfMemoryError:
                completed = False
            statistics = torch.cuda.memory_stats()
            for tensor, weights in zip(self._tensors(), self.weights, strict=True):
                tensor.data = weights
            self.model.zero_grad(set_to_none=True)
            torch._C._cuda_clearCublasWorkspaces()
            free_memory()
        return statistics if completed else None

    def _train(self) -> bool:
        c = self.config
        model = self.model.to(CUDA, torch.bfloat16 if c.precision == "pure_bf16" else torch.float32)
        record = train(
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
        return record.outcome != "out_of_memory"

    def _batches(self) -> Iterator[dict[str, torch.Tensor]]:
        vocab = vocab_size(self.config.model)
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


def row(config: Config, largest_gib: float) -> dict[str, int] | str:
    """Return a config's figures in bytes, or why there are none."""
    support = here.support(config.precision, CUDA)
    if not support.ok:
        return support.reason
    if not BatchSizes(config, here.card(CUDA)).at(config.micro_batch_size).fits(largest_gib):
        return f"predicted to need more than {largest_gib:g} GiB"
    trials = Trials(config)
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


def main(arguments: list[str] | None = None) -> int:
    """Add rows to a table."""
    options = _options(arguments)
    if not torch.cuda.is_available():
        print("no CUDA GPU is here", file=sys.stderr)
        return 1
    facts = {
        "label": options.label,
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    done = _rows_in(options.out)
    with options.out.open("a", newline="") as file:
        table = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if not done:
            table.writeheader()
        for name, overrides in drawn(options.draw, options.seed) if options.draw else configs():
            text = json.dumps(overrides, sort_keys=True)
            if (name, text, facts["card"]) in done:
                continue
            found = row(load_config(name, **overrides).on("cuda"), options.largest_gib)
            if isinstance(found, str):
                print(f"{name} {text}: not run: {found}", flush=True)
                continue
            table.writerow(facts | {"config": name, "overrides": text} | found)
            file.flush()
            in_mib = {key: round(n_bytes / MIB) for key, n_bytes in found.items()}
            print(name, text, in_mib, flush=True)
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    program = "python -m labutils.tools.bench.allocator_table"
    parser = argparse.ArgumentParser(program, description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--draw", type=int, default=0, metavar="N", help="draw N configs instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--label", default="torch's CUDA allocator", help="what ran, for the first column"
    )
    parser.add_argument(
        "--largest-gib",
        type=float,
        default=math.inf,
        help="leave out what is predicted to need more",
    )
    return parser.parse_args(arguments)


def _rows_in(path: Path) -> set[tuple[str, str, str]]:
    """Return (config, overrides, card) of each row of a table; it need not exist."""
    if not path.exists():
        return set()
    with path.open(newline="") as file:
        return {(row["config"], row["overrides"], row["card"]) for row in csv.DictReader(file)}


if __name__ == "__main__":
    raise SystemExit(main())
