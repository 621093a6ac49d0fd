"""What is here is to be read, looked at and tried: `python -m learn.FILE --help` says what each file is about."""
import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """--help prints the description as it is written; a mistake is one line, without the usage, and exit code 2."""

    def __init__(self, module: str, description: str):
        super().__init__(f"python -m {module}", description=description,
                         formatter_class=argparse.RawDescriptionHelpFormatter)
        self.module = module

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.module}: {message}\n")
