"""What guards code while it is moved and reworded: help/renames.py and help/same_code.py."""
import same_code
from renames import Code, Renames, rewrite_tree

RENAMES = Renames(
    flags={"seq": "seq-len", "tied": "tie"},
    files={"config.py": "core/config.py", "latent.py": "mla.py", "run/sampling.py": "run/generate.py"},
    code=[Code("batch.seq", "batch.seq_len"), Code("lower(", "with_transfers(", "pp.py")])
BEFORE = {
    "config.py": '''"""Settings; latent.py reads them."""
WIDTH = 1
''',
    "latent.py": """
import config
from config import WIDTH


def f(batch):
    return batch.seq + config.WIDTH + WIDTH
""",
    "run/sampling.py": """
import latent
from config import (
    WIDTH,
)

code = f"{latent.f} {latent.f(batch.seq)}"
""",
    "pp.py": """
def f(text):
    from run import data, sampling
    return lower(text.lower()), sampling.code
""",
    "docs/A.md": """
[latent.py](../latent.py), `python -m run.sampling --seq 5 --seq-file x --no-tied`, not a/latent.py
""",
    "tests/data/baseline.json": '{"2 ranks, --seq 22 --tied": 1}',
    "tests/data/planted.toml": """
file = 'run/sampling.py'
old = 'batch.seq'
"""}
AFTER = {
    "core/config.py": '''"""Settings; mla.py reads them."""
WIDTH = 1
''',
    "mla.py": """
from core import config
from core.config import WIDTH


def f(batch):
    return batch.seq_len + config.WIDTH + WIDTH
""",
    "run/generate.py": """
import mla
from core.config import (
    WIDTH,
)

code = f"{mla.f} {mla.f(batch.seq_len)}"
""",
    "pp.py": """
def f(text):
    from run import data, generate
    return with_transfers(text.lower()), generate.code
""",
    "docs/A.md": """
[mla.py](../mla.py), `python -m run.generate --seq-len 5 --seq-file x --no-tie`, not a/latent.py
""",
    "tests/data/baseline.json": '{"2 ranks, --seq-len 22 --tie": 1}',
    "tests/data/planted.toml": """
file = 'run/generate.py'
old = 'batch.seq_len'
"""}


def test_renames_reach_imports_uses_links_commands_and_data():
    assert rewrite_tree(BEFORE, RENAMES) == AFTER


def test_a_move_is_the_same_code_and_nothing_else_is():
    moved = rewrite_tree(BEFORE, RENAMES)
    assert same_code.differences(moved, AFTER, with_text=True) == []
    wrapped = AFTER | {"docs/A.md": AFTER["docs/A.md"].replace(", ", ",\n"),
                       "core/config.py": '"""Other words."""\n# Why.\nWIDTH = 1\n'}
    assert same_code.differences(moved, wrapped, with_text=True) == []
    changed = AFTER | {"mla.py": AFTER["mla.py"].replace("+ WIDTH", "- WIDTH"), "docs/A.md": "Other words.",
                       "tests/data/baseline.json": '{"2 ranks, --seq-len 22 --tie": 2}'}
    assert same_code.differences(moved, changed, with_text=True) == [
        "docs/A.md: has other words", "mla.py: f differs", "tests/data/baseline.json: has other words"]


SOURCE = '''"""What a file is about."""
import b
import a


class A:
    """Of a class."""
    x: int = setting(0, "how many of them", choices=("one two", "three"))

    def f(self, n):
        """Of a method."""
        need(n > 0, f"--n {n}: must be positive")  # a comment
        if n > 9:
            raise ValueError(f"{n}: is too large")
        assert n != 5, "never five of them"
        return rearrange(n, "b s -> s b")
'''


def test_words_may_change():
    other = SOURCE.replace("What a file is about", "Another text").replace("import b\nimport a", "import a\nimport b")
    other = other.replace("how many of them", "the number").replace("# a comment", "# why")
    other = other.replace('f"--n {n}: must be positive"', 'f"{n} is not positive: use --n 1"')
    other = other.replace('f"{n}: is too large"', '"is far too large"').replace('"""Of a method."""', "")
    other = other.replace("never five of them", "not five please")
    assert other != SOURCE and same_code.differences({"a.py": SOURCE}, {"a.py": other}) == []


def test_code_may_not_change():
    for old, new, where in (
            ("n > 9", "n > 8", "A.f differs"), ("b s -> s b", "b s -> b s", "A.f differs"),
            ("setting(0", "setting(1", "A differs"), ("class A:", "class A(B):", "A differs"),
            ("import a", "import c", "imports differs"), ("need(n > 0", "need(n > 1", "A.f differs"),
            ("raise ValueError", "raise TypeError", "A.f differs"), ("x: int", "y: int", "A differs")):
        assert old in SOURCE
        found = same_code.differences({"a.py": SOURCE}, {"a.py": SOURCE.replace(old, new)})
        assert found == [f"a.py: {where}"]
