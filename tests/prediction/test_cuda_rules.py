"""What CUDA kernels borrow from the allocator; the bytes were read off torch's CUDA allocator,
without a card.
"""

import pytest
import torch

from labutils.config.card import CARDS
from labutils.prediction.cuda_rules import aten, borrowed, outputs_in_order


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def column_sums(rows: int, columns: int) -> tuple:
    return aten.sum.dim_IntList, (meta(rows, columns), [0], True)


def embedding(n: int) -> tuple:
    ids = meta(1, n, dtype=torch.int64)
    return aten.embedding_dense_backward.default, (meta(1, n, 768), ids, 50257, -1, False)


EFFICIENT = aten._scaled_dot_product_efficient_attention_backward.default
FLASH = aten._scaled_dot_product_flash_attention_backward.default
Q, Q16 = meta(4, 12, 1024, 64), meta(16, 12, 1024, 64, dtype=torch.bfloat16)
WEIGHTS = meta(8, 4, 768, 768, dtype=torch.bfloat16)
ASKED = [
    (column_sums(2048, 768), [12582912]),
    (column_sums(4096, 768), [25165824]),
    (column_sums(16384, 2304), [139198464]),
    (column_sums(512, 768), [0]),  # short columns are summed within a block
    ((aten.sum.dim_IntList, (meta(4096, 768), [1], True)), []),
    (embedding(2048), [0]),
    (embedding(4096), [13839360]),
    ((EFFICIENT, (Q, Q, Q)), [12582912, 12595200]),
    # of 12 heads four share keys and values, whose gradients come for each
    ((EFFICIENT, (Q, Q, Q[:, :3])), [12582912, 12595200 + 2 * 12582912]),
    ((FLASH, (Q16, Q16, Q16)), [786432 + 50331648]),
    ((FLASH, (Q16, Q16, Q16[:, :3])), [786432 + 50331648 + 2 * 25165824]),
    ((aten._softmax_backward_data.default, (WEIGHTS, WEIGHTS, -1, torch.bfloat16)), [37748736]),
]


@pytest.mark.parametrize(("call", "n_bytes"), ASKED)
def test_kernels_borrow_what_was_read_off_the_allocator(call, n_bytes):
    assert [rule(*numbers) for rule, numbers in borrowed(*call, CARDS["h200"].gpu)] == n_bytes


def test_dropouts_mask_is_requested_before_its_result():
    result, mask = meta(4), meta(4, dtype=torch.bool)
    assert outputs_in_order(aten.native_dropout.default, [result, mask]) == [mask, result]
    assert outputs_in_order(aten.native_layer_norm.default, [result, mask]) == [result, mask]
