import math
import socket
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2LMHeadModel

import labutils as lab
from labutils.config.card import PrecisionUnsupported
from labutils.config.choices import CHECKPOINTING
from labutils.techniques.checkpointing import ATTENTION
from labutils.techniques.loss import ChunkedLoss
from labutils.training.run import flops_per_token
from tests.helpers import CPU, POLICIES, TINY, fill_hub_cache, gradient_of, in_a_process


def test_a_workload_is_in_training_mode_and_no_precision_is_built_as_another():
    assert lab.build(lab.load_config("fp32", **TINY), CPU).model.training
    with pytest.raises(PrecisionUnsupported, match="tf32 cannot run here"):
        lab.build(lab.load_config("tf32", **TINY), CPU)


def gradients(model, loss_fn, batch):
    model.zero_grad()
    torch.manual_seed(1)  # the same dropout masks
    loss = loss_fn(model, batch)
    loss.backward()
    return loss.item(), lab.flat_gradient(model)


@pytest.mark.parametrize(("chunk_tokens", "name"), [(7, "fp32"), (64, "bf16"), (1, "fp16")])
def test_chunked_loss_leaves_loss_and_gradients_unchanged(chunk_tokens, name):
    model = lab.build_model()
    ids = torch.randint(0, 2048, (2, 16))
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids % 5 == 0, -100)}
    with lab.autocast(name, CPU):
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


def test_chunked_loss_of_a_frozen_head_has_the_right_gradient_of_the_hidden_states():
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4)
    ChunkedLoss.apply(hidden, weight, torch.arange(6), 2).backward()
    (expected,) = torch.autograd.grad(
        F.cross_entropy(hidden @ weight.T, torch.arange(6), reduction="sum"), hidden
    )
    torch.testing.assert_close(hidden.grad, expected)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_every_checkpointing_policy_leaves_gradients_unchanged(name, dropout):
    gradient = partial(gradient_of, CPU, name, dropout=dropout)
    plain = gradient()
    for policy in POLICIES:  # the random state of dropout is kept too
        assert torch.equal(gradient(gradient_checkpointing=policy), plain), policy


def test_selective_keeps_attention_only_where_it_draws_no_random_numbers():
    """A fused kernel that is skipped when a block is computed again would not advance the random
    state.
    """
    for dropout in (0.0, 0.1):
        model = lab.build_model(dropout=dropout, gradient_checkpointing="selective")
        assert (ATTENTION[0] in model.transformer.h.kept) == (dropout == 0.0)


SWITCHES = [  # and a kind of padding: all three occur with each kind of switch
    ({"attention": "eager"}, ""),
    ({"attention": "flash"}, "right"),
    ({"attention": "auto"}, "left"),
    ({"activation": "gelu_tanh", "use_cache": True}, "right"),
    ({"gradient_checkpointing": "every_2", "use_cache": True}, "left"),
    ({"gradient_checkpointing": "selective", "attention": "eager"}, "right"),
    ({"gradient_checkpointing": "offload", "attention": "flash"}, ""),
    ({"gradient_checkpointing": "block", "activation": "gelu_tanh"}, "left"),
]


@pytest.mark.parametrize(("switches", "padded"), SWITCHES, ids=str)
def test_a_switch_gives_hugging_faces_own_loss_and_gradients(switches, padded):
    theirs = GPT2LMHeadModel(lab.build_model(dropout=0.0).config).train()
    theirs.set_attn_implementation("eager")
    ours = lab.build_model(dropout=0.0, **switches)
    ours.load_state_dict(theirs.state_dict())
    ids = torch.randint(1, 2048, (3, 40), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if padded:
        lengths = torch.tensor([40, 25, 7])
        mask = (torch.arange(40) < lengths[:, None]).long()
        batch["attention_mask"] = mask if padded == "right" else mask.flip(1)
        batch["labels"][batch["attention_mask"] == 0] = -100
    if padded == "left":  # what padding predicts of the first real token is not defined
        batch["labels"][torch.arange(3), 40 - lengths] = -100
    expected = theirs(**batch).loss
    expected.backward()
    loss = lab.lm_loss_sum(ours, batch) / lab.count_targets(batch)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        # float32 sums in another order
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=2e-6)


def test_a_pass_reads_no_number_back_from_the_device():
    """On CUDA each such read makes the CPU wait; transformers' own attention does one, so the test
    can fail.
    """

    def reads() -> int:
        batch = dict.fromkeys(("input_ids", "labels"), torch.ones(2, 16, dtype=torch.int64))
        with torch.profiler.profile() as profile:
            lab.lm_loss_sum(model, batch, chunk_tokens=16).backward()
        return [event.name for event in profile.events()].count("aten::_local_scalar_dense")

    model = lab.build_model(attention="auto")
    assert reads() == 0
    model.set_attn_implementation("sdpa")
    assert reads() > 0


def test_a_padded_vocabulary_counts_in_flops_and_more_positions_can_be_asked_for():
    with torch.device("meta"):
        padded = lab.build_model("gpt2", pad_vocab=True)
    assert padded.lm_head.out_features == 50304
    # 6·N + 12·L·d·T
    assert flops_per_token(padded, 1024) == pytest.approx(8.55e8, rel=2e-3)
    longer = lab.build_model(seq_len=1100)
    assert longer(input_ids=torch.zeros(1, 1100, dtype=torch.long)).logits.shape[1] == 1100


def test_pretrained_weights_come_from_the_cache_or_not_at_all(tmp_path):
    """A hub that takes the call and never answers, then a cache that the real code reads.

    But for transformers' bar while it loads, stderr stays empty.
    """
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub = {"HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        answer = in_a_process(
            "lab.build_model('gpt2', weights='pretrained')", HF_HOME=str(tmp_path), **hub
        )
    assert "WeightsUnavailable: weights: pretrained needs openai-community/gpt2" in answer.stderr
    assert "`weights: random`" in answer.stderr and "HF_HOME" in answer.stderr
    saved = fill_hub_cache(tmp_path)
    code = (
        "config = lab.load_config('fp32', weights='pretrained').on('cuda')\n"
        "model = lab.build_model('gpt2', weights='pretrained', dropout=0.25)\n"
        "total = model.transformer.wpe.weight.sum().item()\n"
        "print(model.training, model.config.resid_pdrop, total)\n"
        "x = torch.zeros(1, 4).long(); lab.build_model()(input_ids=x, labels=x)\n"
        "from labutils.workload.data import build_data\n"
        "print(build_data(config).corpus.tokenizer.get_vocab_size())"
    )
    answer = in_a_process(code, HF_HOME=str(tmp_path), HF_ENDPOINT="http://127.0.0.1:9")
    assert all("Loading weights: " in line for line in answer.stderr.split("\n") if line)
    training, dropout, total, vocabulary = answer.stdout.split()
    assert (training, dropout, vocabulary) == ("True", "0.25", "2048")
    assert float(total) == pytest.approx(saved.transformer.wpe.weight.sum().item(), abs=1e-3)


def test_a_unit_has_so_many_blocks():
    for policy in POLICIES:
        model = lab.build_model(n_layer=7, gradient_checkpointing=policy)
        sizes = [len(unit.args[0]) for unit in model.transformer.h]
        size = CHECKPOINTING[policy].blocks_per_unit
        assert sum(sizes) == 7 and sizes[:-1] == [size] * (len(sizes) - 1)


def test_each_policy_keeps_less_in_eval_mode_too():
    """Hugging Face's own switch is silently off in eval(), where from_pretrained leaves a model."""
    ids = torch.zeros((2, 64), dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    kept = {}
    for policy in CHECKPOINTING:
        options = {"dropout": 0.0, "activation": "gelu_tanh", "gradient_checkpointing": policy}
        model = lab.build_model(**options).eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        ledger = lab.measure_step(model, [batch], lab.lm_loss_sum, optimizer)
        kept[policy] = ledger.phases["loss"]["activations"]
    assert max(kept["every_4"], kept["every_2"], kept["block"]) < 0.25 * kept["none"]
    assert kept["block"] < 0.5 * kept["selective"] < 0.5 * kept["none"]
    for kind in ("flash_attention", "efficient_attention", "cudnn_attention"):
        assert getattr(torch.ops.aten, f"_scaled_dot_product_{kind}").default in ATTENTION


def test_padded_prompts_are_continued_as_hugging_face_does():
    ids = torch.randint(1, 2048, (2, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    eager, auto = (lab.build_model(attention=kind).eval() for kind in ("eager", "auto"))
    assert torch.equal(eager.generate(input_ids=ids, **options), auto.generate(ids, **options))
