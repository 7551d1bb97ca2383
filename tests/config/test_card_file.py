"""A reader's own card, from its datasheet."""

import pytest

import labutils as lab
from labutils.cli import main
from labutils.config.cards import CARDS, load_card
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
def file(tmp_path):
    def write(*replacements):
        text = TEXT
        for before, after in replacements:
            assert before in text
            text = text.replace(before, after)
        path = tmp_path / "card.yaml"
        path.write_text(text)
        return path

    return write


def test_a_card_is_read_and_has_a_wide_band(file):
    card = load_card(file())
    assert card.gpu.capability == (8, 6)
    assert not card.has_bf16  # the file gives no rate for it
    ledger = predict_time(lab.load_config("fp16"), card)
    assert ledger.high_ms == pytest.approx(1.6 * ledger.step_ms)
    assert "uncalibrated" in ledger.why_band


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (
            "448",
            "-3",
            r"card.yaml:5: `bandwidth_gb_s`: expected greater than or equal to 10, got '-3'",
        ),
        ("448", "fast", r"card.yaml:5: `bandwidth_gb_s`: expected a valid number, got 'fast'"),
        ("46", "0", r"card.yaml:4: `multiprocessors`: expected greater than or equal to 1"),
        ("20.3", "2e9", r"card.yaml:6: `float32_tflops`: expected less than or equal to 100000"),
        ("memory_gib: 7.6\n", "", r"card.yaml: missing key `memory_gib`"),
        ("float16_tflops", "float16_tflop", r"card.yaml:7: .*Did you mean `float16_tflops`"),
    ],
)
def test_each_mistake_is_said_with_its_line_and_the_range(file, before, after, expected):
    with pytest.raises(ConfigError, match=expected):
        load_card(file((before, after)))


def test_the_command_takes_a_card_or_a_device(file, capsys):
    assert main(["predict", "fp16", "--card", str(file())]) == 0
    assert "predicted for rtx3070" in capsys.readouterr().out
    assert main(["predict", "fp16", "--card", str(file(("448", "-3")))]) == 1
    assert "equal to 10, got" in capsys.readouterr().err
    assert main(["predict", "fp16", "--device", "t4", "--card", str(file())]) == 2
    assert "exclude each other" in capsys.readouterr().err


WANTED = (
    "t4 v100 p100 a30 a100 a100-40 l4 l40s rtx2000ada rtx3090 rtx4060 rtx4090 rtx5090 h100 "
    "h100-pcie h200 b200"
)


@pytest.mark.parametrize("name", WANTED.split())
def test_each_card_reaches_less_than_its_datasheet_says(name):
    card = CARDS[name]
    for kind in card.speed.tflops:
        share = card.speed.product_rate(kind) / 1e12 / card.speed.tflops[kind]
        assert 0.25 <= share <= 1.2  # boost clocks are above the datasheet's on consumer cards
    assert card.speed.is_calibrated == bool(card.speed.reached)
