"""What torch's CUDA allocator does with runs of many configs: the table that predictions are
compared with.

    python -m labutils.tools.bench.allocator_table OUT.csv             # the configs of CONFIGS that fit this GPU
    python -m labutils.tools.bench.allocator_table OUT.csv --draw 20 --seed 1    # as many drawn at random instead

Each row is three steps of `lab.train` from an empty allocator: the bytes allocated and reserved at
most, with torch's default settings and with expandable segments, and the smallest cap of the
allocator under which the steps complete. Only sizes count, so weights and text are of no matter.
Rows are added to OUT.csv; those that are there are not run.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from labutils.config.reader import load_config
from labutils.config.schema import Config
from labutils.machine import here
from labutils.memory.device_memory import expandable_segments, free_memory, memory_limit
from labutils.prediction.memory import BatchSizes
from labutils.prediction.replay import STEPS
from labutils.techniques import precision
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
)
FIELDS += ("reserved_expandable_bytes", "smallest_cap_bytes", "smallest_cap_expandable_bytes")


def shape(micro_batch_size: int, seq_len: int, accumulate: int = 1) -> dict[str, int]:
    """Return the overrides for a step of `accumulate` micro-batches."""
    tokens = micro_batch_size * seq_len * accumulate
    return {"micro_batch_size": micro_batch_size, "seq_len": seq_len, "tokens_per_step": tokens}


LEAN = {"optimizer": "adamw_8bit", "optimizer_in_backward": True, "max_grad_norm": 0}
BLOCK = {"gradient_checkpointing": "block"}
CHUNKS = {"loss_chunk_tokens": 512}
NO_DROPOUT = {"dropout": 0.0, "activation": "gelu_tanh"}
SMALL = {"model": "gpt2-nano"}
MEDIUM = {"model": "gpt2-medium"}


def configs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name of a shipped config, overrides)."""
    for name in ("fp32", "bf16", "fp16"):
        for sizes in ((1, 128), (1, 512), (4, 512), (4, 1024), (16, 1024)):
            yield name, shape(*sizes)
        yield name, shape(2, 512, 2)
        yield name, shape(1, 1024, 8)
    for sizes in ((1, 128), (4, 512), (16, 1024)):
        yield "bf16", shape(*sizes) | {"precision": "pure_bf16"}
    for name in ("fp32", "bf16"):
        for policy in ("block", "every_2", "every_3", "every_4", "selective", "offload"):
            yield name, shape(4, 1024) | {"gradient_checkpointing": policy}
        for changes in (
            CHUNKS,
            BLOCK | CHUNKS,
            NO_DROPOUT,
            {"optimizer_impl": "foreach"},
            {"attention": "eager"},
        ):
            yield name, shape(4, 1024) | changes
        yield name, shape(4, 512) | LEAN
        yield name, shape(4, 512) | LEAN | BLOCK | CHUNKS
    for changes in ({"optimizer": "sgd"}, {"optimizer": "adamw_bf16"}, {"optimizer": "adamw_8bit"}):
        yield "fp32", shape(4, 512) | changes
    yield "fp32", shape(4, 1024) | {"optimizer_impl": "for_loop"}
    yield "fp32", shape(4, 1024) | {"attention": "math"}
    yield "bf16", shape(4, 1024) | {"attention": "efficient"}
    yield "fp32", shape(8, 512, 4) | {"pad_vocab": True}
    yield "bf16", shape(1, 4096) | BLOCK
    for name in ("fp32", "bf16"):
        yield name, MEDIUM | shape(2, 1024)
        yield name, MEDIUM | shape(8, 512) | BLOCK
    yield "bf16", MEDIUM | shape(4, 1024) | LEAN | BLOCK | CHUNKS | {"precision": "pure_bf16"}
    yield "bf16", {"model": "gpt2-large"} | shape(1, 1024) | BLOCK
    for name in ("fp32", "bf16", "fp16"):
        yield name, SMALL | shape(16, 512)
    yield "optimized", {"compile": "off"}
    yield "checkpointing", {}
    yield "accumulation", {}
    yield "xl", {"memory_limit_gib": 0}


CHOICES = {
    "precision": ["fp32", "bf16", "fp16", "pure_bf16"],
    "micro_batch_size": [1, 2, 3, 4, 6, 8, 12],
    "seq_len": [128, 256, 384, 512, 768, 1024],
    "accumulate": [1, 1, 2, 3],
    "gradient_checkpointing": ["none", "none", "block", "every_2", "every_4", "selective"],
    "optimizer": ["adamw", "adamw", "adamw_8bit", "adamw_bf16", "sgd"],
    "optimizer_impl": ["fused", "fused", "foreach"],
    "attention": ["auto", "auto", "efficient", "eager"],
    "dropout": [0.0, 0.1],
    "activation": ["gelu_new", "gelu_tanh"],
    "loss_chunk_tokens": [0, 0, 256, 512],
    "pad_vocab": [False, True],
    "model": ["gpt2", "gpt2", "gpt2-medium", "gpt2-nano"],
}


def drawn(n: int, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield `n` configs drawn at random, the same ones for a seed."""
    dice = random.Random(seed)
    for _ in range(n):
        values = {key: dice.choice(found) for key, found in CHOICES.items()}
        values |= shape(values["micro_batch_size"], values["seq_len"], values.pop("accumulate"))
        yield "fp32", values


class Trials:
    """Runs of one config, each from an empty allocator; the weights are made once."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.model = float32_model(config)
        self.weights = [tensor.data for tensor in self._tensors()]

    def _tensors(self) -> list[torch.Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]

    def run(self, cap_bytes: float = 0, expandable: bool = False) -> dict[str, int] | None:
        """Return the allocator's statistics after STEPS steps; None where memory ran out under the
        cap.
        """
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
        vocab, size = (
            vocab_size(self.config.model),
            (self.config.micro_batch_size, self.config.seq_len),
        )
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
    reserved, grown = (statistics["reserved_bytes.all.peak"] for statistics in (plain, expandable))
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
    parser = argparse.ArgumentParser(
        "python -m labutils.tools.bench.allocator_table", description=__doc__.splitlines()[0]
    )
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
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA GPU is here", file=sys.stderr)
        return 1
    done = set()
    if options.out.exists():
        with options.out.open(newline="") as file:
            done = {(r["config"], r["overrides"], r["card"]) for r in csv.DictReader(file)}
    facts = {
        "label": options.label,
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
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
            print(
                name,
                text,
                {key: round(n_bytes / MIB) for key, n_bytes in found.items()},
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
