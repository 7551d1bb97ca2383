import pytest
import torch

import labutils as lab
from labutils.config.choices import MODELS
from labutils.prediction.arithmetic import MODEL_PARAMETERS, n_parameters, static_gib

ALONE = {"parameters": 4.0, "gradients": 4.0, "optimizer state": 8.0, "activations": 5.0}
PUBLISHED = {"GPT-2 124M": "gpt2", "GPT-2 355M": "gpt2-medium", "GPT-2 1.5B": "gpt2-xl"}


@pytest.mark.parametrize("model", MODELS)
def test_parameters_are_counted_from_the_shape(model):
    with torch.device("meta"):  # where old versions of transformers do not tie the output embedding
        named = lab.build_model(model).named_parameters()
    counted = sum(p.numel() for key, p in named if not key.startswith("lm_head"))
    assert n_parameters(model) == counted


def test_published_sizes_and_what_the_saying_gets_wrong():
    """Exhibits of the kind "a 7B model trains in 12 GB": weights, gradients and Adam alone say
    otherwise.
    """
    for name, model in PUBLISHED.items():
        assert n_parameters(model) == MODEL_PARAMETERS[name]
    assert static_gib(MODEL_PARAMETERS["7B"], "FP32 or autocast, AdamW") > 100
    four_bits = static_gib(MODEL_PARAMETERS["70B"], "QLoRA: frozen 4-bit weights alone")
    assert four_bits * 2**30 / 1e9 == pytest.approx(35.6, abs=0.1)


def test_each_stage_of_zero_cuts_one_category_more_and_none_activations():
    totals = [sum(lab.sharded(ALONE, 4, stage).values()) for stage in (0, 1, 2, 3)]
    assert totals == [21, 15, 12, 9]
    assert lab.sharded(ALONE, 64, 3)["activations"] == 5
    with pytest.raises(ValueError, match="stages 1 to 3"):
        lab.sharded(ALONE, 2, 4)
