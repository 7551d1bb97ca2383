"""What a notebook's first cell calls."""

from __future__ import annotations

import sys
import traceback
from typing import Any

import pandas as pd
import torch

from labutils.config.schema import Config
from labutils.machine import here
from labutils.machine.gpu import choose_device, diagnose, gpu_facts
from labutils.machine.threads import choose_threads
from labutils.memory.device_memory import cap_to_free, free_memory
from labutils.memory.errors import is_out_of_memory, short_message
from labutils.prediction.out_of_memory import suggest_changes
from labutils.techniques import compiling


def setup() -> torch.device:
    """Choose the device, print what it is, and say loudly if a GPU is there that cannot be used.

    On a busy machine torch computes with one thread (see `choose_threads`). On Windows it gets no
    more of a card's memory than is free. Errors that say out of memory are shortened: see
    `explain_in_notebooks`. Two warnings of the compiler are silenced: see
    `compiling.silence_known_warnings`.
    """
    explain_in_notebooks()
    compiling.silence_known_warnings()
    # pandas would cut the reasons in our tables short
    pd.set_option("display.max_colwidth", None, "display.width", 200)
    facts = gpu_facts()
    problem = diagnose(facts)
    device = torch.device("cuda" if facts.usable and not problem else "cpu")
    cap_to_free(device)
    said = choose_threads()
    if problem:
        print(f"!! GPU NOT USED: {problem}\n")
    facts = here.environment(device)
    del facts["device_type"]
    facts.pop("threads", None)  # the device's name has it
    facts.pop("notebook", None)  # only records need it
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    if said and device.type == "cpu":
        print(f"!! {said}")
    return device


def explain_in_notebooks(on: bool = True) -> None:
    """Let IPython answer an error that says out of memory in a few lines, and give back what the
    cell has allocated.

    The traceback, which IPython keeps, loses its frames' variables, so that the next cell finds the
    memory free. If the notebook has a `config`, its ways out are named. `on=False`: IPython as it
    is. Does nothing outside IPython.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is not None:
        shell.set_custom_exc((RuntimeError, MemoryError) if on else (), _answer if on else None)


def _answer(
    shell: Any, kind: type, error: BaseException, tb: Any, tb_offset: int | None = None
) -> None:
    if not is_out_of_memory(error):
        shell.showtraceback((kind, error, tb), tb_offset=tb_offset)
        return
    frames = [f for f in traceback.extract_tb(tb) if not f.filename.endswith("interactiveshell.py")]
    deepest = [f for f in frames if "ipython-input" in f.filename or "ipykernel_" in f.filename][
        -1:
    ] or frames[:1]
    lines = [f"Out of memory: {short_message(error)}"]
    lines += [
        f"in line {f.lineno} of {'the cell' if f.name == '<module>' else f.name}: {f.line}"
        for f in deepest
    ]
    sys.last_value = error
    free_memory()
    if isinstance(config := shell.user_ns.get("config"), Config):
        lines.append(f"For `config` ({config.name}): {suggest_changes(config, choose_device())}")
    error._render_traceback_ = lambda: lines
    shell.showtraceback((kind, error, tb), tb_offset=tb_offset)
