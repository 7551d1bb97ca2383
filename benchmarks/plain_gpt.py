"""A GPT written plainly, in the style of nanoGPT, with the weights of the course's model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from labutils.config.choices import MODELS
from labutils.config.schema import Config
from labutils.workload.build import float32_model


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
        plain = config.model_copy(update={"gradient_checkpointing": "none"})
        weights = float32_model(plain).state_dict()
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
