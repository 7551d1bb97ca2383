"""Steps that were measured on named cards, by others and for this course, beside predictions."""

from __future__ import annotations

from functools import lru_cache

import pandas as pd
import yaml

from labutils.config.reader import load_config
from labutils.config.schema import Config
from labutils.files import REFERENCE_DIR

# What the published loops have that is not in the table: no dropout, AdamW over lists of tensors.
BASE = {
    "dropout": 0.0,
    "activation": "gelu_tanh",
    "optimizer_impl": "foreach",
    "max_grad_norm": 0.0,
}


@lru_cache(maxsize=1)
def published() -> pd.DataFrame:
    """Return the rows of `reference/published.csv`: milliseconds, and what was timed.

    `besides_gb` are gigabytes that the published loop moves and its config does not: its attention
    fills a mask, in two operations forward and two backward, where Hugging Face's adds one forward.
    """
    return pd.read_csv(REFERENCE_DIR / "published.csv", dtype={"memory": str})


def measured_on_h100(*steps: str) -> pd.DataFrame:
    """Return steps of GPT-2 124M with 16 × 1,024 tokens on an H100, all or those named.

    `ms` of a step and `GB` (10⁹ bytes) allocated at its peak were measured, and from `ms` come
    `tokens/s`. Beside them stands what is predicted; the factor for 16 bits and an odd vocabulary
    was set on this card, after its first miss of 1.32 times. `reference/h100_steps.csv` names card,
    torch and date, and has all steps; `make readme` takes these from it.
    """
    table = pd.read_csv(REFERENCE_DIR / "h100.csv", index_col="step")
    return table.loc[list(steps)] if steps else table


def config_of_row(text: str) -> Config:
    """Return the config of a row, from its keys and values as YAML."""
    return load_config("fp32", **BASE | yaml.safe_load(text))
