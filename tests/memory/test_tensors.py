from __future__ import annotations

import pytest
import torch

from labutils.memory.tensors import saved_names


def test_a_storage_is_named_by_all_who_read_it():
    x = torch.randn(4, 3, requires_grad=True)
    hidden = torch.tanh(x)
    names = saved_names((hidden * hidden.exp()).sum())
    assert names[hidden.untyped_storage().data_ptr()].count(":") == 2  # Tanh and Mul
    assert "Tanh: result" in names[hidden.untyped_storage().data_ptr()]
    assert x.untyped_storage().data_ptr() not in names


def test_views_of_one_storage_share_a_line():
    both = torch.randn(2, 4, 4, requires_grad=True) * 1
    first, second = both.unbind()
    assert saved_names(first @ second)[both.untyped_storage().data_ptr()] == "Mm: mat2, self"


def test_an_output_without_graph_is_refused():
    with pytest.raises(ValueError, match="no graph"):
        saved_names(torch.ones(2))
