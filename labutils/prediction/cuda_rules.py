"""What CUDA does that a CPU build of torch does not: autocast's list, the choice of kernels, memory
that these borrow.

`cuda_rules` makes operations on fake CPU tensors allocate what CUDA's would. `borrowed` says what
an operation's kernels take from the allocator for themselves while they run.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from labutils.config.card import Gpu
from labutils.prediction.allocator import up

aten = torch.ops.aten
# CUDA's autocast runs these in float32 (ATen/autocast_mode.h); CPU's leaves them in the dtype they
# are given.
FLOAT32_ON_CUDA = """
pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar layer_norm native_layer_norm rms_norm group_norm
exp expm1 log log1p log2 reciprocal rsqrt softplus logsumexp cumsum cumprod prod prod.dim_int
cosine_similarity binary_cross_entropy_with_logits
"""
# It asks these for a result in float32, if nobody asks for another: their inputs are not copied.
FLOAT32_RESULTS = "softmax.int log_softmax.int sum sum.dim_IntList linalg_vector_norm"


@contextmanager
def cuda_rules(flash: bool = True, is_compiled: bool = False) -> Iterator[None]:
    """Inside, operations on (fake) CPU tensors allocate what CUDA's would. Global to the process
    while it is open. If they are compiled, norms are taken apart by the compiler.

    It registers kernels for the CPU's autocast and autograd keys; real CPU tensors must not be
    computed with inside.
    """
    # private, as all of torch that swaps kernels: what keeps an operation from autocast once more
    no_autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def in_float32(operation: Callable) -> Callable:
        def call(*args: Any, **options: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(no_autocast):
                return operation(*[_widened(a) for a in args], **options)

        return call

    def with_float32_results(operation: Callable) -> Callable:
        _, *names = (argument.name for argument in operation._schema.arguments)

        def call(x: torch.Tensor, *args: Any, **options: Any) -> Any:
            options |= dict(zip(names, args, strict=False))
            if x.is_floating_point() and options.get("dtype") is None:
                options["dtype"] = torch.float32
            with torch._C._ExcludeDispatchKeyGuard(no_autocast):
                return operation(x, **options)

        return call

    def softmax(kernel: Callable) -> Callable:
        def call(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
            # one kernel reads float16 and writes float32; there is none for bfloat16
            is_wider = x.dtype == torch.float16 and dtype == torch.float32
            return kernel(x if is_wider or dtype is None else x.to(dtype), dim, is_wider)

        return call

    def rms_norm(x, shape, weight=None, eps=None):
        if weight is None or weight.dtype == x.dtype:
            return FusedRMSNorm.apply(x, shape, weight)
        return aten.rms_norm.default.decompose(x, shape, weight, eps)

    def dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        # keeps one byte per element
        return torch.native_dropout(x, p, True)[0] if train and p > 0 else x

    def attention(q, k, v, mask=None, p=0.0, causal=False, *, scale=None, enable_gqa=False):
        allowed = torch.backends.cuda  # what torch.nn.attention.sdpa_kernel switches, on a CPU too
        if mask is None and flash and q.dtype != torch.float32 and allowed.flash_sdp_enabled():
            flash_attention = aten._scaled_dot_product_flash_attention
            return flash_attention(q, k, v, p, causal, False, scale=scale)[0]
        # before Ampere the other fused kernel takes no BF16 either, and before torch 2.14 no groups
        # of queries that share keys (sdp_utils.cpp)
        takes_keys = q.shape[-3] == k.shape[-3] or torch.__version__ >= "2.14"
        has_kernel = takes_keys and (flash or q.dtype != torch.bfloat16)
        if not (has_kernel and allowed.mem_efficient_sdp_enabled()):
            math_attention = aten._scaled_dot_product_attention_math
            options = {"scale": scale, "enable_gqa": enable_gqa}
            return math_attention(q, k, v, mask, p, causal, **options)[0]
        if mask is not None and mask.dtype == torch.bool:
            if is_compiled:  # as numbers: then layers are seen to share it
                mask = torch.where(mask, 0.0, -math.inf).to(q.dtype)
            else:
                mask = torch.empty_like(mask, dtype=q.dtype)
        efficient_attention = aten._scaled_dot_product_efficient_attention
        return efficient_attention(q, k, v, mask, True, p, causal, scale=scale)[0]

    # private: a public Library keeps its kernels for the life of the process
    scoped = partial(torch.library._scoped_library, "aten", "IMPL")
    last = ExitStack()
    last.callback(_forget_kernels)
    with last, scoped("AutocastCPU") as autocast, scoped("AutogradCPU") as autograd:
        for name in FLOAT32_ON_CUDA.split():
            if name == "rms_norm" and torch.__version__ < "2.12":  # not in its list yet
                continue
            packet, _, overload = name.partition(".")
            operation = getattr(getattr(aten, packet), overload or "default")
            # private: where the CPU's autocast has a rule of its own, it is the same
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU"):
                autocast.impl(name, in_float32(operation))
        for name in FLOAT32_RESULTS.split():
            packet, _, overload = name.partition(".")
            operation = getattr(getattr(aten, packet), overload or "default")
            autocast.impl(name, with_float32_results(operation))
        with warnings.catch_warnings():  # CPU's autocast casts it, and CUDA's does not
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            autocast.impl("cross_entropy_loss", aten.cross_entropy_loss.default.decompose)
        autograd.impl("softmax.int", softmax(aten._softmax))
        autograd.impl("log_softmax.int", softmax(aten._log_softmax))
        if not is_compiled:
            autograd.impl("rms_norm", rms_norm)
        autograd.impl("dropout", dropout)
        autograd.impl("scaled_dot_product_attention", attention)
        _forget_kernels()
        yield


def _forget_kernels() -> None:
    """Let Python look up kernels anew: a compiled step asks for them there, and each answer is
    kept, also of a rule that is gone.
    """
    for name in dir(aten):
        operation = getattr(aten, name)
        for overload in getattr(operation, "overloads", list)():
            getattr(operation, overload)._dispatch_cache.clear()


def off_card(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Let a tensor leave the card; return what brings it back, as a new allocation. Parameters
    stay.
    """
    stays = isinstance(tensor, nn.Parameter)
    return (lambda: tensor) if stays else partial(torch.empty, tensor.shape, dtype=tensor.dtype)


@contextmanager
def unwatched_products() -> Iterator[None]:
    """Inside, `prod` has the derivative that it has where no dispatch mode looks on."""
    with torch.library._scoped_library("aten", "IMPL", "AutogradCPU") as autograd:
        autograd.impl("prod.dim_int", _product)
        autograd.impl("prod", _product)
        yield


class FusedRMSNorm(torch.autograd.Function):
    """What CUDA's kernel keeps: its input, and one number for each row (layer_norm.cpp)."""

    @staticmethod
    def forward(ctx, x, shape, weight):
        rows = x.shape[: x.dim() - len(shape)]
        ctx.save_for_backward(x, weight, torch.empty(rows, dtype=torch.float32))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        _, weight, _ = ctx.saved_tensors
        return gradient.clone(), None, None if weight is None else torch.empty_like(weight)


class Product(torch.autograd.Function):
    """The derivative of a product without zeros (prod_backward in FunctionsManual.cpp)."""

    @staticmethod
    def forward(ctx, x, dim):
        with torch._C._AutoDispatchBelowAutograd():  # private: where this rule no longer holds
            result = x.prod(dim, keepdim=True)
        ctx.save_for_backward(x, result)
        ctx.dim = dim
        return result

    @staticmethod
    def backward(ctx, gradient):
        x, result = ctx.saved_tensors
        (x == 0).sum(ctx.dim)  # are there zeros?
        return gradient * (result / x), None


def _product(x, dim=None, keepdim=False, *, dtype=None):
    x, is_flat = x if dtype is None else x.to(dtype), dim is None
    result = Product.apply(x.flatten() if is_flat else x, 0 if is_flat else dim)
    return result if keepdim else result.squeeze(0 if is_flat else dim)


def _widened(argument: Any) -> Any:
    is_float = isinstance(argument, torch.Tensor) and argument.is_floating_point()
    return argument.float() if is_float else argument


Rule = Callable[..., int]  # computes bytes
PRODUCT_KINDS = aten.mm, aten.addmm, aten.bmm, aten.baddbmm
PRODUCTS = {getattr(kind, how) for kind in PRODUCT_KINDS for how in ("default", "out")}
# indices: with more of them the gradient of an embedding is summed after a sort (Embedding.cu)
SORTED_FROM = 3072
ROWS_PER_THREAD = 10  # NROWS_PER_THREAD in EmbeddingBackwardKernel.cu
# flash attention pads queries to a multiple of this in its backward pass (flash_api.cpp)
FLASH_ROWS = 128


def outputs_in_order(operation: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return an operation's results in the order in which its CUDA kernel asks for them."""
    # the mask comes first
    return tensors[::-1] if operation is aten.native_dropout.default else tensors


def borrowed(operation: Any, args: tuple, gpu: Gpu) -> list[tuple[Rule, tuple[int, ...]]]:
    """Return what an operation's CUDA kernels request for themselves, each freed before the next.

    Each is a rule and the numbers from which it computes bytes: those are affine in the number of
    sequences, the bytes are not. Only what can be larger than a MiB in a transformer: smaller
    requests share segments of 2 MiB.
    """
    if operation is aten.sum.dim_IntList and args[0].ndim == 2 and list(args[1]) == [0]:
        return [(partial(_column_sums, gpu), args[0].shape)]
    if operation is aten.embedding_dense_backward.default:
        gradient, indices, n_rows = args[:3]
        return [(_partial_sums, (indices.numel(), n_rows, gradient.shape[-1]))]
    if operation is aten._scaled_dot_product_flash_attention_backward.default:
        return [(partial(_flash_workspace, _expanded(*args[1:3])), args[1].shape)]
    if operation is aten._scaled_dot_product_efficient_attention_backward.default:
        # gradient times result, of which the sums over rows are needed
        kernel = partial(_efficient_workspace, _expanded(*args[1:3]))
        return [(partial(_elements, 4), args[1].shape), (kernel, args[1].shape)]
    if operation is aten._softmax_backward_data.default:
        # gradient times result, before the sums over rows (SoftMax.cu)
        itemsize = torch.promote_types(args[0].dtype, args[1].dtype).itemsize
        return [(partial(_elements, itemsize), args[0].shape)]
    return []


# kernels that want elements in order, and those that want their result's dtype
ORDERED = "_(log_)?softmax|native_layer_norm|reflection_pad|(avg|max)_pool"
COPIES = re.compile(rf"aten::(({ORDERED}).*_back|(?P<dtype>sum|nansum|prod|mean)(\.|$))")
copying = cache(lambda operation: COPIES.match(operation.name()))
SIXTEEN_BIT = torch.float16, torch.bfloat16


def copied(operation: Any, args: tuple, out: Any, *, is_cuda: bool) -> list[int]:
    """Return the bytes of the copies of its inputs that an operation computes with, on any device.

    A reduction's has its result's dtype (make_reduction in ReduceOpsUtils.h; CUDA's kernel reads 16
    bits and sums in float32), and some kernels want their elements in order, for example of a
    gradient that is one number expanded.
    """
    if not (found := copying(operation)):
        return []
    if not found["dtype"]:
        tensors = [x for x in args if isinstance(x, torch.Tensor) and not x.is_contiguous()]
        return [x.numel() * x.itemsize for x in tensors]
    if args[0].dtype == out.dtype:
        return []
    if is_cuda and args[0].dtype in SIXTEEN_BIT and out.dtype == torch.float32:
        return []
    return [args[0].numel() * out.dtype.itemsize]


def _partial_sums(n_indices: int, n_rows: int, width: int) -> int:
    """Return the bytes of the sums over equal indices, each of a few, that make up an embedding's
    gradient.
    """
    if n_indices <= SORTED_FROM:
        return 0
    return (n_indices // ROWS_PER_THREAD + min(n_indices, n_rows)) * width * 4


def _expanded(queries: torch.Tensor, keys: torch.Tensor) -> int:
    """Return the bytes, per head and unit of width, of gradients of keys and values that each head
    has of its own where queries share keys (dk_expanded in flash_api.cpp).
    """
    is_shared = queries.shape[1] != keys.shape[1]
    return is_shared * 2 * keys.shape[2] * keys.itemsize


def _flash_workspace(expanded: int, batch: int, heads: int, n_queries: int, width: int) -> int:
    """Return the bytes of the queries' gradient in float32, and of one number for each row."""
    rows = up(n_queries, FLASH_ROWS)
    return batch * heads * (rows * (width + 1) * 4 + expanded * width)


def _elements(itemsize: int, *shape: int) -> int:
    return itemsize * math.prod(shape)


def _efficient_workspace(expanded: int, batch: int, heads: int, n_queries: int, width: int) -> int:
    """Return the bytes of the queries' gradient, summed in float32, and of a lock for each 64 of
    them.
    """
    return batch * heads * (n_queries * width * 4 + -(-n_queries // 64) * 16 + expanded * width)


def _column_sums(gpu: Gpu, n_rows: int, n_columns: int) -> int:
    """Return the bytes through which thread blocks add up their shares of a matrix's column sums
    (Reduce.cuh).

    setReduceConfig and global_memory_size, for what a bias needs: rows are summed, neighbours in
    memory are columns.
    """
    vector = next(n for n in (4, 2, 1) if n_columns % n == 0)
    threads = 512 // vector
    columns, rows = (min(_power_of_2(n), threads) for n in (n_columns // vector, n_rows))
    height = min(rows, threads // min(columns, 32))
    width = min(columns, threads // height)
    per_thread = -(-n_rows // height) if n_rows >= height * 16 or n_rows >= 256 else n_rows
    grid = -(-(n_columns // vector) // width)
    resident = gpu.n_sms * (gpu.threads_per_sm // (width * height))
    if per_thread == n_rows or per_thread < 256 or grid > resident:
        return 0
    shares = max(min(-(-resident // grid), -(-per_thread // 16)), -(-per_thread // 256))
    return 4 * n_columns * shares * width * vector if shares > 1 else 0


def _power_of_2(n: int) -> int:
    return 1 << (max(n, 1).bit_length() - 1)
