"""What an experiment is: the keys of a config, their units, and what cannot go together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

NAME_PATTERN = r"^\w[\w.+=-]{0,59}$"
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=10**9)]
CountOrOff = Annotated[int, Field(ge=0, le=10**9)]


class ConfigError(ValueError):
    """A config that cannot be used. `str(error)` has one line for each mistake."""


class Config(BaseModel):
    """One experiment, complete: no key has a hidden default. Immutable.

    `when_cpu` holds what is different where no CUDA GPU is used; `on(device_type)` applies it. `overrides` remembers,
    for each value the caller set, what the file says. Make one with `load_config`, which explains
    every mistake.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    name: Annotated[
        str, Field(pattern=NAME_PATTERN, description="letters, digits and . + - _ =, at most 60")
    ]
    note: str = Field(description="free text, shown in tables")
    seed: Annotated[int, Field(ge=0, lt=2**31, description="fixes weights, batches and dropout")]
    model: Literal["gpt2-nano", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"]
    weights: Literal["random", "pretrained"]
    corpus: Annotated[Text, Field(description="`stdlib`, or the path of a UTF-8 text file")]
    seq_len: Annotated[int, Field(ge=2, le=32768, description="tokens per sequence")]
    micro_batch_size: Annotated[Count, Field(description="sequences in one forward pass")]
    tokens_per_step: Annotated[Count, Field(description="tokens per optimizer step")]
    steps: Annotated[Count, Field(description="optimizer steps")]
    learning_rate: Annotated[float, Field(gt=0, le=10)]
    lr_schedule: Literal["constant", "cosine"]
    lr_warmup_steps: Annotated[CountOrOff, Field(description="optimizer steps of linear warm-up")]
    weight_decay: Annotated[float, Field(ge=0, le=1)]
    max_grad_norm: Annotated[float, Field(ge=0, le=1e6, description="0 = no clipping")]
    eval_every: Annotated[
        CountOrOff,
        Field(description="optimizer steps between held-out losses; 0 = only at the end"),
    ]
    save_every: Annotated[
        CountOrOff,
        Field(
            description="optimizer steps between saved states, to continue with run --resume; 0 = none"
        ),
    ]
    precision: Annotated[
        Literal["fp32", "tf32", "fp16", "bf16", "pure_bf16", "16bit"],
        Field(description="16bit is bf16, or fp16 on a card without BF16"),
    ]
    init_scale: Annotated[float, Field(gt=0, le=2.0**60, description="first loss scale; FP16 only")]
    growth_interval: Annotated[
        Count, Field(description="clean steps before the loss scale doubles; FP16 only")
    ]
    optimizer: Annotated[
        Literal["adamw", "adamw_bf16", "adamw_8bit", "sgd"],
        Field(description="bf16, 8bit: of the moments"),
    ]
    optimizer_impl: Annotated[
        Literal["fused", "foreach", "for_loop"], Field(description="of adamw and sgd")
    ]
    optimizer_in_backward: Annotated[
        bool, Field(description="update and free each gradient as soon as it is there")
    ]
    dropout: Annotated[float, Field(ge=0, lt=1)]
    activation: Annotated[
        Literal["gelu_new", "gelu_tanh"], Field(description="the same function, unfused or fused")
    ]
    use_cache: Annotated[
        bool, Field(description="keep keys and values, which training never reads")
    ]
    attention: Annotated[
        Literal["eager", "sdpa", "math", "efficient", "flash", "auto"],
        Field(description="kernel; auto is torch's choice, sdpa the same as transformers calls it"),
    ]
    pad_vocab: Annotated[
        bool, Field(description="round the vocabulary up to a multiple of 64; random weights only")
    ]
    loss_chunk_tokens: Annotated[
        CountOrOff, Field(description="tokens whose logits exist at once; 0 = all")
    ]
    compile: Annotated[
        Literal["off", "default", "reduce-overhead", "max-autotune"],
        Field(description="torch.compile, and its mode"),
    ]
    gradient_checkpointing: Literal[
        "none", "block", "every_2", "every_3", "every_4", "selective", "offload"
    ]
    memory_limit_gib: Annotated[
        float, Field(ge=0, le=1e6, description="cap of CUDA's allocator; 0 = none")
    ]
    expandable_segments: Annotated[
        bool,
        Field(
            description="CUDA's allocator maps memory piece by piece, with fewer holes; Linux only"
        ),
    ] = False
    when_cpu: dict[str, Any] = Field(
        default={}, description="keys that differ where no CUDA GPU is used"
    )
    overrides: dict[str, Any] = Field(default={}, exclude=True)

    @property
    def grad_accum_steps(self) -> int:
        """Micro-batches per optimizer step, derived from `tokens_per_step`."""
        return self.tokens_per_step // (self.seq_len * self.micro_batch_size)

    def on(self, device_type: str) -> Config:
        """Return the config as it runs on `device_type` ("cpu" or "cuda"): override > `when_cpu`
        (CPU only) > file.

        Raises ConfigError if the overridden values do not agree with the others on this device.
        """
        cpu = self.when_cpu if device_type == "cpu" else {}
        kept = {key: value for key, value in cpu.items() if key not in self.overrides}
        resolved = Config.model_validate(self.model_dump() | kept | {"when_cpu": {}})
        problems = [*_contradictions(resolved.__dict__), *_impossible_on(device_type, resolved)]
        if problems:
            where = "on a CPU" if device_type == "cpu" else "with a GPU"
            raise ConfigError(
                "\n".join(f"{self.name}, {where}: `{key}`: {text}" for key, text in problems)
            )
        return resolved

    def changes(self, device_type: str) -> list[str]:
        """Return a line for the values that `when_cpu` set, and one for the overridden ones, where
        there are any.
        """
        cpu = self.when_cpu if device_type == "cpu" else {}
        resolved = self.on(device_type)
        from_cpu = [
            f"{key} {getattr(resolved, key)}"
            for key in KEYS
            if key in cpu and key not in self.overrides
        ]
        set_by_caller = [
            f"{key} {getattr(resolved, key)} (instead of {cpu.get(key, self.overrides[key])})"
            for key in KEYS
            if key in self.overrides and key not in ("name", "note")
        ]
        lines = ["on a CPU (when_cpu): " + ", ".join(from_cpu)] if from_cpu else []
        return lines + (["override: " + ", ".join(set_by_caller)] if set_by_caller else [])


KEYS = [key for key in Config.model_fields if key not in ("when_cpu", "overrides")]


def _contradictions(values: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yield (key, message) for values that are fine alone but not together.

    Keys that are missing are not judged.
    """

    def have(*keys: str) -> bool:
        return all(key in values for key in keys)

    if have("tokens_per_step", "seq_len", "micro_batch_size"):
        tokens, per_pass = values["tokens_per_step"], values["seq_len"] * values["micro_batch_size"]
        if tokens % per_pass:
            nearest = " or ".join(
                str(n)
                for n in (tokens // per_pass * per_pass, -(-tokens // per_pass) * per_pass)
                if n
            )
            text = f"{tokens} is not a multiple of seq_len × micro_batch_size = {per_pass}; nearest: {nearest}"
            yield "tokens_per_step", text
    if have("lr_warmup_steps", "steps") and values["lr_warmup_steps"] > values["steps"]:
        warmup, steps = values["lr_warmup_steps"], values["steps"]
        yield (
            "lr_warmup_steps",
            f"{warmup} warm-up steps in a run of {steps} steps; set it to {steps} or less, 0 say",
        )
    if values.get("optimizer_in_backward"):
        if values.get("max_grad_norm"):
            yield (
                "max_grad_norm",
                "clipping needs all gradients at once; with optimizer_in_backward set it to 0",
            )
        if values.get("precision") in ("fp16", "16bit"):
            yield (
                "precision",
                "a loss scale needs all gradients at once; with optimizer_in_backward use bf16, say",
            )
        if (
            have("tokens_per_step", "seq_len", "micro_batch_size")
            and values["tokens_per_step"] > per_pass
        ):
            text = f"optimizer_in_backward updates after each micro-batch; set it to {per_pass}, or micro_batch_size up"
            yield "tokens_per_step", text
    if (
        have("weights", "model")
        and values["weights"] == "pretrained"
        and values["model"] == "gpt2-nano"
    ):
        yield "weights", "gpt2-nano has no pretrained weights; use weights: random, or model: gpt2"
    if have("weights", "pad_vocab") and values["weights"] == "pretrained" and values["pad_vocab"]:
        yield (
            "pad_vocab",
            "pretrained weights have GPT-2's vocabulary of 50257; set pad_vocab: false",
        )
    if (
        have("weights", "seq_len")
        and values["weights"] == "pretrained"
        and values["seq_len"] > 1024
    ):
        yield (
            "seq_len",
            f"pretrained GPT-2 knows 1024 positions, not {values['seq_len']}; use weights: random",
        )


def _impossible_on(device_type: str, config: Config) -> Iterable[tuple[str, str]]:
    """Yield (key, message) for what one kind of device never has, whatever its model."""
    if device_type == "cpu" and config.attention == "efficient":
        yield "attention", "a CPU has no memory-efficient attention; use auto, math or eager"
    if device_type == "cpu" and config.attention == "flash" and config.dropout > 0:
        yield (
            "attention",
            "a CPU has flash attention without dropout only; use auto, or dropout: 0.0",
        )
    if (
        device_type == "cuda"
        and config.attention == "flash"
        and config.precision in ("fp32", "tf32")
    ):
        yield (
            "attention",
            f"flash attention exists in 16 bits only, not for precision {config.precision}; use auto",
        )


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a config file, for editors that complete and check keys as you
    type.
    """
    schema = Config.model_json_schema()
    properties = schema["properties"]
    del properties["overrides"]
    properties["when_cpu"] = {
        "type": "object",
        "description": properties["when_cpu"]["description"],
        "properties": {key: properties[key] for key in KEYS if key != "name"},
        "additionalProperties": False,
    }
    return schema


def schema_text() -> str:
    """Return the text of configs/schema.json."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
