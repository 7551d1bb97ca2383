"""From a precision's name to what torch needs:

Autocast, GradScaler, TF32 switch; and what this device makes of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch

from labutils.machine.here import matmul_rate

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "pure_bf16")
CHOICE = "16bit"  # in a config: one of two precisions, see `without_choice`
COMPUTE_DTYPE = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "pure_bf16": torch.bfloat16,
}
SLOW_RATIO = 4.0  # a 16-bit product this many times slower than the FP32 one has no fast hardware
SLOW_STEPS_DIVISOR = 8  # a slow precision trains this many times fewer steps
MIN_SLOW_STEPS = 8


class PrecisionUnsupported(RuntimeError):
    """This device cannot run the precision. The message says why, and what to use instead."""


@dataclass(frozen=True)
class Support:
    """Whether a device runs a precision (`ok`), without fast hardware for it (`slow`), and the
    reason in words.
    """

    ok: bool
    slow: bool
    reason: str


def autocast(precision: str, device: torch.device) -> AbstractContextManager:
    """Return the context for forward pass and loss: `torch.autocast` for fp16 and bf16, else one
    that does nothing.

    Like all functions here that take a precision, it raises ValueError for what is none. `16bit` is
    none: it is a config's word for two, and `without_choice` says which.
    """
    _require_known(precision)
    if precision in ("fp16", "bf16"):
        return torch.autocast(device.type, dtype=COMPUTE_DTYPE[precision])
    return nullcontext()


def _require_known(precision: str, choices: tuple[str, ...] = PRECISIONS) -> None:
    if precision not in choices:
        way_out = (
            "; without_choice(precision, has_bf16) says which one it is"
            if precision == CHOICE
            else ""
        )
        raise ValueError(
            f"{precision!r} is not one of the precisions {', '.join(choices)}{way_out}"
        )


def without_choice(precision: str, has_bf16: bool) -> str:
    """Return what `16bit` means where BF16 hardware exists or not; any other precision as it is."""
    _require_known(precision, (*PRECISIONS, CHOICE))
    if precision != CHOICE:
        return precision
    return "bf16" if has_bf16 else "fp16"


def grad_scaler(
    precision: str, device: torch.device, init_scale: float = 65536.0, growth_interval: int = 2000
) -> torch.amp.GradScaler:
    """Return a GradScaler that scales for fp16 and passes everything through for the other
    precisions.
    """
    _require_known(precision)
    enabled = precision == "fp16"
    return torch.amp.GradScaler(
        device.type, init_scale=init_scale, growth_interval=growth_interval, enabled=enabled
    )


@contextmanager
def tf32(enabled: bool) -> Iterator[None]:
    """Let CUDA's float32 products round their inputs to TF32 (or not) inside the block; put the
    setting back after.

    No effect on the CPU. Uses `fp32_precision`: after it is set, the older `allow_tf32` can no
    longer be read.
    """
    matmul, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.fp32_precision
    matmul.fp32_precision = "tf32" if enabled else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def support(precision: str, device: torch.device) -> Support:
    """Return what `device` makes of a precision. On a CPU one small product per dtype is timed,
    once per process.

    That is done with one thread and in processor time (see `matmul_rate`): other programs do not
    change the answer.
    """
    _require_known(precision)
    if device.type == "cuda":
        # Excluding emulation: without it the answer for BF16 is True on a T4, which has no BF16
        # hardware.
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return cuda_support(precision, torch.cuda.get_device_capability(device), bf16)
    if precision == "fp32":
        return Support(True, False, "native")
    if precision == "tf32":
        return Support(
            False, False, "TF32 is a mode of NVIDIA tensor cores, Ampere (2020) or later; use fp32"
        )
    ratio = _cpu_slowdown(COMPUTE_DTYPE[precision])
    dtype = _name(COMPUTE_DTYPE[precision])
    if ratio >= SLOW_RATIO:
        return Support(
            True,
            True,
            f"a {dtype} product takes {_rounded(ratio)} times as long as a float32 one here",
        )
    return Support(
        True, False, f"a {dtype} product takes {ratio:.1f} times as long as a float32 one here"
    )


def cuda_support(precision: str, capability: tuple[int, int], bf16_hardware: bool) -> Support:
    """Return what an NVIDIA card of compute capability `(major, minor)` makes of a precision.

    Tensor cores: FP16 since Volta (7.0), TF32 and BF16 since Ampere (8.0).
    """
    _require_known(precision)
    card = f"compute capability {capability[0]}.{capability[1]}"
    if precision == "fp32":
        return Support(True, False, "native")
    if precision == "fp16":
        fast = capability >= (7, 0)
        return Support(
            True,
            not fast,
            "tensor cores" if fast else f"{card} has no tensor cores: FP16 saves no time",
        )
    if precision == "tf32":
        ok = capability >= (8, 0)
        return Support(
            ok,
            False,
            "tensor cores" if ok else f"{card} has no TF32 (Ampere, 8.0, or later); use fp16",
        )
    return Support(
        bf16_hardware,
        False,
        "tensor cores"
        if bf16_hardware
        else f"{card} has no BF16 hardware, only emulation; use fp16",
    )


def require(precision: str, device: torch.device) -> Support:
    """Return `support(...)`, or raise PrecisionUnsupported with the reason and the way out."""
    answer = support(precision, device)
    if not answer.ok:
        raise PrecisionUnsupported(f"precision {precision} cannot run here: {answer.reason}")
    return answer


def steps_for(steps: int, answer: Support) -> int:
    """Return how many of `steps` optimizer steps to run: an eighth, but at least eight, where the
    precision is slow.

    The batches stay as they are, so the losses of the steps that do run can be compared one by one.
    """
    return min(steps, max(MIN_SLOW_STEPS, steps // SLOW_STEPS_DIVISOR)) if answer.slow else steps


@lru_cache(maxsize=8)
def _cpu_slowdown(dtype: torch.dtype) -> float:
    cpu = torch.device("cpu")
    return matmul_rate(torch.float32, cpu, 256, repeats=10) / matmul_rate(
        dtype, cpu, 256, repeats=3
    )


def _rounded(ratio: float) -> str:
    """Two digits would pretend a precision that a probe of milliseconds does not have."""
    return f"about {float(f'{ratio:.1g}'):.0f}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
