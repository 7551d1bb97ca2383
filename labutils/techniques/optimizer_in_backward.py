"""The optimizer step inside backward: each gradient is used and freed as soon as it is there.

Taught in large_models, section 3.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn


class OptimizerInBackward:
    """Any optimizer, its step for each parameter taken as soon as backward has finished that
    parameter's gradient.

    The gradient is freed at once, so that all gradients never live together. That rules out what
    needs them together: a global norm to clip to, several micro-batches, a loss scale. Stands in
    for the optimizer: `step` and `zero_grad` find nothing left to do. The caller holds it, as any
    optimizer: once it is gone, nothing is updated any more.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        new = type(optimizer)
        self.parts: dict[nn.Parameter, torch.optim.Optimizer] = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                self.parts[p] = new([group | {"params": [p]}])
        self._handles = []
        self.attach()

    def attach(self) -> None:
        """Register the hooks; once more, to come after hooks that others have registered and that
        read gradients.
        """
        for handle in self._handles:
            handle.remove()
        # Weakly: autograd holds hooks where Python's garbage collector does not look. A hook that
        # kept the optimizer alive, which has the parameters, which have the hook, would never be
        # freed, and the whole model with it.
        reference = weakref.WeakMethod(self._update)

        def hook(p: nn.Parameter) -> None:
            update = reference()
            if update is not None:
                update(p)

        self._handles = [p.register_post_accumulate_grad_hook(hook) for p in self.parts]

    def _update(self, p: nn.Parameter) -> None:
        self.parts[p].step()
        p.grad = None

    def step(self) -> None:
        """Update what still has a gradient."""
        for p in self.parts:
            if p.grad is not None:
                self._update(p)

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
        return [part.param_groups[0] for part in self.parts.values()]

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """The optimizer's state by parameter, where it has one."""
        return {p: part.state[p] for p, part in self.parts.items() if part.state}
