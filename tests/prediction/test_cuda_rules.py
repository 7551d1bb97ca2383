"""What CUDA kernels borrow from the allocator; the bytes were read off torch's CUDA allocator,
without a card.
"""

from __future__ import annotations

import pytest
import torch

from labutils.config.card import CARDS
from labutils.prediction.cuda_rules import aten, borrowed, outputs_in_order

HEADS, WIDTH = 12, 64


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def asked(operation, args: tuple, card: str = "h200") -> list[int]:
    return [rule(*numbers) for rule, numbers in borrowed(operation, args, CARDS[card].gpu)]


@pytest.mark.parametrize(
    ("rows", "columns", "n_bytes"),
    [
        (2048, 768, 12582912),
        (2048, 3072, 50331648),
        (4096, 768, 25165824),
        (4096, 3072, 100663296),
        (16384, 2304, 139198464),
        (16384, 3072, 138412032),
        (512, 768, 0),  # short columns are summed within a block
    ],
)
def test_a_bias_gradient_is_summed_through_a_buffer(rows, columns, n_bytes):
    assert asked(aten.sum.dim_IntList, (meta(rows, columns), [0], True)) == [n_bytes]


def test_other_sums_borrow_nothing():
    assert asked(aten.sum.dim_IntList, (meta(4096, 768), [1], True)) == []


@pytest.mark.parametrize(("n", "n_bytes"), [(2048, 0), (4096, 13839360), (16384, 55363584)])
def test_an_embeddings_gradient_is_summed_in_parts(n, n_bytes):
    ids = meta(1, n, dtype=torch.int64)
    assert asked(
        aten.embedding_dense_backward.default, (meta(1, n, 768), ids, 50257, -1, False)
    ) == [n_bytes]


def test_attentions_backward_sums_in_float32():
    q = meta(4, HEADS, 1024, WIDTH)
    efficient = aten._scaled_dot_product_efficient_attention_backward.default
    assert asked(efficient, (q, q)) == [12582912, 12595200]
    q16 = meta(16, HEADS, 1024, WIDTH, dtype=torch.bfloat16)
    flash = aten._scaled_dot_product_flash_attention_backward.default
    assert asked(flash, (q16, q16)) == [786432 + 50331648]


def test_the_backward_pass_of_a_softmax_makes_a_product_first():
    weights = meta(8, 4, 768, 768, dtype=torch.bfloat16)
    softmax = aten._softmax_backward_data.default
    assert asked(softmax, (weights, weights, -1, torch.bfloat16)) == [37748736]


def test_dropouts_mask_is_requested_before_its_result():
    result, mask = meta(4), meta(4, dtype=torch.bool)
    assert outputs_in_order(aten.native_dropout.default, [result, mask]) == [mask, result]
    assert outputs_in_order(aten.native_layer_norm.default, [result, mask]) == [result, mask]
