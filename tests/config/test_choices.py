"""One row per value: an unknown name raises in one place, wherever it is asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import labutils as lab
from labutils.config import choices
from labutils.config.choices import Rows
from labutils.techniques import compiling
from labutils.techniques.attention import use_attention
from labutils.techniques.precision import products_dtype
from labutils.workload.build import build_optimizer

TABLES = [value for value in vars(choices).values() if isinstance(value, Rows)]


def config(**changes):
    return lab.load_config("fp32").model_copy(update=changes)


def optimizer(**changes):
    return build_optimizer(torch.nn.Linear(2, 2), config(**changes))


# Everything that takes a name of a row, with a name that has none.
ASKED = {
    "dtype": lambda: products_dtype("fp8"),
    "optimizer": lambda: optimizer(optimizer="lion"),
    "implementation": lambda: optimizer(optimizer_impl="quick"),
    "attention": lambda: use_attention(lab.build_model(), "linear"),
    "model": lambda: lab.build_model("gpt3"),
    "weights": lambda: lab.build_model(weights="good"),
    "activation": lambda: lab.build_model(activation="relu"),
    "compile": lambda: compiling.mode_and_arguments("fast", "cpu", False),
    "schedule": lambda: lab.rate_of(config(lr_schedule="x"))(0),
    "card": lambda: lab.predict_memory(config(), "rtx9000"),
}


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.kind)
def test_an_unknown_name_raises_in_every_table(table):
    with pytest.raises(ValueError, match="'unknown' is not one of the"):
        table["unknown"]


@pytest.mark.parametrize("ask", ASKED.values(), ids=list(ASKED))
def test_no_code_answers_for_a_name_that_has_no_row(ask):
    with pytest.raises((ValueError, lab.ConfigError)):
        ask()


def test_a_row_without_code_is_not_trained_as_another(monkeypatch):
    lion = replace(choices.OPTIMIZERS["sgd"], name="lion")
    monkeypatch.setitem(choices.OPTIMIZERS, "lion", lion)
    with pytest.raises(ValueError, match="'lion' has a row in `choices`, and no code"):
        optimizer(optimizer="lion")
    monkeypatch.setitem(choices.SCHEDULES, "linear", choices.Choice("linear"))
    with pytest.raises(ValueError, match="'linear' has a row in `choices`, and no code"):
        lab.rate_of(config(lr_schedule="linear"))(9)


def test_each_checkpointing_policy_says_what_it_does():
    """One word behind the last of several would be read as that one's alone."""
    words = {row.name: row.help for row in choices.CHECKPOINTING.values() if row.is_on}
    assert all(words.values()) and [name for name in words if "again" in words[name]] == ["block"]
