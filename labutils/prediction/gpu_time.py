"""How long a GPU computes one operation: the longer of its arithmetic and its bytes.

What a card reaches was measured on single operations; `config/cards.csv` names the sources. The
constants below are estimates from the sources named beside them. None was fitted to whole steps.
But two facts were looked for because whole steps were slower than predicted, and then taken from
measurements of single products: `layers` and `unaligned` of `config.card.Speed`.
"""

from __future__ import annotations

import math

from labutils.config.card import Card
from labutils.memory.kinds import EFFICIENT, FLASH, PRODUCT_KINDS, ROWS
from labutils.prediction.work import Work

# Host: from one call of torch to the next, with autograd; 7 to 20 µs were measured by others.
CALL_SECONDS = 12e-6
COMPILED_CALL_SECONDS = 4e-6
# Assumed: a kernel's start and end, behind another, whatever it computes.
KERNEL_SECONDS = 3e-6
# A product is computed in tiles, one or more waves of as many as there are multiprocessors:
# (side of a tile, share of the rate that it reaches). cuBLAS chooses; here the quicker one wins.
# The shares are assumed. With them NeuSight's float32 products above 10 GFLOP are met within 10 %.
TILES = ((128, 1.0), (64, 0.8))
# Tensor cores are most efficient where sides are multiples of 16 bytes: NVIDIA's guide "Matrix
# Multiplication Background", 2.2. Inductor pads most of the rest away: 1.3 is assumed.
ALIGNED = {"TF32": 4, "float16": 8, "bfloat16": 8}  # numbers in 16 bytes
UNALIGNED_COMPILED = 1.3
# The kernel for older cards beside flash attention, forward and backward: measured on one card
# that is not named (heads of 64, 4,096 tokens), Dao-AILab/flash-attention#416.
EFFICIENT_SHARES = 0.8, 0.55


class GpuTime:
    """Seconds of operations on a card."""

    call_seconds = CALL_SECONDS
    compiled_call_seconds = COMPILED_CALL_SECONDS

    def __init__(self, card: Card, tf32: bool, is_compiled: bool) -> None:
        """`tf32`: products of float32 numbers may round them to TF32."""
        self.speed, self.n_sms = card.speed, card.gpu.n_sms
        self.tensor_cores = self.speed.tflops if card.gpu.capability >= (7, 0) else ()
        self.tf32 = tf32
        self.is_compiled = is_compiled

    def seconds(self, work: Work) -> float:
        """Return how long one operation keeps the card busy, its kernel's start included."""
        n_bytes = work.fused_bytes if self.is_compiled else work.n_bytes
        calls = work.fused_calls if self.is_compiled else work.calls
        moved = n_bytes / self._bytes_per_second(work)
        return max(self._arithmetic(work), moved) + calls * KERNEL_SECONDS

    def _bytes_per_second(self, work: Work) -> float:
        share = self.speed.elements
        if work.kind == ROWS and not self.is_compiled:
            share = self.speed.rows
        return share * self.speed.gb_per_s * 1e9

    def _arithmetic(self, work: Work) -> float:
        if work.kind in PRODUCT_KINDS:
            return self._product(work)
        if work.kind in (FLASH, EFFICIENT):
            return work.flops / self._attention_rate(work)
        return 0.0

    def _product(self, work: Work) -> float:
        kind = self._kind(work.dtype)
        rate = self.speed.layer_rate(kind)
        per_multiprocessor = rate / self.n_sms
        batch, rows, columns = work.shape
        found = []
        for side, share in TILES:
            tiles = batch * math.ceil(rows / side) * math.ceil(columns / side)
            waves = math.ceil(tiles / self.n_sms)
            in_a_tile = 2 * side * side * work.inner
            found.append(waves * in_a_tile / per_multiprocessor / share)
        # small ones are split along their sums, so that all multiprocessors have a share
        seconds = min(*found, 2 * work.flops / rate)
        return seconds * self._misalignment(work)

    def _misalignment(self, work: Work) -> float:
        sides = *work.shape[1:], int(work.inner)
        kind = self._kind(work.dtype)
        n_aligned = ALIGNED.get(kind, 1) if kind in self.tensor_cores else 1
        if not any(side % n_aligned for side in sides):
            return 1.0
        return UNALIGNED_COMPILED if self.is_compiled else self.speed.unaligned

    def _attention_rate(self, work: Work) -> float:
        if work.dtype == "float32":
            rate, shares = self.speed.product_rate("float32"), (1.0, 1.0)
        else:
            rate, shares = self.speed.product_rate(work.dtype), self.speed.flash
        if work.kind == EFFICIENT:
            shares = shares[0] * EFFICIENT_SHARES[0], shares[1] * EFFICIENT_SHARES[1]
        return rate * shares[work.is_backward]

    def _kind(self, dtype: str) -> str:
        return "TF32" if self.tf32 and dtype == "float32" else dtype
