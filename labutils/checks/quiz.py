"""The self-test at the end of a notebook: statements, or questions with four choices, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Statement = tuple[str, bool, str]  # (statement, whether it is true, why)
LETTERS = "abcd"


@dataclass(frozen=True)
class Question:
    """A question with four choices: each with why it is right, or what is wrong about it."""

    text: str
    right: str  # a letter
    choices: tuple[tuple[str, str], ...]  # (choice, why), in the order of LETTERS


PROFILING: tuple[Question, ...] = (
    Question(
        "A technique halves what the blocks keep for backward. The peak stays. Why?",
        "b",
        (
            (
                "the counter counts reserved bytes",
                "max_memory_allocated counts tensors, not segments",
            ),
            (
                "the peak lies where few activations are alive",
                "only what is alive at the peak lowers it",
            ),
            ("activations never make the peak", "in section 1 they are 16 of 42 MiB"),
            ("the cache was not emptied", "the cache is no part of what is allocated"),
        ),
    ),
    Question(
        "A process has 3.0 GiB allocated and 3.6 reserved. empty_cache() leaves 3.6. Why?",
        "d",
        (
            ("empty_cache needs a synchronize first", "it waits by itself"),
            ("a living variable holds the 0.6 GiB", "then they would be allocated"),
            ("0.6 GiB are the context", "the context is not in reserved"),
            ("in each segment some tensor lives", "only whole free segments go back"),
        ),
    ),
    Question(
        "_dump_snapshot is called after a step, and nothing before. What is in the file?",
        "a",
        (
            ("the present blocks, without a history", "_record_memory_history must come first"),
            ("the last 100,000 events", "max_entries belongs to _record_memory_history"),
            ("nothing at all", "segments and their blocks are there"),
            ("the history of the last step", "nothing was recorded"),
        ),
    ),
    Question(
        "By a profile a rewrite saves 12 ms, by a clock in turns 4 ms. What do you report?",
        "c",
        (
            (
                "12 ms: the profile sees each operation",
                "recording slows operations, and not all by one factor",
            ),
            ("8 ms, the mean", "a mean of a right and a wrong number"),
            ("4 ms: the clock ran without the recorder", "the profile tells where to look"),
            (
                "the share by the profile, the time by the clock",
                "the share is as slanted as the time",
            ),
        ),
    ),
    Question(
        "Peaks of 2, 4 and 6 sequences: 900, 1300, 1700 MiB. What does the intercept hold?",
        "b",
        (
            ("activations of the first sequence", "they are in the slope"),
            (
                "weights, moments and what else no sequence adds to",
                "it is the peak of a batch of nothing",
            ),
            ("fragmentation", "allocated bytes have no holes"),
            ("the context", "the context is not allocated by PyTorch"),
        ),
    ),
    Question(
        "In a notebook a cell died of out of memory. What frees its tensors?",
        "d",
        (
            ("torch.cuda.empty_cache()", "they are alive, so they are no cache"),
            ("gc.collect()", "frames still refer to them"),
            ("running the cell again", "then a new error holds new ones"),
            ("clearing the frames of the traceback", "the frames' variables are what holds them"),
        ),
    ),
    Question(
        "Float32, AdamW. How many bytes per parameter are alive when backward begins?",
        "a",
        (
            ("12", "weight and two moments; gradients come during backward"),
            ("4", "those are the weights alone"),
            ("16", "that is so at its end, with the gradients"),
            ("8", "two moments, and the weight as well"),
        ),
    ),
    Question(
        "Which change lowers the peak of a step that is full of activations?",
        "c",
        (
            (
                "more accumulation steps at the same micro-batch",
                "the same micro-batch keeps the same activations",
            ),
            ("a fused AdamW", "it saves temporaries of the optimizer phase"),
            (
                "a smaller micro-batch, and more accumulation steps",
                "fewer tokens are alive at once, and the batch stays",
            ),
            (
                "zero_grad() before the step instead of after it",
                "gradients are not what the step is full of",
            ),
        ),
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

CHECKPOINTING: tuple[Question, ...] = (
    Question(
        "A layer computes y = sin(x). What does autograd keep of it for the backward pass?",
        "b",
        (
            ("its output y", "the derivative is cos(x): the output does not give it back"),
            ("its input x", "the derivative cos(x) is computed from x"),
            ("both x and y", "one of them is enough for cos(x)"),
            ("nothing", "only a derivative that needs no number of the pass keeps nothing: a sum"),
        ),
    ),
    Question(
        "A checkpointed segment forgets the random state. What do you see in a training run?",
        "d",
        (
            ("an error in backward", "every shape fits, so nothing raises"),
            ("another loss in the first step", "the forward pass is unchanged, so this loss is"),
            ("no change: dropout is random anyway", "both passes must use the same masks"),
            ("nothing, but the gradient is wrong", "it mixes two sets of masks: section 2"),
        ),
    ),
    Question(
        "48 layers keep 3 times their input each. Which number of equal segments has the "
        "smallest peak?",
        "a",
        (
            ("12", "√(3 · 48): 12 inputs, and 4 layers of 3 inputs each"),
            ("7, for √48", "√L is for layers that keep just their input"),
            ("4", "the ratio acts the other way: what keeps much asks for short segments"),
            ("48", "then all the inputs are the largest part: 48 of them"),
        ),
    ),
    Question(
        "The forward pass takes half of a plain step. Now each layer runs forward once more. How "
        "long is the step?",
        "c",
        (
            ("1.33 times", "a third holds only where backward takes twice as long as forward"),
            ("2 times", "only the forward pass is repeated, not the step"),
            ("1.5 times", "1 + the share of what is repeated, and what checkpoint itself costs"),
            ("1.25 times", "all of the forward pass is run again, not half of it"),
        ),
    ),
    Question(
        "A checkpoint for each block brings activations from 6184 to 416 MiB. What becomes of "
        "the peak?",
        "d",
        (
            ("it falls to a fifteenth", "the peak also holds weights, gradients and logits"),
            ("it falls by half", "no share holds for every batch"),
            (
                "it falls by 5768 MiB",
                "only if all of them were alive at the peak, and it stays there",
            ),
            ("one must look which phase has it", "it falls as far as they are alive: section 5"),
        ),
    ),
    Question(
        "Hugging Face's switch is on, and activations are as large as without. What is the first "
        "thing to look at?",
        "b",
        (
            ("the batch: it is too small", "activations shrink at any batch size"),
            ("whether the model is in eval()", "there the switch is silently off: section 5"),
            ("the dropout: it is above 0", "dropout changes what is kept, not whether it is"),
            ("the optimizer: it keeps them", "its two moments are no activations"),
        ),
    ),
    Question(
        "BatchNorm inside a checkpointed segment: what is different from a plain run?",
        "c",
        (
            ("its gradient", "both runs see the same batch, so the same mean"),
            ("nothing", "its running mean changes whenever it runs"),
            ("its running statistics", "it runs twice in a step, and each run updates them"),
            ("its output in the forward pass", "in training it uses the batch's own mean"),
        ),
    ),
    Question(
        "A card of 8 GiB fits 3 sequences. About how many fit on 16 GiB?",
        "a",
        (
            ("more than 6", "weights, gradients and optimizer state need their memory only once"),
            ("6", "twice the memory is more than twice what is left for activations"),
            ("fewer than 6", "what does not grow with the batch is paid for already"),
            ("3: the weights fill the rest", "the weights do not grow with the card"),
        ),
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

    A statement is answered by True or False, a question by the letter of a choice. An answer of
    None is open: its reason is not printed. Raises ValueError for an unknown quiz.
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
            print(f"{number:2d}. {_answered(item, answer)}")
        else:
            print(f"{number:2d}. {_judged(item, answer)}")


def _judged(statement: Statement, answer: bool | None) -> str:
    text, truth, reason = statement
    if answer is None:
        return f"open   {text}"
    return f"{'right' if answer is truth else 'wrong'}  {text} ({reason})"


def _answered(question: Question, answer: str | None) -> str:
    """Return the question with its choices, or with the chosen one and what is to say of it."""
    letter = str(answer).lower()
    lines = [f"open   {question.text}"]
    if letter not in LETTERS or len(letter) != 1:
        if answer is not None:
            lines[0] += ' (answer by a letter, for example "a")'
        for each, (choice, _) in zip(LETTERS, question.choices, strict=True):
            lines.append(f"       {each}) {choice}")
        return "\n".join(lines)
    choice, why = question.choices[LETTERS.index(letter)]
    verdict = "right" if letter == question.right else "wrong"
    return f"{verdict}  {question.text}\n       {letter}) {choice} ({why})"
