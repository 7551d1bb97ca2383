"""The self-test at the end of a notebook: questions with four choices, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

MIXED_PRECISION: tuple[Question, ...] = (
    Question(
        "AdamW under BF16 autocast: how many bytes per parameter stay, however small the batch is?",
        "d",
        (
            ("6", "that would be 16-bit weights, gradients and one moment"),
            ("8", "that would be everything in 16 bits; autocast stores weights in float32"),
            ("12", "weights 4 and gradients 4 leave 4 bytes, and AdamW has two moments"),
            ("16", "weight 4, gradient 4, moments 8: all float32, sections 2 and 4"),
        ),
    ),
    Question(
        "Which number does FP16 store as 0?",
        "c",
        (
            ("6e-5", "about the smallest normal number: section 3"),
            ("1e-7", "a subnormal number: it has lost bits, but it is not 0"),
            ("2e-8", "below half of the smallest subnormal number, 3e-8: section 3"),
            ("none: small numbers only lose bits", "below 3e-8 nothing is left"),
        ),
    ),
    Question(
        "In which format does 1e5 become infinity?",
        "b",
        (
            ("BF16", "BF16 has FP32's exponent, and so its range"),
            ("FP16", "its largest number is 65504: section 3"),
            ("TF32", "TF32 has FP32's exponent, and so its range"),
            ("in both 16-bit formats", "BF16 reaches as far as FP32"),
        ),
    ),
    Question(
        "For which run is a GradScaler made?",
        "a",
        (
            ("autocast in FP16", "it makes up for missing range: sections 5 and 7"),
            ("autocast in BF16", "BF16 has FP32's range, so nothing is lost below it"),
            ("all 16-bit runs", "16 bits can be spent on range, as BF16 does"),
            ("weights stored in BF16", "they lose small updates; no scale brings those back"),
        ),
    ),
    Question(
        "Where do small gradients first become 0 in FP16 training?",
        "d",
        (
            ("in .grad", ".grad is float32 here: the zeros come from before"),
            ("in AdamW's moments", "moments are float32"),
            ("when the loss is computed", "the loss is float32"),
            (
                "in the gradients of activations, inside backward",
                "these are FP16: sections 4 and 7",
            ),
        ),
    ),
    Question(
        "A step was skipped, the scale halved, and the next step was clean. What was wrong?",
        "a",
        (
            ("the scale was too high for this step", "the scaler searches: section 7"),
            ("the training has diverged", "no weight has changed; the next step goes on"),
            ("the weights hold inf", "the step was skipped so that they never do"),
            (
                "the gradients explode",
                "the gradients of S times the loss were too large, not theirs",
            ),
        ),
    ),
    Question(
        "Which order is right?",
        "b",
        (
            ("clip, unscale_, step, update", "clipping then sees a norm that is S times as large"),
            ("unscale_, clip, step, update", "clipping sees the true norm: section 5"),
            ("step, unscale_, clip, update", "the step comes after clipping"),
            ("update, unscale_, clip, step", "update chooses the scale of the next step"),
        ),
    ),
    Question(
        "Products are 60 % of a step and take no time any more; the rest stays. The speed-up is",
        "b",
        (
            ("1.7", "1 / 0.6 is what is left if only products took time to begin with"),
            ("2.5", "1 / (1 - 0.6): Amdahl's law, section 6"),
            ("6", "a share is no speed-up"),
            ("unlimited", "the other 40 % still take their time"),
        ),
    ),
    Question(
        "Why does adding 0.01 in BF16 stop at 4?",
        "c",
        (
            ("BF16 overflows there", "BF16 reaches to about 3e38"),
            ("0.01 is not exact in BF16", "true, but a sum of inexact numbers could still grow"),
            (
                "0.01 is less than half of the spacing at 4",
                "each addition is rounded away, as small updates of weights are: sections 3 and 8",
            ),
            ("BF16 products add in BF16", "no product takes part in this sum"),
        ),
    ),
    Question(
        "What showed that 16-bit weights, not 16-bit products, made pure BF16 learn less?",
        "a",
        (
            (
                "a run with rounded weights and all else unchanged",
                "a control differs in one thing only: section 8",
            ),
            ("a run with five seeds", "seeds tell noise from effect, not cause from cause"),
            ("a run in FP16", "it changes the products as well"),
            ("a run with a higher rate", "it changes the size of all updates"),
        ),
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


def self_test(answers: Sequence[str | None], quiz: str) -> None:
    """Print the questions of a quiz, and for each answer whether it is right, and why.

    An answer is the letter of a choice. An answer of None is open: no reason is printed. Raises
    ValueError for an unknown quiz.
    """
    if quiz not in QUIZZES:
        raise ValueError(f"there is no quiz {quiz!r}; there are: {', '.join(QUIZZES)}")
    questions = QUIZZES[quiz]
    if len(answers) != len(questions):
        print(f"There are {len(questions)} questions; the list has {len(answers)} entries.")
        return
    for number, (question, answer) in enumerate(zip(questions, answers, strict=True), start=1):
        print(f"{number:2d}. {_answered(question, answer)}")


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
