"""The exhibit `plan`: bytes, cards and milliseconds of a step, switch by switch.

Its table, `plan.json`, is made by `make exhibits`. It knows a few batch sizes; between them
a straight line is drawn. A test compares it with predictions, and prints the largest error.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import yaml

from labutils.config.card import CARDS, CONTEXT_GIB
from labutils.config.choices import WITH_BF16
from labutils.config.reader import load_config
from labutils.config.schema import Config
from labutils.exhibits.exhibit import Exhibit, looks_of, make_exhibit, table_of
from labutils.memory.ledger import (
    ACTIVATIONS,
    CAST_WEIGHTS,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARIES,
    WORKSPACES,
)
from labutils.plotting import curves
from labutils.prediction.time import EAGER_BAND, LAUNCH_BOUND, WIDE_BAND

Setting = dict[str, Any]  # {switch: value}
SWITCHES: dict[str, tuple] = {
    "model": ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"),
    "precision": ("fp32", WITH_BF16.name, "pure_bf16"),
    "seq_len": (256, 512, 1024),
    "gradient_checkpointing": ("none", "block"),
    "optimizer": ("adamw", "adamw_8bit", "sgd"),
}
SHAPE = ("model", "precision", "seq_len", "gradient_checkpointing")  # what phases depend on
STANDING = ("model", "precision", "optimizer")  # what the update depends on
PHASES = ("forward", "loss", "backward", "optimizer")
POINTS = (1, 8, 64)  # batch sizes that are predicted
FIXED = (PARAMETERS, OPTIMIZER, WORKSPACES)  # equal in every phase and at every batch size
VARYING = (GRADIENTS, ACTIVATIONS, CAST_WEIGHTS, LOGITS, TEMPORARIES)
DEVICE = "a100"  # whose kernels and libraries the bytes are of
TIMED = ("t4", "rtx4090", "a100", "h100")
CHANGED = {"dropout": 0.0}  # what all settings change in the config of BF16


def settings(switches: tuple[str, ...]) -> Iterator[Setting]:
    """Yield all settings of some switches."""
    for values in itertools.product(*[SWITCHES[switch] for switch in switches]):
        yield dict(zip(switches, values, strict=True))


def key_of(setting: Setting, switches: tuple[str, ...]) -> str:
    """Return the name under which the table has what depends on some switches."""
    return "/".join(str(setting[switch]) for switch in switches)


def experiment(setting: Setting, batch: int = 1) -> Config:
    """Return the config of a setting: a step is one micro-batch of so many sequences."""
    shape = {"micro_batch_size": batch, "tokens_per_step": batch * setting["seq_len"]}
    return load_config(WITH_BF16.name, **CHANGED | shape | setting)


def plan(micro_batch_size: int = 4, **start: Any) -> Exhibit:
    """Return an exhibit: choose a model and its switches; see bytes, cards, times and the config.

    `start` are the switches to begin with, as keys of a config: see SWITCHES. Raises ValueError for
    what the table lacks.
    """
    begin = {switch: values[0] for switch, values in SWITCHES.items()}
    begin |= {"precision": WITH_BF16.name, "seq_len": 1024} | start
    for switch, value in begin.items():
        if value not in SWITCHES.get(switch, ()):
            raise ValueError(f"{switch}: {value!r} is not in the table, which has {SWITCHES}")
    milliseconds = table_of("plan")["phases"][key_of(begin, SHAPE)]["ms"]
    lines = {}
    for card, row in zip(TIMED, milliseconds, strict=True):
        if row:
            lines[card] = dict(zip(POINTS, row, strict=True))
    fastest = lines[TIMED[-1]]
    ax = curves(lines, "sequences", "ms before the update, predicted", log2_ticks=POINTS)
    ax.set_yscale("log")
    return make_exhibit(
        "plan",
        "Plan a training step",
        "Choose a model and its switches, then drag the micro-batch: which cards hold it?",
        page_data(begin, micro_batch_size),
        ax,
        f"{begin['model']} in {begin['precision']}: on an {TIMED[-1]} one sequence takes "
        f"{fastest[1]:.0f} ms, and one of {POINTS[-1]} together {fastest[64] / 64:.1f} ms",
    )


def page_data(start: Setting, batch: int) -> dict[str, Any]:
    """Return what the page's script gets."""
    named = experiment(start | {"name": "plan", "note": "from the exhibit plan"})
    lines = []
    for key, value in named.model_dump().items():
        lines.append([key, yaml.safe_dump({key: value}, sort_keys=False).rstrip()])
    return table_of("plan") | {
        "switches": SWITCHES,
        "shape": SHAPE,
        "standing": STANDING,
        "start": start | {"batch": batch},
        "points": POINTS,
        "phase_names": PHASES,
        "looks": looks_of((*FIXED, *VARYING)),
        "n_fixed": len(FIXED),
        "timed": TIMED,
        "launch_bound": LAUNCH_BOUND,
        "bands": {"eager": EAGER_BAND, "wide": WIDE_BAND},
        "cards": [[name, card.memory_gib] for name, card in CARDS.items()],
        "context_gib": CONTEXT_GIB,
        "changed": CHANGED,
        "config": lines,
    }
