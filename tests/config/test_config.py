from __future__ import annotations

import json

import pytest
import yaml

from benchmarks.configs import commented
from labutils.config.reader import config_of, load_config, parse_overrides
from labutils.config.schema import KEYS, ConfigError, schema_text
from tests.helpers import REPO, committed

NAMES = ("fp32", "tf32", "fp16", "bf16", "optimized", "accumulation", "checkpointing")
GOOD = committed("configs/fp32_config.yaml")


@pytest.fixture
def write(tmp_path):
    def _write(text: str | bytes, name: str = "x.yaml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return _write


def errors_of(path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return str(caught.value).splitlines()


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new, 1)


@pytest.mark.parametrize("name", NAMES)
def test_shipped_config_is_valid_on_both_devices(name, write):
    config = load_config(write(committed(f"configs/{name}_config.yaml")))
    assert config.on("cuda").model == ("gpt2-medium" if name == "checkpointing" else "gpt2")
    assert config.on("cpu").model == "gpt2-nano"


def test_precision_configs_differ_only_in_marked_lines():
    texts = {
        name: committed(f"configs/{name}_config.yaml").splitlines()
        for name in ("fp32", "tf32", "fp16", "bf16")
    }
    for name, lines in texts.items():
        body = [line for line in lines if not line.startswith("#")]
        baseline = [line for line in texts["fp32"] if not line.startswith("#")]
        differing = [a for a, b in zip(body, baseline, strict=True) if a != b]
        assert all("[*]" in line for line in differing), name
    values = [yaml.safe_load("\n".join(lines)) for lines in texts.values()]
    assert {k for v in values for k in v if v[k] != values[0][k]} == {"name", "note", "precision"}


@pytest.mark.parametrize("name", ["optimized", "accumulation", "checkpointing"])
def test_other_configs_mark_what_differs_from_fp32(name):
    body = [
        x for x in committed(f"configs/{name}_config.yaml").splitlines() if not x.startswith("#")
    ]
    baseline = [line for line in GOOD.splitlines() if not line.startswith("#")]
    assert all("[*]" in line or "precision: fp32" in line for line in body if line not in baseline)


@pytest.mark.parametrize(
    ("old", "new", "line", "expected"),
    [
        (
            "learning_rate: 6e-4",
            "learning_rte: 6e-4",
            True,
            "unknown key `learning_rte`. Did you mean `learning_rate`?",
        ),
        ("seed: 0 ", "seed: 0\nseed: 1 ", True, "`seed` is given twice"),
        ("steps: 60", "steps: sixty", True, "`steps`: expected a whole number, got 'sixty'"),
        ("steps: 60", "steps: 1e2", True, "`steps`: expected a whole number, got '1e2'"),
        ("steps: 60", "steps: 0", True, "`steps`: expected greater than or equal to 1, got '0'"),
        ("steps: 60", "steps:", True, "`steps` has no value"),
        ("steps: 60", "steps: 1_000_000_000_000", True, "less than or equal to 1000000000"),
        ("name: fp32", "name: my run", True, "`name`: expected letters, digits"),
        ("precision: fp32", "precision: FP16", True, "Did you mean `fp16`?"),
        ("corpus: stdlib", "corpus: nowhere.txt", True, "no such file: 'nowhere.txt'"),
        ("when_cpu:", "when_gpu:", True, "unknown key `when_gpu`. Did you mean `when_cpu`?"),
        ("weights: random", "weights: pretrained", True, "on a CPU, with what `when_cpu` sets"),
        ("steps: 60", "steps: [60]", True, "`steps`: expected one value, not a list"),
        (
            "use_cache: false",
            "use_cache: never",
            True,
            "`use_cache`: expected true or false, got 'never'",
        ),
        ("precision: fp32", "precision: pf32", True, "'pf32' is not one of fp32, tf32"),
        ("precision: fp32", "precision: fp3", True, "Did you mean `fp32`?"),
        ("model: gpt2 ", "model: gpt2-mediun ", True, "Did you mean `gpt2-medium`?"),
        ("tokens_per_step: 4096", "tokens_per_step: 5000", True, "nearest: 4096 or 6144"),
        ("tokens_per_step: 4096", "tokens_per_step: 100", True, "nearest: 2048"),
        (
            "lr_warmup_steps: 5",
            "lr_warmup_steps: 61",
            True,
            "61 warm-up steps in a run of 60 steps",
        ),
        (
            "gradient_checkpointing: none",
            "gradient_checkpointing: every_5",
            True,
            "Did you mean `every_4`?",
        ),
        ("seed: 0 ", "overrides: 1\nseed: 0 ", True, "unknown key `overrides`"),
        ("seed: 0 ", "", False, "missing: `seed`"),
        (
            "  model: gpt2-nano",
            "  modle: gpt2-nano",
            True,
            "unknown key `modle`. Did you mean `model`?",
        ),
        ("  model: gpt2-nano", "  name: other", True, "`name` cannot stand under `when_cpu`"),
        ("  tokens_per_step: 512", "  tokens_per_step: 500", True, "nearest: 512"),
        ("  steps: 60", "  steps: -1", True, "got '-1'"),
        ("learning_rate: 6e-4", "learning_rate: .inf", True, "`learning_rate`: expected"),
        ("learning_rate: 6e-4", "learning_rate: 0x10", True, "`learning_rate`: expected"),
    ],
)
def test_mistake_is_reported_where_it_stands(write, old, new, line, expected):
    path = write(changed(old, new))
    found = [e for e in errors_of(path) if expected in e]
    assert found
    if line:
        at = found[0].removeprefix(str(path)).split(":")[1]
        key = new.strip().splitlines()[-1 if "given twice" in expected else 0].split(":")[0]
        assert path.read_text().splitlines()[int(at) - 1].strip().startswith(key)


def test_all_mistakes_are_reported_at_once(write):
    text = (
        changed("steps: 60", "steps: x")
        .replace("seed: 0 ", "sede: 0 ")
        .replace("dropout: 0.1", "dropout: 2.0")
    )
    errors = "\n".join(errors_of(write(text)))
    assert all(key in errors for key in ("`steps`", "`sede`", "`seed`", "`dropout`"))
    text = (
        changed("steps: 60", "steps: x").replace("tokens_per_step: 4096", "tokens_per_step: 5000")
        + "seed: 1\n"
    )
    lines = errors_of(write(text))
    assert [("`tokens" in line, "`steps`" in line, "twice" in line) for line in lines] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]


def test_overridden_experiment_has_a_name_of_its_own(write):
    path = write(GOOD)
    assert load_config(path, steps=7).name == "fp32+steps=7"
    assert load_config(path, steps=7).note == "fp32 with steps=7"
    assert load_config(path, steps=7, name="x").name == "x"
    many = load_config(
        path, steps=7, seed=123456, dropout=0.25, learning_rate=1.25e-4, weight_decay=0.125
    )
    assert many.name.startswith("fp32+") and len(many.name) <= 60
    assert many.name != load_config(path, **(many.overrides | {"steps": 8})).name


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"a: [1, 2", "not YAML"),
        (b"key: value: more", "not YAML"),
        (b"", "is empty"),
        (b"# only a comment\n", "is empty"),
        (b"- a\n- b\n", "expected lines of `key: value`"),
        (b"just text", "expected lines of `key: value`"),
        (b"\x00\x01\x02\xff\xfe", "not"),
        (b"\xff\xd8\xff\xe0 jpeg", "not UTF-8"),
        (b"seed: 0\n---\nseed: 1\n", "one experiment per file"),
        (b"a: " + b"x" * 70_000, "larger than 64 KiB"),
        (b"steps: &a [1]\nseed: *a\n", "expected one value"),
        (b"steps: 6\n\tseed: 0\n", "indent with spaces, not tabs"),
        (b"note: a: b\n", 'in "quotes"'),
        (b"steps:60\nseed: 0\n", "a space belongs behind the colon"),
        (b"? [1, 2]\n: 3\n", "unknown key"),
        (b"null: 3\n", "unknown key `null`"),
        (b"steps: 10000000000000000000000000000000000000000\n", "`steps`: expected"),
        (b"name: fp32\nwhen_cpu: 5\n", "expected indented lines"),
        (b"when_cpu: 0\n", "expected indented lines"),
        (b"when_cpu: ''\n", "expected indented lines"),
        (b"seed: " + b"9" * 5000 + b"\n", "`seed`: expected a whole number"),
        (b"seed: !!int abc\n", "`seed`: expected a whole number"),
        (b"use_cache: !!bool maybe\n", "`use_cache`: expected true or false"),
        (b'corpus: "a\\0b"\n', "no such file"),
        (b"corpus: ~nouser/x\n", "no such file"),
        (b"<<: {seed: 1}\n", "`<<`"),
        (b"seed: !!python/object/apply:os.system ['true']\n", "`seed`"),
        (b"[" * 150, "not YAML"),
        (b"[" * 5000, "not YAML"),
    ],
)
def test_file_that_is_no_config_is_refused(write, content, expected):
    assert expected in "\n".join(errors_of(write(content)))


def test_folder_and_missing_file_are_refused(tmp_path):
    assert "is a directory; name one YAML file" in errors_of(tmp_path)[0]
    assert "Did you mean `fp32_config.yaml`" in errors_of(tmp_path / "fp32_confg.yaml")[0]


def test_numbers_are_read_as_numbers(write):
    text = changed("learning_rate: 6e-4", "learning_rate: 1_0e-5").replace(
        "tokens_per_step: 4096", "tokens_per_step: 4_096"
    )
    config = load_config(write(text))
    assert (config.learning_rate, config.tokens_per_step) == (1e-4, 4096)


def test_override_beats_when_cpu_beats_file(write):
    config = load_config(write(GOOD), steps=7)
    assert (config.on("cpu").steps, config.on("cuda").steps) == (7, 7)
    assert (config.on("cpu").seq_len, config.on("cuda").seq_len) == (128, 512)
    cpu = "\n".join(config.changes("cpu"))
    assert "steps 7 (instead of 60)" in cpu
    assert "seq_len 128" in cpu
    assert "seq_len" not in "\n".join(config.changes("cuda"))


def test_bad_override_names_the_key(write):
    path = write(GOOD)
    with pytest.raises(ConfigError, match=r"unknown key `step`\. Did you mean `steps`"):
        load_config(path, step=3)
    with pytest.raises(ConfigError, match="expected key=value"):
        parse_overrides(["steps"])
    with pytest.raises(ConfigError, match="`seed`: expected a whole number, got '# x'"):
        load_config(path, **parse_overrides(["seed=# x"]))
    for key in ("when_cpu", "overrides"):
        with pytest.raises(ConfigError, match="unknown key"):
            load_config(path, **{key: {}})
    with pytest.raises(ConfigError, match="unknown key `path`"):
        load_config(path, **parse_overrides(["path=x"]))
    texts = parse_overrides(["learning_rate=3e-4", "use_cache=true", "note=a, b"])
    config = load_config(path, **texts)
    assert (config.learning_rate, config.use_cache, config.note) == (3e-4, True, "a, b")


def test_override_is_judged_on_the_device_it_runs_on(write):
    path = write(GOOD)
    config = load_config(
        path, micro_batch_size=8, seq_len=512
    )  # fits the GPU's 4096 tokens, not the CPU's 512
    assert config.on("cuda").grad_accum_steps == 1
    with pytest.raises(ConfigError, match=r"on a CPU: `tokens_per_step`: 512 is not a multiple"):
        config.on("cpu")
    assert (
        load_config(path, micro_batch_size=3, tokens_per_step=384).on("cpu").grad_accum_steps == 1
    )
    with pytest.raises(ConfigError, match="not a multiple"):
        load_config(path, micro_batch_size=3, tokens_per_step=385)


def test_what_just_fits_is_accepted(write):
    path = write(GOOD)
    assert load_config(path, lr_warmup_steps=60).on("cuda").steps == 60
    assert load_config(path, weights="pretrained", seq_len=1024).on("cuda").grad_accum_steps == 1


def test_override_corpus_is_relative_to_the_working_directory(write, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine.txt").write_text("text")
    monkeypatch.chdir(elsewhere)
    assert load_config(write(GOOD), corpus="mine.txt").corpus == str(
        (elsewhere / "mine.txt").resolve()
    )


def test_config_cannot_be_changed(write):
    config = load_config(write(GOOD))
    with pytest.raises(ValueError, match="frozen"):
        config.steps = 1


def test_corpus_path_is_relative_to_the_file(write, tmp_path):
    (tmp_path / "mine.txt").write_text("text")
    config = load_config(write(changed("corpus: stdlib ", "corpus: mine.txt ")))
    assert config.corpus == str((tmp_path / "mine.txt").resolve())


@pytest.mark.parametrize("name", NAMES)
def test_comments_of_the_shipped_configs_are_those_of_the_rows(name):
    text = committed(f"configs/{name}_config.yaml")
    assert commented(text, committed("configs/fp32_config.yaml")) == text, "run `make configs`"
    assert "$schema=schema.json" in text


def test_schema_file_equals_the_model():
    written = (REPO / "configs" / "schema.json").read_text(encoding="utf-8")
    assert json.loads(written) == json.loads(schema_text()), "run `make configs`"
    assert set(json.loads(schema_text())["properties"]) == {*KEYS, "when_cpu"}


def test_the_config_of_an_old_record_loads_or_says_what_is_unknown():
    values = load_config("fp32").model_dump(exclude={"overrides"})
    del values["expandable_segments"]
    assert not config_of(values, "old run").expandable_segments
    with pytest.raises(ConfigError, match=r"old run: `optimizer`: 'adagrad' is not one of"):
        config_of(values | {"optimizer": "adagrad"}, "old run")
    with pytest.raises(ConfigError, match="old run: unknown key `gone`"):
        config_of(values | {"gone": 1}, "old run")
