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

ACCUMULATION: tuple[Question, ...] = (
    Question(
        "Four micro-batches have 122, 13, 60 and 7 target tokens. By what is each summed loss "
        "divided?",
        "c",
        (
            ("by 4", "then the gradient grows with the number of tokens"),
            ("by its own number of tokens", "then the means are added: nothing divides them"),
            ("by 202", "so each token of the window weighs the same"),
            ("by 4 times its own number", "that is the mean of means: a token of 7 weighs most"),
        ),
    ),
    Question(
        "n is 4. At equal lengths a gradient is 4.00 times as long as the right one, with cosine "
        "1.000. Which bug fits?",
        "a",
        (
            ("nothing divides the four means", "a sum of four means has the right direction"),
            ("clipping per micro-batch", "it makes no gradient longer, and turns it"),
            ("the step comes too early", "one micro-batch of four has another direction"),
            ("the mean of means", "at equal lengths it is exactly right"),
        ),
    ),
    Question(
        "Which test finds the mean of means?",
        "d",
        (
            ("packed sequences, in float64", "all micro-batches then have equally many targets"),
            ("the loss falls", "it falls with the wrong weights, too"),
            ("clipping to a small norm", "clipping changes a length, and here tokens are weighed"),
            ("micro-batches of unequal lengths", "only then the weights of tokens differ"),
        ),
    ),
    Question(
        "Two gradients differ by 2e-7 in float32, and by 5e-16 in float64. What differs?",
        "b",
        (
            ("a divisor", "a wrong divisor gives the same error in every format"),
            ("the order of roundings", "rounding shrinks with eps, and so did the difference"),
            ("a dropout mask", "float64 does not shrink what another mask does"),
            ("batch norm's statistics", "these change the function, in every format"),
        ),
    ),
    Question(
        "With FP16 and a scaler: what runs for each micro-batch?",
        "a",
        (
            ("scale and backward", "all gradients of a window carry the same scale"),
            ("unscale_ and clipping", "before the last backward, .grad holds a part of the sum"),
            ("step and update", "one window is one optimizer step"),
            ("zero_grad", "it would erase what has been accumulated"),
        ),
    ),
    Question(
        "A window of 1 × 4 runs out of memory. Which one needs less?",
        "c",
        (
            ("4 × 4", "it holds the same micro-batch, and gradients besides"),
            ("1 × 4 after empty_cache()", "that frees no tensor"),
            ("4 × 1", "the activations of one sequence instead of four"),
            ("2 × 4", "activations do not shrink, and gradients stay between the two"),
        ),
    ),
    Question(
        "The peak of 1 × 2 is 24 MiB, and that of 2 × 2 is 28 MiB. What is that of 16 × 2?",
        "b",
        (
            ("24 MiB", "the gradients of the first micro-batch stay alive"),
            ("28 MiB", "the third micro-batch finds in memory what the second found"),
            ("84 MiB", "gradients are added in place, not stored one by one"),
            ("384 MiB", "activations are freed after each backward pass"),
        ),
    ),
    Question(
        "125 micro-batches, and `if (i + 1) % 16 == 0: step()`. What becomes of the last 13?",
        "d",
        (
            ("they make a short window", "nobody steps on them"),
            ("they are skipped without a trace", "their gradients are in .grad already"),
            ("they are divided by 13", "the divisor is 16, and there is no step"),
            ("they join the next epoch's first window", ".grad is not cleared before it"),
        ),
    ),
    Question(
        "After equally many tokens 4 × 8 has a higher loss than 1 × 8 at the same rate. What "
        "follows?",
        "a",
        (
            ("batch 32 learned less at this rate", "batch and number of steps have changed"),
            ("accumulation harms learning", "the control of accumulation is 1 × 32"),
            ("4 × 8 has a wrong gradient", "a right gradient of a larger batch does this, too"),
            ("large batches learn worse", "one rate says nothing of the best rate"),
        ),
    ),
    Question(
        "A schedule counts micro-batches, and n is 4. What is wrong?",
        "c",
        (
            ("nothing: gradients are right", "the rate also decides a step's size"),
            ("the gradients", "no gradient depends on the rate"),
            ("the rate ends its schedule too early", "after a quarter of the optimizer steps"),
            ("the logged loss", "it is the sum over the window all the same"),
        ),
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
