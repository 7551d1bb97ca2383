"""GPT-2 in five sizes, with random or pretrained weights."""

from __future__ import annotations

import inspect
import os
import warnings

import torch
from torch import nn

from labutils.config.choices import ACTIVATIONS, CHECKPOINTING, MODELS, WEIGHTS, Model
from labutils.techniques import checkpointing
from labutils.techniques.attention import use_attention
from labutils.workload.data import hub_folder


def build_model(
    model: str | Model = "gpt2-nano",
    *,
    seq_len: int = 1024,
    seed: int | None = 0,
    weights: str = "random",
    dropout: float = 0.1,
    activation: str = "gelu_new",
    use_cache: bool = False,
    attention: str = "auto",
    pad_vocab: bool = False,
    gradient_checkpointing: str = "none",
    n_layer: int | None = None,
) -> nn.Module:
    """Return Hugging Face's GPT-2 of a named size, float32, on the CPU, in training mode.

    A row of one's own in place of a name builds any other size.

    Input and output embedding are one tensor (tied). Random weights are drawn from `seed` (None:
    torch's generator goes on from where it is) and touch no network; positions beyond 1024 are
    allowed. `n_layer` builds another depth than the named one, with random weights.
    `gradient_checkpointing` is a policy: see `CheckpointedBlocks`; `attention` a kernel: see
    `use_attention`.
    Raises ValueError for an unknown name, and WeightsUnavailable, within seconds, if pretrained
    weights cannot be had.
    """
    row = model if isinstance(model, Model) else MODELS[model]
    policy = CHECKPOINTING[gradient_checkpointing]
    switches = {
        "activation_function": ACTIVATIONS[activation].in_transformers,
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        "attn_pdrop": dropout,
        "use_cache": use_cache and not policy.is_on,  # a block computed again would write it twice
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a progress bar without ipywidgets, say
        from transformers import GPT2Config, GPT2LMHeadModel
    if seed is not None:
        torch.manual_seed(seed)
    if WEIGHTS[weights].name == "pretrained":
        folder = hub_folder(row.name)
        built = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32, **switches)
    else:
        padded = -(-row.vocabulary // 64) * 64
        shape = GPT2Config(
            n_layer=n_layer or row.n_layer,
            n_head=row.n_head,
            n_embd=row.width,
            vocab_size=padded if pad_vocab else row.vocabulary,
            n_positions=max(seq_len, 1024),
            bos_token_id=0,
            eos_token_id=0,
            **switches,
        )
        built = GPT2LMHeadModel(shape)
    if policy.is_on:
        checkpointing.set_checkpointing(built, policy.name)
    use_attention(built, attention)
    return built.train()  # from_pretrained returns eval(), which switches dropout off silently


# The keys of a config that `build_model` takes: a new switch of the model is one more argument.
MODEL_KEYS = [key for key in inspect.signature(build_model).parameters if key != "n_layer"]

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_HUB_VERBOSITY", "error")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
