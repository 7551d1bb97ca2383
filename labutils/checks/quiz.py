"""The self-test at the end of a notebook: ten statements, true or false, and why."""

from __future__ import annotations

from collections.abc import Sequence

Statement = tuple[str, bool, str]  # (statement, whether it is true, why)

PROFILING: tuple[Statement, ...] = (
    (
        "A technique that saves activations always lowers the peak.",
        False,
        "only if activations are alive at the peak",
    ),
    (
        "empty_cache() frees tensors that a variable still holds.",
        False,
        "it returns cached segments in which no tensor lives",
    ),
    (
        "nvidia-smi shows at least what PyTorch has reserved.",
        True,
        "reserved segments, and the context",
    ),
    (
        "A snapshot made without _record_memory_history first has no history.",
        True,
        "only the present state",
    ),
    (
        "Twice the batch needs at least twice the memory.",
        False,
        "weights and moments do not grow with it",
    ),
    (
        "More accumulation steps at the same micro-batch lower the peak.",
        False,
        "the micro-batch must shrink",
    ),
    (
        "After a failed cell, tensors of its functions can still be alive.",
        True,
        "the traceback keeps their frames",
    ),
    (
        "In a small model with a large vocabulary the logits can outweigh a block.",
        True,
        "section 4",
    ),
    (
        "A BF16 weight rounded to nearest follows every small update.",
        False,
        "below half a step it does not move",
    ),
    (
        "Freeing gradients in backward still allows clipping by the global norm.",
        False,
        "that needs all gradients",
    ),
)

MIXED_PRECISION: tuple[Statement, ...] = (
    (
        "Autocast halves the bytes of AdamW's moments.",
        False,
        "weights, gradients and moments stay float32: section 4",
    ),
    (
        "A precision that PyTorch supports is faster than FP32.",
        False,
        "supported is not fast: time one product, section 1",
    ),
    (
        "BF16 covers almost the same range as FP32.",
        True,
        "it has as many exponent bits; it lacks mantissa bits",
    ),
    (
        "BF16 needs a scaler as much as FP16 does.",
        False,
        "the scaler makes up for missing range, and BF16 has FP32's",
    ),
    (
        "A product of two BF16 matrices adds its terms in BF16.",
        False,
        "a tensor core adds them in float32: section 3",
    ),
    (
        "In FP16 training small gradients are lost inside backward, before they reach .grad.",
        True,
        "the gradient of an FP16 activation is FP16: section 4",
    ),
    (
        "A skipped step means that the training has diverged.",
        False,
        "the scale was too high for this step; no weight has changed: section 7",
    ),
    (
        "Clipping before unscale_ compares the limit with a norm that is S times too large.",
        True,
        "the gradients are those of S × loss: section 5",
    ),
    (
        "If products took no time at all, a step would take none either.",
        False,
        "the rest of the step stays: Amdahl's law, section 6",
    ),
)

ACCUMULATION: tuple[Statement, ...] = (
    (
        "A window's gradient is right only if its number of targets is known before the step.",
        True,
        "each summed loss is divided by that number, or the sum of gradients is, later",
    ),
    (
        "A test with packed sequences finds the mean of means.",
        False,
        "at equal lengths it gives the right gradient",
    ),
    (
        "An error that float64 does not shrink is not rounding.",
        True,
        "rounding shrinks with eps; dropout and batch norm do not",
    ),
    (
        "Accumulation lets 10⁹ float32 parameters train with AdamW in 8 GiB.",
        False,
        "weights, gradients and moments alone are more, at any micro-batch size",
    ),
    (
        "Against the same micro-batch, a second micro-batch can raise the peak.",
        True,
        "the first one's gradients are alive during its backward pass",
    ),
    (
        "A difference of two timings counts if it is larger than 5 %.",
        False,
        "it counts if it is larger than what two identical variants differ by",
    ),
    (
        "Loss against optimizer steps is a fair comparison of two batch sizes.",
        False,
        "a larger batch has then seen more text: compare at equal tokens",
    ),
    (
        "If 4 × 8 learns worse than 1 × 8 at one rate, accumulation has harmed the learning.",
        False,
        "the batch has changed as well: the control is 1 × 32",
    ),
    (
        "unscale_ and clipping run once per window, after its last backward pass.",
        True,
        "before it, .grad holds a part of the sum",
    ),
    (
        "A schedule that counts micro-batches changes no gradient, so it is harmless.",
        False,
        "the rate then ends its schedule n times too early",
    ),
)

CHECKPOINTING: tuple[Statement, ...] = (
    (
        "Checkpointing changes the gradient a little, so the loss curve differs.",
        False,
        "section 2: with the random state kept, the second run computes the same numbers",
    ),
    (
        "A checkpoint for each block halves the peak, whatever the batch.",
        False,
        "section 5: for one short sequence the peak stays, because activations do not make it",
    ),
    (
        "With a checkpoint per block a step runs about four thirds of the FLOPs, or less.",
        True,
        "section 4: forward, forward again, and a backward pass of two forward passes",
    ),
    (
        "√L segments are best for GPT-2 in float32, as for any network of L layers.",
        False,
        "section 3: √(r L) is best, and r is about 16 for such a block",
    ),
    (
        "If the loss looks right, no random state was forgotten.",
        False,
        "section 2: the forward pass is unchanged; only the gradient is wrong",
    ),
    (
        "A BatchNorm inside a checkpointed segment updates its statistics twice in a step.",
        True,
        "section 5: it runs twice, and nothing takes the second update back",
    ),
    (
        "Under eval() Hugging Face's switch saves as much as under train().",
        False,
        "section 5: it is silently off",
    ),
    (
        "A card of twice the memory holds at least twice as many sequences.",
        True,
        "section 6: weights, gradients and optimizer state need their memory only once",
    ),
)
QUIZZES = {
    "mixed_precision": MIXED_PRECISION,
    "accumulation": ACCUMULATION,
    "checkpointing": CHECKPOINTING,
    "profiling": PROFILING,
}


def self_test(answers: Sequence[bool | None], quiz: str) -> None:
    """Print the statements of a quiz, and for each answer whether it is right, and why.

    An answer of None is open: its reason is not printed. Raises ValueError for an unknown quiz.
    """
    if quiz not in QUIZZES:
        raise ValueError(f"there is no quiz {quiz!r}; there are: {', '.join(QUIZZES)}")
    statements = QUIZZES[quiz]
    if len(answers) != len(statements):
        print(f"There are {len(statements)} statements; the list has {len(answers)} entries.")
        return
    pairs = zip(statements, answers, strict=True)
    for number, ((text, truth, reason), answer) in enumerate(pairs, start=1):
        if answer is None:
            print(f"{number:2d}. open   {text}")
        else:
            verdict = "right" if answer is truth else "wrong"
            print(f"{number:2d}. {verdict}  {text} ({reason})")
