"""The time ledger: what it counts, its bands, and how near it comes to what others measured."""

import itertools
import math
import re
from dataclasses import replace
from unittest.mock import patch

import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import labutils as lab
from labutils.config.card import CARDS, Card, Speed
from labutils.config.choices import PRECISIONS
from labutils.config.schema import resolve
from labutils.files import REFERENCE_DIR
from labutils.memory.kinds import BATCHED, ELEMENTS, FLASH
from labutils.prediction import time, work
from labutils.prediction.calibrate import call_seconds, measured
from labutils.prediction.fusion import fuse
from labutils.prediction.memory import segments_of
from labutils.prediction.published import BASE, config_of_row, published
from labutils.prediction.time import LAUNCHES, MEMORY, PRODUCTS, Clock, GpuTime, TimeLedger
from labutils.prediction.trace import trace_config, traced_module
from labutils.prediction.work import PRODUCT, Work
from labutils.techniques.loss import lm_loss_sum
from tests.helpers import CPU, slow
from tests.prediction.by_hand import Transformer, loss_of

BACKWARD = "backward", 0  # of the first micro-batch
CAME_LAST = ("J", "A", "O")  # sources of published.csv: another author's H100, an A30, our H100


def works_of(trace):
    return [event.work for part in trace.segments for event in part.events if event.work]


def trace_of(model, batch, loss_fn, precision="fp32"):
    return traced_module(model, batch, loss_fn, torch.optim.AdamW, precision, CARDS["a100"])


def test_flops_are_those_that_torch_counts_in_a_real_step():
    config = lab.load_config("fp32", dropout=0.0, attention="eager").on("cpu")
    model = lab.build_model(config.model, dropout=0.0, attention="eager")
    ids = torch.randint(0, 2048, (config.micro_batch_size, config.seq_len))
    with FlopCounterMode(display=False) as counter:
        lm_loss_sum(model, {"input_ids": ids, "labels": ids}).backward()
    trace = trace_config(config, None)
    assert sum(work.flops for work in works_of(trace)) == counter.get_total_flops()


def test_an_operation_reads_and_writes_each_tensor_once_and_a_view_nothing():
    x = torch.zeros(4, 1024)
    trace = trace_of(nn.Linear(1024, 8), x, lambda model, x: (model(x + x).t() * 2).sum())
    out = 4 * 4 * 8
    assert [work.n_bytes for work in works_of(trace)][:5] == [
        2 * x.nbytes,  # the batch is moved to the card
        2 * x.nbytes,  # x is read once, though it is both operands
        x.nbytes + 4 * (1024 * 8 + 8) + out,  # the product, with its bias
        2 * out,  # nothing for the view
        out + 4,
    ]
    moments = 2 * 4 * (1024 * 8 + 8)
    assert sum(work.n_bytes for work in works_of(trace) if work.only_once) == moments


def test_a_fused_chain_reads_what_comes_from_outside_and_writes_what_is_needed():
    def loss(model, x):
        return model[1](torch.tanh(model[0](x)) * 2 + 1).sum()

    model = nn.Sequential(nn.Linear(64, 256, bias=False), nn.Linear(256, 8, bias=False))
    trace = trace_of(model, torch.zeros(512, 64), loss)
    wide = 4 * 512 * 256
    fused = fuse(trace.segments)
    chain = [fused[work] for work in works_of(trace) if work.n_bytes == 2 * wide][:3]
    assert [work.calls for work in chain] == [1, 0, 0]
    assert sum(work.n_bytes for work in chain) == 2 * wide


def product(rows, columns, inner, dtype="bfloat16"):
    return Work(PRODUCT, 0, dtype, 2 * rows * columns * inner, (1, rows, columns))


def seconds(work, card="a100", **how):
    return GpuTime(CARDS[card], **({"tf32": False, "is_compiled": False} | how)).seconds(work)


def test_a_product_takes_whole_waves_of_tiles():
    one_wave = seconds(product(128 * 108, 128, 4096))  # 108 multiprocessors
    a_tile_more = seconds(product(128 * 109, 128, 4096))
    two_waves = seconds(product(128 * 216, 128, 4096))
    assert one_wave < 0.7 * a_tile_more
    start = time.KERNEL_SECONDS
    assert two_waves - start == pytest.approx(2 * (one_wave - start))


@pytest.mark.parametrize(
    ("times", "card", "columns", "dtype", "how"),
    [
        (2.6, "a100", 50257, "bfloat16", {}),
        (1.4, "rtx4090", 50257, "bfloat16", {}),
        (2.6, "h100", 50257, "float32", {"tf32": True}),
        (6.6, "h100", 50257, "bfloat16", {}),
        (1.3, "a100", 50257, "bfloat16", {"is_compiled": True}),
        (1.0, "a100", 50260, "float32", {"tf32": True}),  # 16 bytes are four of its numbers
        (1.0, "t4", 50257, "bfloat16", {}),  # it has no tensor cores for BF16
    ],
)
def test_a_side_of_odd_length_costs_tensor_cores_their_rate(times, card, columns, dtype, how):
    unaligned, aligned = (product(2**14, n, 768, dtype) for n in (columns, 50304))
    slowed = seconds(unaligned, card, **how) / seconds(aligned, card, **how)
    assert slowed == pytest.approx(times, rel=0.02)


def test_bytes_take_their_time_and_16_bit_numbers_more_of_it_on_an_a100():
    narrow, wide = (Work("elementwise", 10**9, has_16bit=is_narrow) for is_narrow in (True, False))
    speed = CARDS["a100"].speed
    moved = 1 / (speed.elements_share * speed.gb_per_s)
    assert seconds(wide) == pytest.approx(moved + time.KERNEL_SECONDS)
    assert seconds(narrow) == pytest.approx(moved / 0.82, rel=0.01)
    assert seconds(narrow, "h100") == seconds(wide, "h100")
    forward, backward = (
        Work(FLASH, 0, "float16", flops=10**12, is_backward=late) for late in (False, True)
    )
    ratio = speed.flash_forward / speed.flash_backward
    assert seconds(backward) / seconds(forward) == pytest.approx(ratio, rel=0.01)
    x = torch.zeros(4, 1024)
    trace = trace_of(nn.Linear(1024, 8), x, lambda model, x: (model(x + x) * 2).sum(), "bf16")
    # the batch moves, x + x; then two casts, the bias's cast, the product, and its double
    assert [work.has_16bit for work in works_of(trace)][:7] == 2 * [False] + 5 * [True]


def test_shares_and_phases_belong_to_the_step():
    fp32, fp16 = (lab.predict_time(lab.load_config(name), "t4") for name in ("fp32", "fp16"))
    assert set(fp16.shares) == {PRODUCTS, "attention", MEMORY, LAUNCHES}
    assert sum(fp16.shares.values()) == pytest.approx(1)
    assert sum(fp16.phases_ms.values()) == pytest.approx(fp16.step_ms)
    assert fp16.tokens_per_s == pytest.approx(4096e3 / fp16.step_ms)
    assert 2 < fp32.step_ms / fp16.step_ms < 65 / 8.1
    assert fp32.shares[MEMORY] < fp16.shares[MEMORY]
    # a scaler divides the gradients
    assert fp16.phases_ms["optimizer"] > 1.1 * fp32.phases_ms["optimizer"]


@pytest.mark.parametrize(
    ("card", "changes", "below", "above"),
    [
        ("a100", {}, 0.2, 0.25),
        ("a100", {"compile": "default"}, 0.2, 0.4),
        ("rtx4060", {}, 0.4, 0.6),  # nothing was measured on it
        ("a100", {"micro_batch_size": 1, "tokens_per_step": 512}, 0.4, 0.6),
        ("h100", {"model": "gpt2-nano", "seq_len": 64, "tokens_per_step": 256}, 0.4, 0.6),
    ],
)
def test_the_band_is_as_wide_as_what_is_not_known(monkeypatch, card, changes, below, above):
    monkeypatch.setattr(time, "SLOW_CALL_SECONDS", time.CALL_SECONDS)
    ledger = lab.predict_time(lab.load_config("bf16", **changes), card)
    assert 1 - ledger.low_ms / ledger.step_ms == pytest.approx(below)
    assert ledger.high_ms / ledger.step_ms - 1 == pytest.approx(above)
    # a small step on a fast card waits for its host, and a small model more
    assert ledger.launch_bound == ("tokens_per_step" in changes)
    assert (card == "h100") == (ledger.shares[LAUNCHES] > 0.5)


@pytest.mark.parametrize(("name", "ms"), [("tf32", 57), ("bf16", 62)])
def test_a_band_holds_what_a_slow_host_made_of_a_step(name, ms):
    """Our H100's host took 51 to 58 µs a call; a T4 computes for longer than any host."""
    ledger = lab.predict_time(lab.load_config(name), "h100")
    assert ledger.step_ms < ms < ledger.high_ms and "as slow as our H100's" in str(ledger)
    old = lab.predict_time(lab.load_config("fp16"), "t4")
    assert old.high_ms == pytest.approx(1.25 * old.step_ms)


def test_a_layer_by_einsum_is_a_matrix_product_and_a_modules_band_is_that_of_modules():
    def loss(model, x):
        return torch.einsum("bti,oi->bto", x, model.weight).sum()

    step = nn.Linear(256, 1024, bias=False), torch.zeros(8, 512, 256), loss
    ledger = lab.predict_module_time(*step, torch.optim.AdamW, device="t4")
    assert set(ledger.operations) & {PRODUCT, BATCHED} == {PRODUCT}
    products = 2 * (2 * 4096 * 256 * 1024)  # inputs need no gradient
    assert 1e9 * ledger.operations[PRODUCT]["gflop"] == products
    for card, above in (("t4", 0.4), ("rtx4060", 0.6)):  # of that nothing was measured
        ledger = lab.predict_module_time(*step, torch.optim.AdamW, device=card)
        assert ledger.high_ms == pytest.approx((1 + above) * ledger.step_ms), card


def test_accumulation_repeats_micro_batches_and_not_the_update():
    one = lab.predict_time(lab.load_config("fp32", tokens_per_step=2048), "a100")
    four = lab.predict_time(lab.load_config("fp32", tokens_per_step=4 * 2048), "a100")
    assert 3.5 * one.step_ms < four.step_ms < 4.1 * one.step_ms
    assert four.phases_ms["optimizer"] == pytest.approx(one.phases_ms["optimizer"], rel=0.1)


def test_recomputation_costs_time():
    plain, checkpointed = (
        lab.predict_time(lab.load_config("bf16", gradient_checkpointing=policy), "a100").step_ms
        for policy in ("none", "block")
    )
    assert 1.15 < checkpointed / plain < 1.4


def test_python_issues_what_a_checkpoint_computes_again():
    by_python = []
    for policy in ("none", "block"):
        config = lab.load_config("fp32", gradient_checkpointing=policy, micro_batch_size=1)
        trace = trace_config(config, CARDS["h100"].gpu)
        [backward] = [part for part in trace.segments if (part.phase, part.micro_batch) == BACKWARD]
        works = [event.work for event in backward.events if event.work]
        by_python.append(sum(work.host_share == 1 for work in works))
    assert by_python[0] <= 1 < 12 * 10 < by_python[1]


def predicted_ms(row, ledger: TimeLedger, card: Card, n_micro_batches: int) -> float:
    """Return the milliseconds of what was timed in a row: a part of the step, or more than it."""
    phases = ledger.phases_ms
    forward = phases["forward"] + phases["loss"]
    parts = {
        "forward": forward,
        "forward and backward": forward + phases["backward"],
        "step": ledger.step_ms,
        "micro-step": ledger.step_ms / n_micro_batches,
    }
    return parts[row.what] + 1e3 * row.besides_gb / (
        card.speed.elements_share * card.speed.gb_per_s
    )


def scored(rows: pd.DataFrame, is_calibrated: bool = True) -> pd.DataFrame:
    """Return for each published row the error in %, half the band's width in %, and whether the
    measured step lies in the band; else as if nothing had been measured on its card.
    """
    scores = []
    for row in rows.itertuples():
        config, card = config_of_row(row.config), CARDS[row.card]
        if not is_calibrated:
            card = replace(card, speed=Speed(card.speed.tflops, card.speed.gb_per_s, {}))
        host = time.CALL_SECONDS if math.isnan(row.host_us) else 1e-6 * row.host_us
        with patch.object(time, "CALL_SECONDS", host):
            ledger = lab.predict_time(config, card)
        ms = predicted_ms(row, ledger, card, config.grad_accum_steps)
        low, high = ledger.low_ms / ledger.step_ms, ledger.high_ms / ledger.step_ms
        score = {"id": row.id, "card": row.card, "ms": ms, "error": 100 * (ms / row.ms - 1)}
        is_small = config.micro_batch_size == 1 or not math.isnan(row.host_us)
        score["kind"] = "small" if is_small else config.compile
        score["source"] = row.id[0]
        score |= {"inside": low * ms <= row.ms <= high * ms, "width": round(50 * (high - low), 6)}
        scores.append(score)
    return pd.DataFrame(scores)


def test_the_lectures_ladder_has_the_right_signs_and_lies_in_the_bands():
    rows = published()
    table = scored(rows[rows.id.str.startswith("K")])
    assert table.error.abs().median() <= 12 and table.inside.all()
    assert table.ms.is_monotonic_decreasing  # what its loop moves besides is not predicted


@slow
def test_published_steps_are_met_by_a_ledger_that_does_not_know_them():
    """No constant was fitted to them: they come from single operations, and of a host from another
    model. Harder is to leave out what was measured on the card as well. Prints the errors.
    """
    tables = scored(published()), scored(published(), is_calibrated=False)
    for table in tables:
        print(table.round(1).to_string())
        before = table[~table.source.isin(CAME_LAST)]
        # most of those that came last were compiled by torch 2.5
        assert before.error.abs().median() <= 12 and table.error.abs().median() <= 13
        assert abs(table.error.mean()) <= 6
        assert table.inside.mean() >= 0.85
    known, _ = tables
    for part in ("kind", "source"):
        print(known.groupby(part).error.describe().round(1).to_string())
    came_last = known.source.isin(CAME_LAST)
    # the bands were drawn when these had not been seen
    assert known[came_last].inside.mean() >= 0.9
    # the band of a small compiled step reaches to what a slow host makes of it
    assert known.width.max() <= 54 and known[~came_last].width.max() <= 50
    assert known.width.median() <= 30
    cards = known[known.card != "a30"].groupby("card").error.agg(["size", "min", "max"])
    often = cards[cards["size"] >= 4]
    assert (often["min"] < 0).all() and (often["max"] > 0).all()
    # nothing was measured on an A30: all its rows are too fast, by less than its band
    assert known[known.card == "a30"].error.between(-25, 0).all()
    # a band drawn around all other sources holds most of a source's steps
    ratios = 1 / (1 + known.error / 100)
    held = []
    for _, own in ratios.groupby(known.source):
        others = ratios.drop(own.index)
        held += [*own.between(*others.quantile([0.05, 0.95]))]
    # 75 of 89; one that a slower host lengthens by 0.6 % lies outside since then (G7-4)
    assert sum(held) / len(held) >= 0.84


@pytest.mark.parametrize(
    ("size", "n_tokens", "precision", "forward_ms", "backward_ms"),
    [
        ("small", 128, "fp32", 21.528, 20.949),
        pytest.param("small", 128, "bf16", 22.572, 24.168, marks=slow),
        pytest.param("small", 256, "fp32", 22.098, 30.164, marks=slow),
        pytest.param("small", 256, "bf16", 24.155, 24.245, marks=slow),
        pytest.param("small", 512, "fp32", 36.107, 61.284, marks=slow),
        pytest.param("small", 512, "bf16", 24.237, 27.99, marks=slow),
        pytest.param("small", 1024, "fp32", 66.007, 129.248, marks=slow),
        ("small", 1024, "bf16", 35.502, 63.334),
        pytest.param("medium", 128, "fp32", 41.968, 51.163, marks=slow),
        pytest.param("medium", 128, "bf16", 46.359, 47.871, marks=slow),
        pytest.param("medium", 256, "fp32", 47.393, 91.278, marks=slow),
        pytest.param("medium", 256, "bf16", 46.913, 48.92, marks=slow),
        pytest.param("medium", 512, "fp32", 94.228, 180.134, marks=slow),
        pytest.param("medium", 512, "bf16", 47.858, 77.747, marks=slow),
        pytest.param("medium", 1024, "fp32", 201.085, 392.607, marks=slow),
        pytest.param("medium", 1024, "bf16", 95.429, 180.768, marks=slow),
    ],
)
def test_a_model_of_hand_written_operations_takes_as_long_as_its_host_or_its_card(
    size, n_tokens, precision, forward_ms, backward_ms
):
    """Forward and backward passes of 4 sequences, torch 2.6, on a card that the page does not name
    (github.com/ShibukiZero/assignment2-systems, ch1/1_1_5c). Very likely an H20, as in its later
    chapters: products in float32 reached 30 TFLOP/s, 0.59 of an H100's, and 78 of the 132
    multiprocessors of that are 0.59 too.
    """
    step = Transformer(size, n_tokens), torch.zeros(4, n_tokens, dtype=torch.long), loss_of
    ledger = lab.predict_module_time(*step, torch.optim.AdamW, precision=precision, device="h20")
    passes_ms = ledger.step_ms - ledger.phases_ms["optimizer"]
    ratio = (forward_ms + backward_ms) / passes_ms
    assert 0.93 < ratio < 1.28
    if n_tokens in (128, 1024):
        assert ledger.launch_bound == (n_tokens == 128)


@slow
def test_steps_of_a_real_h100_are_met():
    """Measured for this course by benchmarks.step_times: an H100 80GB HBM3, torch 2.11."""
    rows, ratios = pd.read_csv(REFERENCE_DIR / "h100_steps.csv", comment="#"), []
    for row in rows.itertuples():
        config = config_of_row(row.config)
        ledger = lab.predict_time(config, "h100")
        ratios.append(row.ms / ledger.step_ms)
        assert ledger.low_ms < row.ms < ledger.high_ms, (row.config, ledger.step_ms)
        if config.compile == "off":
            peak = lab.predict_memory(config, "h100").peak_bytes
            assert row.allocated_bytes == pytest.approx(peak, rel=0.0015)
    print(pd.Series(ratios).describe())
    assert abs(pd.Series(ratios).median() - 1) < 0.06


def times_on(card: Card, sizes: dict[str, int], traces: dict) -> dict[tuple[str, str], TimeLedger]:
    """Return the times of GPT-2 in each precision that is fast on a card, as it is and changed."""
    times = {}
    for name in ("fp32", "tf32", "fp16", "bf16"):
        if not card.support(name).ok or card.support(name).slow:
            continue
        for change in ({}, {"attention": "eager"}, {"pad_vocab": True}):
            run = resolve(lab.load_config("fp32", **BASE, **sizes, precision=name, **change), card)
            # cards with the same kernels do the same
            of = name, str(change), str(sizes), card.gpu.flash, card.gpu.capability >= (8, 0)
            if of not in traces:
                traces[of] = trace_config(run.config, card.gpu)
            clock = Clock(card, tf32=PRECISIONS[name].tf32)
            clock.run(segments_of(traces[of], 1))
            times[name, *change] = clock.ledger(run.config.tokens_per_step, is_small=False)
    return times


@slow
def test_no_card_shows_an_order_that_hardware_does_not():
    """What waits for its host is left out: there our H100 took 62 ms in BF16, and 57 in TF32."""
    traces, n_orders = {}, 0
    small = {"seq_len": 512, "micro_batch_size": 4, "tokens_per_step": 2048}
    large = {"seq_len": 1024, "micro_batch_size": 16, "tokens_per_step": 16384}
    for card, sizes in itertools.product(CARDS.values(), (small, large)):
        times = times_on(card, sizes, traces)
        orders = [(("tf32",), ("fp32",), 1.0)]
        for (name, *change), ledger in times.items():
            if ledger.launch_bound or change:
                continue
            if name in ("fp16", "bf16") and card.gpu.capability >= (7, 0):
                orders.append(((name,), ("tf32",) if ("tf32",) in times else ("fp32",), 1.0))
            # 47 columns more, which are no slower for it but on tensor cores
            orders.append(((name, "pad_vocab"), (name,), 1.0003))
            if sizes is large:  # in TF32 the fused kernel has none: see GpuTime._attention_rate
                orders.append(((name,), (name, "attention"), 1.035 if name == "tf32" else 1.0))
        for faster, slower, most in orders:
            if faster in times and slower in times:
                n_orders += 1
                ratio = times[faster].step_ms / times[slower].step_ms
                assert ratio <= most, (card.name, sizes, faster, slower, ratio)
    assert n_orders > 500


def test_measured_steps_name_their_card():
    head, *_ = (REFERENCE_DIR / "h100_steps.csv").read_text().splitlines()
    assert re.fullmatch(r"# NVIDIA H100 \w+ HBM3, driver .+, torch 2\.\S+, 2026-\d\d-\d\d", head)


def test_a_cpus_time_is_measured_and_not_predicted():
    with pytest.raises(ValueError, match="a CPU's are measured: labutils run"):
        lab.predict_time(lab.load_config("fp32"), "cpu")


def test_a_measured_operation_has_the_work_of_a_predicted_one():
    flops, seconds = measured(PRODUCT, "float32", CPU, (64, 64))
    moved, _ = measured(ELEMENTS, "float32", CPU, (64, 64))
    assert (flops, moved) == (2 * 64**3, 3 * 4 * 64**2)
    assert seconds > 0
    assert 1e-6 < call_seconds(CPU) < 5e-3  # a step has some 230 calls
    with patch.object(work, "AUTOGRAD_SHARE", 1000.0):  # then a call by Python is a small part
        assert call_seconds.__wrapped__(CPU) < call_seconds(CPU) / 50
