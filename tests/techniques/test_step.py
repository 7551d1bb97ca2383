"""In every precision, windows of padded, unequal micro-batches, the last one short, equal full
batches.

The gradients are compared, not the losses: at the first step every bug leaves the loss alone.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import labutils as lab
from labutils.techniques.precision import grad_scaler
from labutils.techniques.step import take_step
from labutils.training import train as module
from tests.helpers import CPU

LENGTHS = ((24, 4), (9, 3), (16, 20), (5, 2), (24, 7), (3, 12))  # of 6 micro-batches of 2 sequences
WINDOWS = (slice(0, 4), slice(4, 6))  # 4 micro-batches and a last window of 2
CLIP = 2.0  # below the norm of these gradients, so that clipping acts
# Rounding only: a sum in another order is off by some eps of the dtype that products run in, more
# where terms cancel.
TOLERANCE = {"fp32": 1e-5, "fp16": 3e-3, "bf16": 2.4e-2}


def padded(lengths: tuple[int, ...], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """A `(B, T)` batch cut to the longest of its lengths; labels are -100 on the padding."""
    longest = max(lengths)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    ids = ids[:, :longest]
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def micro_batches() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(2048, (6, 2, 24), generator=torch.Generator().manual_seed(0))
    return [padded(lengths, rows) for lengths, rows in zip(LENGTHS, ids, strict=True)]


def full_batches() -> list[dict[str, torch.Tensor]]:
    """The two windows as one batch each."""
    ids = torch.randint(2048, (6, 2, 24), generator=torch.Generator().manual_seed(0))
    return [padded(tuple(itertools.chain(*LENGTHS[w])), ids[w].flatten(0, 1)) for w in WINDOWS]


def gradients(
    batches, precision: str, grad_accum_steps: int, clip: float = CLIP
) -> list[torch.Tensor]:
    """Return the gradient of each optimizer step of a run at a rate of 0, so that all steps see the
    same weights.
    """
    model = lab.build_model("gpt2-nano", dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []
    optimizer.register_step_pre_hook(
        lambda *_: found.append(torch.cat([p.grad.flatten() for p in model.parameters()]).clone())
    )
    scaler = grad_scaler(precision, CPU, init_scale=2.0**10)
    lab.train(
        model,
        batches,
        lab.lm_loss_sum,
        optimizer,
        steps=2,
        grad_accum_steps=grad_accum_steps,
        precision=precision,
        scaler=scaler,
        max_grad_norm=clip,
        progress=False,
    )
    return found


def errors(found: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
    if len(found) != len(expected):
        return [float("inf")]
    return [((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]


@pytest.fixture(scope="module")
def expected():
    return {precision: gradients(full_batches(), precision, 1) for precision in TOLERANCE}


@pytest.mark.parametrize("precision", TOLERANCE)
def test_accumulated_windows_equal_full_batches(precision, expected):
    found = gradients(micro_batches(), precision, 4)
    assert max(errors(found, expected[precision])) < TOLERANCE[precision]
    assert found[0].norm().item() == pytest.approx(CLIP, rel=1e-2)  # clipping did act


@pytest.mark.parametrize("precision", TOLERANCE)
def test_losses_of_accumulated_windows_equal_those_of_full_batches(precision):
    losses = []
    for batches, accumulate in ((full_batches(), 1), (micro_batches(), 4)):
        model = lab.build_model("gpt2-nano", dropout=0.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        series = lab.train(
            model,
            batches,
            lab.lm_loss_sum,
            optimizer,
            steps=2,
            grad_accum_steps=accumulate,
            precision=precision,
            scaler=grad_scaler(precision, CPU, init_scale=2.0**10),
            progress=False,
        )
        losses.append(series.loss)
    assert len(losses[1]) == 2
    assert losses[1] == pytest.approx(losses[0], rel=TOLERANCE[precision])


class Scaler:
    """A GradScaler of which single calls can be left out or moved."""

    def __init__(self, real: torch.amp.GradScaler) -> None:
        self.real, self.scale = real, real.scale

    def unscale_(self, optimizer) -> None:
        pass

    def step(self, optimizer) -> None:
        optimizer.step()

    def update(self) -> None:
        pass


def no_division(model, window, loss_fn, optimizer, *, n_targets, **how):
    def own_mean(model, batch):
        return loss_fn(model, batch) / lab.count_targets(batch)

    return take_step(model, window, own_mean, optimizer, n_targets=1, **how)


def mean_of_means(model, window, loss_fn, optimizer, *, n_targets, **how):
    window = list(window)

    def own_mean(model, batch):
        return loss_fn(model, batch) / lab.count_targets(batch)

    return take_step(model, window, own_mean, optimizer, n_targets=len(window), **how)


def short_window_divided_as_if_full(model, window, loss_fn, optimizer, *, n_targets, **how):
    window = list(window)
    as_if_full = n_targets * 4 / len(window)
    return take_step(model, window, loss_fn, optimizer, n_targets=as_if_full, **how)


def unshifted_labels_counted(model, window, loss_fn, optimizer, *, n_targets, **how):
    window = list(window)
    n_labels = sum(int((batch["labels"] != -100).sum()) for batch in window)
    return take_step(model, window, loss_fn, optimizer, n_targets=n_labels, **how)


def windows_of_i_modulo_n_equal_to_0(model, window, loss_fn, optimizer, *, n_targets, **how):
    """The first window ends after micro-batch 0."""
    window = list(window)
    if len(window) == 4:
        window = window[:1]
    n_targets = sum(map(lab.count_targets, window))
    return take_step(model, window, loss_fn, optimizer, n_targets=n_targets, **how)


def last_window_dropped(model, window, loss_fn, optimizer, **how):
    window = list(window)
    if len(window) < 4:
        return torch.zeros(())
    return take_step(model, window, loss_fn, optimizer, **how)


def gradients_not_cleared(model, window, loss_fn, optimizer, **how):
    optimizer.zero_grad = lambda set_to_none: None
    return take_step(model, window, loss_fn, optimizer, **how)


def cleared_per_micro_batch(model, window, loss_fn, optimizer, **how):
    def clearing():
        for micro_batch in window:
            optimizer.zero_grad()
            yield micro_batch

    return take_step(model, clearing(), loss_fn, optimizer, **how)


def clipped_per_micro_batch(model, window, loss_fn, optimizer, *, max_grad_norm, **how):
    def clipping():
        for micro_batch in window:
            yield micro_batch
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)

    how["max_grad_norm"] = max_grad_norm
    return take_step(model, clipping(), loss_fn, optimizer, **how)


def unscaled_per_micro_batch(model, window, loss_fn, optimizer, *, scaler, **how):
    def unscaling():
        for micro_batch in window:
            yield micro_batch
            scaler.unscale_(optimizer)
            scaler.update()

    return take_step(model, unscaling(), loss_fn, optimizer, scaler=Scaler(scaler), **how)


def clipped_before_unscaling(model, window, loss_fn, optimizer, *, scaler, **how):
    late = Scaler(scaler)

    def unscale_and_step(optimizer):
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    late.step = unscale_and_step
    return take_step(model, window, loss_fn, optimizer, scaler=late, **how)


BUGS = [
    mean_of_means,
    windows_of_i_modulo_n_equal_to_0,
    last_window_dropped,
    gradients_not_cleared,
    cleared_per_micro_batch,
    clipped_per_micro_batch,
]
HIDDEN_BY_CLIPPING = [  # only the gradient's length is wrong
    no_division,
    short_window_divided_as_if_full,
    unshifted_labels_counted,
]
FP16_BUGS = [unscaled_per_micro_batch, clipped_before_unscaling]


def name_of(bug) -> str:
    return bug.__name__.replace("_", " ")


@pytest.mark.parametrize("bug", BUGS + HIDDEN_BY_CLIPPING, ids=name_of)
def test_each_classic_bug_in_the_step_is_caught(bug, monkeypatch):
    """Far outside the tolerance, not just outside."""
    clip = 1e9 if bug in HIDDEN_BY_CLIPPING else CLIP
    right = gradients(full_batches(), "fp32", 1, clip)
    monkeypatch.setattr(module, "take_step", bug)
    found = gradients(micro_batches(), "fp32", 4, clip)
    assert max(errors(found, right)) > 1000 * TOLERANCE["fp32"]


@pytest.mark.parametrize("bug", FP16_BUGS, ids=name_of)
def test_each_wrong_order_of_scaler_calls_is_caught(bug, expected, monkeypatch):
    monkeypatch.setattr(module, "take_step", bug)
    found = gradients(micro_batches(), "fp16", 4)
    assert max(errors(found, expected["fp16"])) > 20 * TOLERANCE["fp16"]


class LastOnly:
    """In place of a sum: keeps what was added last."""

    def __init__(self, total: torch.Tensor) -> None:
        self.total = total

    def __iadd__(self, loss: torch.Tensor) -> LastOnly:
        self.total.copy_(loss)
        return self


def last_micro_batch_logged(*args, mean_loss, **how):
    return take_step(*args, mean_loss=LastOnly(mean_loss), **how)


def test_logging_the_last_micro_batch_is_caught(monkeypatch):
    losses = []
    for step in (take_step, last_micro_batch_logged):
        monkeypatch.setattr(module, "take_step", step)
        model = lab.build_model("gpt2-nano", dropout=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        series = lab.train(
            model,
            micro_batches(),
            lab.lm_loss_sum,
            optimizer,
            steps=1,
            grad_accum_steps=4,
            progress=False,
        )
        losses.append(series.loss[0])
    model = lab.build_model("gpt2-nano", dropout=0.0)
    window = micro_batches()[:4]
    with torch.no_grad():
        total = sum(lab.lm_loss_sum(model, b).item() for b in window) / sum(
            map(lab.count_targets, window)
        )
    assert losses[0] == pytest.approx(total, rel=1e-5)
    assert losses[1] != pytest.approx(total, rel=1e-2)
