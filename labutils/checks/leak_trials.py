"""Try a reader's training loop: does the floor of its memory stay flat, with the same losses?"""

from __future__ import annotations

import dis
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

N_STEPS, ROWS, WIDTH = 8, 64, 256
FIRST_COMPARED = 2  # the first two steps make gradients and what a loop keeps of one step
# A step may keep a number or two as tensors: mse_loss keeps a storage of all rows for its mean.
FLAT_BYTES = 16 * ROWS
TOLERANCE = 1e-5
Training = Callable[[nn.Module, list, tuple, torch.optim.Optimizer], Any]


class AliveBytes(TorchDispatchMode):
    """Knows how many bytes of the storages that were made inside are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(out):
            if storage._cdata not in given:  # else a view, or changed in place
                self.storages[storage._cdata] = weakref.ref(storage)
        return out

    def now(self) -> int:
        """Return the bytes alive."""
        found = [reference() for reference in self.storages.values()]
        return sum(storage.nbytes() for storage in found if storage is not None)


def _storages(values: Any) -> list[torch.UntypedStorage]:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return [tensor.untyped_storage() for tensor in tensors]


def try_training(training: Training) -> str | None:
    """Return what is wrong with a repaired training loop; None if it is right."""
    right, _, _ = _run(_without_leak)
    found, floors, model = _run(training)
    problem = _wrong_result(found, right)
    if problem is not None:
        return problem
    if len(floors) != N_STEPS:
        return f"the optimizer stepped {len(floors)} times; there are {N_STEPS} batches."
    a_step = (floors[-1] - floors[FIRST_COMPARED]) / (N_STEPS - 1 - FIRST_COMPARED)
    if a_step > FLAT_BYTES:
        return f"the floor rises by {a_step / 1024:,.1f} KiB a step. {_why(training, found)}"
    if _has_graph(found[0]):
        return (
            "the floor is flat: backward has freed what the graphs kept. But each loss that you "
            "return still holds its graph. Keep numbers."
        )
    if model[0]._forward_hooks:
        return (
            "the floor is flat. But the hook is still registered after the training: a second "
            "training would add another. `register_forward_hook` returns a handle with `remove()`."
        )
    return None


def _run(training: Training) -> tuple[Any, list[int], nn.Module]:
    """Return (result, bytes alive after each optimizer step, model)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.randn(ROWS, 16), torch.randn(ROWS, 1)) for _ in range(N_STEPS)]
    held_out = torch.randn(ROWS, 16), torch.randn(ROWS, 1)
    floors: list[int] = []
    with AliveBytes() as alive:
        optimizer.register_step_post_hook(lambda *_: floors.append(alive.now()))
        result = training(model, batches, held_out, optimizer)
    return result, floors, model


def _without_leak(model, batches, held_out, optimizer):
    losses, curve, largest = [], [], []
    hook = model[0].register_forward_hook(lambda *three: largest.append(three[2].max().item()))
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        with torch.no_grad():
            curve.append(nn.functional.mse_loss(model(held_out[0]), held_out[1]).item())
    hook.remove()
    return losses, curve, max(largest)


def _wrong_result(found: Any, right: Any) -> str | None:
    """Compare losses, held-out losses and the largest output."""
    if not isinstance(found, tuple) or len(found) != 3:
        return "return three things: the losses, the held-out losses and the largest output."
    names = ("the losses", "the held-out losses")
    for name, values, expected in zip(names, found[:2], right[:2], strict=True):
        if not isinstance(values, Sequence | torch.Tensor) or len(values) != N_STEPS:
            return f"{name} are to be {N_STEPS}, one for each step."
        if not _near(values, expected):
            return f"{name} are others than before. A repair must not change the training."
    if not _near([found[2]], [right[2]]):
        return "the largest output is another one: it is that of all batches and of held-out data."
    return None


def _near(values: Sequence[Any], expected: Sequence[float]) -> bool:
    for value, one in zip(values, expected, strict=True):
        number = value.item() if isinstance(value, torch.Tensor) else value
        if abs(number - one) > TOLERANCE:
            return False
    return True


def _why(training: Training, found: Any) -> str:
    """Return which misconception explains that the floor rises."""
    code = training.__code__
    names = set(code.co_names)
    for constant in code.co_consts:  # a hook's function within it
        names |= set(getattr(constant, "co_names", ()))
    _, curve, _ = found
    if names & {"collect", "empty_cache"}:
        return "Collecting garbage frees what nobody holds; these tensors are held by lists."
    if any(line.opname in ("DELETE_FAST", "DELETE_DEREF") for line in dis.get_instructions(code)):
        return "`del` removes a name. The list has a reference of its own to the same tensor."
    if _has_graph(curve):
        return (
            "The held-out losses that you return still have a graph, and no backward pass frees "
            "what it keeps."
        )
    if "detach" in names:
        return "`detach` lets go of the graph; the tensor itself stays. Which number do you need?"
    return "Some list holds whole tensors. Which one, and which number of each is needed?"


def _has_graph(values: Sequence[Any]) -> bool:
    return any(getattr(value, "grad_fn", None) is not None for value in values)
