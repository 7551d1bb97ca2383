"""GPUs that predictions can be made for: their memory, and what decides which kernels run on them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from labutils import precision
from labutils.config import Config

CONTEXT_GIB = 0.5  # assumed: what a process takes on the card before its first tensor, driver and library code


@dataclass(frozen=True)
class Gpu:
    """What of a card decides which kernels run, and what they borrow."""

    capability: tuple[int, int]
    n_sms: int  # streaming multiprocessors
    threads_per_sm: int  # at most

    @property
    def flash(self) -> bool:
        """Whether flash attention exists for 16 bits: since Ampere; else it is the memory-efficient kernel."""
        return self.capability >= (8, 0)

    @property
    def cublas_workspace_bytes(self) -> int:
        """What each cuBLAS handle keeps while the process lives (CublasHandlePool.cpp, parseChosenWorkspaceSize).

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
        """Whether 16-bit attention runs without (T, T) matrices in flash attention, or a kernel that keeps the same."""
        return self.gpu.flash


# Memory as torch sees it, about; streaming multiprocessors and threads from NVIDIA's datasheets and CUDA guide
CARDS = {
    "t4": Card(14.6, Gpu((7, 5), 40, 1024)),
    "rtx4060": Card(7.6, Gpu((8, 9), 24, 1536)),
    "a100": Card(79.2, Gpu((8, 0), 108, 2048)),
    "h200": Card(139.8, Gpu((9, 0), 132, 2048)),
}


def card_named(device: str) -> Card:
    """Return a card of CARDS, or for "this" the one in this machine with the memory that is free now.

    Raises KeyError for another name, RuntimeError for "this" without a CUDA GPU.
    """
    if device != "this":
        return CARDS[device]
    if not torch.cuda.is_available():
        raise RuntimeError('there is no CUDA GPU here; device="cpu" predicts this machine')
    free_bytes, _ = torch.cuda.mem_get_info()
    facts = torch.cuda.get_device_properties()
    gpu = Gpu((facts.major, facts.minor), facts.multi_processor_count, facts.max_threads_per_multi_processor)
    return Card(free_bytes / 2**30, gpu)


def resolve(config: Config, device: str) -> Config:
    """Return a config as it runs on a device. Raises ConfigError or PrecisionUnsupported if it cannot."""
    resolved = config.on("cpu" if device == "cpu" else "cuda")
    if device == "cpu":
        resolved = resolved.model_copy(update={"precision": precision.without_choice(resolved.precision, True)})
    if device != "cpu":
        card = card_named(device)
        has_bf16 = card.capability >= (8, 0)
        resolved = resolved.model_copy(update={"precision": precision.without_choice(resolved.precision, has_bf16)})
        answer = precision.cuda_support(resolved.precision, card.capability, has_bf16)
        if not answer.ok:
            reason = f"precision {resolved.precision} cannot run on {device}: {answer.reason}"
            raise precision.PrecisionUnsupported(reason)
        if resolved.attention == "flash" and not card.flash:
            raise precision.PrecisionUnsupported(f"flash attention needs Ampere or later, not {device}; use auto")
    return resolved
