"""DeepSpeed's JSON: the documented keys that a sharded training needs, checked without DeepSpeed.

Names and limits: deepspeed.ai/docs/config-json and `DeepSpeedZeroConfig` in DeepSpeed's source.
DeepSpeed knows more keys, for example for pipelines and inference; here these are unknown.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Stage = Literal[0, 1, 2, 3]
Device = Literal["none", "cpu", "nvme"]


class Strict(BaseModel):
    """A part of the file: other keys, and values of other types, are mistakes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Bf16(Strict):
    """`bf16`: 16-bit weights beside float32 master weights in the optimizer."""

    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = False
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class Fp16(Strict):
    """`fp16`: the same in FP16, with a loss scale; `loss_scale` 0 means a dynamic one."""

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: float = Field(0, ge=0)
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: int = 1
    fp16_master_weights_and_grads: bool = False


class OffloadOptimizer(Strict):
    """`offload_optimizer`: where moments and master weights are, and who updates."""

    device: Device = "none"
    nvme_path: str | None = None
    pin_memory: bool = True
    ratio: float = Field(1.0, ge=0, le=1)
    buffer_count: int = Field(4, ge=0)
    fast_init: bool = False


class OffloadParam(Strict):
    """`offload_param`: where the sharded weights are, stage 3 only."""

    device: Device = "none"
    nvme_path: str | None = None
    pin_memory: bool = True
    buffer_count: int = Field(5, ge=0)
    buffer_size: int = Field(10**8, ge=0)
    max_in_cpu: int = Field(10**9, ge=0)


class ZeroOptimization(Strict):
    """`zero_optimization`: what is sharded, and how it is sent."""

    stage: Stage = 0
    offload_optimizer: OffloadOptimizer | None = None
    offload_param: OffloadParam | None = None
    contiguous_gradients: bool = True
    overlap_comm: bool | None = None
    reduce_scatter: bool = True
    reduce_bucket_size: int = Field(5 * 10**8, ge=0)
    allgather_partitions: bool = True
    allgather_bucket_size: int = Field(5 * 10**8, ge=0)
    round_robin_gradients: bool = False
    sub_group_size: int = Field(10**9, ge=0)
    stage3_prefetch_bucket_size: int = Field(5 * 10**7, ge=0)
    stage3_param_persistence_threshold: int = Field(10**5, ge=0)
    stage3_max_live_parameters: int = Field(10**9, ge=0)
    stage3_max_reuse_distance: int = Field(10**9, ge=0)
    stage3_gather_16bit_weights_on_model_save: bool = False

    @model_validator(mode="after")
    def _stages_fit(self) -> ZeroOptimization:
        if self.offload_param and self.stage != 3:
            raise ValueError(f"offload_param needs stage 3, and this is stage {self.stage}")
        if self.offload_optimizer and self.stage == 0:
            raise ValueError("offload_optimizer needs stage 1, 2 or 3")
        return self


class Typed(Strict):
    """`optimizer` or `scheduler`: a type, and the arguments of its constructor."""

    type: str
    params: dict[str, Any] = {}


class DeepSpeedConfig(Strict):
    """The whole file."""

    train_batch_size: int | None = Field(None, ge=1)
    train_micro_batch_size_per_gpu: int | None = Field(None, ge=1)
    gradient_accumulation_steps: int | None = Field(None, ge=1)
    gradient_clipping: float = Field(0.0, ge=0)
    steps_per_print: int = 10
    wall_clock_breakdown: bool = False
    zero_allow_untested_optimizer: bool = False
    bf16: Bf16 = Bf16()
    fp16: Fp16 = Fp16()
    zero_optimization: ZeroOptimization = ZeroOptimization()
    optimizer: Typed | None = None
    scheduler: Typed | None = None

    @model_validator(mode="after")
    def _one_precision(self) -> DeepSpeedConfig:
        if self.bf16.enabled and self.fp16.enabled:
            raise ValueError("bf16 and fp16 cannot both be enabled")
        return self


def deepspeed_problems(text: str, n_gpus: int = 1) -> list[str]:
    """Return what is wrong with the text of a DeepSpeed JSON file, one line each; [] if nothing is.

    The three batch sizes must agree for `n_gpus` processes.
    """
    try:
        found = DeepSpeedConfig.model_validate_json(text)
    except ValidationError as error:
        return [_line(problem) for problem in error.errors()]
    micro, accumulation = found.train_micro_batch_size_per_gpu, found.gradient_accumulation_steps
    sizes = (found.train_batch_size, micro, accumulation)
    if sum(size is None for size in sizes) > 1:
        return ["batch: give two of the three batch sizes at least"]
    if None not in sizes and found.train_batch_size != micro * accumulation * n_gpus:
        product = f"{micro} × {accumulation} × {n_gpus}"
        return [f"train_batch_size: {found.train_batch_size} is not {product}"]
    return []


def _line(problem: dict[str, Any]) -> str:
    place = ".".join(str(part) for part in problem["loc"]) or "file"
    return f"{place}: {problem['msg']}"
