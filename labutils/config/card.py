"""What a device is to a config: a GPU that need not be here, or the CPU; and the cards of
`cards.csv`, for which times and bytes can be predicted.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from labutils.config.choices import PRECISIONS, Precision, Rows

# Assumed: what a process takes on the card before its first tensor, for driver and library code.
CONTEXT_GIB = 0.5
SLOW_RATIO = 4.0  # a 16-bit product this many times slower than the FP32 one has no fast hardware


class PrecisionUnsupported(RuntimeError):
    """A device cannot run the precision. The message says why, and what to use instead."""


@dataclass(frozen=True)
class Support:
    """Whether a device runs a precision (`ok`), without fast hardware for it (`slow`), and why."""

    ok: bool
    slow: bool
    reason: str


@dataclass(frozen=True)
class Gpu:
    """What of a GPU decides which kernels run, and what they borrow."""

    capability: tuple[int, int]
    n_sms: int  # streaming multiprocessors
    threads_per_sm: int  # at most

    @property
    def has_bf16(self) -> bool:
        """Whether it multiplies BF16 numbers in hardware. torch emulates them on older cards."""
        return self.capability >= (8, 0)

    @property
    def flash(self) -> bool:
        """Whether flash attention exists for 16 bits. Before Ampere another fused kernel runs."""
        return self.capability >= (8, 0)

    @property
    def cublas_workspace_bytes(self) -> int:
        """What each cuBLAS handle keeps while the process lives.

        One handle belongs to the thread that runs forward, one to autograd's. Source:
        CublasHandlePool.cpp, parseChosenWorkspaceSize.
        """
        if self.capability[0] == 9:
            return 32 * 2**20
        return 4096 * 1024 * 2 + 16 * 1024 * 8


@dataclass(frozen=True)
class Speed:
    """How fast a GPU is: its datasheet's peaks, and what single operations reach of them.

    `tflops` are dense peaks (no sparsity) by the kind of the products; `reached` is what large
    products were measured to reach, also in TFLOP/s: empty if nothing was measured on the card.
    Shares are of `gb_per_s`, 10^9 bytes a second.
    """

    tflops: Mapping[str, float]
    gb_per_s: float
    reached: Mapping[str, float]
    elements_share: float = 0.80  # that elementwise operations reach
    rows_share: float = 0.60  # that norms and softmax reach
    # Fused attention: FLOP/s as a share of what products reach in 16 bits.
    flash_forward: float = 0.68
    flash_backward: float = 0.50
    unaligned: float = 2.6  # times as long, a product on tensor cores with a side of odd length
    unaligned_16bit: float = 0.0  # the same in 16 bits, where it is another number
    # What a linear layer reaches of the fastest square product: 74 of 81.3 TFLOP/s, BERT-large in
    # 16 bits on an RTX 3090 Ti, github.com/mli/transformers-benchmarks.
    layers: float = 0.91
    assumed: float = 0.0  # so many times float32's is the peak in 16 bits, if none was given

    def product_rate(self, kind: str) -> float:
        """Return the FLOP/s of large products of a kind.

        Not measured: 0.75 of the peak in 16 bits, else 0.8. Without hardware for the kind half of
        what float32 reaches, as emulated BF16 does on a T4.
        """
        if kind in self.reached:
            return self.reached[kind] * 1e12
        if kind in self.tflops:
            share = 0.75 if kind in ("float16", "bfloat16") else 0.8
            return share * self.tflops[kind] * 1e12
        return 0.5 * self.product_rate("float32")

    def layer_rate(self, kind: str) -> float:
        """Return the FLOP/s of a model's products; in float32 layers themselves were measured."""
        return self.product_rate(kind) * (1.0 if kind == "float32" else self.layers)


@dataclass(frozen=True)
class Card:
    """A device: its memory, and what it makes of a precision. A CPU has no `gpu`.

    `slowdown` times a product: it takes a dtype's name, and returns how many times as long as a
    float32 product one of that dtype takes. A CPU that is only predicted for has none.
    """

    name: str
    memory_gib: float
    gpu: Gpu | None = None
    is_here: bool = False
    speed: Speed | None = None  # what a time is predicted from; None: nothing is known
    slowdown: Callable[[str], float] | None = None

    @property
    def device_type(self) -> str:
        """torch's name of this kind of device: "cuda" or "cpu"."""
        return "cuda" if self.gpu else "cpu"

    @property
    def place(self) -> str:
        """Where that is, in messages: "here", or on a card by its name."""
        return "here" if self.is_here else f"on {self.name}"

    @property
    def has_bf16(self) -> bool:
        """Whether BF16 runs without emulation. Every CPU runs it, fast or slowly."""
        return self.gpu is None or self.gpu.has_bf16

    def support(self, precision: str) -> Support:
        """Return what the device makes of a precision. Raises ValueError for an unknown one."""
        row = PRECISIONS[precision]
        if self.gpu is None:
            return self._on_a_cpu(row)
        if not row.without_hardware:
            return Support(True, False, "native")
        if self.gpu.capability >= row.fast_since:
            return Support(True, False, "tensor cores")
        major, minor = self.gpu.capability
        reason = f"compute capability {major}.{minor} {row.without_hardware}"
        return Support(row.runs_without_hardware, row.runs_without_hardware, reason)

    def _on_a_cpu(self, row: Precision) -> Support:
        if row.not_on_cpu:
            return Support(False, False, row.not_on_cpu)
        if not row.is_16bit or self.slowdown is None:
            return Support(True, False, "native")
        ratio = self.slowdown(row.products)
        slow = ratio >= SLOW_RATIO
        # two digits would pretend a precision that a probe of milliseconds does not have
        times = f"about {float(f'{ratio:.1g}'):.0f}" if slow else f"{ratio:.1f}"
        reason = f"a {row.products} matmul takes {times} times as long as a float32 one here"
        return Support(True, slow, reason)

    def require(self, precision: str) -> Support:
        """Return `support(precision)`, or raise PrecisionUnsupported with the way out."""
        answer = self.support(precision)
        if not answer.ok:
            message = f"precision {precision} cannot run {self.place}: {answer.reason}"
            raise PrecisionUnsupported(message)
        return answer


CPU = Card("cpu", 0.0)


TABLE = Path(__file__).with_name("cards.csv")
KINDS = ("float32", "TF32", "float16", "bfloat16")  # of products
# Of these columns, which are fields of `Speed`, most cards have the usual number.
SHARES = ("elements_share", "rows_share", "flash_forward", "flash_backward")
SHARES += ("unaligned", "unaligned_16bit")
MOST_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}  # else 2048
N_NEEDED = 6  # columns that have a number for each card
# The peak in 16 bits, as times float32's: of V100, A100, H100 and B200. Others with BF16 are taken
# to have twice as much, as GeForce cards; those for workstations have four times. Older ones half:
# of 7.5 RTX 20 cards have four times, but GTX 16 cards no tensor cores.
TIMES_FLOAT32 = {(7, 0): 8.0, (8, 0): 16.0, (9, 0): 14.8, (10, 0): 30.0}


def card_of_row(row: Mapping[str, str]) -> Card:
    """Return the card of a row: texts by column. It is uncalibrated if nothing was measured on it.

    What is empty, or not there, is not known, but for peaks of tensor cores: BF16 is as fast as
    FP16, TF32 half as fast. Without a peak in 16 bits one is assumed: see `Speed.assumed`.
    """
    numbers = {column: float(text) for column, text in row.items() if text and column != "name"}
    capability = divmod(round(10 * numbers["compute_capability"]), 10)
    threads = MOST_THREADS.get(capability, 2048)
    gpu = Gpu(capability, int(numbers["multiprocessors"]), threads)
    half, assumed = numbers.get("float16_tflops") or numbers.get("bfloat16_tflops"), 0.0
    if not half:
        assumed = TIMES_FLOAT32.get(capability, 2.0 if gpu.has_bf16 else 0.5)
        half = assumed * numbers["float32_tflops"]
    numbers["float16_tflops"] = half
    if gpu.has_bf16:
        numbers = {"tf32_tflops": half / 2, "bfloat16_tflops": half} | numbers
    tflops, reached = {}, {}
    for kind in KINDS:
        for rates, column in ((tflops, f"{kind}_tflops"), (reached, f"reached_{kind}")):
            if column.lower() in numbers:
                rates[kind] = numbers[column.lower()]
    measured = {column: numbers[column] for column in SHARES if column in numbers}
    speed = Speed(tflops, numbers["bandwidth_gb_s"], reached, **measured, assumed=assumed)
    return Card(row["name"], numbers["memory_gib"], gpu, speed=speed)


_LINES = TABLE.read_text(encoding="utf-8").splitlines()
_ROWS = csv.DictReader(line for line in _LINES if not line.startswith("#"))
COLUMNS = _ROWS.fieldnames
CARDS = Rows("cards", *(card_of_row(row) for row in _ROWS))
