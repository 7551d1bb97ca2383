from __future__ import annotations

import ast
import json
import os
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import labutils as lab
from labutils.config.card import PrecisionUnsupported
from labutils.config.choices import OPTIMIZERS, PRECISIONS
from labutils.config.reader import load_config
from labutils.config.schema import Config, ConfigError
from labutils.techniques import optimizers
from labutils.tools import exportable
from labutils.tools.cli import main
from labutils.tools.export import script
from tests.helpers import CPU, REPO, fill_hub_cache, slow

SHIPPED = sorted(
    path.name.removesuffix("_config.yaml") for path in (REPO / "configs").glob("*_config.yaml")
)
SMALL = {"name": "small", "steps": 3, "seq_len": 16, "micro_batch_size": 2, "lr_warmup_steps": 1}


def small(config_name, **overrides):
    """A config as it runs on a CPU, of a few small steps, which still accumulate and go in chunks
    if they did.
    """
    on_cpu = load_config(config_name).on("cpu")
    tokens = 32 * min(2, on_cpu.grad_accum_steps)
    sizes = SMALL | {
        "tokens_per_step": tokens,
        "loss_chunk_tokens": 12 if on_cpu.loss_chunk_tokens else 0,
    }
    return load_config(config_name, **(sizes | overrides))


@pytest.fixture(scope="session")
def own_text(tmp_path_factory):
    """A text whose tokenizer takes no time to train, in a file whose name has what source code
    treats specially.
    """
    path = tmp_path_factory.mktemp("text") / "it's “mine” $name.txt"
    path.write_text(" ".join(f"the {i * i}th word" for i in range(500)), encoding="utf-8")
    return {"corpus": str(path)}


def losses_of_both(config, folder, monkeypatch, capsys):
    """Run a config by labutils and as a script; return both lists of losses and both held-out
    losses.
    """
    record = lab.run_experiment(config, device=CPU, rerun=True, progress=False)
    assert record.outcome == "completed"
    path = folder / "train.py"
    path.write_text(script(config, "cpu"), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [str(path)])
    capsys.readouterr()
    made = runpy.run_path(str(path))
    held_out = float(capsys.readouterr().out.rsplit(" ", 1)[1])
    return record.series.loss, made["losses"].tolist(), record.held_out[-1][1], held_out


def assert_equal_losses(config, folder, monkeypatch, capsys):
    recorded, exported, held_out, exported_held_out = losses_of_both(
        config, folder, monkeypatch, capsys
    )
    assert exported == recorded  # bit for bit: the same operations in the same order
    assert exported_held_out == pytest.approx(held_out, abs=6e-5)  # printed with four digits


@pytest.mark.parametrize("name", [name for name in SHIPPED if name != "tf32"])
def test_script_of_a_shipped_config_has_its_losses(
    name, own_text, runs, tmp_path, monkeypatch, capsys
):
    assert_equal_losses(
        small(name, **({} if name == "fp32" else own_text)), tmp_path, monkeypatch, capsys
    )


def test_tf32_is_refused_for_a_cpu_as_when_run():
    with pytest.raises(PrecisionUnsupported, match="use fp32"):
        script(load_config("tf32"), "cpu")


SWITCHES = {
    "every_3": {"gradient_checkpointing": "every_3"},
    "selective": {"gradient_checkpointing": "selective", "dropout": 0.0},
    "sgd": {
        "optimizer": "sgd",
        "max_grad_norm": 0.0,
        "lr_schedule": "constant",
        "lr_warmup_steps": 0,
    },
    "chunks": {"loss_chunk_tokens": 10, "tokens_per_step": 96, "weight_decay": 0.3},
    "in_backward": {"optimizer_in_backward": True, "max_grad_norm": 0.0, "optimizer": "adamw_bf16"},
}
MORE_SWITCHES = {
    "block": {"gradient_checkpointing": "block"},
    "every_2": {"gradient_checkpointing": "every_2", "use_cache": True},
    "selective with dropout": {"gradient_checkpointing": "selective"},
    "offload": {"gradient_checkpointing": "offload"},
    "adamw_bf16": {"optimizer": "adamw_bf16"},
    "adamw_8bit": {"optimizer": "adamw_8bit"},
    "adamw in backward": {"optimizer_in_backward": True, "max_grad_norm": 0.0},
    "pure_bf16": {"precision": "pure_bf16", "optimizer_impl": "for_loop"},
    "pure_bf16 with bf16 moments": {"precision": "pure_bf16", "optimizer": "adamw_bf16"},
    "fp16 that skips steps": {"precision": "fp16", "init_scale": 1e12, "steps": 4},
    "fp16 that skips steps of small moments": {
        "precision": "fp16",
        "init_scale": 1e9,
        "optimizer": "adamw_8bit",
    },
    "fp16 in chunks": {"precision": "fp16", "loss_chunk_tokens": 12, "max_grad_norm": 0.0},
    "bf16 in chunks": {"precision": "bf16", "loss_chunk_tokens": 12},
    "16bit": {"precision": "16bit"},
    "foreach": {"optimizer_impl": "foreach"},
    "padded vocabulary": {"pad_vocab": True, "activation": "gelu_tanh", "use_cache": True},
    "eager": {"attention": "eager"},
    "sdpa": {"attention": "sdpa", "seed": 3},
    "math": {"attention": "math", "gradient_checkpointing": "block", "loss_chunk_tokens": 12},
    "flash": {"attention": "flash", "dropout": 0.0},
    "long sequences": {
        "seq_len": 1040,
        "tokens_per_step": 1040,
        "micro_batch_size": 1,
        "corpus": "stdlib",
    },
    "all warm-up": {"lr_warmup_steps": 3},
    "cosine from the start": {"lr_warmup_steps": 0},
    "evaluation on the way": {"eval_every": 2},
}


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_switches_keep_the_losses(switches, own_text, runs, tmp_path, monkeypatch, capsys):
    assert_equal_losses(small("fp32", **(own_text | switches)), tmp_path, monkeypatch, capsys)


@slow
@pytest.mark.parametrize("switches", MORE_SWITCHES.values(), ids=MORE_SWITCHES)
def test_more_switches_keep_the_losses(switches, own_text, runs, tmp_path, monkeypatch, capsys):
    assert_equal_losses(small("fp32", **(own_text | switches)), tmp_path, monkeypatch, capsys)


def test_own_text_is_read_again_in_a_new_order(own_text, runs, tmp_path, monkeypatch, capsys):
    config = small("fp32", **own_text, steps=9, seq_len=64, micro_batch_size=8, tokens_per_step=512)
    assert_equal_losses(config, tmp_path, monkeypatch, capsys)
    assert lab.load_record("small").epochs > 2


@slow
def test_slabs_are_rounded_in_the_same_order(own_text, runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        optimizers, "NUMBERS_AT_ONCE", 1 << 12
    )  # else no tensor of a small model has two
    for config in (small("xl", **own_text), small("fp32", optimizer="adamw_bf16", **own_text)):
        assert_equal_losses(config, tmp_path, monkeypatch, capsys)


@slow
def test_long_runs_read_the_same_library(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "labutils.tools.export.LONGEST_TOKEN", 100
    )  # few steps, as if they needed more than the reference
    monkeypatch.setattr("labutils.workload.build.tokens_to_read", lambda config: 400_000)
    monkeypatch.setattr("labutils.tools.export.tokens_to_read", lambda config: 400_000)
    config = small("fp32")
    assert "stdlib" in script(config, "cpu")
    assert_equal_losses(config, tmp_path, monkeypatch, capsys)


@slow
@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler here"
)
def test_compiled_losses_agree(runs, tmp_path, monkeypatch, capsys):
    config = small("optimized", compile="default")
    recorded, exported, *_ = losses_of_both(config, tmp_path, monkeypatch, capsys)
    assert exported == pytest.approx(recorded, rel=1e-6)  # the compiler may add up in another order


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_scripts_of_shipped_configs_are_short_clean_and_alone(device_type, tmp_path):
    names = [name for name in SHIPPED if (name, device_type) != ("tf32", "cpu")]
    for name in names:
        text = script(load_config(name), device_type)
        lines, width = len(text.splitlines()), max(map(len, text.splitlines()))
        assert lines <= 150 and width <= 120, f"{name}: {lines} lines, {width} columns"
        imported = [
            node
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        modules = {alias.name for node in imported for alias in node.names} | {
            getattr(node, "module", "") for node in imported
        }
        assert not any(module.startswith("labutils") for module in modules)
        assert "$" not in text and "#?" not in text
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    for switches in ({}, *SWITCHES.values(), *MORE_SWITCHES.values()):
        if (switches.get("attention"), device_type) != ("flash", "cuda"):
            text = script(small("fp32", **switches), device_type)
            (tmp_path / f"switch_{len(list(tmp_path.iterdir()))}.py").write_text(
                text, encoding="utf-8"
            )
    config = ["--config", str(REPO / "pyproject.toml")]
    for command in (
        ["check", "--no-cache"],
        ["format", "--check", "--no-cache", "--line-length=120"],
    ):
        answer = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *config, str(tmp_path)],
            capture_output=True,
            text=True,
        )
        assert answer.returncode == 0, answer.stdout


def test_script_has_only_what_its_config_uses():
    words = {
        "fp32": [],
        "fp16": ["GradScaler", "autocast", "unscale_"],
        "bf16": ["autocast"],
        "tf32": ["fp32_precision"],
    }
    words["xl"] = [
        "checkpoint",
        "ChunkedLoss",
        "int8",
        "register_post_accumulate_grad_hook",
        "memory_fraction",
    ]
    words["optimized"] = ["autocast", "ChunkedLoss", "torch.compile", "AttentionInterface"]
    for name, expected in words.items():
        text = script(load_config(name), "cuda")
        found = {word for every in words.values() for word in every if word in text}
        assert found == set(expected), name


def test_script_runs_where_labutils_is_not(own_text, runs, tmp_path):
    config = small("accumulation", **own_text)
    recorded = lab.run_experiment(config, device=CPU, rerun=True, progress=False)
    (tmp_path / "train.py").write_text(script(config, "cpu"), encoding="utf-8")
    (tmp_path / "labutils.py").write_text(
        "raise ImportError('no labutils here')"
    )  # found first: the script's folder is
    set_by_labutils = (
        "TRANSFORMERS_VERBOSITY",
        "TOKENIZERS_PARALLELISM",
        "HF_HUB_DISABLE_TELEMETRY",
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", *set_by_labutils)}
    answer = subprocess.run(
        [sys.executable, "train.py", "losses.json"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr == ""
    assert "tokens/s" in answer.stdout
    assert json.loads((tmp_path / "losses.json").read_text()) == recorded.series.loss


def test_a_note_cannot_break_out_of_the_docstring():
    text = script(
        small("fp32", note='"""\nimport os\\N{x}\x00 $imports math. #? \u2028 end'), "cpu"
    )
    docstring = ast.get_docstring(ast.parse(text))
    assert "import os" in docstring and "end" in docstring


def test_values_that_disagree_are_refused():
    with pytest.raises(ConfigError, match="attention"):
        script(load_config("fp32", attention="flash"), "cuda")


def test_export_never_overwrites(tmp_path, capsys):
    path = tmp_path / "train.py"
    changes = ["--set", "steps=7", "--set", "save_every=2"]
    assert main(["export", "bf16", str(path), "--device", "cuda", *changes]) == 0
    printed = capsys.readouterr().out
    assert "lines" in printed and "it has no save_every" in printed
    assert 'DEVICE = "cuda"' in path.read_text() and "STEPS = 7 " in path.read_text()
    path.write_text("mine")
    assert main(["export", "fp32", str(path)]) == 1
    assert "exists already" in capsys.readouterr().err
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fp32", "nowhere/train.py"], "nowhere"),
        (["fp32", "torch.py"], "hides the library"),
        (["fp32", "cuda.py"], "hides the library"),
        (["fp32", "random.py"], "hides the library"),
        (["fp32", "train"], "is not a name for a script"),
        (["fp33", "train.py"], "no such file"),
        (["tf32", "train.py", "--device", "cpu"], "use fp32"),
        (["fp32", "train.py", "--set", "steps=0"], "`steps`"),
    ],
)
def test_what_cannot_be_exported_is_said_and_leaves_no_file(
    arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["export", *arguments]) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@slow
def test_pretrained_weights_give_the_same_losses(tmp_path):
    """The hub refuses; its cache has them."""
    fill_hub_cache(tmp_path)
    code = (
        "import runpy, dataclasses, labutils as lab, labutils.workload.gpt2 as m\n"
        "m.MODELS['gpt2'] = dataclasses.replace(m.MODELS['gpt2-nano'], name='gpt2')\n"
        "from labutils.tools.export import script; from pathlib import Path; from tests.tools.test_export import small\n"
        "config = small('fp32', model='gpt2', weights='pretrained')\n"
        "record = lab.run_experiment(config, rerun=True, progress=False)\n"
        f"path = Path({str(tmp_path / 'train.py')!r}); path.write_text(script(config, 'cpu'))\n"
        "assert runpy.run_path(str(path))['losses'].tolist() == record.series.loss"
    )
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=REPO
    )
    assert answer.returncode == 0, answer.stderr


# a compiled script needs Triton's kernels, which compute the losses
NEED_A_CARD = {"optimized": [pytest.mark.gpu_card]}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=NEED_A_CARD.get(name, [])) for name in SHIPPED]
)
def test_script_for_a_gpu_has_the_losses_of_a_run_there(
    name, own_text, runs, tmp_path, monkeypatch
):
    tokens = 32 if load_config(name).optimizer_in_backward else 64
    config = load_config(
        name, **SMALL, **own_text, model="gpt2-nano", tokens_per_step=tokens, memory_limit_gib=0.0
    )
    cuda = torch.device("cuda")
    if config.precision in PRECISIONS and not lab.support(config.precision, cuda).ok:
        pytest.skip(lab.support(config.precision, cuda).reason)
    record = lab.run_experiment(config, device=cuda, rerun=True, progress=False)
    path = tmp_path / "train.py"
    path.write_text(script(config, "cuda"), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [str(path)])
    exported = runpy.run_path(str(path))["losses"].tolist()
    assert exported == pytest.approx(
        record.series.loss, rel=2e-3
    )  # some kernels add up in no fixed order


def test_no_gpu_is_needed_to_write_for_one():
    if not torch.cuda.is_available():  # then 16bit is BF16
        text = script(load_config("optimized"), "cuda")
        assert "torch.bfloat16" in text and "torch.float16" not in text and "GradScaler" not in text


def test_what_the_template_has_no_code_for_is_refused(monkeypatch):
    """A new row must not be exported as another: a script that says one thing and does another."""
    lion = replace(OPTIMIZERS["sgd"], name="lion")
    monkeypatch.setitem(OPTIMIZERS, "lion", lion)
    config = small("fp32").model_copy(update={"optimizer": "lion"})
    monkeypatch.setattr(lab.Config, "on", lambda self, device_type: self)
    with pytest.raises(ConfigError, match="no code for 'lion'"):
        script(config, "cpu")


def test_a_key_that_the_template_does_not_know_is_refused(monkeypatch):
    """A switch that came later must not be exported as its default."""
    monkeypatch.setattr(exportable, "KEYS_WRITTEN", exportable.KEYS_WRITTEN - {"pad_vocab"})
    monkeypatch.setattr(Config.model_fields["pad_vocab"], "default", False)
    assert script(small("fp32", pad_vocab=False), "cpu")
    with pytest.raises(ConfigError, match="`pad_vocab`: export does not write this key yet"):
        script(small("fp32", pad_vocab=True), "cpu")
