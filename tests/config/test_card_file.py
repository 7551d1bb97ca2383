"""A reader's own card, from its datasheet."""

import pytest

import labutils as lab
from labutils.cli import main
from labutils.config.card import CARDS, Speed
from labutils.config.reader import load_card
from labutils.config.schema import ConfigError
from labutils.prediction.time import predict_time

TEXT = """\
name: rtx3070
memory_gib: 7.6
compute_capability: 8.6
multiprocessors: 46
bandwidth_gb_s: 448
float32_tflops: 20.3
float16_tflops: 40.6
"""


@pytest.fixture
def write(tmp_path):
    def _write(before="", after=""):
        path = tmp_path / "card.yaml"
        path.write_text(TEXT.replace(before, after))
        return path

    return _write


def test_a_card_is_read_and_has_a_wide_band(write):
    card = load_card(write("448", "448\nelements_share: 0.5"))
    assert (card.speed.elements_share, card.speed.rows_share) == (0.5, Speed.rows_share)
    assert (card.gpu.capability, card.memory_gib, card.speed.gb_per_s) == ((8, 6), 7.6, 448)
    assert not card.has_bf16  # the file gives no rate for it
    ledger = predict_time(lab.load_config("fp16"), card)
    assert ledger.high_ms == pytest.approx(1.6 * ledger.step_ms)
    assert "uncalibrated" in ledger.why_band


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("448", "-3", "card.yaml:5: `bandwidth_gb_s`: expected a number such as 8.9, got '-3'"),
        ("memory_gib: 7.6\n", "", "card.yaml: missing: `memory_gib`"),
        ("float16_tflops", "float16_tflop", "unknown key `float16_tflop`. Did you mean `float16_"),
    ],
)
def test_a_mistake_is_reported_where_it_stands(write, before, after, expected):
    with pytest.raises(ConfigError) as caught:
        load_card(write(before, after))
    assert expected in str(caught.value)


def test_the_command_takes_a_card_or_a_device(write, capsys):
    assert main(["predict", "fp16", "--card", str(write())]) == 0
    assert "predicted for rtx3070" in capsys.readouterr().out
    assert main(["predict", "fp16", "--device", "t4", "--card", str(write())]) == 2
    assert "exclude each other" in capsys.readouterr().err


@pytest.mark.parametrize("card", CARDS.values(), ids=list(CARDS))
def test_a_card_reaches_about_what_its_datasheet_says(card):
    for kind, peak in card.speed.tflops.items():
        share = card.speed.product_rate(kind) / 1e12 / peak
        assert 0.25 <= share <= 1.2  # boost clocks are above the datasheet's on consumer cards
