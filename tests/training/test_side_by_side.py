"""Techniques alone and in pairs: which rows there are, and what each is compared with."""

from __future__ import annotations

import labutils as lab
from labutils.training import ladder
from labutils.training import side_by_side as sides
from tests.helpers import CPU

CHANGES = {
    "tanh": {"activation": "gelu_tanh"},
    "16 bits": {"precision": "16bit"},
    "at once": {"optimizer_in_backward": True, "max_grad_norm": 0},
}
SMALL = {"dropout": 0.0, "model": "gpt2-nano", "seq_len": 16, "micro_batch_size": 2}
SMALL |= {"tokens_per_step": 32, "steps": 7, "lr_warmup_steps": 2}


def test_each_alone_and_each_pair_but_those_that_stay_alone():
    assert list(sides.pairs(CHANGES)) == [
        *("as it is", "tanh", "16 bits", "at once"),
        *("tanh + 16 bits", "tanh + at once", "16 bits + at once"),
    ]
    fewer = sides.pairs(CHANGES, alone=["at once"])
    assert list(fewer)[4:] == ["tanh + 16 bits"]
    assert fewer["tanh + 16 bits"] == {"activation": "gelu_tanh", "precision": "16bit"}


def test_16_bits_are_those_that_are_fast_on_the_card():
    for card, precision in (("t4", "fp16"), ("a100", "bf16")):
        rows, _ = sides.plan("fp32", SMALL, sides.pairs(CHANGES), card)
        assert rows["16 bits"].config.precision == precision
        assert rows["tanh"].config.precision == "fp32"


def test_what_cannot_be_combined_is_told_and_is_no_row():
    rows, refused = sides.plan("fp32", SMALL, sides.pairs(CHANGES), "t4")
    assert list(refused) == ["16 bits + at once"] and "16 bits + at once" not in rows
    assert "loss scale" in refused["16 bits + at once"]
    assert not sides.plan("fp32", SMALL, sides.pairs(CHANGES), "a100")[1]


def test_rows_are_compared_with_the_start():
    rows, _ = sides.plan("fp32", SMALL, sides.pairs(CHANGES), "t4")
    assert rows["as it is"].above is None
    assert {row.above for name, row in rows.items() if name != "as it is"} == {"as it is"}


def test_rows_are_predicted_and_measured_alike():
    changes = {name: CHANGES[name] for name in ("tanh", "at once")}
    rows, _ = sides.plan("fp32", SMALL, sides.pairs(changes), CPU)
    sides.predict(rows, CPU)
    ladder.run(rows)
    for row in rows.values():
        assert abs(row.measured_mib / row.predicted_mib - 1) < 0.02
    assert lab.side_by_side is sides
