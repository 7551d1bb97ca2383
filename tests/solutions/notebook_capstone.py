"""Answers to the capstone, right and wrong, as trials; the files beside it are real solutions.

This folder can be removed without breaking the course.
"""

from types import SimpleNamespace

from tests.solutions.answers import Solution

NOTEBOOK = "further/capstone.ipynb"
# what neither hints nor the notebook may say
SECRETS = r"optimizer: adamw_8bit|precision: (pure_)?bf16|gradient_checkpointing: block"
PLAIN = SimpleNamespace(
    micro_batch_size=2,
    seq_len=1024,
    tokens_per_step=8192,
    gradient_checkpointing="none",
    optimizer="adamw_8bit",
)


def trial(config=(), **facts):
    """Return a trial that is right, but for the facts that are given."""
    right = {
        "config": SimpleNamespace(**{**vars(PLAIN), **dict(config)}),
        "is_autocast": True,
        "changed_task": (),
        "needed_gib": 5.4,
        "kept_gib": 3.8,
        "largest": ("parameters", "loss", 1.3),
        "step_ms": 2500.0,
        "limit_ms": 2955.0,
        "budget_gib": 5.5,
        "stalled": 0.0,
        "loss": 7.28,
        "target_loss": 7.30,
        "twin_note": "",
    }
    return SimpleNamespace(**(right | facts))


ACTIVATIONS = ("activations", "backward", 20.0)
FLOOR = {"needed_gib": 9.2, "kept_gib": 5.8}
SOLUTIONS = [
    Solution(
        "capstone",
        right=[trial(), trial(needed_gib=5.5, step_ms=2955.0, loss=7.30)],
        wrong=[
            (trial(changed_task=("seq_len",)), "the task itself: seq_len"),
            (trial(**FLOOR), "Accumulation does not lower this floor"),
            (trial({"gradient_checkpointing": "block"}, **FLOOR), "it saves activations"),
            (trial(**FLOOR), "Autocast does not lower it"),
            (trial(needed_gib=9.0, largest=ACTIVATIONS), "grows with the micro-batch"),
            (trial(needed_gib=6.0), "bytes per parameter"),
            (trial({"gradient_checkpointing": "block"}, step_ms=3300.0), "second time"),
            (trial({"micro_batch_size": 1}, step_ms=3300.0), "less busy"),
            (trial({"optimizer": "adamw"}, stalled=0.3, loss=7.37), "rounds to nearest"),
            (trial({"optimizer": "sgd"}, loss=7.6), "SGD does not learn"),
            (trial(loss=7.4), "learns less than the plain run"),
            (trial(loss=None, twin_note="out of memory"), "did not finish: out of memory"),
        ],
    ),
]
