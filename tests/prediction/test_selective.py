from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

import labutils as lab
from labutils.prediction.selective import WithPolicy, half_of_squares, policy_cost

B, T, H = 2, 64, 128
LAST = (4 * H, H)  # the weights of a block's last matrix multiplication


@pytest.fixture(scope="module")
def block() -> torch.nn.Module:
    return lab.build_model("gpt2-nano", dropout=0.0, activation="gelu_tanh").transformer.h[0]


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.randn(B, T, H)


def keeping(chosen: Callable[[str, tuple], bool]) -> Callable:
    def policy(ctx, op, *args, **kwargs):
        is_kept = chosen(str(op), args)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


nothing = keeping(lambda op, args: False)
products = keeping(lambda op, args: "mm." in op or "scaled_dot_product" in op)
last = keeping(lambda op, args: "addmm." in op and tuple(args[2].shape) == LAST)


def test_nothing_kept_is_the_input_and_all_but_the_last_product_again(block, x):
    kept, again = policy_cost(block, x, nothing)
    forward = 2 * (3 + 1 + 4) * H * H + 4 * T * H  # FLOPs of a token, without the last product
    step = 3 * 2 * 12 * H * H + 4 * T * H * 3.5  # attention's backward: five products for two
    assert kept == pytest.approx(1, abs=0.01)
    assert again == pytest.approx(forward / step, rel=0.01)


def test_without_a_policy_all_is_kept_and_nothing_repeated(block, x):
    kept, again = policy_cost(block, x)
    assert 16 <= kept < 16.1 and again == 0


def test_products_and_attention_kept_leave_none_of_their_flops_to_repeat(block, x):
    kept, again = policy_cost(block, x, products)
    assert 11 <= kept < 11.1  # the input, 3 + 1 + 4 + 1 of products, 1 of attention
    assert again == pytest.approx(0, abs=1e-9)


def test_to_keep_the_last_product_costs_bytes_and_saves_nothing(block, x):
    without, with_it = policy_cost(block, x, nothing), policy_cost(block, x, last)
    assert with_it[0] - without[0] == pytest.approx(1, abs=0.01)
    assert with_it[1] == without[1]


@pytest.mark.parametrize("policy", [nothing, products, last])
def test_a_policy_leaves_the_gradients_unchanged(block, x, policy):
    gradients = []
    for module in (WithPolicy(block), WithPolicy(block, policy)):
        module.zero_grad()
        half_of_squares(module, x).backward()
        gradients.append(lab.flat_gradient(module))
    assert torch.equal(*gradients)
