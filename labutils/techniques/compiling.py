"""torch.compile for a loss function. Where nothing can be compiled, it runs as it is.

Taught in where_time_goes, section 3.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from labutils.config.choices import COMPILE_MODES

FEW_SMS = "Not enough SMs to use max_autotune_gemm mode"  # of the logger torch._inductor.utils
TF32_IS_OFF = (
    "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled"
)


def silence_known_warnings() -> None:
    """Keep two of the compiler's own warnings from the reader; all others come through.

    FEW_SMS comes on every card with fewer than 68 multiprocessors, also for modes that try no
    kernels: the compiler then takes cuBLAS's matrix multiplications, and nothing can be done about
    it. TF32_IS_OFF comes with every float32 model on Ampere or later: here float32 is meant, and
    `precision: tf32` is the experiment beside it.
    """
    logging.getLogger("torch._inductor.utils").addFilter(_is_worth_reading)
    warnings.filterwarnings("ignore", message=TF32_IS_OFF, category=UserWarning)


def _is_worth_reading(record: logging.LogRecord) -> bool:
    return record.getMessage() != FEW_SMS


def mode_and_arguments(
    mode: str, device_type: str, accumulates: bool
) -> tuple[str, dict[str, Any]]:
    """Return the mode that is used on a device, and what `torch.compile` is told."""
    row = COMPILE_MODES[mode]
    if not row.spares_launches:
        return mode, {}
    if device_type == "cpu":
        return mode, {"options": {"cpp_wrapper": True}}
    if accumulates:  # a CUDA graph overwrites the gradients that its last run has left
        return "default", {}
    return mode, {"mode": mode}


def with_own_code(function: Callable) -> Callable:
    """Return a function that calls another, to be compiled in its place.

    torch counts compilations by a function's code, and runs it eagerly after the eighth. Each of
    these has code of its own.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return FunctionType(call.__code__.replace(), globals(), closure=call.__closure__)


class CompiledLoss:
    """`loss_fn(model, batch)` compiled by `torch.compile`; `report` says in words what happened.

    Forward and backward pass become fused kernels, compiled at the first call (half a minute is
    normal). If that fails, for want of Triton on a GPU or of a C++ compiler on a CPU, this call and
    all later ones run `loss_fn` eagerly. Evaluation (no gradients) is eager: it would need kernels
    of its own. `mode`: `default`, or `reduce-overhead`, which spares launches (CUDA graphs on a
    GPU, a wrapper in C++ on a CPU). With `accumulates` there are no graphs on a GPU.
    """

    def __init__(
        self,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        mode: str,
        where: torch.device,
        accumulates: bool = False,
    ) -> None:
        silence_known_warnings()
        # the mode, or that it ran eagerly and why
        self.report, how = mode_and_arguments(mode, where.type, accumulates)
        self.eager = loss_fn
        self.compiled = torch.compile(with_own_code(loss_fn), dynamic=False, **how)

    def __call__(self, model: Any, batch: Any) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return self.eager(model, batch)
        try:
            return self.compiled(model, batch)
        # not what the model itself raises, out of memory say
        except torch._dynamo.exc.TorchDynamoException as error:
            cause = getattr(error, "inner_exception", error)  # around it: which backend raised it
            first, *more = str(cause).strip().splitlines()
            complaints = [line.partition("error: ")[2] for line in more if "error: " in line]
            reason = ": ".join([type(cause).__name__, first, *complaints[:1]])  # of the compiler
            self.report = f"eagerly, since compiling failed: {reason}"
            self.compiled = self.eager
            return self.eager(model, batch)
