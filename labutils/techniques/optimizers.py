"""AdamW in less memory:

Moments of one or two bytes, 16-bit weights rounded by chance, and a step inside backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from labutils.config.choices import OPTIMIZER_IMPLEMENTATIONS, OPTIMIZERS
from labutils.techniques.quantization import (
    BLOCK,
    FIRST,
    SECOND,
    pack,
    round_stochastically,
    unpack,
)

SLAB = 1 << 22  # numbers that are float32 at once; a multiple of BLOCK


BETAS = 0.9, 0.95  # as GPT-3 was trained (Brown et al. 2020, 2005.14165)
MOMENTUM = 0.9
IMPLEMENTATIONS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for_loop": {"foreach": False},
}


def build_optimizer(
    model: nn.Module,
    *,
    optimizer: str,
    implementation: str,
    learning_rate: float,
    weight_decay: float,
    in_backward: bool,
) -> torch.optim.Optimizer | StepInBackward:
    """Return an optimizer of all parameters of a model.

    Weights decay in matrices only, not in biases and layer norms. `implementation` is of torch's
    own optimizers. Raises ValueError for an unknown `optimizer` or `implementation`.
    """
    row = OPTIMIZERS[optimizer]
    how = IMPLEMENTATIONS[OPTIMIZER_IMPLEMENTATIONS[implementation].name]
    groups = decay_groups(model, weight_decay)
    if not row.is_adamw:
        built = torch.optim.SGD(groups, lr=learning_rate, momentum=MOMENTUM, **how)
    elif row.has_implementations:
        built = torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS, **how)
    else:
        built = SmallAdamW(groups, lr=learning_rate, betas=BETAS, bits=row.moment_bits)
    return StepInBackward(built) if in_backward else built


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups: matrices, whose weights decay, and all else."""
    matrices, others = [], []
    for p in model.parameters():
        (matrices if p.dim() >= 2 else others).append(p)
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


class SmallAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) with moments of `bits` 16 (bfloat16) or 8 (codes, see
    `pack`).

    Computes in float32, a slab of SLAB numbers at a time, so that little of it is ever unpacked.
    Weights in bfloat16 and moments are rounded stochastically. Slower than torch's fused AdamW: a
    slab takes dozens of small operations.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        bits: int = 8,
    ) -> None:
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bits": bits},
        )

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p] or self._start(p, group["bits"])
                state["step"] += 1
                keys = ("exp_avg", "exp_avg_sq", "scale", "scale_sq")[
                    : 4 if group["bits"] == 8 else 2
                ]
                flat = [p.view(-1).split(SLAB), p.grad.reshape(-1).split(SLAB)]
                blocks = [state[key].split(SLAB // BLOCK) for key in keys]
                for p_slab, gradient, *moments in zip(*flat, *blocks, strict=True):
                    _update(p_slab, gradient, *moments, group=group, step=state["step"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` has returned; codes and scales keep their dtypes, which torch
        would cast.
        """
        super().load_state_dict(state_dict)
        numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(numbers, parameters, strict=True):
            saved = state_dict["state"].get(i, {})
            self.state[p] = {
                k: v.clone().to(p.device) if isinstance(v, torch.Tensor) else v
                for k, v in saved.items()
            }

    def make_state(self) -> None:
        """Make all moments now, as zeros; otherwise the first step does."""
        for group in self.param_groups:
            for p in group["params"]:
                self._start(p, group["bits"])

    def _start(self, p: nn.Parameter, bits: int) -> dict[str, Any]:
        first, second = (FIRST[0], SECOND[0]) if bits == 8 else (torch.bfloat16, torch.bfloat16)
        shape, state = (
            (-(-p.numel() // BLOCK), BLOCK),
            self.state[p],
        )  # the last block may be longer than it need be
        state |= {"step": 0, "exp_avg": torch.zeros(shape, dtype=first, device=p.device)}
        state["exp_avg_sq"] = torch.zeros(shape, dtype=second, device=p.device)
        if bits == 8:
            for key in ("scale", "scale_sq"):
                state[key] = torch.zeros(
                    len(state["exp_avg"]), 1, dtype=torch.float32, device=p.device
                )
        return state


def _update(
    p, gradient, exp_avg, exp_avg_sq, scale=None, scale_sq=None, *, group: dict[str, Any], step: int
) -> None:
    """Do one slab of one parameter, `(n,)`, its moments `(blocks, BLOCK)`; all but the gradient is
    changed in place.
    """
    beta1, beta2 = group["betas"]
    n, gradient = len(p), gradient.float()
    if n % BLOCK:
        gradient = F.pad(gradient, (0, -n % BLOCK))
    gradient = gradient.view(-1, BLOCK)
    first = exp_avg.float() if scale is None else unpack(exp_avg, scale, FIRST)
    first.lerp_(gradient, 1 - beta1)
    _keep(first, exp_avg, scale, FIRST)
    second = exp_avg_sq.float() if scale is None else unpack(exp_avg_sq, scale_sq, SECOND)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    del gradient
    denominator = second.div(1 - beta2**step).sqrt_().add_(group["eps"])
    _keep(second, exp_avg_sq, scale_sq, SECOND)
    del second
    weights = p.float().mul_(1 - group["lr"] * group["weight_decay"])  # not a copy if p is float32
    weights.addcdiv_(
        first.view(-1)[:n], denominator.view(-1)[:n], value=-group["lr"] / (1 - beta1**step)
    )
    if p.dtype == torch.bfloat16:
        weights = round_stochastically(weights)
    if p.dtype != torch.float32:
        p.copy_(weights)


def _keep(
    moment: torch.Tensor, stored: torch.Tensor, scale: torch.Tensor | None, kind: tuple
) -> None:
    if scale is None:
        stored.copy_(round_stochastically(moment))
    else:
        pack(moment, stored, scale, kind)


def make_state(optimizer: Any, parameters: Iterable[nn.Parameter]) -> None:
    """Let an optimizer make its state before the first step:

    Ours directly, torch's by a step on gradients of zero.
    """
    if hasattr(optimizer, "make_state"):
        optimizer.make_state()
        return
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _weakly(method: Callable[[nn.Parameter], None]) -> Callable[[nn.Parameter], None]:
    """Return a hook that calls a method as long as its object lives, and does not keep the object
    alive.

    Autograd holds hooks where Python's garbage collector does not look. A hook that kept the
    optimizer alive, which has the parameters, which have the hook, would never be freed, and the
    whole model with it.
    """
    reference = weakref.WeakMethod(method)

    def hook(p: nn.Parameter) -> None:
        if alive := reference():
            alive(p)

    return hook


class StepInBackward:
    """Any optimizer, its step for each parameter taken as soon as backward has finished that
    parameter's gradient.

    The gradient is freed at once, so that all gradients never live together. That rules out what
    needs them together: a global norm to clip to, several micro-batches, a loss scale. Stands in
    for the optimizer: `step` and `zero_grad` find nothing left to do. The caller holds it, as any
    optimizer: once it is gone, nothing is updated any more.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        new = type(optimizer)
        self.parts = {
            p: new([group | {"params": [p]}])
            for group in optimizer.param_groups
            for p in group["params"]
        }
        self._handles: list[Any] = []
        self.attach()

    def attach(self) -> None:
        """Register the hooks; once more, to come after hooks that others have registered and that
        read gradients.
        """
        self.detach()
        hook = _weakly(self._step_one)
        self._handles = [p.register_post_accumulate_grad_hook(hook) for p in self.parts]

    def detach(self) -> None:
        """Remove the hooks: an ordinary optimizer again."""
        for handle in self._handles:
            handle.remove()

    def make_state(self) -> None:
        """Make all moments now, by a step on gradients of zero where the optimizer knows no other
        way.
        """
        for p, part in self.parts.items():
            make_state(part, [p])

    def _step_one(self, p: nn.Parameter) -> None:
        self.parts[p].step()
        p.grad = None

    def step(self) -> None:
        """Update what still has a gradient."""
        for p in (p for p in self.parts if p.grad is not None):
            self._step_one(p)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients."""
        for part in self.parts.values():
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The state of every parameter's optimizer, in order."""
        return {"parts": [part.state_dict() for part in self.parts.values()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` has returned."""
        for part, state in zip(self.parts.values(), state_dict["parts"], strict=True):
            part.load_state_dict(state)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups, one for each parameter."""
        return [group for part in self.parts.values() for group in part.param_groups]

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """The optimizer's state by parameter."""
        return {p: state for part in self.parts.values() for p, state in part.state.items()}
