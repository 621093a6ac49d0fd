"""Bugs planted on purpose: each must make the test named beside it fail. `pytest -m mutants` prints how many do.

data/planted.toml has them. A mutant replaces one passage of code, found by file, function and tokens
(help/passages.py). The test runs on a copy of the project. Each is a way in which parallel training has silently gone
wrong somewhere.
"""
import io
import os
import tokenize

import passages
import planted
import pytest

each_mutant = pytest.mark.parametrize("mutant", planted.BUGS, ids=[mutant.name for mutant in planted.BUGS])


@each_mutant
def test_a_mutant_still_has_its_passage_and_its_test(mutant):
    source = (planted.ROOT / mutant.file).read_text()
    compile(passages.replace(source, mutant.symbol, mutant.old, mutant.new), mutant.file, "exec")
    file, name = mutant.test.split("::")
    with open(os.path.join(planted.ROOT, file)) as tests:
        assert f"def {name.split('[')[0]}(" in tests.read()


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in planted.BUGS}))
def test_rewording_loses_no_passage(file):
    """Comments go, docstrings become others and longer: every passage of the file is still found."""
    source = (planted.ROOT / file).read_text()
    kept = {token.start for token in passages.code_tokens(source)}
    lines = source.splitlines(keepends=True)
    for token in reversed(list(tokenize.generate_tokens(io.StringIO(source).readline))):
        (first, start), (last, end) = token.start, token.end
        is_docstring = token.type == tokenize.STRING and token.start not in kept
        if token.type == tokenize.COMMENT or is_docstring:
            other = '"""Other words.\n\nMore of them.\n"""' if is_docstring else ""
            lines[first - 1:last] = [lines[first - 1][:start] + other + lines[last - 1][end:]]
    reworded = "".join(lines)
    assert len(reworded) != len(source)
    lost = [mutant.name for mutant in planted.BUGS if mutant.file == file
            and len(passages.find(reworded, mutant.symbol, mutant.old)) != 1]
    assert lost == []


def test_a_passage_is_replaced_at_its_own_indentation():
    source = """
class A:
    def f(self):
        '''x = 1'''
        if self:
            x = [1,  # one
                 2]
            y = 3

    def g(self):
        x = [1, 2]
"""
    assert passages.replace(source, "A.f", "x = [1, 2]\ny = 3", "x = 4\nif x:\n    y = 5") == """
class A:
    def f(self):
        '''x = 1'''
        if self:
            x = 4
            if x:
                y = 5

    def g(self):
        x = [1, 2]
"""
    with pytest.raises(ValueError, match="2 places, not one, in the file"):
        passages.replace(source, "", "x = [1, 2]", "pass")
    with pytest.raises(ValueError, match="0 places, not one, in A.f: x = 1"):
        passages.replace(source, "A.f", "x = 1", "pass")


def test_mutants_are_killed_in_the_default_tier(request):
    """By tests that are there: those of all files that are collected with this one."""
    if request.config.option.keyword or any("::" in argument for argument in request.config.args):
        pytest.skip("not all tests of a file were asked for")
    there = {item.nodeid for item in request.session.items}
    there |= {name.split("[")[0] for name in there}  # a test with all its parameters
    files = {name.split("::")[0] for name in there}
    assert [mutant.name for mutant in planted.BUGS if mutant.test.split("::")[0] in files - {"tests/test_mutants.py"}
            and mutant.test not in there] == []


def test_a_bug_without_its_passage_is_not_one_that_survives(tmp_path):
    bug = planted.BUGS[0]._replace(old="a passage that no file has")
    assert planted.find(tmp_path, bug) == ("no passage", "")


@pytest.mark.mutants
@each_mutant
def test_a_mutant_is_killed(mutant, tmp_path, record_property):
    outcome, printed = planted.find(tmp_path, mutant)
    record_property("outcome", outcome)
    assert outcome in ("failed", "hung"), f"{outcome}: {mutant.test}\n{printed[-2000:]}"
