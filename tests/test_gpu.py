"""What only a CUDA device shows. Skipped, visibly, without one: nothing here is mocked."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

import labutils as lab
from labutils import precision
from labutils.memory import cuda_memory, tensor_bytes
from labutils.records import load_record

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SMALL = {"model": "gpt2-nano", "seq_len": 64, "micro_batch_size": 4, "tokens_per_step": 512, "steps": 12}


@pytest.mark.parametrize("name", ["fp32", "tf32", "fp16", "bf16"])
def test_each_supported_precision_trains_on_cuda(name, runs):
    if not lab.support(name, CUDA).ok:
        pytest.skip(lab.support(name, CUDA).reason)
    record = lab.run_experiment(lab.load_config(name, **SMALL), where=CUDA, progress=False)
    assert record.outcome == "completed"
    assert record.series.loss[-1] < record.series.loss[0]
    assert record.memory.method.startswith("CUDA")
    assert record.memory.reserved_bytes >= record.memory.peak_bytes
    assert all(ms > 0 for ms in record.series.step_ms)
    assert record.environment["driver"] != "unknown"
    assert load_record(record.id) == record


def test_losses_of_all_precisions_agree(runs):
    usable = [p for p in ("fp32", "tf32", "fp16", "bf16") if lab.support(p, CUDA).ok]
    series = {
        p: lab.run_experiment(lab.load_config(p, **SMALL, dropout=0.0), where=CUDA, progress=False).series.loss
        for p in usable
    }
    for name, losses in series.items():
        # bfloat16 keeps 8 bits of mantissa: a relative 2⁻⁸ per product, averaged over many
        assert losses == pytest.approx(series["fp32"], rel=0.01), name


def test_tf32_rounds_products_and_is_put_back():
    if not lab.support("tf32", CUDA).ok:
        pytest.skip("no TF32")
    a = torch.randn(512, 512, device=CUDA)
    with precision.tf32(False):
        exact = a @ a
    with precision.tf32(True):
        rounded = a @ a
    error = (rounded - exact).abs().max().item()
    assert 1e-4 < error < 1.0
    with precision.tf32(False):
        assert torch.equal(a @ a, exact)


def test_measured_categories_are_exact_on_cuda():
    lab.free_memory()
    before = torch.cuda.memory_allocated()
    model = lab.build_model().to(CUDA)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    blocks, _ = lab.load_corpus().split(64)
    stream = lab.batches(blocks, 4, 0)
    lab.train(model, stream, lab.lm_loss_sum, optimizer, steps=2, progress=False)
    batch = {key: value.to(CUDA) for key, value in next(stream).items()}
    report = lab.measure_step(model, [batch], lab.lm_loss_sum, optimizer)
    weights = tensor_bytes(list(model.parameters()))
    assert report.phases["optimizer"]["gradients"] == weights
    assert report.phases["optimizer"]["optimizer state"] >= 2 * weights
    assert list(report.phases) == ["forward", "backward", "optimizer"]
    assert all(n >= 0 for phase in report.phases.values() for n in phase.values())
    assert report.peak_bytes + before >= torch.cuda.memory_allocated()


def test_free_memory_resets_the_peak_after_the_garbage_is_gone():
    lab.free_memory()
    start = torch.cuda.memory_allocated()
    cycle = [torch.empty(2**26, device=CUDA)]
    cycle.append(cycle)  # only the garbage collector finds it
    del cycle
    lab.free_memory()
    assert cuda_memory(CUDA)["peak"] <= start + 2**20


def test_no_host_synchronisation_per_step():
    """Pinned batches go over without a wait; targets are counted before they do; nothing is read back."""
    model = lab.build_model().to(CUDA)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    blocks, _ = lab.load_corpus().split(64)
    batches = list(islice(lab.batches(blocks, 4, 0), 6))

    def guarded():
        for i, batch in enumerate(batches):
            if i == 2:
                torch.cuda.set_sync_debug_mode("error")
            yield {key: value.pin_memory() for key, value in batch.items()}
        torch.cuda.set_sync_debug_mode("default")

    try:  # one step more than there are batches, so that the guard is lifted before the losses are read
        record = lab.train(model, guarded(), lab.lm_loss_sum, optimizer, steps=7, max_grad_norm=1.0, progress=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(record.series.loss) == 6


def test_out_of_memory_is_an_outcome_and_memory_comes_back(runs):
    lab.free_memory()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_per_process_memory_fraction(0.02)
    try:
        config = lab.load_config("fp32", micro_batch_size=64, tokens_per_step=32768, steps=2, lr_warmup_steps=0)
        record = lab.run_experiment(config, where=CUDA, progress=False)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert record.outcome == "out_of_memory"
    lab.free_memory()
    assert torch.cuda.memory_allocated() <= before + 2**20


def test_bf16_support_is_not_emulation():
    capability = torch.cuda.get_device_capability()
    assert lab.support("bf16", CUDA).ok == (capability >= (8, 0))


def test_peak_rate_names_its_source():
    rate, source = precision.peak_rate("fp16", CUDA)
    assert rate > 1e12
    assert "datasheet" in source or "measured here" in source
