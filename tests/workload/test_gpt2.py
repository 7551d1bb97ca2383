from __future__ import annotations

import copy
import math
import os
import socket
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import labutils as lab
from labutils.config.choices import CHECKPOINTING, MODELS
from labutils.techniques.attention import use_attention
from labutils.techniques.checkpointing import ATTENTION
from labutils.techniques.loss import ChunkedLoss
from labutils.training.runs import flops_per_token
from tests.helpers import REPO, fill_hub_cache, slow

POLICIES = [row.name for row in CHECKPOINTING.values() if row.is_on]


@pytest.mark.parametrize(
    ("name", "millions"), [("gpt2", 124.4), ("gpt2-medium", 354.8), ("gpt2-xl", 1557.6)]
)
def test_sizes_have_gpt2s_parameter_counts(name, millions):
    with torch.device("meta"):  # where old versions of transformers do not tie the output embedding
        model = lab.build_model(name)
    sizes = {key: p.numel() for key, p in model.named_parameters() if not key.startswith("lm_head")}
    assert sum(sizes.values()) / 1e6 == pytest.approx(millions, abs=0.05)


def test_one_seed_gives_one_model():
    a, b, c = (lab.build_model(seed=s).transformer.h[0].attn.c_attn.weight for s in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_lm_loss_is_hugging_faces_loss():
    model = lab.build_model(dropout=0.0)
    ids = torch.randint(0, 2048, (2, 16))
    batch = {"input_ids": ids, "labels": ids.clone()}
    batch["labels"][0, 5:] = -100
    ours = lab.lm_loss_sum(model, batch) / lab.count_targets(batch)
    assert ours.item() == pytest.approx(model(**batch).loss.item(), rel=1e-6)
    assert lab.count_targets(batch) == 4 + 15


def gradients(model, loss_fn, batch):
    model.zero_grad()
    torch.manual_seed(1)  # the same dropout masks
    loss = loss_fn(model, batch)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize(("chunk_tokens", "name"), [(7, "fp32"), (64, "bf16"), (1, "fp16")])
def test_chunked_loss_leaves_loss_and_gradients_unchanged(chunk_tokens, name):
    model = lab.build_model()
    ids = torch.randint(0, 2048, (2, 16))
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids % 5 == 0, -100)}
    with lab.autocast(name, torch.device("cpu")):
        whole, expected = gradients(model, lab.lm_loss_sum, batch)
        chunked, found = gradients(model, lambda m, b: lab.lm_loss_sum(m, b, chunk_tokens), batch)
    # sums in another order; under autocast each chunk's gradient is rounded to 8 bits before they
    # are added
    assert chunked == pytest.approx(whole, rel=1e-5)
    assert (found - expected).norm() < (1e-5 if name == "fp32" else 2e-2) * expected.norm()


def test_chunked_loss_loses_no_small_gradient_in_fp16():
    hidden, weight = torch.ones(1, 4, dtype=torch.float16, requires_grad=True), torch.zeros(4000, 4)
    weight[0] = 3.875  # the others: e^-15.5 each, 3.1 of the smallest FP16 numbers
    weight = weight.half().requires_grad_()
    ChunkedLoss.apply(hidden, weight, torch.tensor([0]), 8).backward(torch.tensor(1024.0))
    others = 1024 * math.exp(-15.5) / (1 + 3999 * math.exp(-15.5))
    assert weight.grad[1:].float().mean().item() == pytest.approx(others, rel=0.01)


def test_chunked_loss_of_a_frozen_head_asks_for_no_gradient_of_it():
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4)
    ChunkedLoss.apply(hidden, weight, torch.arange(6), 2).backward()
    (expected,) = torch.autograd.grad(
        F.cross_entropy(hidden @ weight.T, torch.arange(6), reduction="sum"), hidden
    )
    torch.testing.assert_close(hidden.grad, expected)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_every_checkpointing_policy_leaves_loss_and_gradients_unchanged(name, dropout):
    ids = torch.randint(0, 2048, (2, 16))
    batch = {"input_ids": ids, "labels": ids}
    results = {}
    with lab.autocast(name, torch.device("cpu")):
        for policy in CHECKPOINTING:
            model = lab.build_model(dropout=dropout, gradient_checkpointing=policy)
            results[policy] = gradients(model, lab.lm_loss_sum, batch)
    for policy, (loss, gradient) in results.items():
        assert loss == results["none"][0], policy
        assert torch.equal(gradient, results["none"][1]), (
            policy
        )  # the random state of dropout is kept too


def kept_bytes(model):
    """Return the bytes of the tensors that a forward pass leaves to the backward pass, without the
    parameters.
    """
    tensors = {}

    def pack(t):
        if not isinstance(t, torch.nn.Parameter):
            tensors[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model.base_model(torch.zeros(1, 64, dtype=torch.int64))
    return sum(tensors.values())


@pytest.mark.parametrize(
    "policy", [row.name for row in CHECKPOINTING.values() if row.is_on and not row.to_host]
)
def test_checkpointing_is_active_in_eval_mode_too(policy):
    """Hugging Face's own switch is silently off in eval(), where from_pretrained leaves a model."""
    plain = kept_bytes(lab.build_model(dropout=0.0).eval())
    assert (
        kept_bytes(lab.build_model(dropout=0.0, gradient_checkpointing=policy).eval()) < 0.2 * plain
    )
    theirs = lab.build_model(dropout=0.0).eval()
    hugging_faces_switch(theirs)
    assert kept_bytes(theirs) == plain
    assert kept_bytes(theirs.train()) < 0.2 * plain


def hugging_faces_switch(model):
    # renamed in transformers 5.23
    switch = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    switch({"use_reentrant": False})


def test_block_is_hugging_faces_own_switch():
    ids = torch.randint(0, 2048, (2, 16))
    batch = {"input_ids": ids, "labels": ids}
    theirs = lab.build_model()
    hugging_faces_switch(theirs)
    ours = lab.build_model(gradient_checkpointing="block")
    (loss, gradient), (expected_loss, expected) = (
        gradients(m, lab.lm_loss_sum, batch) for m in (ours, theirs)
    )
    assert loss == expected_loss
    assert torch.equal(gradient, expected)
    assert list(ours.state_dict()) == list(theirs.state_dict())


def test_a_copy_of_a_checkpointed_model_is_independent():
    model = lab.build_model(gradient_checkpointing="every_2")
    twin = copy.deepcopy(model)
    twin(torch.zeros(1, 4, dtype=torch.int64)).logits.sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in twin.parameters())


def test_selective_keeps_attention_only_where_it_draws_no_random_numbers():
    """A fused kernel that is skipped when a block is computed again would not advance the random
    state.
    """
    keeps = {
        p: lab.build_model(dropout=p, gradient_checkpointing="selective").transformer.h.kept
        for p in (0.0, 0.1)
    }
    assert ATTENTION[0] in keeps[0.0]
    assert ATTENTION[0] not in keeps[0.1]


SWITCHES = [
    *({"attention": kind} for kind in ("eager", "flash", "auto")),
    {"activation": "gelu_tanh"},
    {"use_cache": True},
    {"gradient_checkpointing": "block"},
    {"gradient_checkpointing": "every_2", "use_cache": True},
    {"gradient_checkpointing": "selective", "attention": "eager"},
    {"gradient_checkpointing": "offload"},
    {"attention": "eager", "activation": "gelu_tanh", "gradient_checkpointing": "block"},
]


# Each switch with one kind of padding; all three kinds occur with each kind of switch.
@pytest.mark.parametrize(
    ("switches", "padded"),
    [(switches, ("", "right", "left")[i % 3]) for i, switches in enumerate(SWITCHES)],
    ids=str,
)
def test_each_switch_gives_hugging_faces_own_loss_and_gradients(switches, padded):
    from transformers import GPT2Config, GPT2LMHeadModel

    row = MODELS["gpt2-nano"]
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    torch.manual_seed(0)
    plain = GPT2LMHeadModel(
        GPT2Config(
            n_layer=row.n_layer,
            n_head=row.n_head,
            n_embd=row.width,
            vocab_size=row.vocabulary,
            **off,
        )
    ).train()
    ours = lab.build_model(dropout=0.0, **switches)
    ours.load_state_dict(plain.state_dict())
    batch = {
        "input_ids": torch.randint(
            1, row.vocabulary, (3, 40), generator=torch.Generator().manual_seed(1)
        )
    }
    batch["labels"] = batch["input_ids"].clone()
    if padded:
        mask = (torch.arange(40) < torch.tensor([[40], [25], [7]])).long()
        batch["attention_mask"] = mask if padded == "right" else mask.flip(1)
        batch["labels"][batch["attention_mask"] == 0] = -100
        if (
            padded == "left"
        ):  # what a token of padding predicts of the first real one is not defined
            batch["labels"][torch.arange(3), 40 - mask.sum(1)] = -100
    plain(**batch).loss.backward()
    loss = lab.lm_loss_sum(ours, batch) / lab.count_targets(batch)
    loss.backward()
    with torch.no_grad():
        assert loss.item() == pytest.approx(plain(**batch).loss.item(), rel=1e-6)
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            p.grad, q.grad, rtol=1e-4, atol=2e-6
        )  # float32 sums in another order


def test_a_pass_reads_no_number_back_from_the_device():
    """On CUDA each such read makes the CPU wait; transformers' own attention does one, so the test
    can fail.
    """

    class Reads(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.count = 0

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            self.count += op is torch.ops.aten._local_scalar_dense.default
            return op(*args, **(kwargs or {}))

    def reads(kind: str) -> int:
        model = lab.build_model(attention="eager")
        if kind == "auto":
            use_attention(model, kind)
        else:
            model.set_attn_implementation(kind)
        batch = dict.fromkeys(("input_ids", "labels"), torch.ones(2, 16, dtype=torch.int64))
        with Reads() as mode:
            lab.lm_loss_sum(model, batch, chunk_tokens=16).backward()
        return mode.count

    assert reads("auto") == 0
    assert reads("sdpa") > 0


def test_padded_vocabulary_is_a_multiple_of_64_and_hardly_moves_the_loss():
    with torch.device("meta"):
        assert lab.build_model("gpt2", pad_vocab=True).lm_head.out_features == 50304
    assert lab.build_model(pad_vocab=True).lm_head.out_features == 2048


def test_sequences_longer_than_1024_work_with_random_weights():
    model = lab.build_model(seq_len=1100)
    assert model(input_ids=torch.zeros(1, 1100, dtype=torch.long)).logits.shape == (1, 1100, 2048)


def test_flops_per_token_of_gpt2():
    model = lab.build_model("gpt2")
    assert flops_per_token(model, 1024) == pytest.approx(8.55e8, rel=2e-3)


def test_random_weights_touch_no_network(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    lab.build_model()


@pytest.mark.parametrize(
    "endpoint", ["http://127.0.0.1:9", pytest.param("http://10.255.255.1", marks=slow)]
)
def test_pretrained_without_a_hub_says_so_before_anything_is_loaded(endpoint, tmp_path):
    code = (
        "import labutils as lab; from labutils.workload.gpt2 import WeightsUnavailable\n"
        "from transformers import GPT2LMHeadModel\n"
        "def loads(*_, **__): raise SystemExit('it tried to load')\n"
        "GPT2LMHeadModel.from_pretrained = loads\n"
        "try: lab.build_model('gpt2', weights='pretrained')\n"
        "except WeightsUnavailable as e: print(e)\n"
        "else: raise SystemExit('no error')"
    )
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path)}
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=REPO
    )
    assert answer.returncode == 0, answer.stderr
    assert "weights: random" in answer.stdout
    assert "HF_HOME" in answer.stdout


def test_cached_pretrained_weights_load_in_training_mode(tmp_path):
    """The real loading code reads it."""
    saved = fill_hub_cache(tmp_path)
    code = (
        "import sys, dataclasses, labutils as lab, labutils.workload.gpt2 as m\n"
        "m.MODELS['gpt2'] = dataclasses.replace(m.MODELS['gpt2-nano'], name='gpt2')\n"
        "model = lab.build_model('gpt2', weights='pretrained', dropout=0.25)\n"
        "print(model.training, model.config.resid_pdrop, model.transformer.wpe.weight.sum().item())\n"
        "print(m.pretrained_tokenizer('gpt2').get_vocab_size())"
    )
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=REPO
    )
    assert answer.returncode == 0, answer.stderr
    training, dropout, total, vocabulary = answer.stdout.split()
    assert (training, dropout, vocabulary) == ("True", "0.25", "2048")
    assert float(total) == pytest.approx(saved.transformer.wpe.weight.sum().item(), abs=1e-3)


def test_building_and_running_says_nothing_on_stderr():
    code = "import labutils as lab, torch; x = torch.zeros(1, 4).long(); lab.build_model()(input_ids=x, labels=x)"
    answer = subprocess.run(
        [sys.executable, "-W", "default", "-c", code], capture_output=True, text=True, cwd=REPO
    )
    assert answer.returncode == 0
    assert answer.stderr == ""


def test_units_group_so_many_blocks_and_run_each_twice():
    ids = torch.zeros((1, 16), dtype=torch.int64)
    runs = []
    for policy in POLICIES:
        size = CHECKPOINTING[policy].blocks_per_unit
        model = lab.build_model(n_layer=7, dropout=0.0, gradient_checkpointing=policy)
        units = list(model.transformer.h)
        assert len(units) == -(-7 // size)
        assert [len(unit.args[0]) for unit in units[:-1]] == [size] * (len(units) - 1)
        for i in range(7):
            model.transformer.h[i].register_forward_pre_hook(lambda *_: runs.append(1))
        runs.clear()
        lab.lm_loss_sum(model, {"input_ids": ids, "labels": ids}).backward()
        assert len(runs) == (7 if policy == "offload" else 14)


def test_selective_keeps_the_results_of_products_and_of_every_attention_kernel():
    kept = {policy: bytes_kept(policy) for policy in ("none", "selective", "block")}
    assert kept["block"] < 0.5 * kept["selective"] < 0.5 * kept["none"]
    for kind in (
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
        "flash_attention_for_cpu",
    ):
        assert getattr(torch.ops.aten, f"_scaled_dot_product_{kind}").default in ATTENTION


def bytes_kept(policy: str) -> int:
    batch = dict.fromkeys(("input_ids", "labels"), torch.zeros((2, 64), dtype=torch.int64))
    model = lab.build_model(dropout=0.0, activation="gelu_tanh", gradient_checkpointing=policy)
    found = lab.measure_step(
        model, [batch], lab.lm_loss_sum, torch.optim.SGD(model.parameters(), lr=1e-3)
    )
    return found.phases["loss"]["activations"]


def test_padded_prompts_are_continued_as_hugging_face_does():
    ids = torch.randint(1, 2048, (2, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    answers = []
    for attention in ("eager", "auto"):
        model = lab.build_model(attention=attention).eval()
        options = {
            "max_new_tokens": 4,
            "do_sample": False,
            "pad_token_id": 0,
        }
        answers.append(model.generate(input_ids=ids, attention_mask=mask, **options))
    assert torch.equal(*answers)
