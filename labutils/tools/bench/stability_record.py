"""Make reference/stability.csv: `python -m labutils.tools.bench.stability_record`.

Five arms at three rates with eight seeds each: about 15 minutes on one thread of a CPU, most of
them in FP16. Each run is kept in runs/ when it ends, so the command continues where it was stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

from labutils.files import commit, new_id, runs_dir, write_atomically
from labutils.machine import here
from labutils.machine.gpu import choose_device
from labutils.training import stability
from labutils.training.code_version import code_version
from labutils.workload.build import build_data

SEEDS = 8
NOT_FACTS = ("device_type",)


def kept_path(rate: str, arm: str, seed: int, steps: int) -> Path:
    """Return where a run is kept: its name has a hash of its config and of the code behind it."""
    config = stability.config_of(arm, rate, seed, steps).model_dump_json()
    digest = hashlib.sha256((config + code_version()).encode()).hexdigest()[:12]
    return runs_dir() / "stability" / f"{arm}-{seed}-{digest}.csv"


def rows_of_run(rate: str, arm: str, seed: int, steps: int, device: torch.device) -> pd.DataFrame:
    """Return the rows of a run; one that is kept is not trained again."""
    path = kept_path(rate, arm, seed, steps)
    if not path.exists():
        rows = stability.run_one(arm, rate, seed, device, steps)
        write_atomically(path, text_of(rows).encode())
    return pd.read_csv(path)


def text_of(rows: pd.DataFrame) -> str:
    """Return rows as CSV: losses with four digits after the point, NaN as `nan`."""
    return rows.round({"loss": 4}).to_csv(index=False, lineterminator="\n", na_rep="nan")


def facts_of(device: torch.device) -> dict[str, str]:
    """Return what the numbers were made with."""
    environment = here.environment(device)
    facts = {key: value for key, value in environment.items() if key not in NOT_FACTS}
    corpus = build_data(stability.config_of("fp32", "usual", 0).on(device.type)).corpus
    facts |= {"commit": commit(), "corpus": corpus.digest, "created": new_id()[1]}
    facts["threads"] = str(torch.get_num_threads())
    facts["made by"] = "python -m labutils.tools.bench.stability_record"
    rates = ", ".join(f"{name} {rate:g}" for name, rate in stability.RATES.items())
    facts["rates"] = f"{rates}; constant after {stability.WARMUP_STEPS} steps"
    facts["scaler"] = f"from 65536, growth interval {stability.GROWTH_INTERVAL} steps"
    facts["loss"] = f"mean training loss of the last {stability.EVERY} steps, nats per token"
    return facts


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=stability.STEPS)
    parser.add_argument("--to", type=Path, default=stability.RECORD)
    options = parser.parse_args(arguments)
    device = choose_device()
    facts = facts_of(device)
    plan = []
    for seed in range(options.seeds):
        for rate in stability.RATES:
            plan += [(rate, arm, seed) for arm in stability.ARMS]
    tables = []
    for rate, arm, seed in tqdm(plan, file=sys.stderr, unit="run"):
        tables.append(rows_of_run(rate, arm, seed, options.steps, device))
    head = "\n".join(f"# {key}: {value}" for key, value in facts.items())
    write_atomically(options.to, f"{head}\n{text_of(pd.concat(tables))}".encode())
    print(f"wrote {options.to}")


if __name__ == "__main__":
    main()
