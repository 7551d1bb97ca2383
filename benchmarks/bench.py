"""Train the same tokens in several ways, in turns: `python -m benchmarks.bench`.

Each arm has a process of its own. Timed are blocks of steps between two synchronisations, after
warm-up and compilation. In each round every arm runs one block, so that a slow minute of the
machine hits all of them. A row's ratio is the median of its rounds' ratios. All arms live side by
side: where memory is short, choose some of them (`--arms`) or a smaller batch (`--set`).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm import tqdm

from benchmarks.arms import ARMS, Batch
from labutils import machine
from labutils.config.choices import PRECISIONS
from labutils.config.reader import load_config, parse_overrides
from labutils.config.schema import Config, resolve
from labutils.files import commit, new_id, runs_dir, write_atomically
from labutils.machine import choose_device
from labutils.memory.ledger import MIB
from labutils.memory.measure import peak_allocated
from labutils.techniques import precision
from labutils.training.run import flops_per_token, peak_rate
from labutils.workload import data
from labutils.workload.build import float32_model

PEAK_STEPS = 2
LAST_STEPS = 10  # whose mean loss is reported
PATIENCE_S = 900  # compiling takes minutes
SPAWN = multiprocessing.get_context("spawn")  # a forked process could not use CUDA


@dataclass
class Row:
    """One arm's result; `failed` says why there is none."""

    name: str
    arm: str
    config: Config
    tokens_per_s: list[float] = field(default_factory=list)  # one for each block
    facts: dict[str, Any] = field(default_factory=dict)
    failed: str = ""


# ---- In the process of an arm


def run_arm(arm: str, config: Config, plan: dict[str, int], parent: Connection) -> None:
    """Train by one arm, and send what happened. Before each block it waits to be told to go on."""
    try:
        device = choose_device()
        # One step more than there are batches: the end must be asked for.
        steps = plan["warmup"] + plan["blocks"] * plan["steps"] + PEAK_STEPS + 1
        config = config.model_copy(update={"steps": steps})
        facts: dict[str, Any] = {"environment": machine.environment(device)}
        with precision.tf32(PRECISIONS[config.precision].tf32):  # for all arms alike
            stream = timed_stream(config, device, plan, parent, facts)
            facts["losses"], facts["compiled"] = ARMS[arm](config, stream, device)
        if device.type == "cuda":
            facts["reserved_bytes"] = torch.cuda.max_memory_reserved()
        parent.send({"facts": facts})
    except Exception as error:
        parent.send({"failed": f"{type(error).__name__}: {error}"})


def timed_stream(
    config: Config,
    device: torch.device,
    plan: dict[str, int],
    parent: Connection,
    facts: dict[str, Any],
) -> Iterator[Batch]:
    """Yield the batches of the warm-up, those of each block, and a few for the peak of memory.

    A request for the next batch ends the step before.
    """

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    stream = data.build_data(config).batches
    start = time.perf_counter()
    yield from islice(stream, plan["warmup"])
    synchronize()
    facts["warm_s"] = time.perf_counter() - start
    parent.send({})
    for _ in range(plan["blocks"]):
        parent.recv()
        start = time.perf_counter()
        yield from islice(stream, plan["steps"])
        synchronize()
        tokens = config.tokens_per_step * plan["steps"]
        parent.send({"tokens_per_s": tokens / (time.perf_counter() - start)})
    parent.recv()  # what follows must not disturb the others' blocks
    with peak_allocated(device) as peak:
        yield from islice(stream, PEAK_STEPS)
    facts["peak_bytes"] = peak.n_bytes


# ---- In the process that started them


class ArmProcess:
    """The process of a row, and the pipe to it."""

    def __init__(self, row: Row, plan: dict[str, int]) -> None:
        self.row = row
        self.pipe, child = SPAWN.Pipe()
        arguments = (row.arm, row.config, plan, child)
        self.process = SPAWN.Process(target=run_arm, args=arguments, daemon=True)
        self.process.start()
        child.close()

    def read(self) -> dict[str, Any]:
        """Return what the arm sends next; {} when it has failed, and the row says why."""
        report: dict[str, Any] = {"failed": f"no answer for {PATIENCE_S} s"}
        try:
            if self.pipe.poll(PATIENCE_S):
                report = self.pipe.recv()
        except EOFError:
            self.process.join()
            report["failed"] = f"exit code {self.process.exitcode}"
        self.row.failed = report.get("failed", "")
        return report

    def go_on(self) -> dict[str, Any]:
        """Let the arm run its next part, and return what it sends; {} if it has failed before."""
        if self.row.failed:
            return {}
        self.pipe.send("go")
        return self.read()


def run(rows: Sequence[Row], *, warmup: int = 10, blocks: int = 7, steps: int = 10) -> None:
    """Fill the rows in. A process starts when the one before it has warmed up."""
    plan = {"warmup": warmup, "blocks": blocks, "steps": steps}
    processes = []
    try:
        for row in tqdm(rows, "warming up", file=sys.stdout):
            processes.append(ArmProcess(row, plan))
            processes[-1].read()
        for block in tqdm(range(blocks), "blocks", file=sys.stdout):
            for process in processes if block % 2 == 0 else reversed(processes):
                report = process.go_on()
                if "tokens_per_s" in report:
                    process.row.tokens_per_s.append(report["tokens_per_s"])
        for process in processes:
            process.row.facts = process.go_on().get("facts", {})
    finally:
        for process in processes:
            process.process.join(5 if process.row.facts else 0)  # it ends by itself
            process.process.kill()


def rows_of(config: Config, chosen: Sequence[str] = ()) -> list[Row]:
    """Return a row for each arm, or for those chosen, and the course's own as the last."""
    rows = [Row(name, name, config) for name in chosen or ARMS if name != "ours"]
    if config.compile != "off" and not chosen:
        eager = config.model_copy(update={"compile": "off"})
        rows.append(Row("ours, eager", "ours", eager))
    return [*rows, Row(f"ours, compile {config.compile}", "ours", config)]


def benchmark_config(device: torch.device, overrides: dict[str, Any]) -> Config:
    """Return the optimized config as it runs here, compiled.

    A step has one micro-batch, and the learning rate is constant. Raises ConfigError.
    """
    values = {"lr_schedule": "constant", "lr_warmup_steps": 0, "compile": "default"} | overrides
    own = load_config("optimized").on(device.type).model_dump() | values
    one_micro_batch = int(own["micro_batch_size"]) * int(own["seq_len"])
    config = load_config("optimized", **values, tokens_per_step=one_micro_batch)
    return resolve(config, machine.card(device)).config


def table(rows: Sequence[Row], device: torch.device) -> str:
    """Return a table, one row per arm; ratios are to the last row, the course's own."""
    ours = rows[-1]
    per_token = flops_per_token(float32_model(ours.config), ours.config.seq_len)
    peak_flops, source = peak_rate(ours.config.precision, device)
    lines = []
    for row in rows:
        if not row.facts:
            lines.append({"arm": row.name, "tokens/s": f"not run: {row.failed[:90]}"})
            continue
        rate = statistics.median(row.tokens_per_s)
        line = {
            "arm": row.name,
            "tokens/s": f"{rate:,.0f}",
            "from": f"{min(row.tokens_per_s):,.0f}",
            "to": f"{max(row.tokens_per_s):,.0f}",
            "MFU %": f"{100 * rate * per_token / peak_flops:.1f}",
            "peak MiB": f"{row.facts['peak_bytes'] / MIB:,.1f}",
            "loss": f"{statistics.mean(row.facts['losses'][-LAST_STEPS:]):.4f}",
            "warm-up s": f"{row.facts['warm_s']:.1f}",
            "compiled": row.facts["compiled"],
        }
        if ours.facts:
            pairs = zip(ours.tokens_per_s, row.tokens_per_s, strict=True)
            line["last row is × faster"] = f"{statistics.median(a / b for a, b in pairs):.3f}"
        lines.append(line)
    whole = pd.DataFrame(lines).set_index("arm").fillna("")
    return f"{whole.to_string()}\nMFU is of {source}"


def save(rows: Sequence[Row]) -> Path:
    """Write all results to a new file `bench-….json` in runs/, and return its path."""
    run_id, created = new_id()
    document = {"what": "arms", "created": created, "commit": commit(), "rows": []}
    for row in rows:
        config = row.config.model_dump(exclude={"when_cpu", "overrides"})
        named = {"name": row.name, "arm": row.arm, "config": config, "failed": row.failed}
        document["rows"].append(named | {"tokens_per_s": row.tokens_per_s} | row.facts)
    path = runs_dir() / f"bench-arms-{run_id}.json"
    write_atomically(path, json.dumps(document, indent=1).encode())
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the arms; return an exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks.bench", description=__doc__)
    parser.add_argument("--arms", nargs="+", default=[], choices=ARMS)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", dest="pairs")
    parser.add_argument("--warmup", type=int, default=10, help="steps (10)")
    parser.add_argument("--blocks", type=int, default=7, help="rounds (7)")
    parser.add_argument("--steps", type=int, default=10, help="of a block (10)")
    options = parser.parse_args(arguments)
    device = choose_device()
    try:
        config = benchmark_config(device, parse_overrides(options.pairs))
        rows = rows_of(config, options.arms)
    except ValueError as error:
        parser.error(str(error))
    tokens = f"{config.micro_batch_size} × {config.seq_len} tokens a step"
    print(f"{machine.device_name(device)}: {config.model}, {tokens}, {config.precision}")
    run(rows, warmup=options.warmup, blocks=options.blocks, steps=options.steps)
    print(table(rows, device))
    print(f"saved {save(rows)}")
    return 1 if any(row.failed for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
