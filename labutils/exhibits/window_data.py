"""The memory of a window of micro-batches, moment by moment, for any of its sizes.

Bytes are affine in the sequences of a micro-batch, from two on. So two traces give all.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from labutils.config.card import CPU
from labutils.config.reader import load_config
from labutils.config.schema import Config, resolve
from labutils.memory.ledger import (
    ACTIVATIONS,
    CAST_WEIGHTS,
    GRADIENTS,
    LOGITS,
    MIB,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARIES,
)
from labutils.prediction.memory import STEPS, walk
from labutils.prediction.trace import BIRTH, DEATH, trace_config

SEQ_LEN = 64  # as in section 3 of notebook 02
LARGEST = 128  # sequences: up to here no moment is missed that could be a phase's peak
MOMENTS = 14  # of each phase at least, where it has so many
GROUPS = {  # the page's categories, and the ledger's
    "weights and moments": (PARAMETERS, OPTIMIZER),
    "gradients": (GRADIENTS,),
    "activations": (ACTIVATIONS, CAST_WEIGHTS),
    "logits and loss": (LOGITS,),
    "temporaries": (TEMPORARIES,),
}
# Lengths of four sequences, from section 2 of notebook 02.
LENGTHS = ([46, 42, 38, 34], [64, 48, 56, 40], [64, 32, 16, 8], [64, 8, 32, 4])
Part = tuple[str, int | None]  # phase, and micro-batch; the optimizer's has none


def window_config(n: int, m: int) -> Config:
    """Return the config of n micro-batches with m sequences each, as in notebook 02."""
    shape = {"seq_len": SEQ_LEN, "micro_batch_size": m, "tokens_per_step": n * m * SEQ_LEN}
    model = {"model": "gpt2-nano", "steps": 1, "lr_warmup_steps": 0}
    return load_config("configs/accumulation_config.yaml", **model, **shape)


@lru_cache
def film() -> list[dict[str, object]]:
    """Return the parts of a step of two micro-batches, in order: phase, micro-batch, and moments.

    A moment has [bytes at 0 sequences, bytes per sequence] for each of GROUPS. The second
    micro-batch stands for all later ones. Those moments are among them at which a phase can have
    its peak.
    """
    low, high = _alive(2), _alive(3)
    parts: list[dict[str, object]] = []
    for (phase, micro_batch), two in low.items():
        per_sequence = high[phase, micro_batch] - two
        standing = two - 2 * per_sequence
        moments = []
        for i in _chosen(standing.sum(axis=1), per_sequence.sum(axis=1)):
            moments.append(np.stack([standing[i], per_sequence[i]], axis=1).tolist())
        parts.append({"phase": phase, "micro_batch": micro_batch, "moments": moments})
    return parts


def _alive(m: int) -> dict[Part, np.ndarray]:
    """Return {part: bytes (events, groups)} of the last step of 2 × m, as the ledger counts."""
    config = resolve(window_config(2, m), CPU).config
    trace = trace_config(config, None)
    now = dict.fromkeys((category for group in GROUPS.values() for category in group), 0)
    found: dict[Part, list[list[int]]] = {}
    for step, segment, event in walk(trace, 2):
        if event.kind in (BIRTH, DEATH):
            sign = 1 if event.kind == BIRTH else -1
            now[event.storage.category] += sign * event.storage.n_bytes
        if step == STEPS - 1:
            row = [sum(now[category] for category in group) for group in GROUPS.values()]
            found.setdefault((segment.phase, segment.micro_batch), []).append(row)
    return {part: np.array(rows) for part, rows in found.items()}


def _chosen(standing: np.ndarray, per_sequence: np.ndarray) -> list[int]:
    """Return moments: evenly spread ones, the last one, and all that can be the highest."""
    evenly = np.linspace(0, len(standing) - 1, MOMENTS).round().astype(int)
    chosen = set(evenly.tolist())
    for m in range(2, LARGEST + 1):
        chosen.add(int((standing + m * per_sequence).argmax()))
    return sorted(chosen)


def peaks(n_sequences: int) -> dict[str, dict[int, float]]:
    """Return {window: {sequences: peak in MiB}}: of one batch, and of micro-batches of two."""
    found: dict[str, dict[int, float]] = {"1 × m": {}, "n × 2": {}}
    sizes = [2**i for i in range(1, n_sequences.bit_length())]
    for total in sizes:
        found["1 × m"][total] = _peak(1, total) / MIB
        found["n × 2"][total] = _peak(total // 2, 2) / MIB
    return found


def _peak(n: int, m: int) -> int:
    totals = []
    for part in film():
        if n > 1 or part["micro_batch"] != 1:
            moments = np.array(part["moments"])
            totals.append((moments[..., 0] + m * moments[..., 1]).sum(axis=1).max())
    return int(max(totals))
