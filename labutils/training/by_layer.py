"""Gradients layer by layer: how far each is from float64's, with chosen layers in 16 bits."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from labutils.techniques.loss import count_targets, lm_loss_sum
from labutils.techniques.precision import tf32
from labutils.techniques.rounding import round_both_ways
from labutils.workload.data import batches, sequences
from labutils.workload.gpt2 import build_model

SEQ_LEN, TRAINED_ROWS, JUDGED_ROWS = 64, 2, 4
LEARNING_RATE = 1e-3
Batch = Mapping[str, torch.Tensor]
Gradients = dict[str, torch.Tensor]
LOSS = "loss"  # no module: softmax, logarithm and mean of the logits
# {kind: ends of the names of GPT-2's modules}
KINDS = {
    "embedding": ("wte", "wpe"),
    "norms": ("ln_1", "ln_2", "ln_f"),
    "attention": ("attn.c_attn", "attn.c_proj"),
    "MLP": ("mlp.c_fc", "mlp.act", "mlp.c_proj"),
    "logits": ("lm_head",),
    "loss": (),
}


def layers_by_kind(model: nn.Module) -> dict[str, list[str]]:
    """Return {kind: names of GPT-2's modules}, in their order; the loss is a layer, too."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name, _ in model.named_modules():
        for kind, ends in KINDS.items():
            if name.endswith(ends):
                found[kind].append(name)
    found[LOSS] = [LOSS]
    return found


class RoundedLayers:
    """GPT-2 of which some layers compute in 16 bits, and all others in the model's own dtype.

    In a named layer the inputs, the weights and the result are rounded to `dtype`, and so are their
    gradients; sums stay float32. This is done by rounding, so it is as fast, and as exact, on every
    device. Not rounded: softmax and sums inside of attention, and residual additions. The loss, if
    it is named, is computed in `dtype` itself. Call it with a batch: it returns the mean loss.
    """

    def __init__(self, model: nn.Module, layers: Collection[str], dtype: torch.dtype) -> None:
        unknown = set(layers) - {name for name, _ in model.named_modules()} - {LOSS}
        if unknown:
            raise ValueError(f"no such layers: {', '.join(sorted(unknown))}")
        self.model, self.layers, self.dtype = model, frozenset(layers), dtype

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Return the mean next-token loss of a `(B, T)` batch: a float32 scalar."""
        inputs = {"input_ids": batch["input_ids"]}
        with self._hooks():
            # the logits' weight is the embedding's; each is rounded, or not, as its own layer is
            output = functional_call(self.model, self._weights(), (), inputs, tie_weights=False)
        logits = output.logits[:, :-1].flatten(0, 1)
        targets = batch["labels"][:, 1:].flatten()
        if LOSS in self.layers:
            return F.cross_entropy(logits.to(self.dtype), targets).float()
        return F.cross_entropy(logits, targets)

    def _weights(self) -> dict[str, torch.Tensor]:
        weights = {}
        for name, weight in self.model.named_parameters(remove_duplicate=False):
            is_rounded = name.rpartition(".")[0] in self.layers
            weights[name] = round_both_ways(weight, self.dtype) if is_rounded else weight
        return weights

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        hooks = []
        for name, module in self.model.named_modules():
            if name in self.layers:
                hooks.append(module.register_forward_pre_hook(self._round_inputs))
                hooks.append(module.register_forward_hook(self._round_output))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _round_inputs(self, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(self._rounded(value) for value in inputs)

    def _round_output(self, _module: nn.Module, _inputs: object, output: Any) -> Any:
        return self._rounded(output)

    def _rounded(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return round_both_ways(value, self.dtype)
        return value


def mean_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean next-token loss of a `(B, T)` batch: a scalar."""
    return lm_loss_sum(model, batch) / count_targets(batch)


def gradients_of(
    model: nn.Module, loss: Callable[[], torch.Tensor], loss_scale: float = 1.0
) -> Gradients:
    """Return {parameter: gradient of `loss()`, a float64 copy}, computed with a loss scale.

    The backward pass sees `loss_scale` times the loss, and the copies are divided by it. They hold
    inf or NaN where it has overflowed. Gradients that stood in `.grad` before are lost. On CUDA no
    float32 product is rounded to TF32.
    """
    model.zero_grad(set_to_none=True)
    with tf32(False):
        (loss() * loss_scale).backward()
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.grad.double() / loss_scale
    model.zero_grad(set_to_none=True)
    return found


def float64_gradients(model: nn.Module, batch: Batch) -> Gradients:
    """Return the gradients of `mean_loss` computed in float64: what all others are judged by."""
    judge = copy.deepcopy(model).double()
    return gradients_of(judge, lambda: mean_loss(judge, batch))


def total_error(gradients: Gradients, right: Gradients) -> float:
    """Return the norm of the difference of all gradients over the norm of the right ones."""
    difference = sum((gradients[name] - right[name]).square().sum() for name in right)
    return (difference / sum(g.square().sum() for g in right.values())).sqrt().item()


def errors_by_layer(gradients: Gradients, right: Gradients) -> dict[str, float]:
    """Return {layer: relative error of its gradients}; a layer's weight and bias count as one."""
    layers: dict[str, list[str]] = {}
    for name in right:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    errors = {}
    for layer, names in layers.items():
        theirs = {name: gradients[name] for name in names}
        errors[layer] = total_error(theirs, {name: right[name] for name in names})
    return errors


def typical_error(gradients: Gradients, right: Gradients) -> float:
    """Return the median of `errors_by_layer`: layers with long gradients count as all others."""
    return statistics.median(errors_by_layer(gradients, right).values())


def batch_of(number: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return batch `number` of the offline text, `(JUDGED_ROWS, SEQ_LEN)` ids and labels."""
    rows = slice(JUDGED_ROWS * number, JUDGED_ROWS * (number + 1))
    ids = sequences(SEQ_LEN)[rows].to(device)
    return {"input_ids": ids, "labels": ids}


def model_after(
    n_steps: int,
    seed: int,
    device: torch.device,
    nudge: float = 0.0,
) -> nn.Module:
    """Return the small GPT-2 after so many steps of AdamW, in float32.

    The seed decides the weights and the order of the text. `nudge` first multiplies each weight by
    1 ± nudge at random: two runs that differ in this only show how far runs drift apart.
    """
    model = build_model("gpt2-nano", dropout=0.0, seed=seed).to(device)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + nudge * torch.randn_like(weight).sign())
    loss_of = RoundedLayers(model, (), torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    text = batches(sequences(SEQ_LEN), TRAINED_ROWS, seed)
    for _ in range(n_steps):
        batch = next(text)
        with tf32(False):
            loss_of({key: ids.to(device) for key, ids in batch.items()}).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model
