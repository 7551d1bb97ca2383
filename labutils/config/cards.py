"""GPUs that predictions can be made for:

Their memory, and what decides which kernels run on them.
"""

from __future__ import annotations

from dataclasses import dataclass

# assumed: what a process takes on the card before its first tensor, driver and library code
CONTEXT_GIB = 0.5


@dataclass(frozen=True)
class Gpu:
    """What of a card decides which kernels run, and what they borrow."""

    capability: tuple[int, int]
    n_sms: int  # streaming multiprocessors
    threads_per_sm: int  # at most

    @property
    def flash(self) -> bool:
        """Whether flash attention exists for 16 bits:

        Since Ampere; else it is the memory-efficient kernel.
        """
        return self.capability >= (8, 0)

    @property
    def cublas_workspace_bytes(self) -> int:
        """What each cuBLAS handle keeps while the process lives (CublasHandlePool.cpp,
        parseChosenWorkspaceSize).

        One handle belongs to the thread that runs forward, one to autograd's.
        """
        return 32 * 2**20 if self.capability[0] == 9 else 4096 * 1024 * 2 + 16 * 1024 * 8


@dataclass(frozen=True)
class Card:
    """What a prediction needs to know of a device."""

    memory_gib: float
    gpu: Gpu

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability."""
        return self.gpu.capability

    @property
    def flash(self) -> bool:
        """Whether 16-bit attention runs without (T, T) matrices in flash attention, or a kernel
        that keeps the same.
        """
        return self.gpu.flash


# Memory as torch sees it, about; streaming multiprocessors and threads from NVIDIA's datasheets and
# CUDA guide
CARDS = {
    "t4": Card(14.6, Gpu((7, 5), 40, 1024)),
    "rtx4060": Card(7.6, Gpu((8, 9), 24, 1536)),
    "a100": Card(79.2, Gpu((8, 0), 108, 2048)),
    "h200": Card(139.8, Gpu((9, 0), 132, 2048)),
}
