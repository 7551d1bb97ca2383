"""The cards of the exhibit `amdahl`, by the time ledger: half a minute, so their file ships.

`python -m labutils.exhibits.amdahl_data` writes it again; a test says when it is stale.
"""

from __future__ import annotations

import json
from pathlib import Path

from labutils.config.card import CARDS
from labutils.config.choices import PRECISIONS, SIXTEEN_BIT
from labutils.config.reader import load_config
from labutils.config.schema import precision_on
from labutils.memory.kinds import PRODUCT
from labutils.prediction.time import PRODUCTS, predict_time

FILE = Path(__file__).with_name("amdahl_cards.json")
BASELINE = next(iter(PRECISIONS))  # float32
SHOWN = ("t4", "l4", "rtx4090", "a100", "h200")


def predicted(card: str) -> dict[str, str | float]:
    """Return what the time ledger says of GPT-2 124M on a card, in 16 bits against float32.

    `share` is that of matrix products in a float32 step, `product` how many times as fast they are
    in 16 bits, and `step` how many times as fast the whole step is. Four digits each.
    """
    name = precision_on(SIXTEEN_BIT.name, CARDS[card])
    before, after = (predict_time(load_config(one), card) for one in (BASELINE, name))
    products = before.operations[PRODUCT]["ms"] / after.operations[PRODUCT]["ms"]
    numbers = {
        "share": before.shares[PRODUCTS],
        "product": products,
        "step": before.step_ms / after.step_ms,
    }
    rounded = {key: float(f"{value:.4g}") for key, value in numbers.items()}
    return {"card": card, "precision": name, **rounded}


def amdahl(share: float, speedup: float) -> float:
    """Return the speed-up of a whole of which a `share` (0 to 1) becomes `speedup` times as fast.

    Amdahl's law (1967). Raises ValueError for a share beyond 0 to 1, or a speed-up not positive.
    """
    if not 0 <= share <= 1 or speedup <= 0:
        raise ValueError(f"a share is 0 to 1 and a speed-up positive; got {share} and {speedup}")
    return 1 / (1 - share + share / speedup)


def cards() -> list[dict[str, str | float]]:
    """Return the rows of the file."""
    return json.loads(FILE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    rows = [predicted(card) for card in SHOWN]
    FILE.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {FILE.name}")
