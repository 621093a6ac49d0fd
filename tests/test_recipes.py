"""README's table "Change it", followed to a trained step in a copy of the checkout.

Each row says what to touch, and which tests to run then. ADDED and CHANGED have an example of every row, made by its
words alone: an entry in each table that it names, or other code in its files. Lion is README's own code.
"""
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from program import ROOT, python

README = (ROOT / "README.md").read_text()
ROWS = {row[0]: row[1:] for row in (
    [cell.strip() for cell in line.strip("|").split(" | ")] for line in README.split("## Change it")[1].split("## ")[0]
    .splitlines() if line.startswith("| ")) if row[0] not in ("to change", "---")}
LION, = re.findall(r"^To add Lion .*?, put `(.*?)` into `OPTIMIZERS`.*?```python\n(.*?)```", README,
                   re.MULTILINE | re.DOTALL)
SMALL = ("--layers 4 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --seq-len 24 --global-batch 8 --lr 3e-3 --warmup 0 "
         "--sample-prompt= --data README.md --metrics metrics")


# ---- what one would write -------------------------------------------------------------------------------------------

def add(copy: Path, file: str, table: str, entry: str) -> None:
    """Put an entry first into a table, a dict or a tuple, in lines of its own."""
    text = (copy / file).read_text()
    opening, = re.findall(rf"^{table} = [{{(]", text, re.MULTILINE)
    (copy / file).write_text(text.replace(opening, f"{opening}\n    {entry.strip()}\n    "))


def replace(copy: Path, file: str, old: str, new: str) -> None:
    text = (copy / file).read_text()
    assert text.count(old) == 1, f"{file} has {text.count(old)} times: {old}"
    (copy / file).write_text(text.replace(old, new))


def add_schedules(copy: Path) -> None:
    """Micro-batches one after the other: slow, but right; on stages that go round the ranks, and on a V."""
    add(copy, "schedules.py", "SCHEDULES", '''
    "in-turn": Schedule(lambda r, p, m, v, n: [Action(op, r, k) for k in range(m) for op in "FB"]),
    "in-turn-v": Schedule(lambda r, p, m, v, n: [
        Action(op, stage, k) for k in range(m) for op, stage in (
            ("F", r), ("F", 2 * p - 1 - r), ("I", 2 * p - 1 - r), ("I", r), ("W", r), ("W", 2 * p - 1 - r))],
        chunks=2, v_shaped=True),''')


def add_optimizer(copy: Path) -> None:
    entry, code = LION
    add(copy, "core/config.py", "OPTIMIZERS", entry)
    with open(copy / "optimizers.py", "a") as file:
        file.write(f"\n\n{code}")


def add_styles(copy: Path) -> None:
    """A ring, and halves of what is gathered, one after the other: in the steps of halves ranks have unequal work."""
    replace(copy, "cp.py", "\n# The values of --cp-style, except", '''
def in_halves(kv: Tensor, group: Group) -> Iterator[Tensor]:
    _, whole = gather(kv, group)
    yield kv
    yield from whole.chunk(2)


def in_halves_back(dkv: Tensor, pending: Pending | None, group: Group) -> Pending:
    return gather_back(torch.cat((pending.wait(), dkv)), None, group) if pending else done(dkv)


# The values of --cp-style, except''')
    add(copy, "cp.py", "STYLES", '''
    "around": Style(lambda c, i: [own_chunks(c, (i - step) % c) for step in range(c)], ring, ring_back),
    "in-halves": Style(lambda c, i: [own_chunks(c, i), range(c), range(c, 2 * c)], in_halves, in_halves_back),''')
    add(copy, "core/config.py", "CP_STYLES", '"around", "in-halves",')


def add_recipes(copy: Path) -> None:
    add(copy, "core/config.py", "FP8_RECIPES", '''
    "only-e4m3": Fp8Recipe("e4m3", blocks=False), "e5m2-in-blocks": Fp8Recipe("e5m2", blocks=True),''')


def change_activation(copy: Path) -> None:
    """GELU in place of SiLU, so that SwiGLU becomes GeGLU."""
    replace(copy, "operations.py", "    return F.silu(gate).mul_(up)\n", "    return F.gelu(gate).mul_(up)\n")
    replace(copy, "operations.py", '''    torch.ops.aten.silu.out(gate, out=dup).mul_(dy)
    torch.mul(dy, up, out=dgate)
    torch.ops.aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)
''', '''    torch.mul(F.gelu(gate), dy, out=dup)
    dgate.copy_(torch.ops.aten.gelu_backward(dy * up, gate))
''')
    replace(copy, "kernels.py", "torch.nn.functional.silu(gate)", "torch.nn.functional.gelu(gate)")
    replace(copy, "kernels.py", "    sigmoid = tl.sigmoid(gate)\n", '''
    below = 0.5 + 0.5 * tl.erf(gate * 0.7071067811865476)  # the part of the normal distribution that is below the gate
    slope = below + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
''')
    replace(copy, "kernels.py", "grad * up * sigmoid * (1 + gate * (1 - sigmoid))", "grad * up * slope")
    replace(copy, "kernels.py", "grad * gate * sigmoid", "grad * gate * below")
    replace(copy, "kernels.py", "gate * sigmoid * up", "gate * below * up")
    replace(copy, "tests/help/reference.py", "gate * torch.sigmoid(gate)",
            "gate * (1 + torch.erf(gate / 2 ** 0.5)) / 2")


def change_weights(copy: Path) -> None:
    """A feed-forward of two matrices and GELU. Its count in plan/costs.py is left as it was."""
    replace(copy, "model.py",
            "        gate = Spec(name + \"w_gate\", (ffn, config.hidden), {\"tp\": 0}, std=INIT_STD)\n", "")
    replace(copy, "model.py", "self.gate_up = ColumnParallelLinear(make, gate, up, biases=biases)",
            "self.up = ColumnParallelLinear(make, up, biases=biases)")
    replace(copy, "model.py", "gate_up = self.gate_up(x, context.tp)", "up = self.up(x, context.tp)")
    replace(copy, "model.py", "hidden = swiglu(gate_up)", "hidden = nn.functional.gelu(up)")
    replace(copy, "model.py", "drop(hidden, y, swiglu, gate_up)", "drop(hidden, y, nn.functional.gelu, up)")
    replace(copy, "model.py", "rotate_and_split, swiglu\n", "rotate_and_split\n")
    replace(copy, "tests/help/reference.py",
            'swiglu(h, *(w[layer + "shared.w_" + part] for part in ("gate", "up", "down")))',
            'F.gelu(h @ w[layer + "shared.w_up"].T) @ w[layer + "shared.w_down"].T')
    replace(copy, "tests/help/reference.py",
            'swiglu(h, *(w[f"layers.{i}.ffn.w_{part}"] for part in parts), added)',
            'F.gelu(h @ w[f"layers.{i}.ffn.w_up"].T) @ w[f"layers.{i}.ffn.w_down"].T')


ADDED = {"a pipeline schedule": add_schedules, "an optimizer": add_optimizer, "a context-parallel style": add_styles,
         "an FP8 recipe": add_recipes}  # which leave alone what is there, so that one copy has all of them
CHANGED = {"a norm, an activation": change_activation, "a layer's weights": change_weights}


def copied(folder: Path, *changes) -> Path:
    """A copy of the checkout, without what is none of it, such as an environment or traces; then the changes."""
    for path in ROOT.iterdir():
        if path.suffix in (".py", ".md", ".toml", ".txt"):
            shutil.copy(path, folder)
        elif (path / "__init__.py").exists() or path.name in ("docs", "tests"):
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
    for change in changes:
        change(folder)
    return folder


@pytest.fixture(scope="module")
def added(tmp_path_factory) -> Path:
    return copied(tmp_path_factory.mktemp("added"), *ADDED.values())


def test_every_row_has_an_example_and_names_tables_that_its_files_have():
    assert ROWS.keys() == ADDED.keys() | CHANGED.keys()
    for touch, commands in ROWS.values():
        files = re.findall(r"(?<![\w/.])[\w/]+\.py", touch)
        assert files and all((ROOT / file).is_file() for file in files)
        for table, file in re.findall(r"`(\w+)` in ([\w/]+\.py)", touch):
            assert re.search(f"^{table} = ", (ROOT / file).read_text(), re.MULTILINE)
        for command in re.findall("`([^`]+)`", commands):
            assert command.startswith(("pytest tests/", "python -m "))


# ---- a trained step -------------------------------------------------------------------------------------------------

def trained(copy: Path, flags: str, ranks: int = 1) -> tuple[list[float], str]:
    """(the loss of each step, what rank 0 prints) of train.py in the copy."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    (copy / "metrics").unlink(missing_ok=True)

    def start(rank: int):
        env = dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                   MASTER_ADDR="localhost", MASTER_PORT=port) if ranks > 1 else {}
        return python("train.py", *shlex.split(f"{SMALL} {flags}"), root=copy, **env)

    with ThreadPoolExecutor(ranks) as pool:
        done = list(pool.map(start, range(ranks)))
    assert not any(rank.returncode for rank in done), "".join(rank.stderr for rank in done)
    return [json.loads(line)["loss"] for line in (copy / "metrics").read_text().splitlines()], done[0].stderr


def test_what_is_added_by_the_readme_trains_on_one_rank_and_on_two(added):
    """Losses are those of one rank, but for rounding in fp32; Lion's are not AdamW's."""
    adamw, _ = trained(added, "--steps 3")
    lion, said = trained(added, "--steps 3 --optimizer lion")
    assert abs(lion[2] - adamw[2]) > 1e-3 and lion[2] < lion[0] == adamw[0] and "warning" not in said
    for flags in ("--zero 1", "--pp 2 --micro-batch 2 --schedule in-turn",
                  "--pp 2 --micro-batch 2 --schedule in-turn-v", "--cp 2 --cp-style around"):
        losses, _ = trained(added, f"--steps 3 --optimizer lion {flags}", 2)
        assert losses == pytest.approx(lion, rel=1e-5), flags


@pytest.mark.slow
@pytest.mark.parametrize("flags", [
    "--cp 2 --cp-style in-halves", "--cp 2 --cp-style around --cp-zigzag document --mask-documents",
    "--zero 3 --optimizer lion --offload optimizer", "--tp 2 --optimizer lion"])
def test_what_is_added_trains_with_more(added, flags):
    one, _ = trained(added, "--steps 3 " + " ".join(re.findall("--optimizer lion|--mask-documents", flags)))
    assert trained(added, f"--steps 3 {flags}", 2)[0] == pytest.approx(one, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["only-e4m3", "e5m2-in-blocks"])
def test_an_fp8_recipe_that_is_added_trains(added, recipe):
    wide = "--hidden 128 --head-dim 128 --ffn 128 --dtype bf16"
    one, _ = trained(added, f"--steps 3 {wide} --fp8 {recipe}")
    plain, _ = trained(added, f"--steps 3 {wide}")
    assert one != plain and one == pytest.approx(plain, rel=0.02)


def test_a_layer_with_other_weights_is_trained_with_a_warning_that_names_what_to_change(tmp_path):
    """Of 2 x 257 x 32 parameters in tables, 9 x 32 in norms and 4 x (2 x 32 x 48 + 3 x 32 x 48) in matrices 4 x 32 x 48
    have gone. So it is said of a pipeline, whose ranks have two layers each."""
    copy, counted = copied(tmp_path, change_weights), 2 * 257 * 32 + 9 * 32 + 4 * (2 * 32 * 48 + 3 * 32 * 48)
    line = (f"train.py: warning: the model has {counted - 4 * 32 * 48:,} parameters, but plan/costs.py counts "
            f"{counted:,}: predicted memory, times and MFU are wrong until ")
    losses, said = trained(copy, "--steps 2")
    assert len([one for one in said.splitlines() if one.startswith(line)]) == 1 and losses[1] < losses[0]
    in_stages, said = trained(copy, "--steps 2 --pp 2 --micro-batch 2", 2)
    assert line in said and in_stages == pytest.approx(losses, rel=1e-5)


# ---- the tests that the rows name -----------------------------------------------------------------------------------

def words_of(command: str) -> list[str]:
    """What follows `python` in a row's command, `pytest tests/…` or `python -m …`."""
    program, *words = shlex.split(command)
    return ["-m", "pytest", "-n", "0", "-q", "-x", *words] if program == "pytest" else words


def run_in(copy: Path, command: str) -> None:
    """By a Python of its own, as a user starts it: tests of the copy have their own pool, and Triton's interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # which names this checkout
    done = subprocess.run([sys.executable, *words_of(command)], cwd=copy, env=env, capture_output=True, text=True,
                          timeout=3000)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_the_nearest_tests_of_what_is_added_pass(added):
    """Those that are quick, and ask of every entry of a table what holds for all. The rules of the house, too."""
    files = " ".join(f"tests/test_{name}.py" for name in ("pp", "zero", "cp", "house", "config"))
    chosen = ("house or lion or (in-turn and happens) or would_not or all_schedules or "
              "(cover and (around or halves)) or a_rule_names")
    done = python(*words_of(f"pytest {files}"), "-k", chosen, root=added)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"^[1-9]\d+ passed", done.stdout, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for row in ADDED for command in re.findall("`([^`]+)`", ROWS[row][1])])
def test_the_commands_of_a_row_pass_with_what_is_added(added, command):
    run_in(added, command)


@pytest.mark.slow
@pytest.mark.parametrize("row, command", [(row, command) for row in CHANGED
                                          for command in re.findall("`([^`]+)`", ROWS[row][1])])
def test_the_commands_of_a_row_pass_with_what_is_changed(row, command, tmp_path):
    run_in(copied(tmp_path, CHANGED[row]), command)
