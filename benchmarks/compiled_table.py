"""What compiled steps take of a card, for comparing predictions with.

    python -m benchmarks.compiled_table NEW.csv              # the rows of reference/compiled.csv
    python -m benchmarks.compiled_table NEW.csv --of OTHER.csv

Each row is a few steps of `lab.train`, or of a plain loop with a model that is none of the course's
(`module`), from an empty allocator: peaks of bytes allocated and reserved. Rows of this card's
name alone are run, with this torch. Inductor would pad products of odd sizes if a benchmark on the
card said so; here it does not, so that rows can be repeated, without a card too. Needs Triton.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import yaml
from torch import nn
from torch.utils._pytree import tree_map_only

from benchmarks.plain_gpt import PlainGPT
from benchmarks.step_times import figures_of
from labutils.config.reader import load_config
from labutils.files import REFERENCE_DIR
from labutils.machine import choose_device
from labutils.memory.device_memory import free_memory
from labutils.prediction.published import config_of_row
from labutils.techniques import precision

STEPS = 3


def module_of(row: dict[str, Any]) -> tuple[nn.Module, Any, Callable]:
    """Return the model that a row names, a batch, and the loss that is compiled."""
    from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

    ids = torch.zeros(row["batch"], row.get("seq_len", 1), dtype=torch.int64)
    if row["module"] == "plain_gpt":  # in the style of nanoGPT
        model = PlainGPT(load_config("fp32", model="gpt2", seq_len=row["seq_len"]))
        return model, (ids, ids), lambda model, batch: model(*batch)
    if row["module"] == "vit":
        batch = {"pixel_values": torch.zeros(row["batch"], 3, 224, 224), "labels": ids[:, 0]}
        model = ViTForImageClassification(ViTConfig(num_labels=1000))
    else:
        batch = {"input_ids": ids, "labels": ids}
        shape = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12}
        shape |= {"num_attention_heads": 12, "num_key_value_heads": row.get("keys", 12)}
        model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=32000, use_cache=False))
    return model, batch, lambda model, batch: model(**batch).loss


def figures_of_module(row: dict[str, Any], device: torch.device) -> dict[str, int]:
    """Train the model that a row names, by a plain loop; return its peaks in bytes."""
    torch.cuda.reset_peak_memory_stats()
    model, batch, loss_fn = module_of(row)
    model = model.to(device).train()
    optimizer, compiled = torch.optim.AdamW(model.parameters()), torch.compile(loss_fn)
    for _ in range(STEPS):
        for _ in range(row.get("grad_accum_steps", 1)):
            moved = tree_map_only(torch.Tensor, lambda x: x.to(device), batch)
            with precision.autocast(row["precision"], device):
                loss = compiled(model, moved)
            loss.backward()
            del loss
        optimizer.step()
        optimizer.zero_grad()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the rows of one table that are of this card, and write those of another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("new", type=Path)
    parser.add_argument("--of", type=Path, default=REFERENCE_DIR / "compiled.csv")
    options = parser.parse_args(arguments)
    device = choose_device()
    if device.type != "cuda":
        raise SystemExit("no CUDA GPU is here")
    card, rows = torch.cuda.get_device_name(), []
    if options.new.exists():
        rows = pd.read_csv(options.new, comment="#").to_dict("records")
    torch._inductor.config.shape_padding = False
    asked = pd.read_csv(options.of, comment="#").query("card == @card").step
    for text in asked.drop_duplicates():
        torch._dynamo.reset()
        torch._C._cuda_clearCublasWorkspaces()
        free_memory()
        if torch.cuda.memory_reserved():
            raise RuntimeError(f"{torch.cuda.memory_reserved()} bytes are reserved before {text}")
        row = yaml.safe_load(text)
        if "module" in row:
            figures = figures_of_module(row, device)
        else:
            figures = figures_of(config_of_row(text), device, None)
        kept = {key: figures[key] for key in ("allocated_bytes", "reserved_bytes")}
        rows.append({"card": card, "torch": torch.__version__, "step": text} | kept)
        print(rows[-1], flush=True)
        pd.DataFrame(rows).to_csv(options.new, index=False, lineterminator="\n")


if __name__ == "__main__":
    main()
