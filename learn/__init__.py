"""Tutorials, to read and to run. `python -m learn.FILE --help` describes each file."""
import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Print the description unchanged for --help. A mistake gets one line, without the usage, and
    exit code 2."""

    def __init__(self, module: str, description: str):
        super().__init__(f"python -m {module}", description=description,
                         formatter_class=argparse.RawDescriptionHelpFormatter)
        self.module = module

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.module}: {message}\n")
