"""Answers to the exercises that optional notebooks judge in a cell of their own."""

import math

import torch

import labutils as lab
from tests.helpers import CPU
from tests.solutions.answers import Solution, names_of


def floor_ms(m, n, k, bytes_per_number, tflops, gb_per_s):
    computing = 2 * m * n * k / (tflops * 1e12)
    moving = bytes_per_number * (m * k + k * n + m * n) / (gb_per_s * 1e9)
    return 1000 * max(computing, moving)


def two_clocks(operations):
    host = device = 0.0
    for issuing, computing in operations:
        host += issuing
        device = max(device, host) + computing
    return device


def lost_below(weight, dtype, direction):
    mantissa, exponent = math.frexp(weight)
    is_nearer = mantissa == 0.5 and direction < 0  # below a power of two
    spacing = 2.0 ** (exponent - 1 - is_nearer)
    return torch.finfo(dtype).eps * max(spacing, torch.finfo(dtype).smallest_normal) / 2


E4M3 = torch.float8_e4m3fn
GIVEN = {"lab": lab, "torch": torch, "F": torch.nn.functional, "device": CPU}
EIGHT_BITS = names_of(
    "eight_bits", "eight-nearest a5b4888a eight-stored eight-judge eight-verdict", torch=torch
)
rounded = EIGHT_BITS["rounded"]


def one_scale_per_square(x, block):
    parts = x.reshape(len(x) // block, block, -1, block).transpose(1, 2)
    return rounded(parts, E4M3, block=block * block).transpose(1, 2).reshape(x.shape)


def all_is_right(packer, texts):
    """Take each row apart again: each text is there once, with its own positions and targets."""
    found = []
    for ids, labels, positions, document in packer(texts):
        for number in document.unique():
            if number >= 0:
                own = document == number
                text, places = ids[own], torch.arange(int(own.sum()))
                is_masked = labels[own][0] == -100 and torch.equal(labels[own][1:], text[1:])
                if not (is_masked and torch.equal(positions[own], places)):
                    return False
                found.append(text.tolist())
    return sorted(found) == sorted(text.tolist() for text in texts)


# {(notebook, cell, the answer's name): other names that the cell reads, and answers}
CELLS = {
    ("where_time_goes", "5fd5cc00", "floor_ms"): Solution(
        right=[floor_ms],
        broken={
            "how many operations": [("2 * m", "m")],
            "what limits it": [("max(", "min(")],
            "one is written": [(" + m * n", "")],
            "Count bytes": [("bytes_per_number * (", "4 * (")],
        },
    ),
    ("where_time_goes", "24f62975", "two_clocks"): Solution(
        right=[two_clocks],
        broken={
            "cannot begin": [("max(device, host) + computing", "device + computing")],
            "does not wait": [("host += issuing", "host = device + issuing")],
            "may still compute": [("return device", "return host + 2")],
        },
    ),
    ("frameworks", "5830c2f3", "my_loss"): Solution(
        given=GIVEN,
        right=[lambda mean, n, n_window, n_micro: mean * n / n_window * n_micro],
        wrong={
            "nan % off": lambda mean, *_: mean * float("nan"),
            " 75 % off": lambda mean, n, n_window, n_micro: mean * n / 4,
            " 67 % off": lambda mean, n, n_window, n_micro: mean * n / n_window,
            " 419 % off": lambda mean, n, n_window, n_micro: mean,
            " 200 % off": lambda mean, n, n_window, n_micro: mean * n / n_window * n_micro**2,
        },
    ),
    ("packing", "pack-judge", "my_test"): Solution(
        given=names_of("packing", "pack-texts pack-rows pack-fit pack-faults", **GIVEN),
        right=[all_is_right],
        broken={
            "fault is: counts on": [("and torch.equal(positions[own], places)", "")],
            "fault is: trains on borders": [("labels[own][0] == -100 and ", "")],
            "fault is: loses a": [
                ("sorted(found) == sorted(text.tolist() for text in texts)", "True")
            ],
        },
        wrong={"fault is: none": lambda packer, texts: False},
    ),
    ("scaler", "9debf3aa", "my_test"): Solution(
        given=names_of("scaler", "df9c17c0 scaler-toy b7d18d32 exercise-cases", **GIVEN),
        right=[lambda length, norm, limit: 0.99 < length / min(norm, limit) < 1.01],
        wrong={
            "clip, then unscale_, with limit 1.": lambda length, norm, limit: length <= limit,
            "unscale_, then clip": lambda length, norm, limit: length == limit,
            "no clipping": lambda length, norm, limit: length >= 0.99 * min(norm, limit),
        },
    ),
    ("eight_bits", "71785714", "my_squares"): Solution(
        given=EIGHT_BITS,
        right=[one_scale_per_square],
        broken={
            "a square of zeros": [("(x.shape)", "(x.shape) + 0 / x.amax()")],
            "for the whole matrix": [("block=block * block", "")],
            "blocks of one row": [("block * block", "block")],
            "16 numbers of one row": [(".transpose(1, 2)", "")],
            "a power of two": [
                ("block=", "stored=lambda scale: 2.0 ** scale.log2().ceil(), block=")
            ],
        },
    ),
    ("rounding", "numerics-030", "my_limit"): Solution(
        given=GIVEN,
        right=[lost_below],
        broken={
            "high for 0.375": [("2.0 ** (exponent - 1 - is_nearer)", "1.0")],
            "high for 1.5 in torch.float16": [("finfo(dtype)", "finfo(torch.bfloat16)")],
            "high for 1.0 in torch.bfloat16, direction -1": [("direction < 0", "False")],
            "low for 0.375 in torch.bfloat16, direction -1": [("mantissa == 0.5 and ", "")],
            "high for 0.5 in torch.bfloat16, direction -1": [("mantissa == 0.5", "weight == 1")],
            "high for 2.0": [("mantissa == 0.5", "weight in (1.0, 0.5)")],
            "high for 9.5": [("torch.finfo(dtype).smallest_normal)", "2.0**-14)")],
            "low for 9.5": [("max(spacing, torch.finfo(dtype).smallest_normal)", "spacing")],
            "torch.float16, direction -1": [
                ("smallest_normal)", "smallest_normal / (1 + is_nearer))")
            ],
        },
    ),
}
