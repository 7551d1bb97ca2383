"""A reader's own card, from its datasheet."""

import pytest

import labutils as lab
from labutils.config.card import CARDS, TIMES_FLOAT32, Speed
from labutils.config.schema import ConfigError
from labutils.course.cli import main
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
    card = lab.load_card(write("448", "448\nelements_share: 0.5"))
    assert (card.speed.elements_share, card.speed.rows_share) == (0.5, Speed.rows_share)
    assert (card.gpu.capability, card.memory_gib, card.speed.gb_per_s) == ((8, 6), 7.6, 448)
    ledger = predict_time(lab.load_config("fp16"), card)
    assert ledger.high_ms == pytest.approx(1.6 * ledger.step_ms)
    assert "uncalibrated" in ledger.why_band


def test_six_numbers_are_enough_for_bf16_and_what_is_assumed_is_said(write):
    whole = lab.load_card(write())
    card = lab.load_card(write("float16_tflops: 40.6\n"))
    tflops = {"float32": 20.3, "TF32": 20.3, "float16": 40.6, "bfloat16": 40.6}
    assert card.speed.tflops == whole.speed.tflops == tflops
    assert card.support("bf16").reason == "tensor cores"
    given, assumed = (predict_time(lab.load_config("bf16"), each) for each in (whole, card))
    assert assumed.step_ms == given.step_ms
    assert assumed.low_ms < given.step_ms / 2 < given.low_ms  # cards of 8.6 may be twice as fast
    assert "`float16_tflops` is not given: 2 times float32's is assumed" in assumed.why_band
    in_float32 = predict_time(lab.load_config("fp32"), card)
    assert in_float32.why_band == given.why_band  # it does without


def test_turing_has_no_bf16_and_perhaps_no_tensor_cores(write):
    card = lab.load_card(write("8.6", "7.5"))
    assert card.support("bf16").slow
    assert card.speed.tflops == {"float32": 20.3, "float16": 40.6}
    path = write("8.6", "7.5")
    path.write_text(path.read_text().replace("float16_tflops: 40.6", ""))
    assert lab.load_card(path).speed.assumed == 0.5


def test_a_card_s_name_is_no_file():
    with pytest.raises(ConfigError, match=r"no such file; .* A card's name goes after --device"):
        lab.load_card("rtx3060")


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("448", "0.0", "card.yaml:5: `bandwidth_gb_s`: expected a number above 0, such as 8.9"),
        ("20.3", "20300", "card.yaml:6: `float32_tflops`: 20300 is more than any card has"),
        ("memory_gib: 7.6\n", "", "card.yaml: missing: `memory_gib`"),
        ("float16_tflops", "float16_tflop", "unknown key `float16_tflop`. Did you mean `float16_"),
    ],
)
def test_a_mistake_is_reported_where_it_stands(write, before, after, expected):
    with pytest.raises(ConfigError) as caught:
        lab.load_card(write(before, after))
    assert expected in str(caught.value)


def test_predict_and_advise_take_its_file(write, capsys):
    options = ["--set", "model=gpt2-nano", "seq_len=64", "--card", str(write("8.6", "7.5"))]
    assert main(["predict", "fp16", *options]) == 0
    assert "predicted for rtx3070" in capsys.readouterr().out
    assert main(["advise", "fp32", *options]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("fp32+") and " on rtx3070: a peak of " in printed
    assert "precision=fp16" in printed and "bf16" not in printed and "fits 7.6" in printed


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("RTX 3060", "rtx3060"),
        ("3060", "rtx3060"),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", "rtx3060-laptop"),
        ("4070ti super", "rtx4070ti-super"),
        ("4060 Ti 16GB", "rtx4060ti-16"),
        ("A100-80GB", "a100"),
        ("A100-SXM4-40GB", "a100-40"),
        ("T4 16GB", "t4"),
    ],
)
def test_a_card_is_found_as_people_write_it(words, name):
    assert lab.card_of(words) is CARDS[name]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("rtx3060x", "Nearest in name: rtx3060, "),
        ("RTX 3060 8GB", "Nearest in name: rtx3060, "),  # another card, with less bandwidth
        ("mi300x", f"; all {len(CARDS)}: `labutils predict --cards`"),
    ],
)
def test_an_unknown_card_gets_a_hint_and_the_way_to_describe_it(words, hint):
    with pytest.raises(ValueError, match="no card is named") as caught:
        lab.card_of(words)
    assert repr(words) in str(caught.value) and hint in str(caught.value)
    assert "--card FILE, or lab.load_card(FILE)" in str(caught.value)


@pytest.mark.parametrize("card", CARDS.values(), ids=list(CARDS))
def test_a_card_reaches_about_what_its_datasheet_says(card):
    for kind, peak in card.speed.tflops.items():
        share = card.speed.product_rate(kind) / 1e12 / peak
        assert 0.25 <= share <= 1.2  # boost clocks are above the datasheet's on consumer cards
    half, times = card.speed.tflops["float16"], TIMES_FLOAT32.get(card.gpu.capability, 2.0)
    times = 3.3 if card.name == "h20" else times  # its tensor cores were slowed down for export
    assert not card.speed.assumed and half >= 0.98 * times * card.speed.tflops["float32"]
    if card.has_bf16:
        assert card.speed.tflops["bfloat16"] == half
        assert card.speed.tflops["TF32"] == pytest.approx(half / 2, rel=0.02)
