from __future__ import annotations

from itertools import count

import pytest
import torch

from labutils.config.cards import CARDS
from labutils.config.reader import load_config
from labutils.prediction import roofline
from labutils.prediction.time import predict_time
from labutils.prediction.work import kind_of
from labutils.training import shapes

SMALL = {"model": "gpt2-nano", "seq_len": 64, "micro_batch_size": 2, "tokens_per_step": 128}
# a vocabulary and tokens that 128 divides, so that no wave is half empty
LARGE = {"seq_len": 1024, "micro_batch_size": 8, "tokens_per_step": 8192, "dropout": 0.0}


def test_the_rate_under_a_roof_is_the_lower_of_both_limits():
    roof = roofline.Roof({"float32": 100.0}, 10.0)
    assert roof.ridge("float32") == 10.0
    assert roof.rate(2.0, "float32") == 20.0
    assert roof.rate(1000.0, "float32") == 100.0


def test_a_datasheets_roof_is_higher_than_what_is_reached():
    peak, reached = roofline.roof_of("a100", datasheet=True), roofline.roof_of("a100")
    assert peak.flops_per_s["bfloat16"] == 312e12 and peak.bytes_per_s == 2039e9
    assert reached.flops_per_s["bfloat16"] < peak.flops_per_s["bfloat16"]
    assert reached.bytes_per_s < peak.bytes_per_s


def test_a_cpus_roof_is_measured_and_has_no_datasheet():
    roof = roofline.roof_of("cpu")
    assert roof.flops_per_s["float32"] > 1e8
    assert 1e8 < roof.bytes_per_s < 1e13
    with pytest.raises(ValueError, match="measured"):
        roofline.roof_of("cpu", datasheet=True)


@pytest.mark.parametrize(("precision", "card"), [("fp32", "t4"), ("bf16", "a100")])
def test_all_operations_together_are_the_ledgers_step(precision, card):
    config = load_config(precision, **SMALL, max_grad_norm=0.0)
    table = roofline.operations(config, card)
    kinds = roofline.by_kind(table)
    for kind, row in predict_time(config, card).operations.items():
        assert kinds.calls[kind] == row["operations"]
        assert kinds.GFLOP[kind] == pytest.approx(row["gflop"])
        assert kinds.GB[kind] == pytest.approx(row["gbyte"])
        assert kinds.ms[kind] == pytest.approx(row["ms"])
    assert len(kinds) == len(predict_time(config, card).operations)


def test_a_products_flop_and_bytes_are_those_of_its_shape():
    table = roofline.operations(load_config("bf16", **SMALL, pad_vocab=True), "a100")
    shaped = table[table["shape"].map(len) == 4]
    assert len(shaped) > 8
    with_bias = 1.1  # a bias is read as well
    for row in shaped.itertuples():
        assert pytest.approx(row.calls * shapes.flops(row.shape) / 1e9) == row.GFLOP
        moved = row.calls * shapes.n_bytes(row.shape, torch.bfloat16)
        assert moved * 0.999 <= row.GB * 1e9 <= moved * with_bias
        assert row.intensity == pytest.approx(row.GFLOP / row.GB)


def test_large_products_lie_under_the_arithmetics_roof_and_norms_under_the_memorys():
    table = roofline.operations(load_config("fp32", **LARGE, pad_vocab=True), "a100")
    limits = table.set_index("operation")["limit"]
    assert set(limits["product"]) == {roofline.ARITHMETIC}
    assert limits["norm or softmax"] == limits["elementwise"] == roofline.MEMORY
    few = {"seq_len": 2, "micro_batch_size": 1, "tokens_per_step": 2}
    thin = roofline.operations(load_config("bf16", **{**LARGE, **few}), "a100")
    heaviest = thin[thin["operation"] == "product"].iloc[0]
    assert heaviest["limit"] == roofline.MEMORY  # two tokens: a weight of 2 bytes serves 4 FLOP


def test_no_operation_is_predicted_faster_than_its_roof():
    table = roofline.operations(load_config("fp16", **LARGE), "t4")
    assert (table.ms >= 0.999 * table.floor_ms).all()


def test_tf32_has_a_roof_of_its_own():
    full = roofline.operations(load_config("fp32", **SMALL), "a100")
    tf32 = roofline.operations(load_config("tf32", **SMALL), "a100")
    assert set(full[full.GFLOP > 0]["products in"]) == {"float32"}
    assert "TF32" in set(tf32["products in"])
    assert tf32.floor_ms.sum() < full.floor_ms.sum()


def test_a_given_roof_is_taken():
    roof = roofline.Roof({"float32": 1.0}, 1e30)
    table = roofline.operations(load_config("fp32", **SMALL), CARDS["t4"], roof)
    assert set(table[table.GFLOP > 0].limit) == {roofline.ARITHMETIC}
    assert table.floor_ms.sum() == pytest.approx(1e3 * table.GFLOP.sum() * 1e9)


@pytest.mark.parametrize(
    ("card", "kind"), [("a100", "flash attention"), ("t4", "efficient attention")]
)
def test_fused_attention_is_a_kind_of_its_own(card, kind):
    found = roofline.by_kind(roofline.operations(load_config("fp16", **SMALL), card))
    assert found.GFLOP[kind] > 0
    assert kind_of("_scaled_dot_product_flash_attention_backward") == "flash attention"
    assert kind_of("_scaled_dot_product_efficient_attention") == "efficient attention"


def test_a_cpus_bandwidth_counts_each_number_read_and_written_once(monkeypatch):
    seconds = count()
    monkeypatch.setattr(roofline.time, "perf_counter", lambda: next(seconds))  # a pass takes 1 s
    monkeypatch.setattr(roofline.here, "matmul_rate", lambda *_, **__: 1e9)
    roof = roofline.roof_of(torch.device("cpu"))
    assert roof.bytes_per_s == 2 * 4 * roofline.NUMBERS
