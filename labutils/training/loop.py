"""The one training loop: any module, any loss, every precision."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from labutils.files import commit, new_id
from labutils.machine import here
from labutils.memory.errors import is_out_of_memory, short_message
from labutils.techniques import precision
from labutils.techniques.loss import LossFn, count_targets
from labutils.techniques.optimizers import StepInBackward
from labutils.training import distributed
from labutils.training.code_version import code_version
from labutils.training.records import RunRecord
from labutils.training.saved_state import Saver
from labutils.training.step_log import StepLog

NON_FINITE_LIMIT = 5  # losses in a row that are inf or NaN before a run is stopped


def train(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFn,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    grad_accum_steps: int = 1,
    count_targets: Callable[[Any], int] = count_targets,
    precision_name: str = "fp32",
    scaler: torch.amp.GradScaler | None = None,
    max_grad_norm: float = 0.0,
    learning_rate_at: Callable[[int], float] | None = None,
    held_out: Sequence[Any] = (),
    eval_every: int = 0,
    saver: Saver | None = None,
    name: str = "run",
    progress: bool = True,
) -> RunRecord:
    """Train `model` for `steps` optimizer steps on its own device and return the record, unsaved.

    `loss_fn(model, micro_batch)` returns a loss *summed* over `count_targets(micro_batch)` targets: the sum over a
    step's micro-batches is divided once by their total, so the gradient is the full batch's
    whatever their lengths.
    `batches` yields micro-batches (tensors, or dicts of them), which are moved to the device here.
    Under torchrun each process gets its own micro-batches, and the gradient is that of all of them
    together.
    `learning_rate_at(step)` sets every parameter group's rate; without it the optimizer's own rates stand.
    A `saver` keeps the run's state on disk, and skips the steps that are in the state it has found.

    Ctrl-C, several non-finite losses in a row, and running out of memory after the first step, end
    the run early: the record has the steps so far, `outcome` says how it ended. Other exceptions
    are not caught. Raises, before any work, PrecisionUnsupported, and ValueError if an
    `optimizers.StepInBackward` meets what needs all gradients at once.
    """
    where = next(model.parameters()).device
    here.card(where).require(precision_name)
    scaler = scaler or precision.grad_scaler(precision_name, where)
    needs_all_gradients = (
        grad_accum_steps > 1 or max_grad_norm or scaler.is_enabled() or distributed.world_size() > 1
    )
    if isinstance(optimizer, StepInBackward) and needs_all_gradients:
        raise ValueError(
            "a step inside backward allows no accumulation, clipping, loss scale or second process"
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    log = StepLog(where)
    outcome, reason, targets_per_step = "completed", "", 0
    one = torch.ones((), device=where)
    replicas = distributed.Replicas(model, loss_fn)
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler, "log": log}
    done = saver.restore(parts) if saver else 0
    stream = itertools.islice(batches, done * grad_accum_steps, None)
    how = {
        "file": sys.stdout,
        "mininterval": 1,
        "disable": not progress,
        "unit": "step",
        "dynamic_ncols": False,
    }
    bar = tqdm(range(done, steps), desc=name, initial=done, total=steps, **how)
    model.train()
    with precision.tf32(precision_name == "tf32"), bar:
        try:
            for step in bar:
                log.start()
                if learning_rate_at:
                    for group in optimizer.param_groups:
                        group["lr"] = learning_rate_at(step)
                micro_batches = list(itertools.islice(stream, grad_accum_steps))
                if not micro_batches:
                    reason = f"the batches ended after {step} of {steps} steps"
                    break
                n_targets = replicas.total(sum(map(count_targets, micro_batches)))
                targets_per_step = targets_per_step or int(n_targets)
                step_loss = torch.zeros((), device=where)
                for i, micro_batch in enumerate(micro_batches, start=1):
                    with replicas.accumulating(is_last=i == len(micro_batches)):
                        with precision.autocast(precision_name, where):
                            loss = replicas.loss(to_device(micro_batch, where)) / n_targets
                        scaler.scale(
                            loss * replicas.size
                        ).backward()  # the exchange takes the processes' mean
                    step_loss += loss.detach()
                    # it keeps the graph, and with it the logits, alive into the next forward pass
                    del loss
                step_loss = replicas.total(step_loss)
                scale = scaler.scale(one) if scaler.is_enabled() else one
                scaler.unscale_(optimizer)
                grad_norm = (
                    nn.utils.clip_grad_norm_(parameters, max_grad_norm)
                    if max_grad_norm
                    else one * math.nan
                )
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                log.stop(step_loss, grad_norm, scale, optimizer.param_groups[0]["lr"])
                # several processes must read, and so stop, at the same step
                to_save = saver is not None and saver.due(step + 1)
                if (
                    to_save
                    or (log.due() if replicas.size == 1 else step % 10 == 9)
                    or step + 1 == steps
                ):
                    bar.set_postfix_str(f"loss {log.read():.3f}", refresh=False)
                    if log.non_finite_in_a_row >= NON_FINITE_LIMIT:
                        outcome, reason = "non_finite", _diagnosis(log, precision_name)
                        break
                if held_out and (
                    step + 1 == steps or (eval_every and (step + 1) % eval_every == 0)
                ):
                    loss = evaluate(model, held_out, loss_fn, count_targets, precision_name)
                    log.held_out.append((step + 1, loss))
                if to_save and not log.non_finite_in_a_row:
                    saver.save(parts, step + 1)
        except KeyboardInterrupt:
            outcome, reason = (
                "interrupted",
                f"stopped (Ctrl-C or SIGTERM) after {log.n_complete} of {steps} steps",
            )
            optimizer.zero_grad(set_to_none=True)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or not log.n_complete or replicas.size > 1:
                raise  # nothing to keep, or other processes would wait for this one
            outcome, reason = (
                "out_of_memory",
                f"after {log.n_complete} of {steps} steps: {short_message(error)}",
            )
            optimizer.zero_grad(set_to_none=True)
        log.read()
    run_id, created = new_id()
    return RunRecord(
        id=run_id,
        created=created,
        name=name,
        environment={**here.environment(where), "commit": commit()},
        code=code_version(),
        outcome=outcome,
        reason=reason,
        steps_planned=steps,
        tokens_per_step=targets_per_step,
        series=log.series(final_scale=float(scaler.get_scale()) if scaler.is_enabled() else 1.0),
        held_out=log.held_out,
    )


def to_device(batch: Any, where: torch.device) -> Any:
    """Return a batch with its tensors (itself, or a dict's values) on a device."""
    if isinstance(batch, dict):
        return {key: to_device(value, where) for key, value in batch.items()}
    if not isinstance(batch, torch.Tensor):
        return batch
    if where.type == "cuda" and not batch.is_cuda:
        batch = batch.pin_memory()  # from pageable memory a copy cannot run beside the host
    return batch.to(where, non_blocking=True)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFn,
    count_targets: Callable[[Any], int] = count_targets,
    precision_name: str = "fp32",
) -> float:
    """Return the mean loss per target over some batches, without dropout.

    Leaves the model in training mode.
    """
    where = next(model.parameters()).device
    model.eval()
    total = torch.zeros(
        (), device=where, dtype=torch.float64 if where.type == "cpu" else torch.float32
    )
    n_targets = 0
    try:
        for batch in batches:
            with precision.autocast(precision_name, where):
                total += loss_fn(model, to_device(batch, where))
            n_targets += count_targets(batch)
    finally:
        model.train()
    return float(total) / max(n_targets, 1)


def _diagnosis(log: StepLog, precision_name: str) -> str:
    first = len(log.rows) - log.non_finite_in_a_row + 1
    text = f"the loss has been inf or NaN since step {first}: the forward pass overflows or the weights are damaged. "
    if precision_name == "fp16":
        text += (
            "No loss scale can mend that. Try precision: bf16 or fp32; if those fail too, a lower "
        )
    else:
        text += "Try a lower "
    return text + "learning_rate, max_grad_norm: 1.0, or more lr_warmup_steps"
