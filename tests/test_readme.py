"""What the pages name exists: files, functions, commands, flags; and what they say of the program is true."""
import ast
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import optimizers
from core import config
from learn import pages, pictures, puzzles
from plan import step_time

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
MAP = [[cell.strip() for cell in line.strip("|").split(" | ")]
       for line in (ROOT / "docs/PLAYBOOK.md").read_text().split("\n## ")[0].splitlines() if line.startswith("| ")][1:]
COMMANDS = list(dict.fromkeys(command for *_, commands in MAP
                              for command in re.findall(r"`((?:python|torchrun) [^`]+)`", commands)))
DEMOS = {command for file in json.loads(pages.DEMOS.read_text())["outputs"]
         for command in (f"python {file}", f"python -m {file[:-3].replace('/', '.')}")}
FLAGS = {config.flag(name) for name in config.FIELDS}
FLAGS |= {"--no-" + flag[2:] for flag in FLAGS}


def check_command(command: str) -> None:
    words = shlex.split(command, comments=True)
    if "-m" in words:
        script = words[words.index("-m") + 1].replace(".", "/")
        own, is_folder = words[words.index("-m") + 2:], (ROOT / script).is_dir()
        script = f"{script}/__main__.py" if is_folder else f"{script}.py"
    else:
        script = next(word for word in words if word.endswith(".py"))
        own = words[words.index(script) + 1:]
    text = (ROOT / script).read_text()
    for word in own:
        if word.startswith("--"):
            name = word.split("=")[0]
            declared = f"    {name[2:].replace('-', '_')}: "  # in a dataclass of settings
            assert name in FLAGS or declared in text or f'"{name}"' in text, (command, word)
    if own and own[0].isalpha():  # a subcommand
        assert f'"{own[0]}"' in text, command


def test_the_map_of_the_playbook_names_what_exists():
    assert len(MAP) > 45
    for section, where, commands in MAP:
        parts = re.findall(r"\[([\w./\\]+)\]\(\.\./([\w./]+)\)((?: `\w+`)+)", where)
        assert parts, section
        for shown, file, names in parts:
            defined = pages.definitions(file).keys()
            assert shown.replace("\\", "") == file and set(re.findall(r"`(\w+)`", names)) <= defined, section
        assert any(command in commands for command in COMMANDS), section
    for command in COMMANDS:
        check_command(command)


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in DEMOS])
def test_commands_of_the_map_show_something(command, tmp_path):
    """In a copy of the checkout: some write pictures and traces. Of demos test_pages.py says more."""
    shutil.copytree(ROOT, tmp_path / "here", ignore=shutil.ignore_patterns(".git", "__pycache__", "test_*.py"))
    done = subprocess.run(shlex.split(command), cwd=tmp_path / "here", capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 40 or "written" in done.stdout


def test_commands_and_links_of_the_pages_exist():
    for page in "README.md", "CONTRIBUTING.md", "docs/PLAYBOOK.md", "docs/RUNNING.md":
        text = (ROOT / page).read_text()
        for block in re.findall(r"```\n(.*?)```", text, re.DOTALL):
            for line in block.splitlines():
                if re.match(r"(python|torchrun) ", line) and " -c " not in line:
                    check_command(line)
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            assert link.startswith("https://") or (ROOT / page).parent.joinpath(link).exists(), (page, link)


def test_git_ignores_what_documented_commands_write(tmp_path):
    """By their flags, and by default. In a repository of its own: ours may be a download without one."""
    docs = [(ROOT / page).read_text() for page in ("README.md", "docs/PLAYBOOK.md", "docs/RUNNING.md")]
    docs += [ast.get_docstring(ast.parse((ROOT / file).read_text())) for file in pages.files()]
    docs += [ast.get_docstring(ast.parse(path.read_text())) or "" for path in (ROOT / "bench").glob("*.py")]
    written = {path for text in docs for path in re.findall(
        r"--(?:out|checkpoint-dir|metrics|tensorboard|profile|export-hf|memory-snapshot|svg) ([\w./-]+)", text)}
    written = {path for path in written if not path.startswith("/") and not path.isupper()} - {"docs/pictures"}
    written |= {str(Path(folder).relative_to(ROOT)) for folder in (pictures.FOLDER, puzzles.HOME)}
    assert written >= {"traces", "runs/a", "cluster.json", "pages", "pictures"}
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    shutil.copy(ROOT / ".gitignore", tmp_path)
    inside = [path if Path(path).suffix else f"{path}/file" for path in sorted(written)]
    ignored = subprocess.run(["git", "check-ignore", *inside], cwd=tmp_path, capture_output=True, text=True)
    assert ignored.stdout.split() == inside
    tracked = subprocess.run(["git", "check-ignore", "docs/pictures/new.svg"], cwd=tmp_path)
    assert tracked.returncode == 1  # which is to be committed


def test_the_numbers_of_the_readme_are_those_of_the_program():
    runs = re.findall(r"\| `(--preset .*)` \| (\d+) GB \| ([\d.]+) s \| (\d+)% \|", README)
    assert len(runs) == 2
    for flags, *printed in runs:
        run = step_time.run_of(dict(machine="h100", gpus=8) | config.read(shlex.split(flags)))
        found = step_time.predict(run)
        seconds = step_time.step_seconds(run).seconds
        assert printed == [f"{found.memory_gb:.0f}", f"{seconds:.1f}", f"{100 * found.mfu:.0f}"]


def test_the_optimizer_that_the_readme_adds_is_lion():
    """By these numbers. tests/test_recipes.py trains with it."""
    moments, code = re.search("put `(.*?)` into `OPTIMIZERS`.*?```python\n(.*?)```", README, re.DOTALL).groups()
    rules = dict(optimizers.UPDATE_RULES)
    exec(code, dict(vars(optimizers), UPDATE_RULES=rules, OPTIMIZERS=eval(f"{{{moments}}}")))
    weight, mean, grad = torch.tensor([1.0, 1.0]), torch.tensor([0.0, 4.0]), torch.tensor([4.0, -4.0])
    settings = dict(lr=0.1, betas=(0.9, 0.5), weight_decay=0.5, steps=None, eps=1e-8, grad_scale=torch.tensor(2.0))
    rules["lion"].apply([weight], [grad], [mean], found_inf=torch.tensor(1.0), **settings)
    assert weight.tolist() == [1, 1] and mean.tolist() == [0, 4]
    rules["lion"].apply([weight], [grad], [mean], found_inf=torch.tensor(0.0), **settings)
    assert weight.tolist() == pytest.approx([0.85, 0.85]) and mean.tolist() == [1, 1]  # signs of 0.2 and of 3.4
