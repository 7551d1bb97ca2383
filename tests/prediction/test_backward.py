"""What autograd allocates where nobody looks on: operations measured on this CPU, and predicted; and
what the loops of others keep.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import labutils as lab
from tests.helpers import CPU, slow

N, D = 512, 1000
ROWS = torch.arange(N // 4)


def zeros(*shape, dtype=torch.long):
    return torch.zeros(*shape, dtype=dtype)


def assign(x):
    out = zeros(N, D, dtype=x.dtype)
    out[torch.arange(N)] = x
    return out


OPERATIONS = {
    "x[rows]": lambda x: x[ROWS],
    "x[:, columns]": lambda x: x[:, ROWS],
    "pick": lambda x: x[torch.arange(N), zeros(N)],
    "index_select": lambda x: x.index_select(0, ROWS),
    "gather": lambda x: x.gather(1, zeros(N, 1)),
    "take_along_dim": lambda x: x.take_along_dim(zeros(N, 8), 1),
    "take": lambda x: x.take(torch.arange(1000)),
    "slices": lambda x: x[: N // 2] * x[N // 2 :],
    "topk": lambda x: x.topk(8, -1)[0],
    "max": lambda x: x.max(-1)[0],
    "min": lambda x: x.min(-1)[0],
    "median": lambda x: x.median(-1)[0],
    "cummax": lambda x: x.cummax(-1)[0],
    "sort": lambda x: x.sort(-1)[0],
    "cumsum": lambda x: x.cumsum(-1),
    "masked_fill": lambda x: x.masked_fill(x.detach() > 0, 0.0),
    "index_add": lambda x: torch.zeros(N, D).index_add(0, torch.arange(N), x),
    "index_copy": lambda x: torch.zeros(N, D).index_copy(0, torch.arange(N), x),
    "index_put": lambda x: x.index_put((ROWS,), torch.zeros(())),
    "scatter": lambda x: x.scatter(1, zeros(N, 8), x[:, :8]),
    "scatter_add_": lambda x: torch.zeros(N, D).scatter_add_(0, zeros(N, D), x),
    "assignment": assign,
    "embedding": lambda x: F.embedding(ROWS, x),
    "roll": lambda x: x.roll(1, 0),
    "unfold": lambda x: x.unfold(1, 4, 2),
    "prod": lambda x: x.prod(-1),
    "prod, kept": lambda x: x.prod(0, True),
    "amax": lambda x: x.amax(-1),
    "aminmax": lambda x: torch.add(*torch.aminmax(x, dim=-1)),
    "bool sum": lambda x: x * (x > 0).sum(-1, keepdim=True),
    "sum in float32": lambda x: x.bfloat16().sum(-1, dtype=torch.float32),
    "softmax of an expanded gradient": lambda x: x.softmax(-1),
    "layer_norm of an expanded gradient": lambda x: F.layer_norm(x, (D,)),
    "max_pool": lambda x: F.max_pool2d(x[None, None], 2),
    "interpolate": lambda x: F.interpolate(x[None, None], scale_factor=0.5, mode="bilinear"),
}
OPERATIONS.pop("aminmax" if torch.__version__ < "2.12" else "", None)  # 2.11 cannot derive it


class Applied(nn.Module):
    """An operation on what a linear layer makes."""

    def __init__(self, operation):
        super().__init__()
        self.weight, self.operation = nn.Parameter(torch.randn(8, D)), operation

    def forward(self, x):
        return self.operation(x @ self.weight)


def loss_of(model, x):
    return model(x).sum()


def measured(model, batch, loss_fn, optimizer):
    return lab.measure_step(model, [batch], loss_fn, optimizer, count_targets=lambda _: 1).peak_mib


@pytest.mark.parametrize("name", OPERATIONS)
def test_bytes_of_an_operation_and_its_backward_are_those_of_the_allocator(name):
    model, x = Applied(OPERATIONS[name]), torch.randn(N, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    predicted = lab.predict_module(model, x, loss_of, torch.optim.SGD, device="cpu").peak_mib
    assert predicted == pytest.approx(measured(model, x, loss_of, optimizer), rel=0.01)


def test_a_product_is_left_as_it_is():
    x = torch.rand(4, 5, requires_grad=True)
    before = torch.autograd.grad(x.prod(1).sum(), x)[0]
    lab.predict_module(Applied(OPERATIONS["prod"]), torch.randn(N, 8), loss_of, torch.optim.SGD)
    assert torch.equal(torch.autograd.grad(x.prod(1).sum(), x)[0], before)
    with lab.prediction.trace.fake_world(None):
        shapes = [torch.ones(4, 5).prod(*where).shape for where in ((), (1,), (-1, True))]
    assert shapes == [(), (4,), (4, 1)]


# ---- What a loop keeps


class Classifier(nn.Sequential):
    """Logits of many classes, which are most of its memory."""

    def __init__(self):
        super().__init__(nn.Embedding(2000, 16), nn.Linear(16, 2000))


IDS = torch.arange(500)


def cross_entropy(model, ids):
    return F.cross_entropy(model(ids), ids)


def test_a_loop_that_keeps_its_logits_has_them_through_backward():
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters())

    def usual_step():
        logits = model(IDS)  # the name lives until the function ends
        loss = F.cross_entropy(logits, IDS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    usual_step()
    standing = 3 * sum(p.nbytes for p in model.parameters())
    others = lab.allocated_bytes(CPU) - standing  # of this process
    with lab.peak_allocated(CPU) as peak:
        usual_step()
    step = model, IDS, cross_entropy, torch.optim.AdamW
    kept, gone = (
        lab.predict_module(*step, device="cpu", keeps_outputs=keeps) for keeps in (True, False)
    )
    assert kept.peak_bytes == pytest.approx(peak.n_bytes - others, rel=0.01)
    assert kept.peak_bytes - gone.peak_bytes == 4 * 500 * 2000
    assert "outputs kept through backward" in str(kept)
    assert "outputs gone before backward" in str(gone)
    assert not model._forward_hooks


def test_what_a_closure_keeps_counts_once():
    model, kept = Classifier(), []

    def keeping(model, ids):
        kept[:] = [model(ids)]
        return F.cross_entropy(kept[0], ids)

    real = measured(model, IDS, keeping, torch.optim.SGD(model.parameters(), 0.1))
    step = model, IDS, keeping, torch.optim.SGD
    assert lab.predict_module(*step, device="cpu").peak_mib == pytest.approx(real, rel=0.01)


def test_gradients_that_no_optimizer_clears_count_once():
    def a_part(parameters):
        return torch.optim.Adam([*parameters][2:])

    model, x = nn.Sequential(nn.Linear(500, 500), nn.Linear(500, 10)), torch.randn(1000, 500)
    optimizer = a_part(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
    predicted = lab.predict_module(model, x, loss_of, a_part, device="cpu")
    assert predicted.peak_mib == pytest.approx(measured(model, x, loss_of, optimizer), rel=0.01)
    assert predicted.phases["forward"]["gradients"] == 4 * 501 * 500


def test_bytes_and_times_take_the_same_arguments():
    # so many targets that the card has more to do than its host
    step = Classifier(), IDS.repeat(40), cross_entropy, torch.optim.AdamW
    loop = {"max_grad_norm": 1.0, "keeps_gradients": True, "keeps_outputs": True}
    for precision, device in (("16bit", "a100"), ("fp16", "t4")):
        where = {"precision": precision, "device": device}
        ms = [
            lab.predict_module_time(*step, **where, **how).step_ms
            for how in ({}, loop, loop | {"grad_accum_steps": 4})
        ]
        assert ms[0] < ms[1] and 3 < ms[2] / ms[1] < 4  # it clips
        lab.predict_module(*step, **where, **loop, grad_accum_steps=4)


@pytest.mark.parametrize("n", [0, -1, 2.5])
def test_a_step_has_a_whole_number_of_micro_batches(n):
    step = Classifier(), IDS, cross_entropy, torch.optim.AdamW
    for predict in (lab.predict_module, lab.predict_module_time):
        with pytest.raises(ValueError, match="grad_accum_steps: expected 1 or more"):
            predict(*step, grad_accum_steps=n)


@slow
def test_flex_attention_is_named_with_what_to_take_for_it():
    from torch.nn.attention.flex_attention import flex_attention

    def attend(x):
        return flex_attention(*x[None, :, :960].view(1, N, 20, 48).transpose(1, 2).chunk(3, -1))

    step = Applied(attend), torch.randn(N, 8), loss_of, torch.optim.SGD
    with pytest.raises(ValueError, match=r"Take scaled_dot_product_attention for it$"):
        lab.predict_module(*step)
