from __future__ import annotations

from itertools import count

import pytest
import torch

from labutils.config.reader import load_config
from labutils.prediction import roofline
from labutils.prediction.time import predict_time

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
        batch, rows, columns, inner = row.shape
        assert pytest.approx(row.calls * 2 * batch * rows * columns * inner / 1e9) == row.GFLOP
        numbers = batch * (rows * inner + inner * columns + rows * columns)
        moved = 2 * row.calls * numbers  # 16 bits each
        assert moved * 0.999 <= row.GB * 1e9 <= moved * with_bias
        assert row.intensity == pytest.approx(row.GFLOP / row.GB)


def test_no_operation_is_predicted_faster_than_its_roof():
    table = roofline.operations(load_config("fp16", **LARGE), "t4")
    assert (table.ms >= 0.999 * table.floor_ms).all()


def test_a_cpus_bandwidth_counts_each_number_read_and_written_once(monkeypatch):
    seconds = count()
    monkeypatch.setattr(roofline.time, "perf_counter", lambda: next(seconds))  # a pass takes 1 s
    monkeypatch.setattr(roofline.here, "matmul_rate", lambda *_, **__: 1e9)
    roof = roofline.roof_of(torch.device("cpu"))
    assert roof.bytes_per_s == 2 * 4 * roofline.NUMBERS
