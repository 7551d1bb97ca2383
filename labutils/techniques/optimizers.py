"""Optimizers: torch's own, Muon beside AdamW, and AdamW with moments and weights in fewer bits.

Taught in large_models, section 5.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from labutils.config.choices import OPTIMIZER_IMPLEMENTATIONS, OPTIMIZERS

NUMBERS_AT_ONCE = 1 << 22  # numbers that are float32 at once; a multiple of BLOCK
BLOCK = 256  # numbers that share one scale
BETAS = 0.9, 0.95  # as GPT-3 was trained (Brown et al. 2020, 2005.14165)
MOMENTUM = 0.9


def build_optimizer(
    model: nn.Module,
    *,
    optimizer: str,
    implementation: str,
    learning_rate: float,
    weight_decay: float,
) -> torch.optim.Optimizer:
    """Return an optimizer of all parameters of a model.

    Weights decay in matrices only, not in biases and layer norms. `implementation` is of torch's
    own optimizers. Raises ValueError for an unknown `optimizer` or `implementation`.
    """
    bits = OPTIMIZERS[optimizer].moment_bits
    own = {OPTIMIZER_IMPLEMENTATIONS[implementation].name: True}
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    match optimizer:
        case "sgd":
            return torch.optim.SGD(groups, lr=learning_rate, momentum=MOMENTUM, **own)
        case "adamw":
            return torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS, **own)
        case "muon":
            # GPT-2's output layer is among them: it has the weight of its embedding. A set, since
            # `in` a list would compare the numbers of tensors, and raise.
            embeddings = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
            adamw = {"lr": learning_rate, "betas": BETAS} | own
            # Updates as large as AdamW's, so that its rate fits (Liu et al. 2025, 2502.16982).
            muon = {"lr": learning_rate, "use_muon": True, "adjust_lr_fn": "match_rms_adamw"}
            inner = {"params": [p for p in matrices if p not in embeddings]}
            groups.append(groups[0] | muon | inner)
            groups[0]["params"] = [p for p in matrices if p in embeddings]
            return MuonWithAdamW([adamw | group for group in groups])
        case "adamw_bf16" | "adamw_8bit":
            return LowBitAdamW(groups, lr=learning_rate, betas=BETAS, bits=bits)
    raise ValueError(f"{optimizer!r} has a row in `choices`, and no code in `build_optimizer`")


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for groups that say `use_muon`, all of matrices; AdamW for the others.

    Muon (Jordan 2024, kellerjordan.github.io/posts/muon) keeps one number per parameter, a moving
    average of gradients, and moves a matrix by the nearest orthogonal one, found by five rounds of
    matrix multiplications in bfloat16. Embeddings are no such matrices: they look rows up.
    A group has the `lr` and the options of its rule.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"use_muon": False})

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        # Made anew in each step: `load_state_dict` puts other groups and another state in the place
        # of these, which rules that are made once would not see.
        for group in self.param_groups:
            rule = torch.optim.Muon if group["use_muon"] else torch.optim.AdamW
            of_group = rule([group])
            of_group.state = self.state
            of_group.step()


def round_stochastically(x: torch.Tensor) -> torch.Tensor:
    """Return float32 `x` as bfloat16, rounded up or down by chance so that the mean of many
    roundings is `x`.

    To nearest, a weight stays as it is when its update is below half a step of its format (a step
    is 1/128 to 1/256 of it); by chance, it moves now and then. The 16 bits that bfloat16 drops get
    16 random ones added: a carry rounds up. Inf and NaN stay. See Zamirai et al. 2020 (2010.06192).
    Draws from the global generator.
    """
    noise = torch.randint_like(x, 1 << 16, dtype=torch.int32)
    rounded = noise.add_(x.view(torch.int32)).bitwise_and_(-(1 << 16)).view(torch.float32)
    # A carry would make -0 of a NaN whose bits are all ones.
    return torch.where(x.isfinite(), rounded, x).bfloat16()


def quantize(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor | None) -> None:
    """Write float32 `x`, `(blocks, BLOCK)`, as 8-bit `codes` of that shape and one `scale` per
    block, `(blocks, 1)`; without a scale, as bfloat16 `codes`, which are `x` rounded by chance.

    Signed codes are for the first moment, unsigned ones for the second. Coded is the square root
    (unsigned: the fourth root) of a number over the scale, so that small numbers, of which there
    are many, get most codes. Codes are rounded by chance, or a slow average would never move. In
    the second moment, which is divided by, no code is 0. After Dettmers et al. 2022 (2110.02861),
    whose codes are spaced otherwise. `x` is overwritten where it can be.
    """
    if scale is None:
        codes.copy_(round_stochastically(x))
        return
    is_signed = codes.dtype.is_signed
    largest = torch.iinfo(codes.dtype).max
    sizes = x.abs() if is_signed else x
    scale.copy_(sizes.amax(dim=1, keepdim=True)).div_(largest ** (2 if is_signed else 4))
    # A block of zeros over a scale of 0 is NaN. Its code is 0, which a second moment must not have.
    scale.clamp_(min=torch.finfo(torch.float32).tiny)
    sizes.div_(scale).sqrt_()
    if is_signed:
        sizes.copysign_(x)
    else:
        sizes.sqrt_()
    sizes.add_(torch.rand_like(sizes)).floor_().clamp_(-largest if is_signed else 1, largest)
    codes.copy_(sizes)


def dequantize(codes: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return the float32 numbers, `(blocks, BLOCK)`, that `quantize` has coded."""
    x = codes.float()
    if scale is None:
        return x
    x = x.mul_(x.abs()) if codes.dtype.is_signed else x.square_().square_()
    return x.mul_(scale)


def _update(
    p, gradient, exp_avg, exp_avg_sq, scale=None, scale_sq=None, *, group: dict[str, Any], step: int
) -> None:
    """Update one slab of one parameter.

    `p` and `gradient` are `(n,)`, the moments `(blocks, BLOCK)`, their scales `(blocks, 1)`. All
    but the gradient are changed in place.
    """
    beta1, beta2 = group["betas"]
    n = len(p)
    gradient = gradient.float()
    if n % BLOCK:
        gradient = F.pad(gradient, (0, -n % BLOCK))
    gradient = gradient.view(-1, BLOCK)
    first = dequantize(exp_avg, scale)
    first.lerp_(gradient, 1 - beta1)
    quantize(first, exp_avg, scale)
    second = dequantize(exp_avg_sq, scale_sq)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    del gradient
    # before `quantize`, which overwrites an unsigned `second`; `first` is signed, and stays whole
    denominator = second.div(1 - beta2**step).sqrt_().add_(group["eps"])
    quantize(second, exp_avg_sq, scale_sq)
    del second
    weights = p.float().mul_(1 - group["lr"] * group["weight_decay"])  # not a copy if p is float32
    weights.addcdiv_(
        first.view(-1)[:n], denominator.view(-1)[:n], value=-group["lr"] / (1 - beta1**step)
    )
    if p.dtype == torch.bfloat16:
        weights = round_stochastically(weights)
    if p.dtype != torch.float32:
        p.copy_(weights)


class LowBitAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) with moments of `bits` 16 (bfloat16) or 8 (codes, see
    `quantize`).

    Computes in float32, a slab of NUMBERS_AT_ONCE numbers at a time, so that little of it is ever
    unpacked. Weights in bfloat16 and moments are rounded stochastically. Slower than torch's fused
    AdamW: a slab takes dozens of small operations.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        bits: int = 8,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, settings | {"bits": bits, "step": 0})
        self.update = _update  # what does a slab

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            # One count a group, so that the state holds moments alone. A parameter without a
            # gradient in some step is corrected for that step, too.
            group["step"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                moments = self.state[p] or self._start(p, group["bits"])
                slabs = [p.view(-1).split(NUMBERS_AT_ONCE)]  # never a copy: it is changed in place
                # may be a copy, if a gradient has another layout: it is only read
                slabs.append(p.grad.reshape(-1).split(NUMBERS_AT_ONCE))
                slabs += [codes.split(NUMBERS_AT_ONCE // BLOCK) for codes in moments.values()]
                for slab in zip(*slabs, strict=True):
                    self.update(*slab, group=group, step=group["step"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` has returned; codes and scales keep their dtypes, which torch
        would cast to that of the parameter.
        """
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for i, saved in state_dict["state"].items():
            for key, codes in saved.items():
                self.state[parameters[i]][key] = codes.to(parameters[i].device, copy=True)

    def _start(self, p: nn.Parameter, bits: int) -> dict[str, Any]:
        """Make a parameter's moments, `(blocks, BLOCK)`; the last block may be too long."""
        n_blocks = -(-p.numel() // BLOCK)
        moments = {"exp_avg": (BLOCK, torch.bfloat16), "exp_avg_sq": (BLOCK, torch.bfloat16)}
        if bits == 8:
            moments = {"exp_avg": (BLOCK, torch.int8), "exp_avg_sq": (BLOCK, torch.uint8)}
            moments |= {"scale": (1, torch.float32), "scale_sq": (1, torch.float32)}
        for key, (width, dtype) in moments.items():
            self.state[p][key] = torch.zeros(n_blocks, width, dtype=dtype, device=p.device)
        return self.state[p]
