"""Learn by doing: write 24 functions of the playbook whose bodies are empty, and find planted bugs.

    python -m learn.puzzles --list              all of them, in the playbook's order
    python -m learn.puzzles ring-attention      a copy of the project in puzzles/ring-attention/ with that body empty;
                                                run the same command again to test your solution
    python -m learn.puzzles ring-attention --hint       the next hint
    python -m learn.puzzles ring-attention --reveal     the repository's own body
    python -m learn.puzzles bug-17              a copy with one line changed, and the output of a test that fails

Your files are not touched: everything is in puzzles/, or --in FOLDER. The bugs are in
tests/data/planted.toml. A test takes from a few seconds to a minute, and needs the packages of
requirements-test.txt. The exit code is 0 if nothing is left to fix, 1 while the test fails, and 2
if the command cannot be carried out.
"""
import argparse
import ast
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from learn import Parser

ROOT = Path(__file__).parent.parent
HOME = ROOT / "puzzles"  # the default of --in
BLANK = "raise NotImplementedError('this is the puzzle')"


class Puzzle(NamedTuple):
    file: str
    function: str  # or Class.method
    test: str  # a test that fails without the body and passes with it
    hints: tuple[str, ...]
    also: tuple[str, ...] = ()  # tests of what the docstring says beyond `test`


WAITED_FOR = "tests/test_zero.py::test_every_collective_is_waited_for_before_its_tensors_are_used"
HOPS_HIDE = "tests/test_tp.py::test_every_hop_of_the_ring_hides_under_the_matmul_of_a_shard"

PUZZLES = {
    "boxes": Puzzle("core/param.py", "boxes", "tests/test_param.py::test_a_flat_range_is_a_few_boxes_in_order", (
        "A range of a flattened matrix is the end of a row, whole rows, and the beginning of a row.",
        "A part of one row is a range of a tensor with one dimension less: the function calls itself.")),
    "drop": Puzzle("recompute.py", "drop",
                   "tests/test_recompute.py::test_views_of_a_dropped_result_are_refilled", (
                       "untyped_storage().resize_(0) frees memory under tensors that stay valid.",
                       "A hook on the gradient of `until` runs before the backward that reads `out`."), (
                           "tests/test_recompute.py::"
                           "test_nothing_is_dropped_in_other_modes_nor_where_no_backward_follows",
                           "tests/test_recompute.py::test_dropped_results_take_no_memory_but_where_backward_is_and_are_"
                           "refilled_once_for_all_who_saved_them")),
    "bucket": Puzzle("dp.py", "Bucket.ready",
                     "tests/test_dp.py::test_a_step_sends_2P_once_whatever_the_micro_batches", (
                         "The bucket knows how many gradients are still missing in this step.",)),
    "assign": Puzzle("dp.py", "assign_to_buckets",
                     "tests/test_dp.py::test_whole_units_share_a_bucket_until_it_is_large_enough", (
                         "Fill a bucket per data axis, unit by unit; close it when its gradients reach bucket_mb.",
                         "A parameter of several units, or with a tie, is a bucket of its own."), (
                             "tests/test_dp.py::test_what_is_shared_or_different_is_apart",
                             "tests/test_dp.py::test_a_parameter_gets_a_gradient_from_each_stage_that_uses_it")),
    "reduction": Puzzle("zero.py", "ShardedBucket.continue_reduction",
                        "tests/test_zero.py::test_micro_batches_are_summed_in_fp32_whatever_is_sent", (
                            "If a reduce-scatter is running, wait for it and give its result to put_into_shard.",
                            "`reduced` counts the results of this step. After the last, start the all-reduce."), (
                                "tests/test_zero.py::test_a_hybrid_sums_over_replicas_what_a_rank_owns_once",
                                f"{WAITED_FOR}[4---zero 1 --dp-replicate 2]")),
    "norm": Puzzle("zero.py", "ShardedBucket.squared_norm",
                   "tests/test_zero.py::test_clipping_scales_the_whole_gradient_to_the_limit", (
                       "Each element is owned by one rank of those that hold it: `owns` says whether by this one.",), (
                           f"{WAITED_FOR}[2---tp 2]", f"{WAITED_FOR}[4---zero 1 --dp-replicate 2]")),
    "column": Puzzle("tp.py", "Column.backward", "tests/test_tp.py::test_a_pair_of_matrices_equals_the_dense_one", (
        "Start to gather X, compute dX, start to reduce it, add the weight's gradient: see the timeline above it.",
        "start_weight_grad starts to gather X. The function that it returns waits for X and adds the gradient."), (
            "tests/test_tp.py::test_in_the_column_layers_backward_a_matmul_lies_between_each_start_and_its_wait",
            HOPS_HIDE, "tests/test_tp.py::test_fp8_hides_the_same_exchanges")),
    "row": Puzzle("tp.py", "Row.forward", "tests/test_tp.py::test_a_pair_of_matrices_equals_the_dense_one", (
        "Each rank has a term of Z: `tp.reduce` sums them.",), (
            "tests/test_tp.py::test_products_in_bf16_are_rounded_once", HOPS_HIDE)),
    "async-tp": Puzzle("tp.py", "matmul_reduce_scatter",
                       "tests/test_tp.py::test_a_pair_of_matrices_equals_the_dense_one", (
                           "A shard's sum starts at the rank after its owner and reaches the owner after n-1 hops.",),
                       (HOPS_HIDE,)),
    "zig-zag": Puzzle("cp.py", "own_chunks", "tests/test_cp.py::test_every_token_is_at_one_place", (
        "2c chunks: one from the front and one from the back for each rank.",), (
            "tests/test_cp.py::test_ranks_have_equal_work_in_the_few_blocks_of_a_step",)),
    "merge": Puzzle("cp.py", "merge", "tests/test_cp.py::test_attention_by_blocks_equals_attention_at_once", (
        "The new logsumexp is that of both; each result is weighted by exp(its logsumexp - the new one).",)),
    "ring-attention": Puzzle("cp.py", "ring", "tests/test_cp.py::test_attention_by_blocks_equals_attention_at_once", (
        "Start to send what you have and to receive the previous rank's before you yield.",), (
            "tests/test_cp.py::test_keys_are_sent_while_those_before_them_are_used",)),
    "engine": Puzzle("pp.py", "Engine.run", "tests/test_pp.py::test_bytes_alive_at_every_action_are_the_plans", (
        "For each item of this rank's program: receive, compute, send; wait for the sends at the end.",), (
            "tests/test_pp.py::test_an_output_is_freed_at_once_and_what_is_sent_when_it_has_left",)),
    "1f1b": Puzzle("schedules.py", "one_f_one_b", "tests/test_pp.py::test_four_ranks_as_drawn_by_hand", (
        "Some forwards of warmup, then forward and backward in turns, then the backwards that are left.",
        "Forwards go through n micro-batches of one chunk, then through the same n of the next chunk."), (
            "tests/test_pp.py::test_interleaving_takes_the_smallest_possible_group_and_of_one_chunk_is_1f1b",
            "tests/test_pp.py::test_the_order_is_that_of_torch")),
    "bubble": Puzzle("schedules.py", "bubble", "tests/test_pp.py::test_bubbles_are_those_of_the_formulas", (
        "The rank that works least is idle for the rest of the step.",), (
            "tests/test_pp.py::test_stages_may_take_different_times",)),
    "held": Puzzle("schedules.py", "activations_held",
                   "tests/test_pp.py::test_activations_held_are_those_of_the_formulas", (
                       "A forward holds one more, a backward frees one; of a split one only the second half does.",)),
    "choose": Puzzle("ep.py", "choose_experts",
                     "tests/test_ep.py::test_a_group_is_as_good_as_its_two_best_experts_or_its_only_one", (
                         "The bias changes who is chosen, not the weight.",
                         "Groups are compared by the sum of their two best experts; experts of others are masked.")),
    "permute": Puzzle("ep.py", "Copies.permute", "tests/test_ep.py::test_experts_on_ranks_equal_a_dense_loop", (
        "Look at `unpermute`: it is the inverse.",)),
    "balance": Puzzle("ep.py", "update_biases",
                      "tests/test_ep.py::test_biases_move_by_the_rate_once_a_step_and_not_at_all_when_it_is_skipped", (
                          "An expert with more than the mean load moves down by the rate, one with less up.",), (
                              "tests/test_ep.py::"
                              "test_loads_are_summed_over_every_group_and_compared_within_their_layer",)),
    "grid": Puzzle("core/groups.py", "groups_along",
                   "tests/test_groups.py::test_axes_with_the_same_ranks_share_a_group_unless_they_are_busy_together", (
                       "Ranks whose other coordinates are equal are a group.",), (
                           "tests/test_groups.py::test_ranks_of_a_group_differ_only_along_its_dimensions",)),
    "quantise": Puzzle("fp8.py", "to_fp8",
                       "tests/test_fp8.py::test_what_is_too_large_becomes_the_largest_and_nan_stays", (
                           "E4M3 has no infinity: clamp before the cast, or what is too large becomes NaN.",)),
    "swiglu": Puzzle("operations.py", "swiglu_no_grad",
                     "tests/test_huggingface.py::test_a_published_model_gives_the_same_logits_here", (
                         "silu(gate) * up, in fp32, rounded once.",)),
    "ring-all-reduce": Puzzle("learn/written_out.py", "reduce_round",
                              "tests/test_ring.py::test_results_are_those_of_torch_for_any_dtype_and_size", (
                                  "n-1 hops: send a chunk's sum to the next rank, add what comes to another chunk.",)),
    "bruck": Puzzle("learn/written_out.py", "bruck_all_gather",
                    "tests/test_ring.py::test_results_are_those_of_torch_for_any_dtype_and_size", (
                        "Send all you have, twice as far each time.",
                        "At the end rank r has the blocks beginning with its own: rotate them.")),
}


def planted_bugs() -> list[dict]:
    return tomllib.loads((ROOT / "tests" / "data" / "planted.toml").read_text())["bug"]


def find(name: str) -> Puzzle | dict:
    """Return the puzzle or bug of that name. Raise ValueError for an unknown name."""
    bugs = planted_bugs()
    if name in PUZZLES:
        return PUZZLES[name]
    number = name.removeprefix("bug-")
    if name.startswith("bug-") and number.isdecimal() and 1 <= int(number) <= len(bugs):
        return bugs[int(number) - 1]
    raise ValueError(f"{name}: unknown, use one of {', '.join(PUZZLES)}, or bug-1 to bug-{len(bugs)}")


def function_in(source: str, name: str) -> ast.FunctionDef:
    body = ast.parse(source).body
    for part in name.split("."):
        node = next(node for node in body if getattr(node, "name", None) == part)
        body = node.body
    return node


def blanked(source: str, name: str) -> str:
    """Return the file with the function's body removed, except its docstring."""
    node, lines = function_in(source, name), source.splitlines(keepends=True)
    first = node.body[1] if ast.get_docstring(node) else node.body[0]
    indent = " " * first.col_offset
    start = min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", []))])
    return "".join([*lines[:start - 1], f"{indent}{BLANK}\n", *lines[node.end_lineno:]])


def load_passages():
    """Load tests/help/passages.py, which finds a planted bug's code, by its path: the tests are no package."""
    spec = importlib.util.spec_from_file_location("passages", ROOT / "tests" / "help" / "passages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def next_name(name: str) -> str:
    """Return the name of the next puzzle. Bugs follow the last function, and "" follows the last
    bug."""
    names = [*PUZZLES, *(f"bug-{number}" for number in range(1, len(planted_bugs()) + 1)), ""]
    return names[names.index(name) + 1]


def is_left_out(path: Path, copied_to: Path) -> bool:
    """Return whether a copy of the project leaves out this file or folder. There are three cases:

    - It is hidden, or a cache.
    - It is the copy itself or an earlier copy, which may be anywhere in the project.
    - It lies beside our folders and has neither code nor pages, such as an environment, a corpus or
      the checkpoints of a run.
    """
    if path.name.startswith(".") or path.name == "__pycache__":
        return True
    if not path.is_dir():
        return False
    if path.resolve() == copied_to.resolve() or (path / "learn" / "puzzles.py").exists():
        return True
    return path.parent == ROOT and not any(path.glob("*.py")) and not any(path.glob("*.md"))


def copy(puzzle: Puzzle | dict, folder: Path) -> None:
    """Copy the project to the folder, and put the puzzle in. The folder may be inside the project."""
    def left_out(parent: str, names: list[str]) -> list[str]:
        return [name for name in names if is_left_out(Path(parent, name), folder)]

    shutil.copytree(ROOT, folder, ignore=left_out, symlinks=True)
    file = folder / (puzzle.file if isinstance(puzzle, Puzzle) else puzzle["file"])
    source = file.read_text()
    file.write_text(blanked(source, puzzle.function) if isinstance(puzzle, Puzzle)
                    else load_passages().replace(source, puzzle["symbol"], puzzle["old"], puzzle["new"]))


def tests_of(puzzle: Puzzle | dict) -> list[str]:
    return [puzzle.test, *puzzle.also] if isinstance(puzzle, Puzzle) else [puzzle["test"]]


def judge(puzzle: Puzzle | dict, folder: Path) -> tuple[bool, str]:
    """Return (whether the tests pass, the last lines that they print).

    Raise ValueError if they have not ended after five minutes, perhaps because a rank waits for
    ever.
    """
    tests = tests_of(puzzle)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m", "", *tests]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        raise ValueError(f"{', '.join(tests)}: not ended after five minutes; perhaps a rank waits for ever") from None
    lines = (done.stdout + done.stderr).rstrip().splitlines()  # errors in flags or in conftest.py are on stderr
    passes = done.returncode == 0 and re.search(r"\b[1-9]\d* passed", done.stdout)  # 0 also where all were skipped
    return bool(passes), "\n".join(lines[-25:])


def attempt(name: str, puzzle: Puzzle | dict, asked: argparse.Namespace) -> int:
    """Make the copy, or run the test in it if it exists already. Return the exit code."""
    is_bug, folder = not isinstance(puzzle, Puzzle), asked.folder / name
    command = "python -m learn.puzzles"
    where = "" if asked.folder == HOME else f" --in {shlex.quote(str(asked.folder))}"
    if find_spec("pytest") is None or find_spec("xdist") is None:
        raise ValueError("puzzles are judged by pytest: pip install -r requirements-test.txt")
    if asked.folder.exists() and not asked.folder.is_dir():
        raise ValueError(f"--in {asked.folder}: is a file, name a folder")
    if not folder.exists():
        copy(puzzle, folder)
        task = "one line of some file is wrong" if is_bug else f"write {puzzle.function} in {puzzle.file}"
        print(f"{folder}: {task}, then run this command again")
        if not is_bug:
            return 0
    print(f"running {', '.join(tests_of(puzzle))} in {folder}, which takes from a few seconds to a minute", flush=True)
    passes, printed = judge(puzzle, folder)
    if not passes:
        print(f"{printed}\nnot solved yet; for a hint: {command} {name} --hint{where}")
        return 1
    following = next_name(name)
    print("solved" + (f"; the next one: {command} {following}{where}" if following else "; it was the last one"))
    return 0


def main(arguments: list[str]) -> int:
    parser = Parser("learn.puzzles", __doc__)
    parser.add_argument("name", nargs="?", help="of a puzzle, or bug-N; without a name all puzzles are listed")
    parser.add_argument("--list", action="store_true", help="list all puzzles")
    parser.add_argument("--hint", action="store_true", help="print the next hint")
    parser.add_argument("--reveal", action="store_true", help="print the solution")
    parser.add_argument("--in", dest="folder", metavar="FOLDER", type=Path, default=HOME,
                        help="where copies of the project are made [puzzles/]")
    asked = parser.parse_args(arguments)
    if asked.list or not asked.name:
        for name, puzzle in PUZZLES.items():
            print(f"{name:16s} {puzzle.file:22s} {puzzle.function}")
        return 0
    puzzle, folder = find(asked.name), asked.folder / asked.name
    is_bug = not isinstance(puzzle, Puzzle)
    if asked.reveal:
        source = (ROOT / (puzzle["file"] if is_bug else puzzle.file)).read_text()
        print(f"{puzzle['file']}: {puzzle['name']}\n- {puzzle['old'].strip()}\n+ {puzzle['new'].strip()}" if is_bug
              else ast.get_source_segment(source, function_in(source, puzzle.function)))
    elif asked.hint:
        seen = folder / ".hints"
        number = int(seen.read_text()) if seen.exists() else 0
        hints = (f"It is in {puzzle['file']}.", f"It is called: {puzzle['name']}.") if is_bug else puzzle.hints
        print(hints[min(number, len(hints) - 1)])
        if folder.exists():
            seen.write_text(str(number + 1))
    else:
        return attempt(asked.name, puzzle, asked)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        print(f"learn.puzzles: {error}", file=sys.stderr)
        sys.exit(2)
