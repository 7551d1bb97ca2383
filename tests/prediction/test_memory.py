"""Predicted bytes beside measured ones: of this CPU's allocator, and of torch's CUDA allocator as
recorded in reference/allocator.csv.
"""

import copy
import json
import operator
from dataclasses import replace
from functools import partial
from itertools import product

import pandas as pd
import pytest
import torch
import transformers
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

import labutils as lab
from labutils.config.card import CARDS, PrecisionUnsupported
from labutils.files import REFERENCE_DIR
from labutils.memory.ledger import (
    ACTIVATIONS,
    CAST_WEIGHTS,
    LOGITS,
    OPTIMIZER,
    PARAMETERS,
    ROUNDING,
    TEMPORARIES,
    WORKSPACES,
)
from labutils.memory.measure import measure_step
from labutils.prediction import memory
from labutils.prediction.allocator import DEFAULT, EXPANDABLE, MIB, CachingAllocator, Settings
from labutils.prediction.cuda_rules import cuda_rules
from labutils.prediction.memory import (
    Prediction,
    allocator_settings,
    completes,
    predict_memory,
    predict_module,
    replayed,
    smallest_limit,
)
from labutils.techniques import precision
from labutils.techniques.adapters import add_lora
from labutils.techniques.loss import count_targets, lm_loss_sum
from labutils.workload.build import build_experiment_model, build_optimizer
from tests.helpers import CPU, POLICIES, modules_with_rules, predicted_on, slow, without_onednn

TINY = {"seq_len": 32, "micro_batch_size": 2, "tokens_per_step": 64, "dropout": 0.0}
CHECKPOINTED = {"seq_len": 96, "micro_batch_size": 3, "tokens_per_step": 288, "optimizer": "sgd"}
LEAN = {"optimizer": "adamw_8bit", "activation": "gelu_tanh", "max_grad_norm": 0.0}
NANO = {"model": "gpt2-nano", "seq_len": 128, "micro_batch_size": 4, "tokens_per_step": 1024}
SHAPE = {"seq_len": 512, "micro_batch_size": 2, "tokens_per_step": 1024}
SAME_BYTES = partial(pytest.approx, rel=0.005)
OLD, NEW = torch.__version__ < "2.12", torch.__version__ > "2.15"


def measured_second_step(model, optimizer, micro_batches, loss_fn, **how):
    """Return the profiler's ledger of a step on the CPU that finds the optimizer's state."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    how = {"precision": "bf16", "count_targets": len} | how
    with without_onednn():
        return measure_step(model, micro_batches, loss_fn, optimizer, **how)


def measured(config):
    """Return the ledger of one real step of a config on the CPU."""
    model = build_experiment_model(config, CPU)
    ids = torch.zeros(config.micro_batch_size, config.seq_len, dtype=torch.int64)
    return measured_second_step(
        model,
        build_optimizer(model, config),
        [{"input_ids": ids, "labels": ids}] * config.grad_accum_steps,
        partial(lm_loss_sum, chunk_tokens=config.loss_chunk_tokens),
        precision=config.precision,
        # Small enough that no gradient is inf: a skipped step has no temporaries.
        scaler=precision.grad_scaler(config.precision, CPU, init_scale=2.0**10),
        max_grad_norm=config.max_grad_norm,
        count_targets=count_targets,
    )


def cases() -> list:
    """Return changes to the shipped config `fp32` that change the bytes of a step."""
    changes = [
        {"activation": "gelu_tanh"},
        {"use_cache": True, "dropout": 0.1},
        {"loss_chunk_tokens": 50, "seq_len": 96, "tokens_per_step": 192},
        {"loss_chunk_tokens": 64, "precision": "pure_bf16"},
        {"attention": "flash"},
        {"attention": "eager", "dropout": 0.1, "gradient_checkpointing": "block"},
        {"gradient_checkpointing": "block", "loss_chunk_tokens": 64, "precision": "bf16"},
        {"gradient_checkpointing": "block", "precision": "fp16"},
        LEAN,
        LEAN | {"optimizer": "adamw_bf16", "precision": "pure_bf16"},
        {"optimizer": "muon", "precision": "pure_bf16"},
        {"optimizer": "muon", "precision": "fp16", "tokens_per_step": 192},
        LEAN | {"optimizer": "muon", "optimizer_in_backward": True},
        LEAN
        | {"precision": "pure_bf16", "optimizer_in_backward": True, "loss_chunk_tokens": 64}
        | {"gradient_checkpointing": "block"},
    ]
    precisions, implementations = ("fp32", "fp16", "bf16", "pure_bf16"), ("fused", "foreach")
    for name, how, tokens in product(precisions, implementations, (64, 192)):
        changes.append({"precision": name, "optimizer_impl": how, "tokens_per_step": tokens})
    for policy, dropout in product(POLICIES, (0.0, 0.1)):
        changes.append(CHECKPOINTED | {"gradient_checkpointing": policy, "dropout": dropout})
    return changes


@pytest.mark.parametrize("changes", cases(), ids=str)
def test_prediction_is_what_this_cpus_allocator_gives(changes):
    config = lab.load_config("fp32", **TINY | changes)
    predicted, real = predict_memory(config, "cpu"), measured(config.on("cpu"))
    assert predicted.peak_bytes == SAME_BYTES(real.peak_bytes)
    near = partial(SAME_BYTES, abs=0.002 * real.peak_bytes)
    for phase, parts in real.phases.items():
        if phase == "optimizer" and config.optimizer_in_backward:
            continue  # it updates in another phase
        ours = predicted.phases[phase]
        assert sum(ours.values()) == SAME_BYTES(sum(parts.values())), phase
        assert ours[PARAMETERS] == parts[PARAMETERS]
        assert ours[OPTIMIZER] == near(parts[OPTIMIZER])
        if config.gradient_checkpointing == "none":  # else activations are temporaries too
            kept = ours[ACTIVATIONS] + ours[CAST_WEIGHTS] + ours[LOGITS]
            assert kept == near(parts[ACTIVATIONS] + parts[LOGITS]), phase


# ---- What the trace knows of torch


def test_a_prediction_leaves_torchs_random_numbers_alone():
    before = torch.manual_seed(5).get_state()
    changes = TINY | {"seq_len": 48, "tokens_per_step": 96}  # a step that no other test has traced
    predict_memory(lab.load_config("fp32", **changes))
    assert torch.equal(torch.get_rng_state(), before)


def test_cuda_rules_are_gone_afterwards():
    x = torch.randn(1, 1, 4, 4, requires_grad=True)
    before = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    with pytest.raises(RuntimeError, match="inside"), cuda_rules():
        raise RuntimeError("inside")
    assert torch.equal(nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True), before)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert x.bfloat16().exp().dtype == torch.bfloat16


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


def adam(parameters) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in parameters if p.requires_grad])


@pytest.mark.parametrize("has_adapters", [False, True])
def test_any_module_is_predicted_in_training_mode_and_left_alone(has_adapters):
    model = nn.Sequential(nn.Linear(256, 512), nn.Dropout(), nn.Linear(512, 256)).eval()
    if has_adapters:
        add_lora(model, ["0", "2"], 4)
    before, batch = copy.deepcopy(model.state_dict()), torch.randn(64, 256)
    predicted = predict_module(model, batch, squares, adam, precision="bf16", device="cpu")
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert not model.training
    real = measured_second_step(model.train(), adam(model.parameters()), [batch], squares)
    assert predicted.peak_bytes == SAME_BYTES(real.peak_bytes)
    n_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert real.categories[OPTIMIZER] == pytest.approx(8 * n_trained, rel=0.01)


def test_any_module_may_accumulate_and_clip():
    model, batch = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256)), torch.randn(8, 256)
    step, how = (model, batch, squares, adam), {"precision": "fp32", "max_grad_norm": 1.0}
    predicted = predict_module(*step, device="cpu", grad_accum_steps=3, **how)
    real = measured_second_step(model, adam(model.parameters()), 3 * [batch], squares, **how)
    assert predicted.peak_bytes == SAME_BYTES(real.peak_bytes)
    assert predicted.phases["forward"]["gradients"]  # of the micro-batch before
    clips = [predict_module(*step, max_grad_norm=x).phases["optimizer"] for x in (0.0, 1.0)]
    assert clips[0] != clips[1]


def test_a_loop_may_keep_gradients_until_backward():
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    optimizer, batch = torch.optim.SGD(model.parameters()), torch.randn(600, 256)
    for _ in range(2):
        before = lab.allocated_bytes(CPU)
        with lab.peak_allocated(CPU) as peak:
            loss = squares(model, batch)
            optimizer.zero_grad()
            loss.backward()
        del loss
    step = model, batch, squares, torch.optim.SGD
    predicted = predict_module(*step, device="cpu", keeps_gradients=True)
    gradients = sum(p.nbytes for p in model.parameters())
    assert predicted.phases["loss"]["gradients"] == gradients
    assert not predict_module(*step, device="cpu").phases["loss"]["gradients"]
    # beside weights and gradients, which were there before; on a CPU the batch is not counted
    assert predicted.peak_bytes == SAME_BYTES(peak.n_bytes - before + 2 * gradients)


class Other(nn.Module):
    """A linear layer, and what a module may do besides."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mask = nn.Linear(256, 256), torch.ones(64, 256)
        layer = self.layer
        self.behind = lambda x: layer(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.shape
        return self.behind(x) * self.mask


def test_tensors_beside_parameters_and_batch_are_counted():
    model, batch = Other(), torch.randn(64, 256)
    weight, targets = torch.ones(256), torch.zeros(64, dtype=torch.int64)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(x), targets, weight=weight)

    before = {**vars(model)}, [*model.parameters()]
    predicted = predict_module(model, batch, loss_fn, adam, device="cpu")
    assert all(map(operator.is_, model.parameters(), before[1])) and vars(model) == before[0]
    real = measured_second_step(model, adam(model.parameters()), [batch], loss_fn)
    others = weight.nbytes + targets.nbytes + model.mask.nbytes  # it does not see these three
    assert predicted.peak_bytes == SAME_BYTES(real.peak_bytes + others)


def on_condition(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).sum() if model(x).mean() > 0 else model(x).mean()


def with_a_stranger(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) * STRANGER).sum()


STRANGER = torch.ones(8, requires_grad=True)
LAYER = nn.Linear(8, 8)


@pytest.mark.parametrize(
    ("loss_fn", "optimizer", "words"),
    [
        (on_condition, adam, "in on_condition: return .* if model"),
        (with_a_stranger, adam, r"\(8,\) that requires a gradient is no parameter"),
        (squares, adam(LAYER.parameters()), "what makes the optimizer .* torch.optim.Adam"),
        (squares, torch.optim.Adafactor, "backward or the optimizer"),
    ],
)
def test_what_cannot_be_predicted_is_said_with_its_line(loss_fn, optimizer, words):
    with pytest.raises(ValueError, match=words):
        predict_module(LAYER, torch.ones(4, 8), loss_fn, optimizer)
    assert LAYER.weight.tolist()  # it has data again


@pytest.mark.parametrize(
    ("module", "card", "precision", "n_bytes"),  # read off torch's CUDA allocator, without a card
    [
        ("shared keys", "h200", "fp32", 136612864 if NEW else 289440768),
        ("shared keys", "h200", "bf16", 124683264),
        ("shared keys", "t4", "fp16", 74613760 if NEW else 238584832),
        ("cross entropy", "h200", "fp32", 221337088),
        ("cross entropy", "h200", "bf16", 202454528 if OLD else 198260224),
        ("cross entropy", "t4", "fp16", 146101760 if OLD else 141907456),
    ],
)
def test_what_only_cuda_has_kernels_for_takes_what_its_allocator_gave(
    module, card, precision, n_bytes
):
    net, loss_fn = modules_with_rules()[module]
    options = {"precision": precision, "device": card}
    predicted = predict_module(net, torch.ones(4, 512, 512), loss_fn, torch.optim.AdamW, **options)
    assert predicted.peak_bytes == pytest.approx(n_bytes, rel=0.001)


# By transformers' version: bytes in fp32 and bf16, read off torch's CUDA allocator, without a card.
# With torch 2.11 and 2.13 they are the same; 2.15 was read with the newest alone.
EXPERTS = {
    "5.17": {"fp32": 153113088, "bf16": 141130752},
    "5.23": {"fp32": 152814080, "bf16": 141110784},
    "5.24": {"fp32": 142453248 if NEW else 152814080, "bf16": 140093952},
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_mixture_of_experts_takes_what_the_allocator_gave(precision):
    """By `grouped_mm`, as transformers' models by default: the same bytes for any routing."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    net = MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=4))
    ids = torch.zeros(4, 256, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    predict = partial(predict_module, net, batch, lambda model, batch: model(**batch).loss)
    adamw = partial(torch.optim.AdamW, fused=True)
    predicted = predict(adamw, precision=precision, device="a100").peak_bytes
    version = ".".join(transformers.__version__.split(".")[:2])
    n_bytes = EXPERTS.get(version, {precision: predicted})[precision]
    assert predicted == pytest.approx(n_bytes, rel=0.001)
    if precision == "fp32":
        on_cpu = predict(adamw, precision=precision, device="cpu")
        loss_fn, optimizer = predict.args[2], adamw(net.parameters())
        options = {"precision": precision, "count_targets": lambda _: 1}
        real = measured_second_step(net, optimizer, [batch], loss_fn, **options)
        assert on_cpu.peak_bytes == SAME_BYTES(real.peak_bytes)


@pytest.mark.parametrize(
    ("device", "chosen", "n_layers_copied"),
    [
        ("a100", {}, 12),  # CUDA's default: one list of all square roots
        # a root, its quotient, and the quotient of the layer before
        ("a100", {"foreach": False}, 3),
        ("a100", {"fused": True}, 0),
        ("cpu", {}, 3),
    ],
)
def test_temporaries_of_adamw_are_those_of_the_implementation(device, chosen, n_layers_copied):
    net = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(12)))
    adamw = partial(torch.optim.AdamW, **chosen)
    ledger = predict_module(net, torch.ones(1, 256), squares, adamw, device=device)
    copied = ledger.phases["optimizer"][TEMPORARIES] / (256 * 256 * 4)
    assert copied == pytest.approx(n_layers_copied, abs=0.05)


# ---- On a card


def test_each_policy_keeps_less_on_the_card():
    kept = []
    for policy in ("none", "selective", "block", "offload"):
        config = lab.load_config("bf16", **SHAPE, gradient_checkpointing=policy)
        kept.append(predict_memory(config).phases["loss"])
    activations = [phase[ACTIVATIONS] for phase in kept]
    assert activations == sorted(activations, reverse=True)
    # what stays on the card is made behind the last block: its result, and the last norm's
    assert activations[-1] < 4 * 4 * 1024 * 768
    # of all products the weights, and of those in blocks the biases, once in 16 bits
    cast = 2 * (12 * (12 * 768**2 + 9 * 768) + 50257 * 768)
    assert [phase[CAST_WEIGHTS] for phase in kept] == [cast] * 4


def test_emulated_bf16_has_no_fused_attention_and_what_a_device_lacks_is_refused():
    """Emulated is what is predicted for a card that is elsewhere: it keeps the (T, T) matrices."""
    configs = (lab.load_config(name, **SHAPE, dropout=0.0) for name in ("bf16", "fp16"))
    emulated, fused = (predict_memory(config, "t4") for config in configs)
    matrices = 12 * 2 * 12 * 512 * 512 * 2
    assert emulated.peak_bytes > fused.peak_bytes + matrices
    with pytest.raises(PrecisionUnsupported, match="Ampere"):
        predict_memory(lab.load_config("fp16", attention="flash"), "t4")


# ---- Torch's CUDA allocator, as recorded

CARD_OF = {"NVIDIA H200": "h200", "Tesla T4": "t4", "NVIDIA GeForce RTX 4060": "rtx4060"}
NEAR = {"allocated": 0.001, "reserved": 0.01, "reserved_expandable": 0.01}
NEAR |= {"smallest_cap": 0.02, "smallest_cap_expandable": 0.04}


@pytest.mark.parametrize("every", [13, pytest.param(1, marks=slow)])
def test_predictions_agree_with_the_recorded_table(every):
    """Each figure is as near as NEAR says. And never a false "fits": what is called enough
    completes.
    """
    table = pd.read_csv(REFERENCE_DIR / "allocator.csv")
    for row in table[::every].to_dict("records"):
        config = lab.load_config(row["config"], **json.loads(row["overrides"]))
        requests, figures = predicted_on(CARD_OF[row["card"]], config).requests, {}
        for settings, suffix in ((DEFAULT, ""), (EXPANDABLE, "_expandable")):
            unlimited = replayed(requests, CachingAllocator(settings=settings))
            figures[f"allocated{suffix}"] = unlimited.peak_allocated
            figures[f"reserved{suffix}"] = unlimited.peak_reserved
            figures[f"smallest_cap{suffix}"] = smallest_limit(requests, unlimited)
        for name, most in NEAR.items():
            assert figures[name] == pytest.approx(row[f"{name}_bytes"], rel=most), (name, row)
            if name.startswith("smallest_cap"):
                assert memory.MARGIN * figures[name] >= row[f"{name}_bytes"], row


# ---- What a card must have


@pytest.fixture(scope="module")
def nano() -> Prediction:
    return predicted_on("a100", lab.load_config("fp32", **NANO))


@pytest.mark.parametrize("settings", [DEFAULT, EXPANDABLE])
def test_the_smallest_limit_is_enough_and_less_is_not(nano, settings):
    unlimited = replayed(nano.requests, CachingAllocator(settings=settings))
    least = smallest_limit(nano.requests, unlimited)
    assert completes(nano.requests, least, settings)
    assert not completes(nano.requests, unlimited.peak_allocated - 2 * MIB, settings)
    assert unlimited.peak_allocated <= least <= unlimited.peak_reserved


def test_categories_add_up_to_what_the_allocator_has_given(nano):
    """In the third step; the peak of all three is at most a rounding away."""
    unlimited = replayed(nano.requests, CachingAllocator())
    assert nano.ledger.peak_bytes == pytest.approx(unlimited.peak_allocated, rel=0.002)
    assert nano.ledger.categories[WORKSPACES] == 2 * 8519680
    assert nano.ledger.categories[ROUNDING] >= 0


@pytest.mark.parametrize("problem", ["", "not under WSL"])
def test_on_the_gpu_here_the_environment_and_the_system_count(monkeypatch, problem):
    growing = lab.load_config("fp32", expandable_segments=True)
    card = replace(CARDS["t4"], is_here=True)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.setattr(memory, "without_expandable_segments", lambda: problem)
    assert allocator_settings(growing, card) == Settings(not problem, 64 * MIB)
    assert allocator_settings(growing, CARDS["a100"]) == EXPANDABLE
