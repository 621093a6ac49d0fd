import json
import sys
from dataclasses import dataclass

from core import config
from core.config import need, setting
from plan.step_time import HELD_OUT

from . import __doc__ as DOC
from . import fit, runs


@dataclass
class Flags:
    rounds: int = setting(fit.ROUNDS, "fit: rounds")
    tables: str = setting(str(runs.FOLDER), "check: a folder of published runs")


def write_held_out() -> None:
    """plan/held_out.json, a line for each kind."""
    left_out = runs.read_left_out()
    made = runs.held_out(runs.predict(row, left_out) for row in runs.rows())
    lines = [f"{json.dumps(kind)}: {json.dumps(errors)}" for kind, errors in made["steps"].items()]
    HELD_OUT.write_text('{"steps": {\n' + ",\n".join(lines) + '},\n"memory": ' + json.dumps(made["memory"]) + "}\n")
    print(f"written: {HELD_OUT}")


def main(arguments: list[str]) -> None:
    if not arguments or {"-h", "--help"} & set(arguments):
        return print(DOC)
    asked, rest = config.read_known(Flags, config.expand(arguments), "python -m tests.published check|fit")
    need(rest in (["check"], ["fit"]), f"{' '.join(rest)}: use check or fit")
    if rest == ["check"]:
        return runs.print_check(asked.tables)
    fit.write(asked.rounds)
    write_held_out()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        print(f"published: {error}", file=sys.stderr)
        sys.exit(2)
