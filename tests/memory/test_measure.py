from __future__ import annotations

import pytest
import torch
from torch import nn

import labutils as lab
from labutils.memory.ledger import (
    ACTIVATIONS,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARIES,
)
from labutils.memory.tensors import tensor_bytes
from labutils.techniques.precision import grad_scaler
from tests.helpers import CPU, without_onednn

WIDTH, ROWS = 64, 32


def chain(depth: int = 3) -> nn.Module:
    """Linear layers without bias: each keeps its input for backward, and nothing else."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)))


def step_report(model, batches, **options):
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(ROWS, WIDTH)
    model(x).sum().backward()
    optimizer.step()
    with without_onednn():
        return lab.measure_step(
            model, batches, lambda m, b: m(b).sum(), optimizer, count_targets=len, **options
        )


def test_standing_bytes_are_exact():
    model = chain()
    report = step_report(model, [torch.randn(ROWS, WIDTH)])
    weights = 4 * 3 * WIDTH**2
    for phase in ("forward", "backward", "optimizer"):
        assert report.phases[phase][PARAMETERS] == weights
        assert (
            report.phases[phase][OPTIMIZER] == 2 * weights + 3 * 4
        )  # two moments, and a step counter each
    assert report.phases["optimizer"][GRADIENTS] == weights
    assert report.phases["forward"][GRADIENTS] == 0
    assert set(report.categories) == {
        PARAMETERS,
        GRADIENTS,
        OPTIMIZER,
        ACTIVATIONS,
        LOGITS,
        TEMPORARIES,
    }


def test_forward_peak_is_what_arithmetic_says():
    report = step_report(chain(), [torch.randn(ROWS, WIDTH)])
    outputs = 3 * 4 * ROWS * WIDTH  # each layer's output; the batch itself existed before
    assert report.phases["forward"][ACTIVATIONS] == pytest.approx(outputs, abs=64)


def test_gradients_stay_alive_between_micro_batches():
    batch = torch.randn(ROWS, WIDTH)
    one, two = (step_report(chain(), [batch] * n) for n in (1, 2))
    assert two.phases["forward"][GRADIENTS] == 4 * 3 * WIDTH**2
    assert one.phases["forward"][GRADIENTS] == 0
    assert two.phases["forward"][ACTIVATIONS] == pytest.approx(
        one.phases["forward"][ACTIVATIONS], abs=64
    )


def test_timeline_reaches_each_phases_peak_in_order():
    report = step_report(chain(), [torch.randn(ROWS, WIDTH)] * 2)
    assert [phase for phase, _ in report.timeline] == ["forward", "loss", "backward"] * 2 + [
        "optimizer"
    ]
    positions = [point[0] for _, points in report.timeline for point in points]
    assert positions == sorted(positions)
    for phase, parts in report.phases.items():
        totals = [
            sum(point[1:]) for name, points in report.timeline if name == phase for point in points
        ]
        assert max(totals) == sum(parts.values())


def test_a_model_can_be_measured_again():
    """A hook left behind by the first measurement would begin phases of its own in the second."""
    model = chain()
    first, second = (step_report(model, [torch.randn(ROWS, WIDTH)]) for _ in range(2))
    assert [phase for phase, _ in second.timeline] == [phase for phase, _ in first.timeline]
    assert second.peak_bytes == first.peak_bytes


def test_autocast_keeps_parameters_gradients_and_moments_in_float32():
    reports = []
    for name in ("fp32", "bf16"):
        reports.append(step_report(chain(), [torch.randn(ROWS, WIDTH)], precision=name))
    for category in (PARAMETERS, GRADIENTS, OPTIMIZER):
        assert reports[0].phases["optimizer"][category] == reports[1].phases["optimizer"][category]


def test_measured_step_is_a_real_step():
    model = chain()
    before = model[0].weight.detach().clone()
    step_report(model, [torch.randn(ROWS, WIDTH)])
    assert not torch.equal(before, model[0].weight)
    assert all(p.grad is None for p in model.parameters())


def test_tied_weights_count_once():
    model = lab.build_model()
    assert tensor_bytes(list(model.parameters())) == 4 * sum(p.numel() for p in model.parameters())
    assert tensor_bytes([model.lm_head.weight, model.transformer.wte.weight]) == 4 * 2048 * 128


def test_measuring_says_nothing_on_stderr(capfd):
    step_report(chain(), [torch.randn(ROWS, WIDTH)])
    assert capfd.readouterr().err == ""


def test_measured_fp16_step_is_not_a_skipped_one():
    """Divided by too little, the scaled gradients overflow, the step is skipped, and its
    temporaries are missed.
    """
    model = lab.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    scaler = grad_scaler("fp16", CPU, init_scale=2.0**14)
    stream = lab.batches(lab.load_corpus().split(32)[0], 1, 0)
    lab.train(
        model,
        stream,
        lab.lm_loss_sum,
        optimizer,
        steps=1,
        precision="fp16",
        scaler=scaler,
        progress=False,
    )
    before = model.transformer.wpe.weight.detach().clone()
    options = {"precision": "fp16", "scaler": scaler, "max_grad_norm": 1.0}
    report = lab.measure_step(model, [next(stream)], lab.lm_loss_sum, optimizer, **options)
    assert not torch.equal(model.transformer.wpe.weight, before)
    assert scaler.get_scale() == 2.0**14
    assert (
        report.phases["optimizer"][TEMPORARIES] > 4e6
    )  # foreach AdamW makes a list of temporaries as large as the weights


def test_first_step_is_refused():
    model = chain()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="run an ordinary step first"):
        lab.measure_step(
            model, [torch.randn(2, WIDTH)], lambda m, b: m(b).sum(), optimizer, count_targets=len
        )


def test_buffers_count_as_parameters():
    model = nn.Sequential(chain(1), nn.BatchNorm1d(WIDTH))
    report = step_report(model, [torch.randn(ROWS, WIDTH)])
    buffers = 2 * 4 * WIDTH + 8
    assert report.phases["forward"][PARAMETERS] == 4 * WIDTH**2 + 2 * 4 * WIDTH + buffers


def test_memory_is_freed_in_the_right_order(monkeypatch):
    """Garbage first, then the cache, then the statistics.

    Shown on CUDA by a gpu test; here only the order.
    """
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("gc.collect", lambda: calls.append("collect"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: calls.append("reset_peak"))
    lab.free_memory()
    assert calls == ["collect", "empty_cache", "reset_peak"]
