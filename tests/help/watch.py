"""Watching what torch does: every operation that is dispatched, in order."""
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """Calls see(function, args, kwargs, out) after every operation."""

    def __init__(self, see: Callable[..., Any]):
        super().__init__()
        self.see = see

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        self.see(function, args, kwargs or {}, out)
        return out
