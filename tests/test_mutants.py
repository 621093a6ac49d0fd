"""Bugs planted on purpose: each must make the test named beside it fail. `pytest -m mutants` prints how many do.

data/planted.toml has them. A mutant is one passage of a source file, replaced; the test runs on a copy of the project.
Each is a way in which parallel training has silently gone wrong somewhere.
"""
import os

import planted
import pytest

each_mutant = pytest.mark.parametrize("mutant", planted.BUGS, ids=[mutant.name for mutant in planted.BUGS])


@each_mutant
def test_a_mutant_still_has_its_passage_and_its_test(mutant):
    with open(os.path.join(planted.ROOT, mutant.file)) as file:
        assert file.read().count(mutant.old) == 1
    file, name = mutant.test.split("::")
    with open(os.path.join(planted.ROOT, file)) as tests:
        assert f"def {name.split('[')[0]}(" in tests.read()


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
