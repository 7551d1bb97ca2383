"""What compiled steps take of a card: `python -m benchmarks.compiled_table NEW.csv`.

Each row is a few steps of `lab.train`, or of a plain loop with a model that is none of the course's
(`module`), from an empty allocator: peaks of bytes allocated and reserved. Rows of this card's
name alone are run, with this torch. Inductor would pad products of odd sizes if a benchmark on the
card said so; here it does not, so that rows can be repeated, without a card too. Needs Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import yaml
from torch import nn
from torch.utils._pytree import tree_map_only

from benchmarks import step_times
from benchmarks.cuda_rows import make_rows, peaks
from benchmarks.plain_gpt import PlainGPT
from labutils.config.reader import load_config
from labutils.machine import choose_device
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


def figures_of(step: str) -> dict[str, float]:
    """Train what a row names, a model that is none of the course's by a plain loop; return its
    peaks in bytes.
    """
    row, device = yaml.safe_load(step), choose_device()
    if "module" not in row:
        step_times.figures_of(step)
        return peaks()
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
    return peaks()


if __name__ == "__main__":
    torch._inductor.config.shape_padding = False
    make_rows("compiled.csv", ["step"], figures_of, of_this_card=True)
