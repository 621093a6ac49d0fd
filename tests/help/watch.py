"""Watching what torch does: every operation that is dispatched, in order."""
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # tags of operations
INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default}


class Watch(TorchDispatchMode):
    """Calls see(function, args, kwargs, out) after every operation."""

    def __init__(self, see: Callable[..., Any]):
        super().__init__()
        self.see = see

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        self.see(function, args, kwargs or {}, out)
        return out


def reads_values(function: Any, args: tuple) -> bool:
    """Whether a GPU would wait for values, to count them or to return one."""
    if function not in INDEXING:
        return bool(READS_VALUES & set(function.tags))
    is_fill = len(args) == 3 and args[2].numel() == 1  # x[mask] = a number, for which torch counts nothing
    return not is_fill and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
