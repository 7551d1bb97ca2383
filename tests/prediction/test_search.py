"""What would fit: changes to a config, and the largest sizes."""

from dataclasses import replace

import pytest

import labutils as lab
from benchmarks.configs import shipped
from labutils import machine
from labutils.config.card import CARDS, CONTEXT_GIB
from labutils.config.reader import parse_overrides
from labutils.course import session
from labutils.machine import SMALLEST_GIB
from labutils.prediction import compiled, search
from labutils.prediction.memory import needed_gib, predict_memory, with_more_sequences
from labutils.prediction.search import Forecast, advise, suggest_changes
from labutils.prediction.time import predict_time
from labutils.prediction.trace import with_shape
from labutils.training import run as training_run
from tests.helpers import CPU, predicted_on, slow

GIB = 2**30
SMALL = {"model": "gpt2-nano", "seq_len": 512, "micro_batch_size": 4, "tokens_per_step": 2048}
SHORT = {"seq_len": 32, "micro_batch_size": 1, "tokens_per_step": 32, "activation": "gelu_tanh"}
NAMES = [path.name.removesuffix("_config.yaml") for path in shipped()]


@pytest.fixture(scope="module")
def config() -> lab.Config:
    return lab.load_config("fp32", **SMALL)


def forecast(config, device="a100"):
    return Forecast(config, lab.card_of(device))


def budget_of(config: lab.Config, share: float) -> float:
    """Return GiB of a card with this share of the memory that a config needs."""
    return CONTEXT_GIB + share * (needed_gib(predict_memory(config)) - CONTEXT_GIB)


@pytest.mark.parametrize("share", [0.999, 0.7, 0.6, 0.35])
def test_a_plan_fits_keeps_the_tokens_per_step_and_has_no_change_too_many(config, share):
    budget = budget_of(config, share)
    plan = forecast(config).way_out(budget)
    goal = budget * (search.ROOM if share > 0.4 else 1)
    assert plan.fits(goal) and plan.changes
    assert plan.config.tokens_per_step == config.tokens_per_step
    changed = config.model_copy(update=plan.changes)
    assert predict_memory(changed).phases == plan.prediction.ledger.phases
    assert plan.step_ms == pytest.approx(predict_time(changed).step_ms)
    assert str(plan.time) in str(plan) and "predicted for cpu" in str(forecast(config, "cpu"))
    for key in plan.changes:  # each is needed
        fewer = {other: value for other, value in plan.changes.items() if other != key}
        assert needed_gib(predict_memory(config.model_copy(update=fewer))) > goal, key
    if share > 0.9:  # where little is missing no change costs time
        assert predict_time(changed).step_ms <= predict_time(config).step_ms
        assert not {"gradient_checkpointing", "optimizer", "micro_batch_size"} & set(plan.changes)


def test_a_smaller_batch_is_as_large_as_fits(config):
    budget = budget_of(config, 0.7)
    plan = forecast(config).way_out(budget)
    assert plan.changes["micro_batch_size"] == 2
    four = needed_gib(
        predict_memory(config.model_copy(update=plan.changes | {"micro_batch_size": 4}))
    )
    assert four > search.ROOM * budget


def test_room_is_not_bought_with_another_arithmetic(config):
    budget = budget_of(config, 0.4)
    plan = forecast(config).way_out(budget)
    assert search.ROOM * budget < plan.needed_gib <= budget
    assert set(plan.changes) == {"activation", "micro_batch_size"}


def test_where_nothing_fits_all_changes_are_told_and_where_all_fits_nothing_is_changed(config):
    plan = forecast(config).way_out(CONTEXT_GIB)
    assert not plan.fits(CONTEXT_GIB)
    assert {"gradient_checkpointing", "micro_batch_size"} <= set(plan.changes)
    assert plan.fits(plan.needed_gib + 1e-6)
    assert forecast(config).way_out(forecast(config).needed_gib + 0.001).changes == {}


def test_what_leaves_the_arithmetic_alone_comes_before_16_bits_and_what_is_learned():
    def order(card: str, **changes) -> list[str]:
        plan = forecast(lab.load_config("fp32", **SMALL | changes), card)
        return [plan.changed(*row).name for row in search.changes_of(plan.run.config, plan.card)]

    assert ", ".join(order("a100")) == (
        "expandable_segments=True, activation=gelu_tanh, compile=default, loss_chunk_tokens=512, "
        "micro_batch_size=2, micro_batch_size=1, gradient_checkpointing=block, precision=bf16, "
        "optimizer=adamw_8bit, optimizer_in_backward=True max_grad_norm=0.0, precision=pure_bf16"
    )
    for precision in ("fp32", "bf16"):  # which a T4 would emulate
        names = order("t4", precision=precision)
        assert [name for name in names if "precision" in name] == ["precision=fp16"]


def test_a_compiled_step_alone_spares_what_takes_time_unless_the_answer_is_wanted_at_once(
    config, monkeypatch
):
    plan = forecast(config).changed(search.COMPILED, "")
    budget = 1.001 * plan.needed_gib / search.ROOM
    assert forecast(config).way_out(budget).changes == search.COMPILED
    with monkeypatch.context() as patch:
        # on a GPU here a time needs memory, and it has just run out
        patch.setattr(search, "timed", None)
        at_once = forecast(config).way_out(budget, may_compile=False)
    assert at_once.fits(budget) and "compile" not in at_once.changes
    assert plan.step_ms < forecast(config).step_ms < at_once.step_ms
    on_card, on_cpu = (advise(config, device).index for device in ("a100", "cpu"))
    assert "compile=default" in on_card and "compile=default" not in on_cpu


def test_advice_says_where_the_compiler_does_not_plan_a_step(monkeypatch):
    def refuse(*_, **__):
        raise compiled.NoPlan("as a test wants it")

    monkeypatch.setattr(compiled, "_plan", refuse)
    config = lab.load_config("fp32", **SMALL | {"seq_len": 128, "tokens_per_step": 512})  # unseen
    assert "as if not compiled" in advise(config).costs["compile=default"]


@slow
def test_the_solver_finds_a_recipe_for_xl_in_eight_gib():
    shape = {"seq_len": 1024, "micro_batch_size": 1, "tokens_per_step": 1024}
    model = {"model": "gpt2-xl", "dropout": 0.0, "max_grad_norm": 0.0}
    plan = forecast(lab.load_config("fp32", **shape, **model), "rtx4060").way_out(7.6)
    assert plan.fits(7.6)
    assert {"optimizer", "optimizer_in_backward", "gradient_checkpointing"} <= set(plan.changes)


# ---- Each change alone


@pytest.mark.parametrize(
    "name", [n if n == "optimized" else pytest.param(n, marks=slow) for n in NAMES]
)
def test_the_first_suggestion_lowers_the_ledger_in_every_shipped_config(name):
    device = "rtx4060" if name == "xl" else "cpu"  # there nothing is left that would help xl
    config = forecast(lab.load_config(name), device).run.config
    advice = advise(config, device)
    again = predict_memory(
        lab.load_config(name, **parse_overrides(advice.index[0].split())), device
    )
    assert advice.attrs["peak_bytes"] - again.peak_bytes == advice["saves MiB"].iloc[0] * 2**20 > 0
    assert advice["saves MiB"].dropna().is_monotonic_decreasing


def test_what_does_nothing_here_saves_nothing_and_what_cannot_be_says_why():
    """With one short sequence the peak is what stands; what accumulates cannot update within
    backward.
    """
    advice = advise(lab.load_config("fp32", **SHORT | {"tokens_per_step": 64}), "cpu")
    assert advice.index[0] == "optimizer=adamw_8bit"
    assert advice["saves MiB"]["gradient_checkpointing=block"] == pytest.approx(0, abs=0.2)
    last = advice.loc["optimizer_in_backward=True max_grad_norm=0.0"]
    assert last.costs.startswith("not possible here: `optimizer_in_backward`: updates after each")
    assert last.isna()[["saves MiB", "needs GiB"]].all()
    assert "adds ms" not in advice and "step_ms" not in advice.attrs  # a CPU's times are measured


def test_a_precision_that_is_slow_here_is_not_advised(monkeypatch):
    monkeypatch.setattr(machine, "cpu_slowdown", lambda dtype: 99.0)
    advice = advise(lab.load_config("fp32", **SHORT, optimizer="sgd"), "cpu")
    why = "slow here: a bfloat16 matmul takes about 100 times as long"
    assert advice.costs["precision=bf16"].startswith(why)


# ---- The largest sizes


def test_largest_micro_batch_fits_and_one_more_does_not():
    config = lab.load_config("bf16", model="gpt2-nano", seq_len=256)
    budget = CONTEXT_GIB + 0.5
    size = search.largest_micro_batch(config, budget, limit=64)
    fits = needed_gib(predict_memory(with_shape(config, size)))
    does_not = needed_gib(predict_memory(with_shape(config, size + 1)))
    assert fits <= budget < does_not and size > 3
    assert search.largest_micro_batch(config, CONTEXT_GIB, limit=3) == 0
    assert search.largest_micro_batch(config, 80, limit=8) == 8


def test_two_and_three_sequences_tell_about_seven_and_about_what_kernels_borrow():
    # without autocast, which frees its weights in another order each time
    config = lab.load_config("fp32", model="gpt2-nano", seq_len=512)
    few, more, seven = (predicted_on("a100", with_shape(config, n)).requests for n in (2, 3, 7))
    grown = with_more_sequences(few, more, 5)
    bytes_of = [[(storage.n_bytes, born) for storage, born in each] for each in (grown, seven)]
    assert bytes_of[0] == bytes_of[1]


@pytest.mark.parametrize(
    ("free_gib", "model", "size"),
    [(80, "gpt2-medium", 8), (3.7, "gpt2", None), (0.1, "gpt2-nano", 1)],
)
def test_a_model_that_does_not_fit_the_card_gives_way_to_a_smaller_one(
    monkeypatch, free_gib, model, size
):
    card = replace(CARDS["rtx4060"], memory_gib=free_gib)
    monkeypatch.setattr(machine, "card", lambda device: card)
    changes = lab.size_that_fits(lab.load_config("checkpointing").on("cuda"))
    assert changes["model"] == model
    assert changes["micro_batch_size"] == (size or changes["micro_batch_size"])
    assert changes["tokens_per_step"] == 512 * changes["micro_batch_size"]
    monkeypatch.setattr(machine, "card", lambda device: replace(card, gpu=None))
    assert lab.size_that_fits(lab.load_config("checkpointing").on("cpu")) == {}


def test_where_memory_is_short_micro_batches_shrink_and_nothing_else(monkeypatch):
    plain = lab.load_config("fp32")
    assert lab.fitting("fp32") == [plain]
    now = needed_gib(predict_memory(plain, "cpu"), "cpu")
    sizes = []
    for share in (0.7, 0.001):
        monkeypatch.setattr(machine, "free_bytes", lambda _, n=share * now * GIB: n)
        fp32, bf16 = (config.on("cpu") for config in lab.fitting("fp32", "bf16", steps=7))
        assert fp32.micro_batch_size == bf16.micro_batch_size
        assert (fp32.tokens_per_step, fp32.steps) == (plain.on("cpu").tokens_per_step, 7)
        sizes.append(fp32.micro_batch_size)
    assert sizes == [2, 1]


def test_the_smallest_gpt2_run_is_what_setup_asks_for():
    alone = predict_memory(lab.load_config("fp32", micro_batch_size=1), "a100")
    assert SMALLEST_GIB - 0.2 < needed_gib(alone) - CONTEXT_GIB <= SMALLEST_GIB


# ---- Out of memory


def test_ways_out_fit_what_is_free(monkeypatch):
    config = lab.load_config("fp32", micro_batch_size=8, tokens_per_step=1024)
    free = 0.7 * needed_gib(predict_memory(config, "cpu"), "cpu")
    monkeypatch.setattr(machine, "free_bytes", lambda _: free * GIB)
    answer = suggest_changes(config, CPU)
    assert answer.startswith(f"{1024 * free:.0f} MiB are free now. Cheapest way out (predicted): ")
    assert forecast(config, "cpu").way_out(free).name in answer
    assert "precision" not in answer  # what leaves the arithmetic alone is enough
    monkeypatch.setattr(search, "timed", lambda *_: pytest.fail("times were predicted"))
    assert suggest_changes(config, CPU) == answer
    monkeypatch.setattr(machine, "free_bytes", lambda _: 2**20)
    tiny = lab.load_config("fp32", **SHORT)
    assert suggest_changes(tiny, CPU).startswith("No change fits 1 MiB free; the smallest needs ")


def test_a_cpu_run_without_room_is_not_started(runs, monkeypatch):
    """Where memory is overcommitted, nothing would say no: the process would be killed."""
    monkeypatch.setattr(session, "require_host_memory", search.require_host_memory)
    # enough, but for fragmentation
    monkeypatch.setattr(machine, "free_host_bytes", lambda: 70 * 2**20)
    monkeypatch.setattr(training_run, "train", lambda *_, **__: pytest.fail("it trained"))
    record = lab.run_experiment(lab.load_config("fp32"), device=CPU, progress=False)
    assert record.outcome == "out_of_memory"
    expected = "asked for 75 MiB more, 70 MiB free. 70 MiB are free now. Cheapest way out"
    assert record.reason.startswith(expected)
