import pytest
import torch
from torch import nn

import labutils as lab
from labutils.memory.ledger import ACTIVATIONS, GRADIENTS, OPTIMIZER, PARAMETERS, TEMPORARIES
from labutils.techniques.precision import grad_scaler
from tests.helpers import CPU, without_onednn

WIDTH, ROWS, DEPTH = 64, 32, 3
WEIGHTS = 4 * DEPTH * WIDTH**2  # bytes
BATCH = torch.ones(ROWS, WIDTH)


def chain() -> nn.Module:
    """Linear layers without bias: each keeps its input for backward, and nothing else."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))


def measured(model: nn.Module, n_micro_batches: int = 1):
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(BATCH).sum().backward()
    optimizer.step()

    def loss_fn(model, batch):
        return model(batch).sum()

    batches = [BATCH] * n_micro_batches
    with without_onednn():
        return lab.measure_step(model, batches, loss_fn, optimizer, count_targets=len)


def test_standing_bytes_are_exact_and_the_forward_peak_is_what_arithmetic_says(capfd):
    model = chain()
    before = model[0].weight.detach().clone()
    ledger = measured(model)
    for phase in ("forward", "backward", "optimizer"):
        assert ledger.phases[phase][PARAMETERS] == WEIGHTS
        # two moments, and a step counter each
        assert ledger.phases[phase][OPTIMIZER] == 2 * WEIGHTS + 4 * DEPTH
    assert ledger.phases["optimizer"][GRADIENTS] == WEIGHTS
    # all else is free again when the fused update begins
    assert sum(ledger.phases["optimizer"].values()) == pytest.approx(4 * WEIGHTS, abs=64)
    assert ledger.phases["forward"][GRADIENTS] == 0
    outputs = DEPTH * BATCH.nbytes  # each layer's output; the batch itself existed before
    assert ledger.phases["forward"][ACTIVATIONS] == pytest.approx(outputs, abs=64)
    assert not torch.equal(before, model[0].weight)  # it is a real step
    assert all(p.grad is None for p in model.parameters())
    assert capfd.readouterr().err == ""


def test_gradients_stay_alive_between_micro_batches_and_a_second_measurement_finds_the_same():
    """A hook that the first has left behind would begin phases of its own."""
    model = chain()
    one, two, again = measured(chain()), measured(model, 2), measured(model, 2)
    assert two.phases["forward"][GRADIENTS] == WEIGHTS
    activations = one.phases["forward"][ACTIVATIONS]
    assert two.phases["forward"][ACTIVATIONS] == pytest.approx(activations, abs=64)
    assert again == two
    assert list(again.phases) == ["forward", "loss", "backward", "optimizer"]


def test_measured_fp16_step_is_not_a_skipped_one():
    """Divided by too little, the scaled gradients overflow, the step is skipped, and its
    temporaries are missed.
    """
    model = lab.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    ids = lab.sequences(32)[:1]
    step = [{"input_ids": ids, "labels": ids}], lab.lm_loss_sum, optimizer
    options = {"precision": "fp16", "scaler": grad_scaler("fp16", CPU, init_scale=2.0**14)}
    lab.train(model, *step, steps=1, progress=False, **options)
    before = model.transformer.wpe.weight.detach().clone()
    ledger = lab.measure_step(model, *step, max_grad_norm=1.0, **options)
    assert not torch.equal(model.transformer.wpe.weight, before)
    assert options["scaler"].get_scale() == 2.0**14
    # foreach AdamW makes a list of temporaries as large as the weights
    assert ledger.phases["optimizer"][TEMPORARIES] > 4e6
    # the output layer's weight is the embedding: its bytes count once
    n_parameters = sum(p.numel() for p in model.parameters())
    assert ledger.categories[PARAMETERS] == 4 * n_parameters


def test_first_step_is_refused():
    model = chain()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="run an ordinary step first"):
        lab.measure_step(model, [BATCH], lambda m, b: m(b).sum(), optimizer, count_targets=len)


def test_buffers_count_as_parameters():
    ledger = measured(nn.Sequential(chain(), nn.BatchNorm1d(WIDTH)))
    norm = 4 * 4 * WIDTH + 8  # two parameters, two buffers, and a counter
    assert ledger.phases["forward"][PARAMETERS] == WEIGHTS + norm


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
