"""A transformer by einsum, with norms, softmax, rotations and SwiGLU by hand, as exercises have it."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 10_000
SIZES = {"small": (768, 12, 12), "medium": (1024, 24, 16)}  # width, blocks, heads


class Linear(nn.Module):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (self.weight * (wide * scale)).to(x.dtype)


def rotated(x: Tensor, table: Tensor) -> Tensor:
    cos, sin = table[:, torch.arange(x.shape[-2], device=x.device)]
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((cos * a - sin * b, sin * a + cos * b), -1).flatten(-2)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    place = torch.arange(q.shape[-2], device=q.device)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1] ** 0.5
    scores = torch.where(place[:, None] >= place[None], scores, float("-inf"))
    exponentials = torch.exp(scores - torch.max(scores, -1, keepdim=True)[0])
    shares = exponentials / torch.sum(exponentials, -1, keepdim=True)
    return torch.einsum("bhqk,bhkd->bhqd", shares, v)


class Block(nn.Module):
    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norms = nn.ModuleList(Norm(width) for _ in range(2))
        self.attention = nn.ModuleList(Linear(width, width) for _ in range(4))
        self.gate, self.up = Linear(width, 4 * width), Linear(width, 4 * width)
        self.down = Linear(4 * width, width)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (layer(y).unflatten(-1, (self.n_heads, -1)) for layer in self.attention[:3])
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = attended(rotated(q, table), rotated(k, table), v)
        x = x + self.attention[3](y.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        gate = self.gate(y)
        return x + self.down(gate * torch.sigmoid(gate) * self.up(y))


class Transformer(nn.Module):
    def __init__(self, size: str, n_tokens: int) -> None:
        super().__init__()
        width, n_blocks, n_heads = SIZES[size]
        self.embedding = nn.Parameter(torch.empty(VOCABULARY, width))
        self.register_buffer("table", torch.ones(2, n_tokens, width // n_heads // 2))
        self.blocks = nn.ModuleList(Block(width, n_heads) for _ in range(n_blocks))
        self.norm, self.head = Norm(width), Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding[ids]
        for block in self.blocks:
            x = block(x, self.table)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
