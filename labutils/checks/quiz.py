"""The self-test at the end of a notebook: statements, or questions with four choices, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Statement = tuple[str, bool, str]  # (statement, whether it is true, why)


@dataclass(frozen=True)
class Question:
    """A question with choices A to D, of which one is right; the others are misconceptions."""

    text: str
    choices: tuple[str, str, str, str]
    right: str
    reason: str

    def __str__(self) -> str:
        choices = zip("ABCD", self.choices, strict=True)
        return "\n".join([self.text, *(f"      {letter}  {text}" for letter, text in choices)])


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

MIXED_PRECISION = (
    Question(
        "AdamW under BF16 autocast: how many bytes per parameter stay, however small the batch is?",
        ("6", "8", "12", "16"),
        "D",
        "weight 4, gradient 4, moments 8: all float32, sections 2 and 4",
    ),
    Question(
        "Which number does FP16 store as 0?",
        ("6e-5", "1e-7", "2e-8", "none: small numbers only lose bits"),
        "C",
        "below half of the smallest subnormal number, 3e-8; 6e-5 is the smallest normal: section 3",
    ),
    Question(
        "In which format does 1e5 become infinity?",
        ("BF16", "FP16", "TF32", "in both 16-bit formats"),
        "B",
        "BF16 and TF32 have FP32's range: section 3",
    ),
    Question(
        "For which run is a GradScaler made?",
        ("autocast in FP16", "autocast in BF16", "all 16-bit runs", "weights stored in BF16"),
        "A",
        "it makes up for missing range, and BF16 has FP32's: sections 5 and 7",
    ),
    Question(
        "Where do small gradients first become 0 in FP16 training?",
        (
            "in .grad",
            "in AdamW's moments",
            "when the loss is computed",
            "in the gradients of activations, inside backward",
        ),
        "D",
        "these are FP16, .grad is float32: sections 4 and 7",
    ),
    Question(
        "A step was skipped and the scale halved. What do you know?",
        (
            "the scale was too high for this step",
            "the training has diverged",
            "the weights hold inf",
            "the gradients explode",
        ),
        "A",
        "the scaler searches by trial and error; no weight has changed: section 7",
    ),
    Question(
        "Which order is right?",
        (
            "clip, unscale_, step, update",
            "unscale_, clip, step, update",
            "step, unscale_, clip, update",
            "update, unscale_, clip, step",
        ),
        "B",
        "clipping must see the true norm, not one that is S times as large: section 5",
    ),
    Question(
        "Products are 60 % of a step and take no time any more; the rest stays. The speed-up is",
        ("1.7", "2.5", "6", "unlimited"),
        "B",
        "1 / (1 - 0.6): Amdahl's law, section 6",
    ),
    Question(
        "Why does adding 0.01 in BF16 stop at 4?",
        (
            "BF16 overflows there",
            "0.01 is not exact in BF16",
            "0.01 is less than half of the spacing at 4",
            "BF16 products add in BF16",
        ),
        "C",
        "so each addition is rounded away; weights lose small updates alike: sections 3 and 8",
    ),
    Question(
        "What showed that 16-bit weights, not 16-bit products, made pure BF16 learn less?",
        (
            "a run with rounded weights and all else unchanged",
            "a run with five seeds",
            "a run in FP16",
            "a run with a higher rate",
        ),
        "A",
        "a control differs in one thing only: section 8",
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


def self_test(answers: Sequence[bool | str | None], quiz: str) -> None:
    """Print the items of a quiz, and for each answer whether it is right, and why.

    An answer is True or False to a statement, a letter to a question. An answer of None is open:
    its reason is not printed. Raises ValueError for an unknown quiz.
    """
    if quiz not in QUIZZES:
        raise ValueError(f"there is no quiz {quiz!r}; there are: {', '.join(QUIZZES)}")
    items = QUIZZES[quiz]
    if len(answers) != len(items):
        kind = "questions" if isinstance(items[0], Question) else "statements"
        print(f"There are {len(items)} {kind}; the list has {len(answers)} entries.")
        return
    for number, (item, answer) in enumerate(zip(items, answers, strict=True), start=1):
        if isinstance(item, Question):
            text, right, reason = str(item), item.right, item.reason
        else:
            text, right, reason = item
        if answer is None:
            print(f"{number:2d}. open   {text}")
        else:
            verdict = "right" if answer == right else "wrong"
            print(f"{number:2d}. {verdict}  {text} ({reason})")
