"""The models that the arms train: Hugging Face's GPT-2 as it comes, and a GPT written plainly.

All arms start from the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from labutils.config.choices import MODELS
from labutils.config.schema import Config
from labutils.workload.build import float32_model


def initial_weights(config: Config) -> dict[str, torch.Tensor]:
    """Return the weights all arms start from, by Hugging Face's names.

    The vocabulary is padded if the config says so.
    """
    return float32_model(config.model_copy(update={"gradient_checkpointing": "none"})).state_dict()


def hugging_face_model(config: Config, device: torch.device, **switches: Any) -> nn.Module:
    """Return GPT-2 as transformers makes it by default, on a device, in training mode.

    That is: dropout 0.1, gelu_new, a key-value cache, and the vocabulary as it is.
    """
    from transformers import GPT2Config, GPT2LMHeadModel  # takes seconds; few arms need it

    row = MODELS[config.model]
    n_layer, n_head, n_embd, vocab = row.n_layer, row.n_head, row.width, row.vocabulary
    shape = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "vocab_size": vocab}
    shape |= {"n_positions": max(1024, config.seq_len), "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**shape, **switches))
    model.loss_type = "ForCausalLM"
    weights = initial_weights(config)
    for name in ("transformer.wte.weight", "lm_head.weight"):
        weights[name] = weights[name][:vocab]  # without the rows that pad the vocabulary
    model.load_state_dict(weights)
    return model.to(device).train()


class Block(nn.Module):
    """A block of GPT-2, written plainly: fused attention, tanh GELU, no dropout."""

    def __init__(self, n_head: int, width: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(B, T, 3, self.n_head, width // self.n_head)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # (B, heads, T, width of a head) each
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """GPT-2 in 20 lines, in the style of nanoGPT, with the same weights.

    `forward` returns the mean loss.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        row = MODELS[config.model]
        n_layer, n_head, width = row.n_layer, row.n_head, row.width
        weights = initial_weights(config)
        vocab = len(weights["transformer.wte.weight"])
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(max(1024, config.seq_len), width)
        self.blocks = nn.ModuleList(Block(n_head, width) for _ in range(n_layer))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        self.load_state_dict(dict(_by_plain_names(weights)))

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100)


PLAIN_NAMES = {
    "wte": "tokens",
    "wpe": "positions",
    "ln_f": "norm",
    "lm_head": "head",
    "h": "blocks",
    "ln_1": "norm_1",
    "ln_2": "norm_2",
    "attn.c_attn": "qkv",
    "attn.c_proj": "out",
    "mlp.c_fc": "up",
    "mlp.c_proj": "down",
}


def _by_plain_names(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield Hugging Face's weights under PlainGPT's names."""
    for name, value in weights.items():
        plain = f".{name.removeprefix('transformer.')}"
        for old, new in PLAIN_NAMES.items():
            plain = plain.replace(f".{old}.", f".{new}.")
        is_conv1d = ".c_" in name and value.dim() == 2  # holds the transposed matrix of a Linear
        yield plain[1:], value.T if is_conv1d else value
