"""One experiment = one YAML file → a validated, frozen `Config`. Needs neither torch nor a GPU.

Every mistake in a file is reported at once, each as `file:line:column: what is wrong. What was expected.`
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

CONFIGS_DIR = Path(__file__).resolve().parent.parent / "configs"
MAX_FILE_BYTES = 64 * 1024  # a config is one screen; anything larger is some other file

# Choices of the course that later labs build. Refused as such until they are.
NOT_BUILT: dict[str, tuple[str, ...]] = {
    "attention": (),  # an empty tuple: the whole key
    "pad_vocab": (),
    "loss_chunk_tokens": (),
    "compile": (),
    "gradient_checkpointing": (),
    "optimizer_in_backward": (),
    "memory_limit_gib": (),
    "save_every": (),
}

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=10**9)]
CountOrOff = Annotated[int, Field(ge=0, le=10**9)]


class ConfigError(ValueError):
    """A config that cannot be used. `str(error)` has one line for each mistake."""


class Config(BaseModel):
    """One experiment, complete: no key has a hidden default. Immutable.

    `when_cpu` holds what is different where no CUDA GPU is used; `on(device_type)` applies it. `overrides` remembers,
    for each value the caller set, what the file says. Raises pydantic's ValidationError; `load_config` a ConfigError.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    name: Annotated[str, Field(pattern=r"^[\w][\w.+-]{0,59}$", description="letters, digits and . + - _")]
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
    eval_every: Annotated[CountOrOff, Field(description="optimizer steps between held-out losses; 0 = only at the end")]
    precision: Literal["fp32", "tf32", "fp16", "bf16", "pure_bf16"]
    init_scale: Annotated[float, Field(gt=0, le=2.0**60, description="first loss scale; FP16 only")]
    growth_interval: Annotated[Count, Field(description="clean steps before the loss scale doubles; FP16 only")]
    optimizer: Literal["adamw", "sgd"]
    optimizer_impl: Literal["fused", "foreach", "for_loop"]
    dropout: Annotated[float, Field(ge=0, lt=1)]
    activation: Annotated[Literal["gelu_new", "gelu_tanh"], Field(description="the same function, unfused or fused")]
    use_cache: Annotated[bool, Field(description="keep keys and values, which training never reads")]
    when_cpu: dict[str, Any] = Field(default={}, description="keys that differ where no CUDA GPU is used")
    overrides: dict[str, Any] = Field(default={}, exclude=True)

    @model_validator(mode="after")
    def _keys_agree(self) -> Config:
        problems = list(_contradictions(self))
        if problems:
            raise ValueError("\n".join(f"{key}\t{text}" for key, text in problems))
        return self

    @property
    def grad_accum_steps(self) -> int:
        """Micro-batches per optimizer step, derived from `tokens_per_step`."""
        return self.tokens_per_step // (self.seq_len * self.micro_batch_size)

    def on(self, device_type: str) -> Config:
        """Return the config as it runs on `device_type` ("cpu" or "cuda"): override > `when_cpu` (CPU only) > file."""
        cpu = self.when_cpu if device_type == "cpu" else {}
        kept = {key: value for key, value in cpu.items() if key not in self.overrides}
        return Config.model_validate(self.model_dump() | kept | {"when_cpu": {}})

    def changes(self, device_type: str) -> list[str]:
        """Return a line for the values that `when_cpu` set, and one for the overridden ones, where there are any."""
        resolved, cpu, set_by_caller = self.on(device_type), [], []
        for key in KEYS:
            value = getattr(resolved, key)
            if key in self.overrides:
                set_by_caller.append(f"{key} {value} (file: {self.overrides[key]})")
            elif device_type == "cpu" and key in self.when_cpu:
                cpu.append(f"{key} {value}")
        lines = ["on a CPU (when_cpu): " + ", ".join(cpu)] if cpu else []
        return lines + (["override: " + ", ".join(set_by_caller)] if set_by_caller else [])


KEYS = [key for key in Config.model_fields if key not in ("when_cpu", "overrides")]


def _contradictions(c: Config) -> Iterable[tuple[str, str]]:
    """Yield (key, message) for values that are fine alone but not together."""
    per_pass = c.seq_len * c.micro_batch_size
    if c.tokens_per_step % per_pass:
        below, above = c.tokens_per_step // per_pass * per_pass, -(-c.tokens_per_step // per_pass) * per_pass
        nearest = " or ".join(str(n) for n in (below, above) if n)
        yield (
            "tokens_per_step",
            f"{c.tokens_per_step} is not a multiple of seq_len × micro_batch_size = {per_pass}; nearest: {nearest}",
        )
    if c.lr_warmup_steps > c.steps:
        yield "lr_warmup_steps", f"{c.lr_warmup_steps} warm-up steps in a run of {c.steps} steps"
    if c.weights == "pretrained" and c.model == "gpt2-nano":
        yield "weights", "gpt2-nano has no pretrained weights; use weights: random, or model: gpt2"
    if c.weights == "pretrained" and c.seq_len > 1024:
        yield "seq_len", f"pretrained GPT-2 knows 1024 positions, not {c.seq_len}; use weights: random for longer ones"
    if c.optimizer == "sgd" and c.precision == "pure_bf16" and c.optimizer_impl == "fused":
        yield "optimizer_impl", "fused SGD with bfloat16 weights is untested here; use foreach"


# ---- YAML with positions --------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2 numbers and booleans: 6e-4 and 1_024 are numbers, yes is text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag.rsplit(":", 1)[1] not in ("bool", "int", "float")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^[-+]?[0-9][0-9_]*$", "-+0123456789"),
    ("float", r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?$", "-+0123456789."),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))


def _scalar(node: yaml.ScalarNode) -> Any:
    kind = node.tag.rsplit(":", 1)[-1]
    if kind == "int":
        return int(node.value.replace("_", ""))
    if kind == "float":
        return float(node.value.replace("_", ""))
    if kind == "bool":
        return node.value.lower() == "true"
    return None if kind == "null" else node.value


class _Source:
    """Where values stand, and the mistakes found so far."""

    def __init__(self, label: str) -> None:
        self.label, self.marks, self.errors = label, {}, []

    def add(self, mark: yaml.Mark | None, message: str) -> None:
        at = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        line = f"{self.label}{at}: {message}"
        if line not in self.errors:
            self.errors.append(line)

    def raise_if_any(self) -> None:
        if self.errors:
            raise ConfigError("\n".join(self.errors))


def _read(path: Path, source: _Source) -> yaml.Node | None:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        names = [p.name for p in (*path.parent.glob("*.y*ml"), *CONFIGS_DIR.glob("*.yaml"))]
        source.add(None, f"no such file.{_did_you_mean(path.name, names)}")
    except IsADirectoryError:
        source.add(None, "is a folder; name one YAML file in it")
    except OSError as error:
        source.add(None, f"a folder or unreadable: {error.strerror}; name one YAML file")
    else:
        if len(raw) > MAX_FILE_BYTES:
            source.add(
                None, f"is larger than {MAX_FILE_BYTES // 1024} KiB; a config is one screen of `key: value` lines"
            )
        else:
            return _compose(raw, source)
    return None


def _compose(raw: bytes, source: _Source) -> yaml.Node | None:
    try:
        text = raw.decode("utf-8-sig")
        documents = list(yaml.compose_all(text, _Loader))
    except UnicodeDecodeError as error:
        source.add(None, f"is not UTF-8 text (byte {error.start}); a config is a text file")
    except yaml.MarkedYAMLError as error:
        source.add(error.problem_mark, f"not YAML: {error.problem}. Expected lines of `key: value`")
    except (yaml.YAMLError, RecursionError) as error:
        source.add(None, f"not YAML: {str(error).splitlines()[0]}")
    else:
        if len(documents) > 1:
            source.add(documents[1].start_mark, "a second YAML document; keep one experiment per file, without `---`")
        elif not documents or documents[0].tag == "tag:yaml.org,2002:null":
            source.add(None, "is empty; copy one of the files in configs/, or run `python -m labutils new NAME`")
        else:
            return documents[0]
    return None


def _mapping(node: yaml.Node, source: _Source, prefix: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return {key: value} of a flat YAML mapping; report duplicates and everything that is not `key: value`."""
    if not isinstance(node, yaml.MappingNode):
        source.add(node.start_mark, "expected lines of `key: value`")
        return {}
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "?"
        if key in found:
            source.add(key_node.start_mark, f"`{key}` is given twice; delete one")
        elif isinstance(value_node, yaml.ScalarNode):
            found[key] = _scalar(value_node)
        elif key == "when_cpu" and not prefix:
            found[key] = _mapping(value_node, source, (key,))
        else:
            source.add(value_node.start_mark, f"`{key}`: expected one value, not a list or a nested block")
            found[key] = None
        source.marks[(*prefix, key)] = key_node.start_mark, value_node.start_mark
    return found


def _did_you_mean(word: str, choices: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f" Did you mean `{close[0]}`?" if close else ""


def _expected(key: str, error: Mapping[str, Any]) -> str:
    """Return pydantic's complaint about one value in the reader's words."""
    value, kind = error["input"], error["type"]
    shown = f"{value!r}"[:60]
    if kind == "literal_error":
        choices = [str(c) for c in Config.model_fields[key].annotation.__args__]
        return f"`{key}`: {shown} is not one of {', '.join(choices)}.{_did_you_mean(str(value), choices)}"
    expected = error["msg"].replace("Input should be ", "expected ").replace("a valid ", "a ")
    if kind == "bool_type":
        expected = "expected true or false"
    elif kind == "int_type":
        expected = "expected a whole number"
        if isinstance(value, float) and value.is_integer():
            expected += f"; write {int(value)}"
    elif kind in ("string_type", "float_type") and value is None:
        expected = "has no value"
    return f"`{key}`: {expected}, got {shown}"


def _validate(values: dict[str, Any], source: _Source, prefix: tuple[str, ...] = ()) -> Config | None:
    """Return a Config, or report every mistake in `values`; positions are looked up under `prefix` first."""

    def mark(key: str, value: bool) -> yaml.Mark | None:
        pair = source.marks.get((*prefix, key)) or source.marks.get((key,))
        return pair[value] if pair else None

    try:
        return Config.model_validate(values)
    except ValidationError as errors:
        for error in errors.errors():
            key = str(error["loc"][0]) if error["loc"] else ""
            if not error["loc"]:
                for line in error["msg"].removeprefix("Value error, ").splitlines():
                    key, _, text = line.partition("\t")
                    source.add(mark(key, True), f"`{key}`: {text}")
            elif error["type"] == "extra_forbidden":
                source.add(mark(key, False), _unknown(key))
            elif error["type"] == "missing":
                source.add(None, f"missing key `{key}`; a config is complete (see configs/fp32_config.yaml)")
            else:
                source.add(mark(key, True), _expected(key, error))
    return None


def _unknown(key: str) -> str:
    if key in NOT_BUILT:
        return f"`{key}` is planned but not built yet; delete the line"
    return f"unknown key `{key}`.{_did_you_mean(key, KEYS)}"


def parse_overrides(pairs: Iterable[str]) -> dict[str, Any]:
    """Return {key: value} for `key=value` texts, each value read as the YAML file would read it.

    Raises ConfigError for a text without `=`, or a value that is not one YAML scalar.
    """
    source, values = _Source("--set"), {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            source.add(None, f"{pair!r}: expected key=value, as in --set steps=20")
            continue
        node = _compose(text.encode(), source) if text else None
        if isinstance(node, yaml.ScalarNode):
            values[key.strip()] = _scalar(node)
        elif not source.errors:
            source.add(None, f"{pair!r}: expected one value behind `=`")
    source.raise_if_any()
    return values


def find_config(name: str | os.PathLike[str]) -> Path:
    """Return the file meant by `name`: a path, or a short name such as "bf16" for configs/bf16_config.yaml."""
    path = Path(name)
    if path.exists() or path.is_absolute():
        return path
    root = CONFIGS_DIR.parent / path
    short = [CONFIGS_DIR / f"{name}_config.yaml", CONFIGS_DIR / f"{name}.yaml", CONFIGS_DIR / path.name]
    return next((p for p in (root, *short) if p.is_file()), path)


def load_config(path: str | os.PathLike[str], **overrides: Any) -> Config:
    """Read, check and return the experiment in a YAML file; keyword arguments override its values.

    `path` may be a short name ("bf16" is configs/bf16_config.yaml). The main part and `when_cpu` are both checked.
    Raises ConfigError with one `file:line:column` line for each mistake.
    """
    path = find_config(path)
    source = _Source(_shown(path))
    node = _read(path, source)
    source.raise_if_any()
    values = _mapping(node, source)
    when_cpu = values.pop("when_cpu", None) or {}
    if not isinstance(when_cpu, dict):
        source.add(source.marks[("when_cpu",)][1], "`when_cpu`: expected indented lines of `key: value`")
        when_cpu = {}
    if "overrides" in values:
        source.add(source.marks[("overrides",)][0], _unknown("overrides"))
        del values["overrides"]
    for part, base in ((values, path.parent), (when_cpu, path.parent), (overrides, Path.cwd())):
        if isinstance(part.get("corpus"), str) and part["corpus"] not in ("", "stdlib"):
            part["corpus"] = str((base / Path(part["corpus"]).expanduser()).resolve())
    for key in ("when_cpu", "overrides", "name"):
        if key in when_cpu:
            source.add(source.marks[("when_cpu", key)][0], f"`{key}` cannot stand under `when_cpu`")
    if not source.errors:
        _validate(values, source)
        _validate(values | when_cpu, source, ("when_cpu",))
    source.raise_if_any()
    set_source = _Source("override")
    for branch in (values, values | when_cpu) if overrides else ():
        _validate(branch | overrides, set_source)
    set_source.raise_if_any()
    file_values = {key: values[key] for key in overrides}
    return Config.model_validate(values | overrides | {"when_cpu": when_cpu, "overrides": file_values})


def _shown(path: Path) -> str:
    try:
        return path.resolve().relative_to(CONFIGS_DIR.parent).as_posix()
    except ValueError:
        return str(path)


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a config file, for editors that complete and check keys as you type."""
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
