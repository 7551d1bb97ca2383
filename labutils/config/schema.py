"""What an experiment is: the keys of a config, their units, what cannot go together, and what it
is on a card.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from pydantic.fields import FieldInfo

from labutils.config.card import Card, PrecisionUnsupported
from labutils.config.choices import (
    ACTIVATIONS,
    ATTENTION,
    CHECKPOINTING,
    COMPILE_MODES,
    MODELS,
    NO_AUTOCAST,
    OPTIMIZER_IMPLEMENTATIONS,
    OPTIMIZERS,
    PRECISIONS,
    SCHEDULES,
    SIXTEEN_BIT,
    WEIGHTS,
    WITH_BF16,
    WITHOUT_BF16,
    Choice,
    Rows,
)

UNSAID = ("note",)  # it changes no result, so it is not in a run's name
CPU_PART = "when_cpu"
NAME_PATTERN = r"^\w[\w.+=-]{0,59}$"
MAY_SCALE_LOSS = [SIXTEEN_BIT.name, *(row.name for row in PRECISIONS.values() if row.loss_scale)]
TO_HOST = [row.name for row in CHECKPOINTING.values() if row.to_host]
MOST = 10**9
Count = Annotated[int, Field(ge=1, le=MOST)]
CountOrOff = Annotated[int, Field(ge=0, le=MOST)]
# A file of another tool has a mistake in each line; nobody reads the twenty-first.
MISTAKES_SHOWN = 20


def one_of(rows: Rows, *more: Choice, of: str = "") -> Any:
    """Return the type of a value that names one of the rows; its description has what stands behind
    each.
    """
    choices = [*rows.values(), *more]
    named = [f"{row.name} ({row.help})" if row.help else row.name for row in choices]
    description = " | ".join(named) + (f": {of}" if of else "")
    return Annotated[Literal[*(row.name for row in choices)], Field(description=description)]


class ConfigError(ValueError):
    """A config that cannot be used. `str(error)` has one line for each mistake."""


def disagreements(values: Mapping[str, Any], device_type: str | None = None) -> dict[str, str]:
    """Return {key: message} for values that are fine alone but not together.

    A key that is missing breaks no rule. With a `device_type`, "cpu" or "cuda", what that kind of
    device never has counts as well.
    """
    texts: dict[str, str] = {}
    for key, text in broken_rules(values, device_type):
        texts[key] = f"{texts[key]}; {text}" if key in texts else f"`{key}`: {text}"
    return texts


def broken_rules(values: Mapping[str, Any], device_type: str | None) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for each rule that is broken."""
    value = values.get
    model, precision, seq_len = value("model"), value("precision"), value("seq_len", 0)
    tokens, steps, warmup = (
        value(key, 0) for key in ("tokens_per_step", "steps", "lr_warmup_steps")
    )
    per_pass = seq_len * value("micro_batch_size", 0) or tokens or 1
    if value("weights") == "pretrained":
        if model and not MODELS[model].is_published:
            yield "weights", f"{model} has no pretrained weights; use random, or model: gpt2"
        if seq_len > 1024:
            yield "seq_len", "pretrained GPT-2 knows 1024 positions; use weights: random"
        if value("pad_vocab"):
            text = "pretrained weights have GPT-2's vocabulary of 50257; set it to false"
            yield "pad_vocab", text
    if tokens % per_pass:
        next_multiple = tokens - tokens % per_pass + per_pass
        way_out = f"the next one is {next_multiple}"
        if next_multiple > MOST:
            way_out = "use a smaller micro_batch_size"
        text = f"{tokens} is not a multiple of seq_len × micro_batch_size = {per_pass}; {way_out}"
        yield "tokens_per_step", text
    if 0 < steps < warmup:
        yield "lr_warmup_steps", f"{warmup} are more than the {steps} steps; 0 is no warm-up"
    if value("optimizer_in_backward"):
        key = "optimizer_in_backward"
        if value("max_grad_norm"):
            yield key, "clipping needs all gradients at once; set max_grad_norm to 0"
        if precision in MAY_SCALE_LOSS:
            yield key, "a loss scale needs all gradients at once; use precision: bf16, say"
        if per_pass < tokens:
            way_out = f"set tokens_per_step to {per_pass}, or micro_batch_size up"
            yield key, f"updates after each micro-batch; {way_out}"
    if value("attention") == "flash":
        if device_type == "cpu" and value("dropout"):
            yield "attention", "a CPU has flash without dropout only; use auto, or dropout: 0.0"
        if device_type == "cuda" and precision in NO_AUTOCAST:
            yield "attention", f"flash exists in 16 bits only, not in {precision}; use auto"
    if value("compile", "off") != "off" and value("gradient_checkpointing") in TO_HOST:
        text = "torch.compile cannot take offload's hooks; use gradient_checkpointing: block, say"
        yield "compile", text


class Config(BaseModel):
    """One experiment, complete and immutable. Make one with `load_config`, which explains mistakes.

    `when_cpu` holds what is different where no CUDA GPU is used; `on(device_type)` applies it.
    `overrides` has the values that the caller set: they are in the other fields already.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # The description of a key is its comment in the YAML files: a test compares them.
    # That of a key with choices is written from their rows.
    name: str = Field(pattern=NAME_PATTERN, description="letters, digits and . + - _ =, at most 60")
    note: str = Field(description="free text, shown in tables")
    seed: int = Field(ge=0, lt=2**31, description="fixes weights, batches and dropout")
    model: one_of(MODELS)
    weights: one_of(WEIGHTS)
    corpus: str = Field(
        min_length=1,
        description="stdlib (text that ships with Python) | path of a UTF-8 text file, "
        "relative to this file",
    )
    seq_len: int = Field(
        ge=2,
        le=32768,
        description="tokens per sequence; at most 1024 with pretrained weights",
    )
    micro_batch_size: Count = Field(
        description="sequences in one forward pass: what decides activation memory"
    )
    tokens_per_step: Count = Field(
        description="tokens per optimizer step; more than seq_len × micro_batch_size "
        "accumulates gradients"
    )
    steps: Count = Field(description="optimizer steps")
    learning_rate: float = Field(
        gt=0,
        le=10,
        description="the highest of the schedule; 1e-4 is a number here, unlike plain PyYAML",
    )
    lr_schedule: one_of(SCHEDULES)
    lr_warmup_steps: CountOrOff = Field(description="optimizer steps of linear warm-up")
    weight_decay: float = Field(ge=0, le=1, description="on matrices only, decoupled (AdamW)")
    max_grad_norm: float = Field(
        ge=0, le=1e6, description="clip the global gradient norm to this; 0 = off"
    )
    eval_every: CountOrOff = Field(
        description="optimizer steps between held-out losses; 0 = once, at the end"
    )
    precision: one_of(PRECISIONS, SIXTEEN_BIT)
    init_scale: float = Field(gt=0, le=2.0**60, description="first loss scale; read by fp16 only")
    growth_interval: Count = Field(
        description="steps without overflow before the loss scale doubles; read by fp16 only"
    )
    optimizer: one_of(OPTIMIZERS)
    optimizer_impl: one_of(OPTIMIZER_IMPLEMENTATIONS)
    optimizer_in_backward: bool = Field(
        description="true updates and frees each gradient at once: no clipping, no accumulation"
    )
    dropout: float = Field(ge=0, lt=1, description="GPT-2 was trained with 0.1")
    activation: one_of(ACTIVATIONS)
    use_cache: bool = Field(description="true keeps keys and values that training never reads")
    attention: one_of(ATTENTION)
    pad_vocab: bool = Field(
        description="true rounds the vocabulary up to a multiple of 64 (50257 to 50304); "
        "random weights"
    )
    loss_chunk_tokens: CountOrOff = Field(
        description="0 = all logits at once; else the loss in chunks of so many tokens"
    )
    compile: one_of(COMPILE_MODES, of="torch.compile")
    gradient_checkpointing: one_of(CHECKPOINTING)
    memory_limit_gib: float = Field(
        ge=0,
        le=1e6,
        description="cap of CUDA's allocator, to make a large card behave like a small one; "
        "0 = none",
    )
    expandable_segments: bool = Field(
        description="true: CUDA's allocator maps memory piece by piece, with fewer holes; "
        "Linux only",
    )
    when_cpu: dict[str, Any] = Field(
        default={}, description="what is smaller where no CUDA GPU is used"
    )
    overrides: dict[str, Any] = Field(default={}, exclude=True)

    @property
    def grad_accum_steps(self) -> int:
        """Micro-batches per optimizer step, derived from `tokens_per_step`."""
        return self.tokens_per_step // (self.seq_len * self.micro_batch_size)

    def changed(self, **values: Any) -> Config:
        """Return the config with other values, which are overrides: on a CPU too they stay.

        Name and note tell what was changed, unless `name` is among the values. Raises ConfigError,
        with a line for each mistake, as `load_config` does.
        """
        missing_file = located_corpus(values, Path.cwd())
        config, mistakes, on_cpu = combined(dict(self), self.when_cpu, values)
        texts = (missing_file | on_cpu | mistakes).values()
        if texts:
            raise ConfigError("\n".join(f"{self.name}: {text}" for text in texts))
        return config

    def on(self, device_type: str) -> Config:
        """Return the config as it runs on `device_type` ("cpu" or "cuda"): override > `when_cpu`
        (CPU only) > file.

        Raises ConfigError if the overridden values do not agree with the others on this device.
        """
        cpu = self.when_cpu if device_type == "cpu" else {}
        config = Config.model_validate(dict(self) | cpu | {"when_cpu": {}, "overrides": {}})
        mistakes = disagreements(dict(config), device_type)
        if mistakes:
            raise ConfigError(f"{self.name} on {device_type}: {'; '.join(mistakes.values())}")
        return config

    def changes(self, device_type: str) -> list[str]:
        """Return what does not come from the main part of the file: a line for each source."""
        cpu = self.when_cpu if device_type == "cpu" else {}
        lines = []
        for source, values in {"on a CPU (when_cpu)": cpu, "override": self.overrides}.items():
            # without the first two, name and note, which only tell of the others
            texts = [f"{key} {values[key]}" for key in KEYS[2:] if key in values]
            if texts:
                lines.append(f"{source}: {', '.join(texts)}")
        return lines


KEYS = [key for key in Config.model_fields if key not in ("when_cpu", "overrides")]
FINITE = ConfigDict(allow_inf_nan=False)


def _alone(field: FieldInfo) -> TypeAdapter:
    """Return the type of one value, which is judged before others are known to be right."""
    kind = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    return TypeAdapter(kind, config=FINITE)


TYPES = {key: _alone(field) for key, field in Config.model_fields.items()}


# ---- Values as they come from a file, a shell or a notebook


OTHER_NAMES = {  # what Lightning, Hugging Face and nanoGPT call ours
    "gpt2": "small gpt2-small 124m",
    "fp32": "float32 32-true",
    "fp16": "half float16 16-mixed",
    "16bit": "16 amp mixed",
    "bf16": "bfloat16 bf16-mixed",
    "pure_bf16": "bf16-true",
    "tokens_per_step": "gradient_accumulation_steps accumulate_grad_batches",
    "micro_batch_size": "batch_size per_device_train_batch_size",
    "seq_len": "block_size",
    "steps": "max_steps max_iters",
    "learning_rate": "lr",
    "max_grad_norm": "grad_clip gradient_clip_val",
    "block": "on true yes",  # of gradient_checkpointing
    "default": "on true yes",  # of compile
}


def did_you_mean(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a question that names the choice most like a word, or nothing."""
    by_lower = {choice.lower(): choice for choice in choices}
    close = [ours for ours in OTHER_NAMES if word.lower() in OTHER_NAMES[ours].split()]
    close = [ours for ours in close if ours in by_lower]
    close += difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return f" Did you mean `{by_lower[close[0]]}`?" if close else ""


def typed(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Check each value by itself; return ({key: value in its type}, {key: what is wrong with it}).

    A key is in one of the two. "" stands for all keys that are missing.
    """
    known, mistakes = {}, {}
    for key, given in values.items():
        if key in TYPES:
            try:
                known[key] = TYPES[key].validate_python(given)
            except ValidationError as error:
                detail = error.errors()[0]
                mistakes[key] = f"`{key}`: {_expected(Config.model_fields[key], detail)}"
        else:
            # a question takes time: only mistakes that are shown have one
            hint = did_you_mean(key, TYPES) if len(mistakes) < MISTAKES_SHOWN else ""
            mistakes[key] = f"unknown key `{key}`.{hint}"
    required = [key for key, field in Config.model_fields.items() if field.is_required()]
    missing = ", ".join(f"`{key}`" for key in required if key not in values)
    if missing:
        mistakes[""] = f"missing: {missing}; a config is complete (see fp32_config.yaml)"
    return known, mistakes


def _expected(field: FieldInfo, detail: Mapping[str, Any]) -> str:
    """Return what pydantic has expected of a value, and what it got."""
    # pydantic says "Input should be a valid integer, unable to parse string as an integer"
    text = detail["msg"].partition(", unable")[0].replace("Input should be", "expected")
    # the largest loss scale, 2**60, has nineteen digits, of which three are enough
    text = re.sub(r"\d{11,}", lambda digits: f"{float(digits[0]):.3g}", text)
    hint = ""
    if detail["type"] == "string_pattern_mismatch":
        text = f"expected {field.description}"
    if detail["type"] == "literal_error":
        hint = did_you_mean(str(detail["input"]), get_args(field.annotation))
    return f"{text}, got {repr(detail['input'])[:60]}.{hint}"


def located_corpus(values: dict[str, Any], folder: Path) -> dict[str, str]:
    """Make the corpus among some values, if it is a file, an absolute path; return what is wrong
    with it, by its key.
    """
    corpus = str(values.get("corpus", "stdlib"))
    if corpus != "stdlib":
        values["corpus"] = str((folder / corpus).absolute())
        if not Path(values["corpus"]).is_file():
            return {"corpus": f"`corpus`: no such text file: {corpus!r}"}
    return {}


def combined(
    values: Mapping[str, Any], when_cpu: Mapping[str, Any], overrides: Mapping[str, Any]
) -> tuple[Config, dict[str, str], dict[str, str]]:
    """Return the config of a file's two parts and of overrides, which are in its name; and {key:
    what is wrong} on a GPU and on a CPU. If either has an entry, the config must not be used.
    """
    # Both parts are judged everywhere: a file that is right on the laptop of its author must not
    # fail on the card that it was written for.
    gpu, mistakes = typed(values | overrides)
    cpu, mistakes_on_cpu = typed(values | when_cpu | overrides)
    broken, broken_on_cpu = disagreements(gpu), disagreements(cpu)
    # what fits one kind of device only is judged when it runs
    if not overrides or (broken and broken_on_cpu):
        mistakes |= broken
        mistakes_on_cpu |= broken_on_cpu
    if CPU_PART in overrides:
        mistakes[CPU_PART] = f"`{CPU_PART}` is a part of a file; override its keys one by one"
    changes = {key: gpu.get(key) for key in overrides}
    parts = {
        CPU_PART: {key: cpu.get(key) for key in when_cpu if key not in overrides},
        "overrides": gpu.get("overrides", {}) | changes,
    }
    named = _named(str(values.get("name")), changes)
    # Not validated once more: with a mistake that would raise, and callers tell all mistakes.
    return Config.model_construct(**gpu | named | changes | parts), mistakes, mistakes_on_cpu


def _named(name: str, changes: Mapping[str, Any]) -> dict[str, str]:
    """Return a name and a note that tell what was overridden, if a result depends on it."""
    words = []
    for key, value in changes.items():
        # of a path its last part, and only signs that a name may have (NAME_PATTERN)
        word = re.sub(r"[^\w.-]", "_", Path(str(value)).name)
        if key not in UNSAID:
            words.append(f"{key}={word}")
    if not words:
        return {}
    # The name is the file's name of its record: most file systems take 255 bytes, people fewer.
    long = "+".join([name, *words])
    short = f"{name[:53]}+{hashlib.sha256(long.encode()).hexdigest()[:6]}"
    note = f"{name} with {', '.join(words)}"
    return {"name": long if len(long) <= 60 else short, "note": note}


# ---- What a config is on a card

SLOW_STEPS_DIVISOR = 8  # a slow precision trains this many times fewer steps
MIN_SLOW_STEPS = 8


@dataclass(frozen=True)
class Run:
    """A config as it runs on a card.

    `config` has a value for every key, `when_cpu` applied; its `steps` are as planned. `steps` are
    those that will be taken: fewer where the precision is slow, and `reason` says why. `changes`
    says what does not come from the main part of the file: a line for each source.
    """

    config: Config
    card: Card
    steps: int
    changes: list[str]
    reason: str = ""


def resolve(config: Config, card: Card, *, to_train: bool = False) -> Run:
    """Decide what a config leaves open: values for a CPU, the 16-bit precision, the steps.

    Raises ConfigError if its values do not agree on this kind of device, and PrecisionUnsupported
    if the card lacks what they ask for. A CPU is asked only `to_train`: its products are timed, and
    the bytes of a step do not depend on them.
    """
    resolved, changes = config.on(card.device_type), config.changes(card.device_type)
    precision = precision_on(resolved.precision, card)
    resolved = resolved.model_copy(update={"precision": precision})
    # To time its products takes a moment, and the answer differs while other programs compute:
    # a prediction of bytes must not depend on it.
    if card.gpu is None and not to_train:
        return Run(resolved, card, resolved.steps, changes)
    support = card.require(precision)
    needed = ATTENTION[resolved.attention].since
    if card.gpu and card.gpu.capability < needed:
        kind = resolved.attention
        message = f"{kind} attention cannot run {card.place}: it needs Ampere or later; use auto"
        raise PrecisionUnsupported(message)
    steps = fewer_steps(resolved.steps) if support.slow else resolved.steps
    return Run(resolved, card, steps, changes, support.reason)


def precision_on(precision: str, card: Card) -> str:
    """Return the precision that a config's word means on a card: `16bit` is one of two."""
    if precision != SIXTEEN_BIT.name:
        return PRECISIONS[precision].name
    return WITH_BF16.name if card.has_bf16 else WITHOUT_BF16.name


def fewer_steps(steps: int) -> int:
    """Return an eighth of the steps, but at least eight.

    The batches stay as they are, so the losses can be compared one by one.
    """
    return min(steps, max(MIN_SLOW_STEPS, steps // SLOW_STEPS_DIVISOR))
