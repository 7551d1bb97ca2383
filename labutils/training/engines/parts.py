"""What every engine gets, and what it gives back: one value per step."""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from labutils.config.choices import CHECKPOINTING, PRECISIONS
from labutils.config.schema import Config
from labutils.techniques.loss import LossFn
from labutils.training.records import Series

INSTALL = 'python -m pip install -c constraints.txt -e ".[frameworks]"'


class FrameworkMissing(ImportError):
    """A framework that is not installed. The message says what to type."""


def require(package: str) -> Any:
    """Return a package, imported. Raises FrameworkMissing where it is not installed."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of progress bars, and meant for others
            return importlib.import_module(package)
    except ModuleNotFoundError as error:
        message = f"{error.name} is not installed. In a clone run:  {INSTALL}"
        raise FrameworkMissing(message) from None


@dataclass
class Parts:
    """What an engine trains. The model is on its device, in training mode."""

    config: Config  # resolved
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: LossFn  # (model, micro-batch) → a sum over targets
    scaler: torch.amp.GradScaler  # disabled where the precision needs none
    micro_batches: Iterator[dict[str, torch.Tensor]]  # on the CPU; it never ends
    steps: int
    rate_at: Callable[[int], float]
    device: torch.device
    callbacks: Sequence[Any] = ()  # for Trainer

    def __post_init__(self) -> None:
        # Dropout draws from here. Frameworks seed again, or draw, while they set themselves up.
        self.cpu_random = torch.get_rng_state()
        self.cuda_random = None
        if self.device.type == "cuda":
            self.cuda_random = torch.cuda.get_rng_state(self.device)

    @property
    def mixed(self) -> str:
        """Say "no", or the precision: autocast's formats have the names that Accelerate uses."""
        row = PRECISIONS[self.config.precision]
        return row.name if row.autocast else "no"

    def checkpoint(self) -> None:
        """Switch on Hugging Face's own checkpointing of blocks, if the config wants it."""
        if CHECKPOINTING[self.config.gradient_checkpointing].is_on:
            switch = getattr(self.model, "activation_checkpointing_enable", None)  # since 5.2
            switch = switch or self.model.gradient_checkpointing_enable
            switch({"use_reentrant": False})

    def begin_step(self, step: int, optimizer: Any) -> None:
        """Set the rate of a step; before the first one also the state of random numbers."""
        if step == 0:
            torch.set_rng_state(self.cpu_random)
            if self.cuda_random is not None:
                torch.cuda.set_rng_state(self.cuda_random, self.device)
        for group in optimizer.param_groups:
            group["lr"] = self.rate_at(step)


@dataclass
class StepSeries:
    """One value per optimizer step, as a framework gives it."""

    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    learning_rate: list[float] = field(default_factory=list)
    loss_scale: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)

    def begin(self, scale: float, rate: float) -> None:
        self.loss_scale.append(scale)
        self.learning_rate.append(rate)
        self.begun = time.perf_counter()

    def end(self, loss: float, grad_norm: float) -> None:
        """Note a step. The floats were read from the device, so its work is done."""
        self.loss.append(loss)
        self.grad_norm.append(grad_norm)
        self.step_ms.append(1000 * (time.perf_counter() - self.begun))

    def series(self, final_scale: float) -> Series:
        """Return them as in a record. A scale that fell means that the step was skipped."""
        skipped = []
        for old, new in zip(self.loss_scale, [*self.loss_scale[1:], final_scale], strict=True):
            skipped.append(new < old)
        columns = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return Series(**columns, skipped=skipped)


def scale_of(scaler: torch.amp.GradScaler | None) -> float:
    """Return the loss scale; 1 where nothing is scaled."""
    return 1.0 if scaler is None else scaler.get_scale()
