"""The command of tables that are made on this machine's NVIDIA GPU, for comparing predictions with.

    python -m benchmarks.step_times NEW.csv         # the rows of its table in labutils/reference/
    python -m benchmarks.step_times NEW.csv --of OTHER.csv --every 20       # each twentieth row

and the same of `compiled_table` and `allocator_table`. What has a row in NEW.csv is not run again;
to add one, write the columns that say what is run into OTHER.csv. Let nothing else run beside it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch

from labutils.files import REFERENCE_DIR
from labutils.machine import choose_device
from labutils.memory.device_memory import free_memory


def make_rows(
    file: str,
    keys: list[str],
    figures_of: Callable[..., dict[str, float] | str],
    of_this_card: bool = False,
) -> None:
    """Write rows as those of a table: its `keys`, this card, and what `figures_of` says of them.

    `figures_of` gets a row's keys, and returns its figures, or why there are none. With
    `of_this_card` only the rows of a card of this name are made.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("new", type=Path)
    parser.add_argument("--of", type=Path, default=REFERENCE_DIR / file)
    parser.add_argument("--every", type=int, default=1, help="only each so many-th row")
    parser.add_argument("--label", help="a column more, the first")
    options = parser.parse_args()
    if choose_device().type != "cuda":
        raise SystemExit("no CUDA GPU is here")
    card = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
    label = {"label": options.label} if options.label else {}
    rows = pd.read_csv(options.new).to_dict("records") if options.new.exists() else []
    done = [[row[key] for key in keys] for row in rows]
    asked = pd.read_csv(options.of, comment="#")
    if of_this_card:
        asked = asked[asked.card == card["card"]]
    for named in asked[keys].drop_duplicates().iloc[:: options.every].to_dict("records"):
        if [*named.values()] in done:
            continue
        torch._dynamo.reset()
        torch._C._cuda_clearCublasWorkspaces()
        free_memory()
        if torch.cuda.memory_reserved():
            raise RuntimeError(f"{torch.cuda.memory_reserved()} bytes are reserved before {named}")
        torch.cuda.reset_peak_memory_stats()
        figures = figures_of(**named)
        print(*named.values(), figures, flush=True)
        if not isinstance(figures, str):
            rows.append(label | named | card | figures)
            pd.DataFrame(rows).to_csv(options.new, index=False, lineterminator="\n")


def peaks() -> dict[str, int]:
    """Return the bytes allocated and reserved at their peaks since the last reset."""
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }
