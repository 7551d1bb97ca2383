from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers
from torch import nn

import labutils as lab
from labutils.cli import main
from labutils.config.card import CARDS, PrecisionUnsupported
from labutils.config.choices import CHECKPOINTING
from labutils.config.schema import ConfigError
from labutils.memory.ledger import (
    ACTIVATIONS,
    CAST_WEIGHTS,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    PARAMETERS,
    ROUNDING,
    TEMPORARIES,
    WORKSPACES,
)
from labutils.memory.measure import measure_step
from labutils.prediction.cuda_rules import cuda_rules
from labutils.prediction.memory import predict_memory
from labutils.prediction.module import predict_module
from labutils.techniques import precision
from labutils.techniques.loss import lm_loss_sum
from labutils.workload.build import build_experiment_model, build_optimizer
from tests.helpers import CPU, sizes_on, slow, without_onednn

TINY = {"seq_len": 32, "micro_batch_size": 2, "dropout": 0.0}


def measured(config):
    """Return the profiler's ledger of one real step of a config on the CPU, without oneDNN."""
    model = build_experiment_model(config, CPU)
    optimizer = build_optimizer(model, config)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    batch = {"input_ids": torch.zeros(config.micro_batch_size, config.seq_len, dtype=torch.int64)}
    batch["labels"] = batch["input_ids"]
    with without_onednn():
        return measure_step(
            model,
            [batch] * config.grad_accum_steps,
            partial(lm_loss_sum, chunk_tokens=config.loss_chunk_tokens),
            optimizer,
            precision=config.precision,
            # Small enough that no gradient is inf: a skipped step has no temporaries.
            scaler=precision.grad_scaler(config.precision, CPU, init_scale=2.0**10),
            max_grad_norm=config.max_grad_norm,
        )


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16", "pure_bf16"])
def test_prediction_is_the_real_allocators_peak_on_a_cpu(name, accumulate, implementation):
    changes = {
        "precision": name,
        "optimizer_impl": implementation,
        "tokens_per_step": 64 * accumulate,
    }
    config = lab.load_config("fp32", **TINY, **changes)
    predicted, real = predict_memory(config, "cpu"), measured(config.on("cpu"))
    assert predicted.peak_bytes == pytest.approx(real.peak_bytes, rel=0.005)
    assert sum(real.phases[predicted.peak_phase].values()) == pytest.approx(
        real.peak_bytes, rel=0.005
    )  # or a tie
    for phase, parts in real.phases.items():
        ours = predicted.phases[phase]
        near = partial(pytest.approx, rel=0.005, abs=0.002 * real.peak_bytes)
        assert ours[PARAMETERS] == parts[PARAMETERS]
        assert ours[OPTIMIZER] == near(parts[OPTIMIZER])
        assert ours[ACTIVATIONS] + ours[CAST_WEIGHTS] + ours[LOGITS] == near(
            parts[ACTIVATIONS] + parts[LOGITS]
        ), phase
        assert ours[GRADIENTS] + ours[TEMPORARIES] == near(parts[GRADIENTS] + parts[TEMPORARIES]), (
            phase
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"dropout": 0.1},
        {"activation": "gelu_tanh"},
        {"use_cache": True},
        {"seq_len": 96},
        {"loss_chunk_tokens": 50},
        {"gradient_checkpointing": "block"},
        {
            "gradient_checkpointing": "block",
            "dropout": 0.1,
            "loss_chunk_tokens": 64,
            "precision": "bf16",
        },
        {"gradient_checkpointing": "block", "precision": "fp16"},
        {"attention": "eager"},
        {"attention": "flash"},
        {"attention": "eager", "dropout": 0.1, "gradient_checkpointing": "block"},
        {"loss_chunk_tokens": 64, "precision": "pure_bf16"},
    ],
)
def test_prediction_knows_the_switches_of_the_model(changes):
    values = {**TINY, "tokens_per_step": 192, "micro_batch_size": 2} | changes
    config = lab.load_config("fp32", **values)
    predicted, real = predict_memory(config, "cpu"), measured(config.on("cpu"))
    assert predicted.peak_bytes == pytest.approx(real.peak_bytes, rel=0.005)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", ["fp32", pytest.param("bf16", marks=slow)])
@pytest.mark.parametrize("policy", [row.name for row in CHECKPOINTING.values() if row.is_on])
def test_prediction_knows_every_checkpointing_policy(policy, name, dropout):
    shape = {
        "seq_len": 96,
        "micro_batch_size": 3,
        "tokens_per_step": 288,
        "dropout": dropout,
        "precision": name,
    }
    config = lab.load_config("fp32", **shape, gradient_checkpointing=policy, optimizer="sgd")
    predicted, real = predict_memory(config, "cpu"), measured(config.on("cpu"))
    for phase, parts in real.phases.items():
        ours = sum(predicted.phases[phase].values())
        assert ours == pytest.approx(sum(parts.values()), rel=0.005), phase


def test_offloaded_tensors_are_not_on_the_card():
    shape = {"seq_len": 512, "micro_batch_size": 8, "tokens_per_step": 4096}
    policies = ("none", "selective", "block", "offload")
    found = {
        p: predict_memory(lab.load_config("bf16", **shape, gradient_checkpointing=p))
        for p in policies
    }
    kept = [found[p].phases["loss"][ACTIVATIONS] for p in policies]
    assert all(more > less for more, less in itertools.pairwise(kept))
    # what stays on the card is made behind the last block: its result, and the last norm's
    assert kept[-1] < 4 * 4 * 4096 * 768


@pytest.mark.parametrize(
    ("name", "seq_len", "chunk"),
    [pytest.param("fp32", 96, 0, marks=slow), ("optimized", 256, 128), ("fp32", 64, 64)],
)
def test_two_and_three_sequences_tell_about_all(name, seq_len, chunk):
    config = lab.load_config(
        name,
        model="gpt2-nano",
        seq_len=seq_len,
        micro_batch_size=1,
        tokens_per_step=28 * seq_len,
        loss_chunk_tokens=chunk,
    )
    sweep = sizes_on("a100", config)
    for size in (1, 7):
        direct = predict_memory(config.model_copy(update={"micro_batch_size": size}))
        for phase, parts in direct.phases.items():
            total = sum(sweep.at(size).ledger.phases[phase].values())
            assert total == pytest.approx(sum(parts.values()), rel=0.001), (
                size,
                phase,
            )  # requests are rounded up
    assert ((2, 2) in sweep.traces._known) == (chunk == 0)  # else every size is traced


def test_kept_outputs_keep_the_logits():
    config = lab.load_config("fp32", seq_len=128, optimizer_impl="foreach")
    freed, kept = (predict_memory(config, keep_outputs=keep) for keep in (False, True))
    logits = 4 * config.micro_batch_size * 128 * 50257
    more = sum(kept.phases["optimizer"].values()) - sum(freed.phases["optimizer"].values())
    assert more == pytest.approx(logits, rel=0.01)


class UsesItsWeightTwice(nn.Module):
    """256 float32 numbers whose two gradients are summed in place, where nobody watches."""

    # the weight and its first gradient, the second for a moment, three scalars
    BACKWARD_BYTES = 3080

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.weight * x


def test_this_torch_can_be_traced():
    """The log rests on private parts of torch: it must see gradients summed in place."""
    module = UsesItsWeightTwice()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    real = measure_step(
        module, [torch.ones(256)], lambda m, x: m(x).sum(), optimizer, count_targets=lambda x: 1
    )
    assert sum(real.phases["backward"].values()) == pytest.approx(module.BACKWARD_BYTES, abs=16)
    ledger = predict_module(
        module, torch.empty(256), lambda m, x: m(x).sum(), torch.optim.SGD, device="cpu"
    )
    assert sum(ledger.phases["backward"].values()) == module.BACKWARD_BYTES


def test_prediction_for_cuda_is_what_independent_traces_found():
    """124M, B4 T1024, BF16 autocast, tanh GELU, no cache, no dropout, fused AdamW:

    5333 MiB by a fake-CUDA trace.
    """
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 20):
        pytest.skip("found with transformers 5.23; 5.0 has a buffer of 1 MiB more in every layer")
    values = {"seq_len": 1024, "micro_batch_size": 4, "tokens_per_step": 4096}
    config = lab.load_config("optimized", **values, pad_vocab=False, loss_chunk_tokens=0)
    found = predict_memory(config, "a100").categories
    tensors = (
        sum(found.values()) - found[WORKSPACES] - found[ROUNDING]
    )  # which that trace did not count
    assert tensors / 2**20 == pytest.approx(5333, rel=0.001)


def test_cuda_rules_are_gone_afterwards():
    x = torch.randn(1, 1, 4, 4, requires_grad=True)
    before = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    predict_memory(lab.load_config("fp32", **TINY, tokens_per_step=64), "a100")
    assert torch.equal(nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True), before)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert x.bfloat16().exp().dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="inside"), cuda_rules():
        raise RuntimeError("inside")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert x.bfloat16().exp().dtype == torch.bfloat16


def test_memory_efficient_attention_where_there_is_no_flash():
    config = lab.load_config("fp16", seq_len=512, micro_batch_size=4, tokens_per_step=2048)
    assert predict_memory(config, "t4").peak_bytes > 0
    with pytest.raises(PrecisionUnsupported, match="tf32 cannot run on t4"):
        predict_memory(lab.load_config("tf32"), "t4")


def test_emulated_bf16_has_no_fused_attention():
    """It is predicted for a card that is elsewhere: the (T, T) matrices of attention are kept."""
    shape = {"seq_len": 512, "micro_batch_size": 4, "tokens_per_step": 2048, "dropout": 0.0}
    emulated, fused = (predict_memory(lab.load_config(p, **shape), "t4") for p in ("bf16", "fp16"))
    matrices = 12 * 4 * 12 * 512 * 512 * 2
    assert emulated.peak_bytes > fused.peak_bytes + matrices
    here = replace(CARDS["t4"], is_here=True)
    with pytest.raises(PrecisionUnsupported, match="bf16 cannot run here"):
        predict_memory(lab.load_config("bf16"), here)


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_any_module_is_predicted_and_left_alone(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256))
    before = [p.detach().clone() for p in model.parameters()]
    batch = torch.randn(64, 256)
    predicted = predict_module(
        model,
        batch,
        lambda m, b: m(b).square().sum(),
        torch.optim.Adam,
        precision=name,
        device="cpu",
    )
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with without_onednn():
        real = measure_step(
            model,
            [batch],
            lambda m, b: m(b).square().sum(),
            optimizer,
            count_targets=lambda b: 1,
            precision=name,
        )
    assert predicted.peak_bytes == pytest.approx(real.peak_bytes, rel=0.005)


def test_nothing_of_the_predicted_size_is_allocated():
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ledger = predict_memory(lab.load_config("fp32", model="gpt2-xl", seq_len=1024), "h200")
    assert ledger.peak_bytes > 30 * 2**30
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 2 * 2**30


def test_predict_command(capsys):
    assert main(["predict", "optimized", "--gpu-memory-gib", "8", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["peak_bytes"] == sum(answer["categories"].values())
    assert answer["peak_phase"] in answer["phases"]
    assert answer["fits"] is True
    assert (
        answer["peak_bytes"]
        <= answer["reserved_bytes"]
        < answer["needed_bytes"]
        == answer["needed_gib"] * 2**30
    )
    assert (
        answer["reserved_expandable_bytes"]
        < answer["needed_expandable_bytes"]
        <= answer["needed_bytes"]
    )
    nano = ["predict", "fp32", "--set", "model=gpt2-nano", "--set", "activation=gelu_tanh"]
    assert main([*nano, "--gpu-memory-gib", "0.6"]) == 0
    printed = capsys.readouterr().out
    assert "does NOT fit 0.6 GiB" in printed and "both predicted" in printed
    assert "gradient_checkpointing block: each block's forward pass twice" in printed
    assert main([*nano, "--set", "memory_limit_gib=0.1"]) == 0
    assert "0.6 GiB" in capsys.readouterr().out  # the limit leaves the context out
    for nonsense in ("0", "-1", "nan", "inf", "much"):
        assert main([*nano, "--gpu-memory-gib", nonsense]) == 2
    capsys.readouterr()
    assert main(["predict", "tf32", "--device", "t4"]) == 1
    assert "use fp16" in capsys.readouterr().err
    assert main(["predict", "fp32", "--set", "steps=0"]) == 1
    assert main(["predict", "fp32", "--set", "attention=flash"]) == 1
    assert "16 bits only" in capsys.readouterr().err


def test_attention_that_a_device_lacks_is_refused():
    with pytest.raises(PrecisionUnsupported, match="Ampere"):
        predict_memory(lab.load_config("fp16", attention="flash"), "t4")
    with pytest.raises(ConfigError, match="without dropout"):
        cpu = {"when_cpu": {"attention": "flash", "dropout": 0.1}}
        predict_memory(lab.load_config("fp32").model_copy(update=cpu), "cpu")


@pytest.mark.parametrize(("device", "smallest"), [("cpu", 4), ("a100", 512)])
def test_a_request_is_rounded_up_on_cuda_only(device, smallest):
    """The caching allocator gives nothing below 512 bytes; here to a weight and a bias of one
    number each.
    """
    net = nn.Linear(1, 1)
    ledger = predict_module(
        net, torch.ones(1, 1), lambda m, x: m(x).sum(), torch.optim.SGD, device=device
    )
    assert ledger.phases["forward"][PARAMETERS] == 2 * smallest


@pytest.mark.parametrize(
    ("device", "chosen", "n_layers_copied"),
    [
        ("a100", {}, 12),  # CUDA's default: one list of all square roots
        ("a100", {"foreach": True}, 12),
        # a root, its quotient, and the quotient of the layer before
        ("a100", {"foreach": False}, 3),
        ("a100", {"fused": True}, 0),
        ("cpu", {}, 3),
    ],
)
def test_temporaries_of_adamw_are_those_of_the_implementation(device, chosen, n_layers_copied):
    net = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(12)))
    adamw = partial(torch.optim.AdamW, **chosen)
    ledger = predict_module(net, torch.ones(1, 256), lambda m, x: m(x).sum(), adamw, device=device)
    found = ledger.phases["optimizer"][TEMPORARIES]
    assert found / (256 * 256 * 4) == pytest.approx(n_layers_copied, abs=0.05)


def test_a_module_is_predicted_in_training_mode_and_left_in_its_own():
    def activations(*layers: nn.Module) -> int:
        net = nn.Sequential(nn.Linear(8, 8), *layers).eval()
        ledger = predict_module(
            net, torch.ones(4, 8), lambda m, x: m(x).sum(), torch.optim.SGD, device="cpu"
        )
        assert not net.training
        return ledger.phases["forward"][ACTIVATIONS]

    assert activations(nn.Dropout(0.5)) > activations()  # a mask, and a result beside its input
