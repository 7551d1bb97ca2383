"""In every precision, windows of padded, unequal micro-batches, the last one short, equal full
batches.

The gradients are compared, not the losses: at the first step every bug leaves the loss alone.
"""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch

import labutils as lab
from labutils.techniques.precision import grad_scaler
from labutils.training import loop as training
from labutils.training.loop import train
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
    batches, precision: str, grad_accum_steps: int, train=lab.train, clip: float = CLIP
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
    train(
        model,
        batches,
        lab.lm_loss_sum,
        optimizer,
        steps=2,
        grad_accum_steps=grad_accum_steps,
        precision_name=precision,
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
    series = []
    for batches, accumulate in ((full_batches(), 1), (micro_batches(), 4)):
        model = lab.build_model("gpt2-nano", dropout=0.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        record = lab.train(
            model,
            batches,
            lab.lm_loss_sum,
            optimizer,
            steps=2,
            grad_accum_steps=accumulate,
            precision_name=precision,
            scaler=grad_scaler(precision, CPU, init_scale=2.0**10),
            progress=False,
        )
        series.append(record.series.loss)
    assert len(series[1]) == 2
    assert series[1] == pytest.approx(series[0], rel=TOLERANCE[precision])


def broken_train(*changes: tuple[str, str]):
    """Return the training loop with source lines replaced."""
    source = inspect.getsource(train)
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    namespace = dict(vars(training))
    exec(
        compile(f"from __future__ import annotations\n{source}", "broken train", "exec"), namespace
    )
    return namespace["train"]


LOSS = "replicas.loss(to_device(micro_batch, where))"
DIVIDE = f"{LOSS} / n_targets"
PASS, MICRO, WINDOW = (
    24 * " ",
    20 * " ",
    16 * " ",
)  # indentation: in a pass, after it, and per window
BACKWARD = f"{PASS}scaler.scale(loss * replicas.size).backward()  # the exchange takes the processes' mean\n"
COLLECT = "list(itertools.islice(stream, grad_accum_steps))"
UNSCALE, STEP, UPDATE = (
    f"{WINDOW}scaler.{call}\n" for call in ("unscale_(optimizer)", "step(optimizer)", "update()")
)
CLEAR = f"{WINDOW}optimizer.zero_grad(set_to_none=True)\n{WINDOW}log.stop"
BUGS = {
    "no division": [(DIVIDE, f"{LOSS} / count_targets(micro_batch)")],
    "mean of means": [(DIVIDE, f"{LOSS} / count_targets(micro_batch) / len(micro_batches)")],
    "short window divided as if full": [
        (DIVIDE, f"{DIVIDE} * len(micro_batches) / grad_accum_steps")
    ],
    "unshifted labels counted": [
        (DIVIDE, f"{LOSS} / sum(int((b['labels'] != -100).sum()) for b in micro_batches)")
    ],
    "windows of i % n == 0": [
        (COLLECT, "list(itertools.islice(stream, grad_accum_steps if step else 1))")
    ],
    "last window dropped": [("if not micro_batches:", "if len(micro_batches) < grad_accum_steps:")],
    "gradients not cleared": [(CLEAR, f"{WINDOW}log.stop")],
    "cleared per micro-batch": [(BACKWARD, f"{PASS}optimizer.zero_grad()\n{BACKWARD}")],
    "clipped per micro-batch": [
        (BACKWARD, f"{BACKWARD}{MICRO}nn.utils.clip_grad_norm_(parameters, max_grad_norm)\n"),
    ],
}
HIDDEN_BY_CLIPPING = (
    "no division",
    "short window divided as if full",
    "unshifted labels counted",
)  # wrong length only


@pytest.mark.parametrize("bug", BUGS)
def test_each_classic_bug_in_the_loop_is_caught(bug):
    """Far outside the tolerance, not just outside.

    Without clipping where that would hide a wrong length.
    """
    clip = 1e9 if bug in HIDDEN_BY_CLIPPING else CLIP
    right = gradients(full_batches(), "fp32", 1, clip=clip)
    found = gradients(micro_batches(), "fp32", 4, broken_train(*BUGS[bug]), clip)
    assert max(errors(found, right)) > 1000 * TOLERANCE["fp32"]


FP16_BUGS = {
    "unscaled per micro-batch": [
        (BACKWARD, f"{BACKWARD}{MICRO}scaler.unscale_(optimizer)\n{MICRO}scaler.update()\n"),
        (f"scaler.scale(one) if scaler.is_enabled() else one\n{UNSCALE}", "one\n"),
        (f"{STEP}{UPDATE}", f"{WINDOW}optimizer.step()\n"),
    ],
    "clipped before unscaling": [(UNSCALE, ""), (STEP, f"{UNSCALE}{STEP}")],
}


@pytest.mark.parametrize("bug", FP16_BUGS)
def test_each_wrong_order_of_scaler_calls_is_caught(bug, expected):
    found = gradients(micro_batches(), "fp16", 4, broken_train(*FP16_BUGS[bug]))
    assert max(errors(found, expected["fp16"])) > 20 * TOLERANCE["fp16"]


def test_logging_the_last_micro_batch_is_caught():
    losses = []
    for train_or_broken in (
        lab.train,
        broken_train(("step_loss += loss.detach()", "step_loss = loss.detach()")),
    ):
        model = lab.build_model("gpt2-nano", dropout=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        record = train_or_broken(
            model,
            micro_batches(),
            lab.lm_loss_sum,
            optimizer,
            steps=1,
            grad_accum_steps=4,
            progress=False,
        )
        losses.append(record.series.loss[0])
    model = lab.build_model("gpt2-nano", dropout=0.0)
    window = micro_batches()[:4]
    with torch.no_grad():
        total = sum(lab.lm_loss_sum(model, b).item() for b in window) / sum(
            map(lab.count_targets, window)
        )
    assert losses[0] == pytest.approx(total, rel=1e-5)
    assert losses[1] != pytest.approx(total, rel=1e-2)
