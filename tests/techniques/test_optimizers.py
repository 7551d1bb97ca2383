import math
from functools import partial

import pytest
import torch
from torch import nn

import labutils as lab
from labutils.memory.tensors import optimizer_tensors, tensor_bytes
from labutils.techniques.optimizer_in_backward import OptimizerInBackward
from labutils.techniques.optimizers import (
    BETAS,
    BLOCK,
    LowBitAdamW,
    build_optimizer,
    dequantize,
    quantize,
    round_stochastically,
)
from labutils.training.train import train
from tests.helpers import count_rows, regression_batches, squared_error_sum, two_layers

OPTIONS = {"count_targets": count_rows, "progress": False}


def test_stochastic_rounding_is_right_on_average_and_never_off_by_more_than_a_step():
    x = torch.full((100_000,), 1 + 0.3 / 128)  # bfloat16 has 1 and 1 + 1/128
    rounded = round_stochastically(x).float()
    assert set(rounded.unique().tolist()) == {1.0, 1 + 1 / 128}
    standard_error = (1 / 128) * 0.5 / math.sqrt(len(x))
    assert rounded.mean().item() == pytest.approx(x[0].item(), abs=5 * standard_error)
    exact = torch.tensor([0.0, -2.5, 1.0, torch.inf, -torch.inf])
    assert torch.equal(round_stochastically(exact).float(), exact)
    # CUDA's NaN is the second
    patterns = torch.tensor([0x7FC00000, 0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32)
    assert round_stochastically(patterns.view(torch.float32).repeat(1000)).isnan().all()


def quantized(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale = torch.zeros(x.shape, dtype=dtype), torch.zeros(len(x), 1)
    quantize(x.clone(), codes, scale)
    return codes, scale


@pytest.mark.parametrize(("dtype", "root"), [(torch.int8, 0.5), (torch.uint8, 0.25)])
def test_codes_come_back_within_one_code_and_right_on_average(dtype, root):
    x = torch.randn(5, BLOCK) * torch.logspace(-3, 0, BLOCK)
    x[0, 0] = 0
    if dtype == torch.uint8:
        x = x.square()
    codes, scale = quantized(x, dtype)
    before = (x.abs() / scale) ** root
    after = (dequantize(codes, scale).abs() / scale) ** root
    largest = torch.iinfo(dtype).max
    # the largest has the largest code
    assert before.amax(dim=1).tolist() == pytest.approx([largest] * 5, rel=1e-5)
    assert (before - after).abs().max() < 1.001
    assert (codes.sign() * x.sign() >= 0).all()
    # the second moment is divided by: its codes are never 0
    assert codes[0, 0] == (dtype == torch.uint8)
    equal = torch.full((100, BLOCK), (3.3 / largest) ** (1 / root))
    equal[:, 0] = 1  # the scale
    assert quantized(equal, dtype)[0][:, 1:].float().mean().item() == pytest.approx(3.3, abs=0.02)


def test_a_block_of_zeros_stays_next_to_zero():
    assert 0 < dequantize(*quantized(torch.zeros(1, BLOCK), torch.uint8)).max() < 1e-37


@pytest.mark.parametrize(("bits", "tolerance"), [(16, 0.02), (8, 0.1)])
def test_small_moments_take_nearly_torchs_steps(bits, tolerance):
    """16 bits err by 1/256 in a moment, 8 bits by a few per cent, more where numbers are small
    beside their block's.
    """
    moved = []
    for make in (torch.optim.AdamW, lambda params, **how: LowBitAdamW(params, bits=bits, **how)):
        torch.manual_seed(0)
        model = nn.Linear(50, 40)
        optimizer = make(model.parameters(), lr=1e-3, weight_decay=0.1)
        start = model.weight.detach().clone()
        for i in range(20):
            torch.manual_seed(i)
            optimizer.zero_grad()
            model(torch.randn(16, 50)).square().mean().backward()
            optimizer.step()
        moved.append(model.weight.detach() - start)
    assert (moved[0] - moved[1]).norm() / moved[0].norm() < tolerance


@pytest.mark.parametrize(("bits", "n_bytes"), [(8, 2 * (1 + 4 / BLOCK)), (16, 4)])
def test_bfloat16_weights_move_by_updates_too_small_to_be_rounded_to(bits, n_bytes):
    """1e-4 a step is a fifth of what rounding to nearest would notice at 1; in the mean of many
    weights it must add up. The second moment, of beta 0.999, changes by less than its own rounding.
    """
    p = nn.Parameter(torch.ones(80 * BLOCK, dtype=torch.bfloat16))
    optimizer = LowBitAdamW([p], lr=1e-4, betas=(0.9, 0.999), weight_decay=0.0, bits=bits)
    for _ in range(50):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert p.float().mean().item() == pytest.approx(1 - 50 * 1e-4, abs=5e-4)
    assert tensor_bytes(optimizer_tensors(optimizer)) == n_bytes * p.numel()


def test_a_step_inside_backward_gives_the_same_weights_and_frees_every_gradient():
    """At a learning rate that changes: it must reach the optimizer of every parameter."""
    weights, alive = [], []
    for inside in (False, True):
        model = two_layers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        if inside:
            optimizer = OptimizerInBackward(optimizer)

            def count(_, model=model):
                alive.append(sum(p.grad is not None for p in model.parameters()))

            for p in model.parameters():
                p.register_post_accumulate_grad_hook(count)
        rate = {"learning_rate_at": lambda step: 0.01 * step}
        batches = regression_batches(4)
        series = train(model, batches, squared_error_sum, optimizer, steps=4, **OPTIONS, **rate)
        weights.append([p.detach().clone() for p in model.parameters()])
        weights[-1].append(torch.tensor(series.loss))
    assert all(map(torch.equal, *weights))
    assert max(alive) == 0


def test_an_optimizer_inside_backward_that_is_gone_updates_nothing():
    """As with any other optimizer: gradients stay. Its model is free, too."""
    model = two_layers()
    optimizer = OptimizerInBackward(torch.optim.SGD(model.parameters(), lr=1.0))
    before = [p.detach().clone() for p in model.parameters()]
    del optimizer
    lab.free_memory()
    squared_error_sum(model, regression_batches(1)[0]).backward()
    assert all(map(torch.equal, before, model.parameters()))
    assert all(p.grad is not None for p in model.parameters())


def test_muon_moves_what_lies_in_blocks_and_adamw_the_rest_also_from_a_loaded_state():
    """Beside torch's two optimizers, each of its own parameters."""

    def gradients(model):
        for i, p in enumerate(model.parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i))

    ours, theirs = lab.build_model(), lab.build_model()
    theirs.load_state_dict(ours.state_dict())
    build = partial(build_optimizer, optimizer="muon", implementation="fused", weight_decay=0.1)
    optimizer = build(ours, learning_rate=0.01)
    inner = [p for name, p in theirs.named_parameters() if ".h." in name and p.dim() == 2]
    embeddings = [theirs.transformer.wte.weight, theirs.transformer.wpe.weight]
    vectors = [p for p in theirs.parameters() if p.dim() == 1]
    rest = [{"params": embeddings}, {"params": vectors, "weight_decay": 0.0}]
    muon = torch.optim.Muon(inner, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=0.01, betas=BETAS, weight_decay=0.1, fused=True)
    for _ in range(2):
        for model, optimizers in ((ours, [optimizer]), (theirs, [muon, adamw])):
            gradients(model)
            for one in optimizers:
                one.step()
        loaded = build(ours, learning_rate=1.0)
        loaded.load_state_dict(optimizer.state_dict())
        optimizer = loaded
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q)
    n_inner = sum(p.numel() for p in inner)
    n_rest = sum(p.numel() for p in ours.parameters()) - n_inner
    n_bytes = tensor_bytes(optimizer_tensors(optimizer))
    assert n_bytes == pytest.approx(4 * n_inner + 8 * n_rest, abs=4 * 200)  # and a step count each
