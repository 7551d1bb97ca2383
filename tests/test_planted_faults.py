"""50 faults, planted one at a time in a copy of the package: the fast test named beside a fault
must fail there.

A test that never fails proves nothing; here each is seen to fail. Faults around the step, planted as
functions, are in techniques/test_step.py.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tokenize
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers import REPO, committed, slowest


@dataclass(frozen=True)
class Fault:
    """In a module of labutils `old`, which is there once, becomes `new`; `test` must notice.

    White space and comments are ignored in `old`. Further lines of `new` are indented as its first.
    """

    module: str
    name: str
    old: str
    new: str
    test: str

    def __str__(self) -> str:
        return f"{self.module}: {self.name}"


FAULTS = [
    Fault(
        "config.resolve",
        "BF16 chosen for a card without it",
        "WITH_BF16.name if card.has_bf16 else WITHOUT_BF16.name",
        "WITH_BF16.name",
        "techniques/test_precision.py::test_16bit_is_no_precision_until_a_card_decides",
    ),
    Fault(
        "config.choices",
        "an unknown name answered by the first row",
        "raise ValueError(f\"{name!r} is not one of the {self.kind}: {', '.join(self)}\")",
        "return next(iter(self.values()))",
        "config/test_choices.py::test_an_unknown_name_raises_in_every_table",
    ),
    Fault(
        "machine.here",
        "what torch holds unused counted as taken",
        "return free + unused",
        "return free",
        "machine/test_machine.py::test_what_torch_holds_unused_is_free",
    ),
    Fault(
        "training.code_version",
        "a module that decides numbers forgotten",
        "to_read += imported_files(one)",
        "pass",
        "training/test_records.py::test_every_module_that_decides_a_number_is_in_the_code_version",
    ),
    Fault(
        "training.loop",
        "divided as if all micro-batches had the targets of the first",
        "sum(map(count_targets, window))",
        "len(window) * count_targets(window[0])",
        "training/test_loop.py::test_accumulated_gradients_equal_full_batch",
    ),
    Fault(
        "training.loop",
        "held-out loss a mean of means",
        "total += loss_fn(model, to_device(batch, device)) n_targets += count_targets(batch)",
        "total += loss_fn(model, to_device(batch, device)) / count_targets(batch); n_targets += 1",
        "training/test_loop.py::test_held_out_loss_is_taken_without_dropout_and_training_goes_on",
    ),
    Fault(
        "techniques.step",
        "clipped before unscaling",
        """
        scaler.unscale_(optimizer)
        grad_norm = None
        if max_grad_norm:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            grad_norm = clip(parameters, max_grad_norm)
        """,
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        grad_norm = clip(parameters, max_grad_norm)
        scaler.unscale_(optimizer)
        """,
        "training/test_loop.py::test_clipping_acts_on_unscaled_gradients",
    ),
    Fault(
        "techniques.step",
        "loss scale never updated",
        "scaler.update()",
        "pass",
        "training/test_loop.py::test_an_overflow_skips_the_step_and_halves_the_scale",
    ),
    Fault(
        "techniques.step",
        "gradients not cleared",
        "optimizer.zero_grad(set_to_none=True)",
        "pass",
        "training/test_experiment.py::test_run_equals_the_loop_written_out",
    ),
    Fault(
        "techniques.step",
        "logged loss not detached",
        "mean_loss += loss.detach()",
        "mean_loss += loss",
        "training/test_loop.py::test_no_graph_outlives_its_micro_batch",
    ),
    Fault(
        "techniques.step",
        "backward under autocast",
        "scaler.scale(loss).backward()",
        "with autocast(): scaler.scale(loss).backward()",
        "training/test_loop.py::test_autocast_is_over_before_backward",
    ),
    Fault(
        "techniques.step",
        "gradients cleared before they are measured",
        'phase("clear") optimizer.zero_grad(set_to_none=True)',
        'optimizer.zero_grad(set_to_none=True); phase("clear")',
        "memory/test_measure.py::test_standing_bytes_are_exact",
    ),
    Fault(
        "techniques.loss",
        "labels not shifted",
        'F.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:].flatten()',
        'batch["labels"].flatten()',
        "workload/test_gpt2.py::test_lm_loss_is_hugging_faces_loss",
    ),
    Fault(
        "techniques.precision",
        "autocast around weights that are BF16 already",
        "if PRECISIONS[precision].autocast:",
        "if PRECISIONS[precision].is_16bit:",
        "techniques/test_precision.py::test_autocast_gives_the_dtype_of_the_precision",
    ),
    Fault(
        "techniques.precision",
        "TF32 left on after an error",
        "    try:\n        yield\n    finally:\n        matmul.fp32_precision = before\n",
        "    yield\n    matmul.fp32_precision = before\n",
        "techniques/test_precision.py::test_tf32_switch_is_put_back",
    ),
    Fault(
        "machine.here",
        "BF16 said to be supported on a T4",
        "torch.cuda.is_bf16_supported(including_emulation=False)",
        "torch.cuda.is_bf16_supported()",
        "techniques/test_precision.py::test_emulated_bf16_is_not_support",
    ),
    Fault(
        "machine.here",
        "a multiplication and an addition counted as one operation",
        "return threads * 2 * n**3 / seconds",
        "return threads * n**3 / seconds",
        "techniques/test_precision.py::test_a_multiplication_and_an_addition_are_two_operations",
    ),
    Fault(
        "config.schema",
        "when_cpu beats an override",
        "for key, value in cpu.items() if key not in self.overrides}",
        "for key, value in cpu.items()}",
        "config/test_config.py::test_override_beats_when_cpu_beats_file",
    ),
    Fault(
        "config.yaml_source",
        "columns counted from 0",
        "(mark.line + 1, mark.column + 1)",
        "(mark.line + 1, mark.column)",
        "config/test_config.py::test_line_and_column_are_those_of_an_editor",
    ),
    Fault(
        "config.schema",
        "unknown keys accepted",
        'extra="forbid"',
        'extra="ignore"',
        "config/test_config.py::test_mistake_is_reported_where_it_stands",
    ),
    Fault(
        "config.agreement",
        "tokens_per_step rounded down to a multiple",
        "if per_pass and tokens % per_pass:",
        "if per_pass and tokens < per_pass:",
        "config/test_config.py::test_mistake_is_reported_where_it_stands",
    ),
    Fault(
        "config.agreement",
        "as many warm-up steps as steps refused",
        "and warmup > steps:",
        "and warmup >= steps:",
        "config/test_config.py::test_what_just_fits_is_accepted",
    ),
    Fault(
        "prediction.traces",
        "blocks beyond whole checkpointing units forgotten",
        "last_unit = n_layer % unit",
        "last_unit = 0",
        "prediction/test_memory.py::test_two_and_three_layers_tell_about_all[smaller-last-unit]",
    ),
    Fault(
        "prediction.memory",
        "a card traced by a CPU's rules",
        "Traces(config, card.gpu, keep_outputs)",
        "Traces(config, None, keep_outputs)",
        "prediction/test_replay.py::test_categories_add_up_to_what_the_allocator_has_given",
    ),
    Fault(
        "prediction.memory",
        "gradients of earlier micro-batches forgotten",
        "trace = self.traces.at(micro_batch_size, n_traced)",
        "trace = self.traces.at(micro_batch_size, 1)",
        "prediction/test_memory.py::test_gradients_stay_alive_between_micro_batches",
    ),
    Fault(
        "prediction.module",
        "modules predicted without their dropout",
        "twin.train(),",
        "twin.eval(),",
        "prediction/test_memory.py::test_a_module_is_predicted_in_training_mode_and_left_in_its_own",
    ),
    Fault(
        "prediction.replay",
        "requests not rounded up to 512 bytes",
        "n_bytes = rounded(storage.n_bytes) if self.on_card else storage.n_bytes",
        "n_bytes = storage.n_bytes",
        "prediction/test_memory.py::test_a_request_is_rounded_up_on_cuda_only",
    ),
    Fault(
        "prediction.replay",
        "optimizer state made in every step",
        "storage.category in LASTING and id(storage) in alive",
        "storage.category not in LASTING and id(storage) in alive",
        "prediction/test_replay.py::test_the_first_step_makes_what_later_ones_find",
    ),
    Fault(
        "prediction.extrapolation",
        "backward frees in the order of forward",
        "if -there.unit in steps:",
        "if there.unit == 0:",
        "prediction/test_memory.py::test_each_layer_frees_what_is_its_own_however_deep[True]",
    ),
    Fault(
        "prediction.allocator",
        "every rest split off",
        "return remaining > SMALL_REQUEST and size",
        "return remaining > 0 and size",
        "prediction/test_allocator.py::test_a_rest_of_more_than_a_mib_is_split_off_in_the_large_pool_only",
    ),
    Fault(
        "prediction.allocator",
        "free neighbours not merged",
        "if neighbour and not neighbour.used and neighbour.mapped: block.pool",
        "if neighbour and neighbour.used is None:\n    block.pool",
        "prediction/test_allocator.py::test_neighbours_merge_and_holes_between_living_blocks_do_not",
    ),
    Fault(
        "prediction.allocator",
        "gives up before it returns what is cached",
        "            self.empty_cache()\n            block = self._new_block",
        "            block = self._new_block",
        "prediction/test_allocator.py::test_before_it_gives_up_it_returns_what_is_cached",
    ),
    Fault(
        "prediction.gpu_time",
        "waves of tiles not rounded up",
        "waves = math.ceil(tiles / self.n_sms)",
        "waves = tiles / self.n_sms",
        "prediction/test_time.py::test_a_product_takes_whole_waves_of_tiles",
    ),
    Fault(
        "prediction.gpu_time",
        "arithmetic and bytes added up",
        "return max(self._arithmetic(work), moved) + calls",
        "return self._arithmetic(work) + 2 * moved + calls",
        "prediction/test_time.py::test_bytes_take_their_time_where_they_are_more_than_the_arithmetic",
    ),
    Fault(
        "prediction.time",
        "the device never waits for its host",
        "self.device = max(self.device, self.host) + seconds",
        "self.device = self.device + seconds",
        "prediction/test_time.py::test_a_small_model_on_a_fast_card_waits_for_its_host",
    ),
    Fault(
        "prediction.replay",
        "micro-batches beyond those traced left out",
        "max(more, 0) * repeated",
        "0 * repeated",
        "prediction/test_time.py::test_accumulation_repeats_micro_batches_and_not_the_update",
    ),
    Fault(
        "prediction.fusion",
        "fused operations write all that they make",
        "if id(storage) in kept:",
        "if True:",
        "prediction/test_time.py::test_a_fused_chain_reads_what_comes_from_outside_and_writes_what_is_needed",
    ),
    Fault(
        "prediction.work",
        "what is added to itself read twice",
        "key = tensor.untyped_storage()._cdata, tensor.storage_offset()",
        "key = len(found)",
        "prediction/test_time.py::test_an_operation_reads_and_writes_each_tensor_once_and_a_view_nothing",
    ),
    Fault(
        "prediction.work",
        "work of few layers not extrapolated",
        "return a + ratio * (b - a)",
        "return b",
        "prediction/test_time.py::test_few_layers_and_sequences_tell_the_work_of_all",
    ),
    Fault(
        "guesses",
        "a late guess passed off as early",
        "before.was_early if is_same and before else is_open",
        "True",
        "test_guesses.py::test_a_guess_after_the_result_is_taken_and_said",
    ),
    Fault(
        "training.noise",
        "noise not asked",
        "noise if equal_pairs else (0.0, 0.0, 0.0)",
        "(0.0, 0.0, 0.0)",
        "training/test_noise.py::test_what_equal_pairs_differ_by_is_noise",
    ),
    Fault(
        "prediction.cuda_rules",
        "rows and columns of a bias's gradient mixed up",
        "def _column_sums(gpu: Gpu, n_rows: int, n_columns: int)",
        "def _column_sums(gpu: Gpu, n_columns: int, n_rows: int)",
        "prediction/test_cuda_rules.py::test_a_bias_gradient_is_summed_through_a_buffer",
    ),
    Fault(
        "memory.cpu_recorder",
        "peak taken at the end of a phase",
        "by_category[by_category.sum(axis=1).argmax()]",
        "by_category[-1]",
        "memory/test_measure.py::test_timeline_reaches_each_phases_peak_in_order",
    ),
    Fault(
        "memory.ledger",
        "activations and logits mixed up",
        '{"forward": ACTIVATIONS, "loss": LOGITS}',
        '{"forward": LOGITS, "loss": ACTIVATIONS}',
        "memory/test_measure.py::test_forward_peak_is_what_arithmetic_says",
    ),
    Fault(
        "memory.measure",
        "hook left behind",
        "    finally:\n        handle.remove()\n",
        "    finally:\n        del handle\n",
        "memory/test_measure.py::test_a_model_can_be_measured_again",
    ),
    Fault(
        "memory.ledger",
        "peak downsample_timeline out of the timeline",
        ".tolist(), int(alive.sum(axis=1).argmax())}",
        ".tolist()}",
        "memory/test_measure.py::test_a_long_timeline_keeps_its_peak",
    ),
    Fault(
        "checks.mixed_precision",
        "a step that never clears is right",
        "error > 0.3 * expected.norm()",
        "error > 3.0 * expected.norm()",
        "solutions/test_solutions.py::test_wrong_answers_get_their_misconception",
    ),
    Fault(
        "checks.core",
        "an answer that raises is right",
        'return f"it raised {type(error).__name__}: {error}"',
        "return None",
        "solutions/test_solutions.py::test_wrong_answers_get_their_misconception",
    ),
    Fault(
        "checks.profiling",
        "a process without its context is right",
        "if abs(answer - right_gib * 1024) < 1:",
        "if abs(answer - right_gib * 1024) < 1024:",
        "solutions/test_solutions.py::test_wrong_answers_get_their_misconception",
    ),
    Fault(
        "checks.epoch_trials",
        "a last window left uncleared is right",
        "    for _ in range(2):\n        batches = make_micro_batches(EQUAL_ROWS)\n"
        "        epoch(toy.model, batches, toy.optimizer, GRAD_ACCUM_STEPS, max_norm)\n",
        "    batches = make_micro_batches(EQUAL_ROWS)\n"
        "    epoch(toy.model, batches, toy.optimizer, GRAD_ACCUM_STEPS, max_norm)\n"
        "    watch.steps *= 2\n",
        "solutions/test_solutions.py::test_a_shorter_window_that_is_not_cleared_is_noticed_in_the_next_epoch",
    ),
]


def words(source: str) -> list[tuple[str, int, int]]:
    """Return names and signs with where they start and end.

    Left out is what a formatter may change: white space, and a comma before a closing bracket.
    """
    found: list[tuple[str, int, int]] = []
    for match in re.finditer(r"\w+|[^\w\s]", source):
        if match.group() in ")]}" and found and found[-1][0] == ",":
            found.pop()
        found.append((match.group(), *match.span()))
    return found


def without_comments(source: str) -> str:
    """Return a file's source with blanks in place of its comments."""
    lines = source.splitlines(keepends=True)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            line = lines[row - 1]
            blanks = " " * len(token.string)
            lines[row - 1] = line[:column] + blanks + line[column + len(token.string) :]
    return "".join(lines)


def path_of(fault: Fault) -> str:
    return f"labutils/{fault.module.replace('.', '/')}.py"


def planted(fault: Fault) -> str:
    """Return the module's source with the fault in it.

    Fails if the source has changed where the fault belongs.
    """
    source = (REPO / path_of(fault)).read_text(encoding="utf-8")
    there = words(without_comments(source))
    old = [word for word, _, _ in words(fault.old)]
    places = []
    for i in range(len(there) - len(old) + 1):
        if [word for word, _, _ in there[i : i + len(old)]] == old:
            places.append((there[i][1], there[i + len(old) - 1][2]))
    assert len(places) == 1, (
        f"{fault}: {path_of(fault)} has this {len(places)} times; plant it anew: {fault.old!r}"
    )
    start, end = places[0]
    line = source[source.rfind("\n", 0, start) + 1 : start]
    indent = line[: len(line) - len(line.lstrip())]
    new = textwrap.dedent(fault.new).strip().replace("\n", f"\n{indent}")
    return source[:start] + new + source[end:]


def copied(folder: Path) -> Path:
    """Copy what the named tests need, configs as committed, and return the root of the copy."""
    course = folder / "course"
    for name in ("labutils", "tests", "configs"):
        shutil.copytree(REPO / name, course / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (REPO / "configs").glob("*_config.yaml"):
        (course / "configs" / path.name).write_text(
            committed(f"configs/{path.name}"), encoding="utf-8"
        )
    shutil.copy(REPO / "pyproject.toml", course)
    return course


def run_fast_tests(course: Path, module: str, *tests: str) -> subprocess.CompletedProcess:
    """Run tests in a copy. Exit code 1 is a failed test; no such test, only slow ones, or a broken
    import are others.

    For the import a plugin sees to that: it also refuses a module that is not the copy's.
    """
    plugin = f"""
from pathlib import Path
import labutils.{module} as module
assert Path(module.__file__).is_relative_to(Path(__file__).parent), module.__file__
"""
    (course / "in_the_copy.py").write_text(plugin, encoding="utf-8")
    options = [
        "-o",
        "addopts=",
        "-m",
        "not (slow or slowest)",
        "-p",
        "in_the_copy",
        "-p",
        "no:cacheprovider",
        "-x",
        "-q",
    ]
    command = [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in tests)]
    environment = os.environ | {
        "PYTHONPATH": str(course),
        "OMP_NUM_THREADS": "1",
        "PYTEST_ADDOPTS": "",
    }
    environment["GIT_DIR"] = (
        os.devnull
    )  # the copy is in no repository, wherever temporary files lie
    return subprocess.run(
        command, cwd=course, env=environment, capture_output=True, text=True, timeout=600
    )


def is_here(test: str) -> bool:
    """Whether a test is there: a copy of the course for students has no solutions."""
    return not test.startswith("solutions/") or (REPO / "tests" / "solutions").is_dir()


def test_every_planted_fault_fits_the_source_and_is_python():
    assert len({str(fault) for fault in FAULTS}) == 50
    for fault in FAULTS:
        compile(planted(fault), str(fault), "exec")


@slowest
def test_the_unbroken_copy_passes_the_same_tests(tmp_path):
    tests = dict.fromkeys(fault.test for fault in FAULTS if is_here(fault.test))
    answer = run_fast_tests(copied(tmp_path), "training", *tests)
    assert answer.returncode == 0, answer.stdout + answer.stderr


@slowest
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_is_noticed(fault, tmp_path):
    if not is_here(fault.test):
        pytest.skip("tests/solutions, whose tests notice it, is not here")
    course = copied(tmp_path)
    (course / path_of(fault)).write_text(planted(fault), encoding="utf-8")
    answer = run_fast_tests(course, fault.module, fault.test)
    assert answer.returncode == 1, f"{fault} survived {fault.test}:\n{answer.stdout}{answer.stderr}"
