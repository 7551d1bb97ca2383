"""`make readme`: what the H100 of `reference/h100_steps.csv` measured, as tables.

All rows are steps of GPT-2 124M with 16 sequences of 1,024 tokens; `what_it_saves.yaml` names them.
Out of them come

- `reference/h100.csv`: steps measured, and predicted by the code as it is now, which
  `lab.measured_on_h100` hands to the notebooks;
- the table between the markers of README.md, some of them;
- the table between the markers of docs/what_it_saves.md: what each technique changes.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import torch
import yaml
from torch import nn

import labutils as lab
from labutils.files import REFERENCE_DIR, REPO_DIR, write_atomically
from labutils.prediction.published import config_of_row
from labutils.techniques.adapters import add_lora
from labutils.workload.gpt2 import build_model

STEPS, TARGET = REFERENCE_DIR / "h100_steps.csv", REFERENCE_DIR / "h100.csv"
README, SHEET = REPO_DIR / "README.md", REPO_DIR / "docs" / "what_it_saves.md"
DATA = yaml.safe_load(Path(__file__).with_name("what_it_saves.yaml").read_text(encoding="utf-8"))
BATCH = {"seq_len": 1024, "micro_batch_size": 16, "tokens_per_step": 16384}
LORA, GB = "LoRA", 1e9
FORMATS = {  # of the columns of h100.csv
    "ms": "{:.1f}",
    "ms predicted": "{:.1f}",
    "GB": "{:.2f}",
    "GB predicted": "{:.2f}",
    "tokens/s": "{:,.0f}",
}
BETWEEN = re.compile(r"(?s)(?<=<!-- h100 -->\n).*?(?=<!-- end -->)")


def full(config: str) -> dict[str, object]:
    """Return the keys of a row of STEPS, with those of BATCH: it leaves out what fp32 has."""
    usual = config_of_row("{}")
    return {key: getattr(usual, key) for key in BATCH} | yaml.safe_load(config)


def steps() -> pd.DataFrame:
    """Return the steps of what_it_saves.yaml, measured if they are in STEPS, and predicted."""
    measured = pd.read_csv(STEPS, comment="#")
    keys = list(map(full, measured.config))
    rows = {LORA: lora()}
    for name, changes in DATA["steps"].items():
        config = config_of_row(str(BATCH | changes))
        row = {"GB predicted": lab.predict_memory(config, "h100").peak_bytes / GB}
        if name not in DATA["without_time"]:
            row["ms predicted"] = lab.predict_time(config, "h100").step_ms
        if BATCH | changes in keys:
            of_card = measured.iloc[keys.index(BATCH | changes)]
            row |= {"ms": of_card.ms, "GB": of_card.allocated_bytes / GB}
            row["tokens/s"] = 1e3 * config.tokens_per_step / of_card.ms
        rows[name] = row
    table = pd.DataFrame.from_dict(rows, orient="index")[list(FORMATS)].rename_axis("step")
    return table.round({"ms": 1, "ms predicted": 1, "GB": 2, "GB predicted": 2, "tokens/s": 0})


def lora() -> Mapping[str, float]:
    """Return what is predicted for LoRA in each linear layer of the blocks, in BF16 by autocast."""
    model = build_model("gpt2", dropout=0.0, activation="gelu_tanh")
    for block in model.transformer.h:
        for part in (block.attn, block.mlp):
            for name, layer in list(part.named_children()):
                if hasattr(layer, "nx"):  # transformers' Conv1D
                    setattr(part, name, nn.Linear(layer.nx, layer.nf))
    add_lora(model, ("c_attn", "c_proj", "c_fc"), 16)
    batch = {name: torch.zeros(16, 1024, dtype=torch.int64) for name in ("input_ids", "labels")}
    step = model, batch, lambda model, batch: model(**batch).loss, torch.optim.AdamW
    on = {"precision": "bf16", "device": "h100"}
    n_bytes = lab.predict_module(*step, **on).peak_bytes
    ms = lab.predict_module_time(*step, **on).step_ms
    return {"ms predicted": ms, "GB predicted": n_bytes / GB}


def markdown(rows: list[list[str]]) -> str:
    """Return a table in Markdown; the first row is its head."""
    head, *others = rows
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, ["---"] * len(head), *others])


def readme_table(table: pd.DataFrame) -> str:
    """Return what stands between README's markers."""
    rows = [["a step of 16 × 1,024 tokens", *FORMATS]]
    for name in DATA["in_readme"]:
        rows.append([name, *(form.format(table[key][name]) for key, form in FORMATS.items())])
    return markdown(rows)


def change(before: pd.Series, after: pd.Series, unit: str) -> str:
    """Return two numbers and their difference; in italics if they are predicted."""
    is_measured = pd.notna(before[unit]) and pd.notna(after[unit])
    key = unit if is_measured else f"{unit} predicted"
    if pd.isna(after[key]):
        return "not predicted"
    first, second = (FORMATS[key].format(row[key]) for row in (before, after))
    percent = f"{100 * (after[key] / before[key] - 1):+.0f} %".replace("-", "−")
    words = f"{first}, as before" if first == second else f"{first} → {second} ({percent})"
    return words if is_measured else f"*{words}*"


def sheet(table: pd.DataFrame) -> str:
    """Return what stands between the markers of docs/what_it_saves.md."""
    rows = [["technique", "in frameworks", "GB at the peak", "ms a step", "when not"]]
    for row in DATA["techniques"]:
        before, after = table.loc[row["before"]], table.loc[row["after"]]
        changes = [change(before, after, unit) for unit in ("GB", "ms")]
        rows.append([row["technique"], row["frameworks"], *changes, row["when_not"]])
    return markdown(rows)


def write() -> None:
    """Write the measured steps, README's table and the page of techniques."""
    table = steps()
    measured = table.dropna().astype({"tokens/s": int})
    write_atomically(TARGET, measured.to_csv().encode())
    for path, new in ((README, readme_table(table)), (SHEET, sheet(table))):
        text = path.read_text(encoding="utf-8")
        write_atomically(path, BETWEEN.sub(lambda _, new=new: f"\n{new}\n", text).encode())


if __name__ == "__main__":
    write()
