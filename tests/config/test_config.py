from __future__ import annotations

import json
import re
from functools import partial

import pytest

from benchmarks.configs import commented, json_schema, shipped
from labutils.config import reader, schema
from labutils.config.reader import load_card, load_config, parse_overrides
from labutils.config.schema import ConfigError
from labutils.files import CONFIGS_DIR

TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in shipped()}
GOOD = TEXTS["fp32_config"]


@pytest.fixture
def write(tmp_path):
    """Write a file; it is fp32_config.yaml with an edit, or other text."""

    def _write(old: str = "", new: str = "", text: str = GOOD):
        assert old in text
        path = tmp_path / "x.yaml"
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
        return path

    return _write


def errors_of(path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return str(caught.value)


@pytest.mark.parametrize("name", TEXTS)
def test_a_shipped_config_is_valid_and_its_comments_are_those_of_the_rows(name, write):
    text = TEXTS[name]
    config = load_config(write(text=text))
    assert (config.on("cuda").model, config.on("cpu").model) == (config.model, "gpt2-nano")
    assert commented(text, GOOD) == text, "run `make configs`"
    assert "$schema=schema.json" in text


def test_a_readers_own_config_is_none_of_the_courses(tmp_path):
    (tmp_path / "my_config.yaml").touch()
    assert not shipped(tmp_path)


def test_precision_configs_differ_only_in_marked_lines():
    baseline = load_config("fp32").model_dump().items()
    for name in ("tf32", "fp16", "bf16"):
        changed = set(TEXTS[f"{name}_config"].splitlines()) - {*GOOD.splitlines()}
        assert all("[*]" in line for line in changed if line[0] != "#")
        config = load_config(name).model_dump()
        assert {k for k, usual in baseline if config[k] != usual} == {"name", "note", "precision"}


PRECISIONS = [("half", "fp16"), ("float16", "fp16"), ("16-mixed", "fp16"), ("amp", "16bit")]
PRECISIONS += [("bf16-mixed", "bf16"), ("float32", "fp32")]
MISTAKES = [
    ("learning_rate: 6e-4", "learning_rte: 6e-4", "Did you mean `learning_rate`?"),
    ("steps: 60", "steps: sixty", "`steps`: expected a valid integer, got 'sixty'"),
    ("name: fp32", "name: my run", "`name`: expected letters, digits"),
    ("precision: fp32", "precision: FP16", "'16bit', got 'FP16'. Did you mean `fp16`?"),
    ("learning_rate: 6e-4", "learning_rate: .inf", "`learning_rate`: expected"),
    ("corpus: stdlib", "corpus: nowhere.txt", "no such text file: 'nowhere.txt'"),
    ("corpus: stdlib", "corpus: ..", "no such text file: '..'"),
    ("init_scale: 65536.0", "init_scale: 1e30", "less than or equal to 1.15e+18, got '1e30'"),
    ("  seq_len: 128", "  when_cpu: {steps: 3}", "`when_cpu` stands inside `when_cpu`"),
    ("tokens_per_step: 4096", f"tokens_per_step: {10**9}", "; use a smaller micro_batch_size"),
    ("when_cpu:", "when_gpu:", "unknown key `when_gpu`. Did you mean `when_cpu`?"),
    ("tokens_per_step: 4096", "tokens_per_step: 5000", "the next one is 6144"),
    ("lr_warmup_steps: 5", "lr_warmup_steps: 61", "more than the 60 steps"),
    ("weights: random", "weights: pretrained", "gpt2-nano has no pretrained weights"),
    ("  model: gpt2-nano", "  modle: gpt2-nano", "Did you mean `model`?"),
    ("  tokens_per_step: 512", "  tokens_per_step: 500", "next one is 512 (on a CPU, with"),
    ("  steps: 60", "  steps: -1", "got '-1'"),
    # what others call ours
    ("model: gpt2 ", "model: gpt2-small ", "Did you mean `gpt2`?"),
    ("model: gpt2 ", "model: small ", "Did you mean `gpt2`?"),
    *[("precision: fp32", f"precision: {name}", f"mean `{ours}`?") for name, ours in PRECISIONS],
    ("micro_batch_size: 4", "batch_size: 4", "Did you mean `micro_batch_size`?"),
    ("  steps: 60", "  gradient_accumulation_steps: 2", "Did you mean `tokens_per_step`?"),
    ("gradient_checkpointing: none", "gradient_checkpointing: on", "Did you mean `block`?"),
    ("compile: off", "compile: true", "Did you mean `default`?"),
]


@pytest.mark.parametrize(("old", "new", "expected"), MISTAKES)
def test_a_mistake_is_reported_where_it_stands(write, old, new, expected):
    path = write(old, new)
    (line,) = [line for line in errors_of(path).splitlines() if expected in line]
    number = int(re.match(rf"{path}:(\d+): ", line)[1])
    assert path.read_text().splitlines()[number - 1].startswith(new.splitlines()[-1].rstrip())


def test_all_mistakes_are_reported_at_once(write):
    text = GOOD.replace("steps: 60", "steps: x", 1).replace("seed: 0 ", "sede: 0 ")
    text = text.replace("tokens_per_step: 4096", "tokens_per_step: 5000") + "model: gpt2\n"
    lines = errors_of(write(text=text)).splitlines()
    words = ("missing: `seed`", "`sede`", "`tokens_per_step`", "`steps`", "`model` is given twice")
    assert all(word in line for word, line in zip(words, lines, strict=True))


@pytest.mark.parametrize("load", [load_config, load_card])
def test_of_many_mistakes_some_are_shown_and_few_are_thought_about(load, tmp_path, monkeypatch):
    asked = []
    for module in (reader, schema):
        monkeypatch.setattr(module, "did_you_mean", lambda word, _: asked.append(word) or "")
    path = tmp_path / "x.yaml"
    path.write_text("".join(f"key_{i}: 0\n" for i in range(3000)), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(path)
    *shown, last = str(caught.value).splitlines()
    assert len(shown) == 20 and len(asked) <= 2 * 20
    n_missing = sum("missing" in line for line in shown)
    assert last == f"{path}: … and {3000 + n_missing - 20:,} more"


def test_a_step_in_backward_needs_one_whole_micro_batch(write):
    good = {"max_grad_norm": 0, "tokens_per_step": 2048, "optimizer_in_backward": True}
    assert load_config(write(), **good).on("cuda").optimizer_in_backward
    with pytest.raises(ConfigError) as caught:
        load_config(write(), optimizer_in_backward=True, precision="16bit")
    for reason in ("clipping needs all", "a loss scale needs all", "set tokens_per_step to 2048"):
        assert reason in str(caught.value).splitlines()[0]


def test_a_compiler_does_not_take_what_goes_to_the_host(write):
    with pytest.raises(ConfigError, match="cannot take offload's hooks"):
        load_config(write(), gradient_checkpointing="offload", compile="default")
    assert load_config(write(), gradient_checkpointing="block", compile="default").compile


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1, 2", "not YAML"),
        ('seed: 0\nnote: "a\nsteps: 6\n', ":2: not YAML: found unexpected end of stream"),
        ("", "Expected lines of `key: value`"),
        ("seed: 0\n---\nseed: 1\n", "another document"),
        ("steps: 6\n\tseed: 0\n", "indented with spaces"),
        ("note: a: b\n", 'text with a colon in "quotes"'),
        ("name: fp32\nwhen_cpu: 5\n", "`when_cpu`: expected a valid dictionary"),
    ],
)
def test_a_file_that_is_no_config_is_refused(write, text, expected):
    assert expected in errors_of(write(text=text))


HOSTILE = r"""[1, 2]|{a: 1}|&a 1|*a|!!python/object/apply:os.system ['true']|>|null|~|yes|0x10|1e999
-1|.nan|'|"|\t1|2001-01-01|1:2|@|`|%|/dev/zero|"a\0b"|汉"""
# The last ones add a key that is there already, a line with a tab, and one of a list.
VALUES = [*re.split("[|\n]", HOSTILE), "1\nsteps: 2", "1\n\tsteps: 2", "1\n  - 1"]
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{f'*a{i - 1}, ' * 9}]\n" for i in range(1, 20)
)
FILES = [LAUGHS.encode(), b"[" * 50_000, b"{a: " * 10_000, GOOD.encode("utf-16"), b"\xff\x00\x9f"]


@pytest.mark.parametrize("line", ["", *(line for line in GOOD.splitlines() if ":" in line)])
def test_any_file_is_a_config_or_a_config_error(tmp_path, line):
    path, key = tmp_path / "x.yaml", line.partition(":")[0]
    edits = [GOOD.replace(line, f"{key}: {value}", 1).encode() for value in VALUES]
    for content in edits if line else FILES:
        path.write_bytes(content)
        try:
            load_config(path)
        except ConfigError as error:
            for mistake in str(error).splitlines():
                assert re.match(rf".*{path.name}(:\d+)?: \S", mistake), (content, mistake)


def test_a_folder_and_a_missing_file_are_refused(tmp_path, write):
    write()
    folder = tmp_path / "a_folder.yaml"
    folder.mkdir()
    assert errors_of(folder).startswith(f"{folder}: is a folder; name one of its YAML files")
    assert "Did you mean `x.yaml`" in errors_of(tmp_path / "x.yml")


def test_an_override_beats_when_cpu_beats_the_file(write):
    config = load_config(write(), steps=7)
    on_cpu, on_gpu = config.on("cpu"), config.on("cuda")
    assert (on_cpu.steps, on_gpu.steps, on_cpu.seq_len, on_gpu.seq_len) == (7, 7, 128, 512)
    from_cpu, from_caller = config.changes("cpu")
    assert from_cpu.startswith("on a CPU (when_cpu): model gpt2-nano, seq_len 128")
    assert " steps " not in from_cpu
    assert config.changes("cuda") == [from_caller] == ["override: steps 7"]


def test_an_overridden_experiment_has_a_name_of_its_own(write):
    config = load_config(write(), steps=7)
    assert (config.name, config.note) == ("fp32+steps=7", "fp32 with steps=7")
    assert load_config(write(), steps=7, name="x").name == "x"
    many = {"seed": 123456, "dropout": 0.25, "learning_rate": 1.25e-4, "weight_decay": 0.125}
    a, b = (load_config(write(), **many, steps=steps).name for steps in (7, 8))
    assert a != b and a.startswith("fp32+") and len(a) <= 60


def test_a_bad_override_is_told_from_a_line_that_it_makes_wrong():
    with pytest.raises(ConfigError, match="override: unknown key `step`"):
        load_config("fp32", step=3)
    with pytest.raises(ConfigError, match=r":18: `lr_warmup_steps`: 5 .* \(with steps=4\)"):
        load_config("fp32", steps=4)
    with pytest.raises(ConfigError, match="expected key=value"):
        parse_overrides(["steps"])


def test_overrides_are_read_as_a_file_is(write):
    texts = parse_overrides(["learning_rate=1_0e-5", "use_cache=true", "note=a, b"])
    config = load_config(write(), **texts)
    assert (config.learning_rate, config.use_cache, config.note) == (1e-4, True, "a, b")


def test_an_override_is_judged_on_the_device_it_runs_on(write):
    config = load_config(write(), micro_batch_size=8)  # the GPU's 4096 tokens, not the CPU's 512
    assert config.on("cuda").grad_accum_steps == 1
    with pytest.raises(ConfigError, match="on cpu: `tokens_per_step`: 512 is not a multiple"):
        config.on("cpu")
    good = {"micro_batch_size": 3, "tokens_per_step": 384}
    assert load_config(write(), **good).on("cpu").grad_accum_steps == 1
    with pytest.raises(ConfigError, match="not a multiple"):
        load_config(write(), **good | {"tokens_per_step": 385})


def test_what_just_fits_is_accepted(write):
    good = {"lr_warmup_steps": 60, "weights": "pretrained", "seq_len": 1024}
    assert load_config(write(), **good).on("cuda").grad_accum_steps == 1


def test_a_corpus_is_relative_to_its_file_or_to_the_working_directory(write, tmp_path, monkeypatch):
    text = tmp_path / "mine.txt"
    text.write_text("text")
    assert load_config(write("corpus: stdlib ", "corpus: mine.txt ")).corpus == str(text)
    monkeypatch.chdir(tmp_path)
    assert load_config("fp32", corpus="mine.txt").corpus == str(text)


def test_a_config_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        load_config("fp32").steps = 1


def test_a_change_is_an_override(write):
    config = load_config(write(), steps=7, lr_warmup_steps=0)
    config = config.changed(precision="bf16", seq_len="64")
    for device_type in ("cpu", "cuda"):
        there = config.on(device_type)
        assert (there.steps, there.precision, there.seq_len) == (7, "bf16", 64)
    [said] = config.changes("cuda")
    assert said == "override: seq_len 64, steps 7, lr_warmup_steps 0, precision bf16"
    assert config.changed(steps=8, name="x").name == "x"


def test_each_change_has_a_name_of_its_own_and_a_valid_one(write):
    config = load_config(write("name: fp32", f"name: {'a' * 60}"))
    assert len({config.changed(seed=seed).on("cpu").name for seed in range(3)}) == 3


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"precision": "fp61"}, "`precision`: expected .*'fp61'. Did you mean `fp16`"),
        ({"step": 3}, r"unknown key `step`\. Did you mean `steps`"),
        ({"path": "x"}, "unknown key `path`"),
        ({"seed": "# x"}, "`seed`: expected a valid integer, got '# x'"),
        ({"lr_warmup_steps": 61}, "`lr_warmup_steps`: .*more than the 60 steps"),
        ({"corpus": "nowhere.txt"}, "`corpus`: no such text file: 'nowhere.txt'"),
        ({"when_cpu": {"steps": 3}}, "`when_cpu` is a part of a file"),
    ],
)
def test_a_bad_change_is_named_as_a_bad_override_is(values, expected):
    config = load_config("fp32")
    for change in (config.changed, partial(load_config, "fp32")):
        with pytest.raises(ConfigError, match=expected):
            change(**values)


def test_the_schema_file_equals_the_model():
    written = (CONFIGS_DIR / "schema.json").read_text(encoding="utf-8")
    assert json.loads(written) == json_schema(), "run `make configs`"
