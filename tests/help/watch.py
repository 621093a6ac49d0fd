"""Watch every operation that torch dispatches, calls of chosen functions in order, and changes of
files."""
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from core import collectives

READS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # tags of operations
INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default}


class Watch(TorchDispatchMode):
    """Call see(function, args, kwargs, out) after every operation."""

    def __init__(self, see: Callable[..., Any]):
        super().__init__()
        self.see = see

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        self.see(function, args, kwargs or {}, out)
        return out


def reads_values(function: Any, args: tuple) -> bool:
    """Return whether the host would wait for a GPU's values, to count them or to return one."""
    if function not in INDEXING:
        return bool(READS_VALUES & set(function.tags))
    is_fill = len(args) == 3 and args[2].numel() == 1  # x[mask] = number, for which torch counts nothing
    return not is_fill and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])


def noted(events: list, function: Callable, name: Any) -> Callable:
    """Return the function, wrapped so that each call first adds its name to the events.

    name: the name, or a function of the same arguments that returns it, or None for a call that is
    not of interest.
    """
    def call(*args, **how):
        event = name(*args, **how) if callable(name) else name
        if event is not None:
            events.append(event)
        return function(*args, **how)
    return call


@contextmanager
def in_order(*calls: tuple[Any, str, Any]) -> Iterator[list]:
    """Yield the events of the body: the name of every call of owner.attribute, in order.

    calls: (owner, attribute, the name for `noted`).
    """
    events = []
    with ExitStack() as patches:
        for owner, attribute, name in calls:
            replacement = noted(events, getattr(owner, attribute), name)
            patches.enter_context(patch.object(owner, attribute, replacement))
        yield events


def waits(name: str) -> tuple:
    """Return an argument of `in_order` that notes waits for collectives in flight."""
    return collectives.Pending, "wait", lambda pending: name if pending.works else None


class Killed(BaseException):
    """What `killed` raises where a kill would end the process."""


class Changes:
    """A hook for Python's events that counts the changes of files in a folder. Such a hook cannot
    be removed."""

    def __init__(self):
        self.folder, self.left = "", 0  # "": count nothing; how many more changes are allowed
        sys.addaudithook(self.see)

    def see(self, event: str, arguments: tuple) -> None:
        opens = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if not self.folder or not (opens or event in ("os.rename", "os.remove")):
            return
        if not str(arguments[0]).startswith(self.folder):
            return
        self.left -= 1
        if self.left < 0:
            self.folder = ""
            if opens:
                open(arguments[0], "wb").close()
            raise Killed


@cache
def changes() -> Changes:
    return Changes()


def is_killed(work: Callable[[], Any], folder: Path, after: int) -> bool:
    """Do the work until it has changed files in the folder `after` times, as if the process were
    then killed.

    Return whether it was killed. A file that it has just opened to write is then empty.
    """
    seen = changes()
    seen.folder, seen.left = str(folder), after
    try:
        work()
    except Killed:
        return True
    finally:
        seen.folder = ""
    return False
