"""Networks for the exhibit about segments: their layers, and what a layer keeps of each input."""

from __future__ import annotations

from labutils.config.choices import MODELS, NO_AUTOCAST, PRECISIONS, WITH_BF16
from labutils.prediction.arithmetic import KEPT_PER_BLOCK, arithmetic_of

MASKS = 2  # bytes of two dropout masks: the networks here have none
CHAIN = {"name": "the chain of 36 layers in notebook 03", "n_layer": 36, "ratio": 1.0}


def ratio(precision: str) -> float:
    """Return r: how many times the bytes of its input a block of GPT-2 keeps, by hand.

    Without dropout, with fused attention and fused GELU. Its input has the dtype of the weights.
    """
    input_bytes = 4 if PRECISIONS[precision].weights == "float32" else 2
    return (KEPT_PER_BLOCK[arithmetic_of(precision)] - MASKS) / input_bytes


def networks() -> list[dict[str, object]]:
    """Return name, layers and r of a chain of small layers, and of GPT-2 in each size.

    A GPT-2 comes in two precisions: without autocast, and with it.
    """
    found: list[dict[str, object]] = [CHAIN]
    for precision in (NO_AUTOCAST[0], WITH_BF16.name):
        for model in MODELS.values():
            name = f"{model.name}, {precision}"
            found.append({"name": name, "n_layer": model.n_layer, "ratio": ratio(precision)})
    return found


def peaks_of_equal_segments(n_layer: int, layer_ratio: float) -> dict[int, float]:
    """Return {n: n + r · L / n, in inputs}, for numbers n of equally long segments."""
    found = {}
    for n in range(1, n_layer + 1):
        if n_layer % n == 0:
            found[n] = n + layer_ratio * n_layer / n
    return found
