"""Where training and prediction meet: what a notebook's first cell calls, and its experiments."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from typing import Any

import pandas as pd
import torch

from labutils import machine
from labutils.config.card import PrecisionUnsupported
from labutils.config.reader import load_config
from labutils.config.schema import Config
from labutils.files import new_id
from labutils.machine import choose_device, choose_threads, gpu_problem
from labutils.memory.device_memory import cap_to_free, free_memory
from labutils.memory.errors import is_out_of_memory, short_message
from labutils.plotting.style import use_style
from labutils.prediction.search import require_host_memory, suggest_changes
from labutils.techniques import compiling
from labutils.training.record import RunRecord
from labutils.training.run import run_config


def setup() -> torch.device:
    """Choose the device, print what it is, and say loudly if a GPU is there that cannot be used.

    Of a card it says what other programs have left, if they hold much, and which one of several.
    On a busy machine torch computes with one thread (see `choose_threads`). On Windows it gets no
    more of a card's memory than is free. Errors that say out of memory, and interrupts, are
    shortened: see `explain_in_notebooks`. Two warnings of the compiler are silenced: see
    `compiling.silence_known_warnings`.
    """
    explain_in_notebooks()
    compiling.silence_known_warnings()
    use_style()
    # pandas would cut the reasons in our tables short
    pd.set_option("display.max_colwidth", None, "display.width", 200)
    problem, device = gpu_problem(), choose_device()
    cap_to_free(device)
    said = choose_threads()  # before `environment`, whose facts name the number of threads
    if problem:
        print(f"!! GPU NOT USED: {problem}\n")
    facts = machine.environment(device)
    del facts["device_type"]
    facts.pop("threads", None)  # the device's name has it
    facts.pop("notebook", None)  # only records need it
    if device.type == "cuda":
        free = machine.free_bytes(device) / 2**30
        # Only what matters: CUDA's context alone takes about half a GiB (CONTEXT_GIB).
        if float(facts["gpu_memory_gib"]) - free > 1:
            facts["gpu_memory_gib"] += f" ({free:.1f} of them free)"
        n_cards = torch.cuda.device_count()
        if n_cards > 1:
            number = torch.cuda.current_device()
            facts["card"] = f"{number} of 0 to {n_cards - 1} (CUDA_VISIBLE_DEVICES chooses)"
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    if said and device.type == "cpu":
        print(f"!! {said}")
    return device


def run_experiment(
    config: Config | str,
    *,
    device: torch.device | None = None,
    rerun: bool = False,
    progress: bool = True,
) -> RunRecord:
    """Train the experiment of a config (or of a YAML file), and save and return its record.

    A completed run with equal config, code, corpus and device is returned instead, unless
    `rerun=True`. A slow precision runs fewer steps. After training, one untimed step measures
    memory.

    Raises ConfigError, DataError, PrecisionUnsupported or WeightsUnavailable, before training. Out
    of memory, losses that stay inf or NaN, and Ctrl-C are outcomes in the record, and what was
    allocated is free again. In a notebook KeyboardInterrupt is raised again when the record is
    saved; any other error is raised, and the record says so. Raises OSError if runs/ cannot be
    written: before training, unless the disk fills up.
    """
    return run_config(
        config,
        device or choose_device(),
        rerun=rerun,
        progress=progress,
        require_memory=require_host_memory,
        ways_out=suggest_changes,
    )


def run_experiments(configs: Iterable[Config | str], *, progress: bool = True) -> list[RunRecord]:
    """Run configs (or YAML files), one after the other, and return their records.

    A precision that this device lacks gives an unsaved record with `outcome` "unsupported" and the
    reason.
    """
    records = []
    for config in configs:
        config = config if isinstance(config, Config) else load_config(config)
        try:
            record = run_experiment(config, progress=progress)
        except PrecisionUnsupported as problem:
            reason = str(problem).partition(": ")[2]
            if progress:
                print(f"{config.name}: not on this device: {reason}")
            run_id, created = new_id()
            what = {"id": run_id, "created": created, "name": config.name, "note": config.note}
            record = RunRecord(**what, outcome="unsupported", reason=reason)
        records.append(record)
    return records


def explain_in_notebooks(on: bool = True) -> None:
    """Let IPython answer an error that says out of memory in a few lines, and give back what the
    cell has allocated; and answer an interrupt in one line, which still stops Run All.

    The traceback of the first, which IPython keeps, loses its frames' variables, so that the next
    cell finds the memory free. If the notebook has a `config`, its ways out are named. With
    `on=False` IPython answers as it does by itself. Does nothing outside IPython.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is not None:
        # All RuntimeErrors: a CPU's allocator and drivers say out of memory in a plain one.
        kinds = (RuntimeError, MemoryError, KeyboardInterrupt) if on else ()
        shell.set_custom_exc(kinds, _answer if on else None)


def _answer(
    shell: Any, kind: type, error: BaseException, tb: Any, tb_offset: int | None = None
) -> None:
    """Show an error in a notebook: as IPython would, or shortened, as `explain_in_notebooks` says.

    The parameters are those with which IPython calls a handler of `set_custom_exc`.
    """
    is_interrupt = isinstance(error, KeyboardInterrupt)
    if not is_interrupt and not is_out_of_memory(error):
        shell.showtraceback((kind, error, tb), tb_offset=tb_offset)
        return
    frames = [f for f in traceback.extract_tb(tb) if not f.filename.endswith("interactiveshell.py")]
    # IPython names a cell <ipython-input-…>, a Jupyter kernel a file below ipykernel_PID
    in_cells = [f for f in frames if "ipython-input" in f.filename or "ipykernel_" in f.filename]
    lines = ["Interrupted" if is_interrupt else f"Out of memory: {short_message(error)}"]
    for deepest in in_cells[-1:] or frames[:1]:
        place = "the cell" if deepest.name == "<module>" else deepest.name
        lines.append(f"in line {deepest.lineno} of {place}: {deepest.line}")
    config = shell.user_ns.get("config")
    if is_interrupt:
        lines = [" ".join(lines)]
    else:
        # `free_memory` clears the frames of this one; IPython sets it only when it shows an error
        sys.last_value = error
        free_memory()
        if isinstance(config, Config):
            ways_out = suggest_changes(config, choose_device())
            lines.append(f"For `config` ({config.name}): {ways_out}")
    error._render_traceback_ = lambda: lines  # what IPython prints in place of the frames
    shell.showtraceback((kind, error, tb), tb_offset=tb_offset)
