"""The exhibit `window`: the memory of micro-batches, moment by moment, for any of their sizes.

Bytes are affine in the sequences of a micro-batch, from two on. So two traces give all.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from labutils.config.card import CPU
from labutils.config.reader import load_config
from labutils.config.schema import Config, resolve
from labutils.exhibits.exhibit import Exhibit, looks_of, make_exhibit
from labutils.memory.ledger import (
    ACTIVATIONS,
    GRADIENTS,
    LOGITS,
    MIB,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARIES,
)
from labutils.plotting import curves
from labutils.prediction.memory import STEPS, walk
from labutils.prediction.trace import BIRTH, CATEGORIES, DEATH, trace_config

SEQ_LEN = 64  # as in section 3 of notebook 02
LARGEST = 128  # sequences: up to here no moment is missed that could be a phase's peak
# Of the ledger's categories: a CPU has no workspaces, and float32 no cast weights.
SHOWN = (PARAMETERS, OPTIMIZER, GRADIENTS, ACTIVATIONS, LOGITS, TEMPORARIES)
MOMENTS = 14  # of each phase at least, where it has so many
Part = tuple[str, int | None]  # phase, and micro-batch; the optimizer's has none


def window() -> Exhibit:
    """Return an exhibit: scrub through the memory of n × m sequences, and weigh unequal ones.

    Bytes are those of the ledger, of a small GPT-2 on a CPU: two traces take a few seconds.
    """
    sizes = (2, 4, 8, 16, 32)
    at_once = [part for part in film() if part["micro_batch"] != 1]
    lines = {
        "one batch": {m: peak_mib(at_once, m) for m in sizes},
        "micro-batches of 2": {m: peak_mib(film(), 2) for m in sizes},
    }
    ends = [line[32] for line in lines.values()]
    return make_exhibit(
        "window",
        "A window of micro-batches",
        "Scrub through one optimizer step: activations come and go, gradients stay.",
        {"film": film(), "looks": looks_of(SHOWN)},
        curves(lines, "sequences per optimizer step", "predicted peak, MiB", log2_ticks=sizes),
        f"32 sequences take {ends[0]:.0f} MiB in one batch, {ends[1]:.0f} MiB in 16 micro-batches",
    )


def peak_mib(parts: list[dict[str, Any]], m: int) -> float:
    """Return the predicted peak of parts of the film, with m sequences in a micro-batch."""
    bytes_of = [np.array(part["moments"]).sum(axis=1) @ (1, m) for part in parts]
    return max(moments.max() for moments in bytes_of) / MIB


def window_config(n: int, m: int) -> Config:
    """Return the config of n micro-batches with m sequences each, as in notebook 02."""
    shape = {"seq_len": SEQ_LEN, "micro_batch_size": m, "tokens_per_step": n * m * SEQ_LEN}
    model = {"model": "gpt2-nano", "steps": 1, "lr_warmup_steps": 0}
    return load_config("configs/accumulation_config.yaml", **model, **shape)


@lru_cache
def film() -> list[dict[str, Any]]:
    """Return the parts of a step of two micro-batches, in order: phase, micro-batch, and moments.

    A moment has [bytes at 0 sequences, bytes per sequence] for each of SHOWN. The second
    micro-batch stands for all later ones. Those moments are among them at which a phase can have
    its peak.
    """
    low, high = _alive(2), _alive(3)
    parts: list[dict[str, Any]] = []
    for (phase, micro_batch), two in low.items():
        per_sequence = high[phase, micro_batch] - two
        standing = two - 2 * per_sequence
        moments = np.stack([standing, per_sequence], axis=2)  # (moments, categories, 2)
        chosen = _chosen(standing.sum(axis=1), per_sequence.sum(axis=1))
        part = {"phase": phase, "micro_batch": micro_batch, "moments": moments[chosen].tolist()}
        parts.append(part)
    return parts


def _alive(m: int) -> dict[Part, np.ndarray]:
    """Return {part: bytes (events, categories)} of the last step of 2 × m, as the ledger counts."""
    config = resolve(window_config(2, m), CPU).config
    trace = trace_config(config, None)
    now = dict.fromkeys(CATEGORIES, 0)
    signs = {BIRTH: 1, DEATH: -1}
    parts: dict[Part, list[list[int]]] = {}
    for step, segment, event in walk(trace, 2):
        if event.kind in signs:
            now[event.storage.category] += signs[event.kind] * event.storage.n_bytes
        if step == STEPS - 1:
            parts.setdefault((segment.phase, segment.micro_batch), []).append(
                [now[category] for category in SHOWN]
            )
    return {part: np.array(rows) for part, rows in parts.items()}


def _chosen(standing: np.ndarray, per_sequence: np.ndarray) -> list[int]:
    """Return moments: evenly spread ones, the last one, and all that can be the highest."""
    evenly = np.linspace(0, len(standing) - 1, MOMENTS).round().astype(int)
    highest = [(standing + m * per_sequence).argmax() for m in range(2, LARGEST + 1)]
    return sorted({int(i) for i in (*evenly, *highest)})
