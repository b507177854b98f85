"""What is said to torch's compiler before it is loaded, which most chunks never do."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from baton.components.shared.core import deferring
from baton.components.shared.core.deferring import Contents

DYNAMO = "torch._dynamo"
Function = Callable[..., Any]
_marked: list[tuple[str, Function]] = []


def _marking(name: str) -> Function:
    """Returns what stands for a decorator that tells the compiler of a function and returns that as it is."""

    def mark(function: Function) -> Function:
        _marked.append((name, function))
        return function

    return mark


def _tell(dynamo: ModuleType) -> None:
    for name, function in _marked:
        getattr(dynamo, name)(function)
    _marked.clear()
    import torch

    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=warn_only)


def _disable(function: Function | None = None, recursive: bool = True, **options: Any) -> Function:
    """Returns what stands for `torch._dynamo.disable`: nothing is compiled before the compiler is loaded."""
    if function is None:
        return functools.partial(_disable, recursive=recursive, **options)
    disabled: Function | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if deferring.is_waiting(DYNAMO):
            return function(*args, **kwargs)
        if disabled is None:
            import torch._dynamo

            disabled = torch._dynamo.disable(function, recursive, **options)  # type: ignore[no-untyped-call]
        return disabled(*args, **kwargs)

    return call


CONTENTS = Contents(
    names=frozenset({"OptimizedModule", "TransformGetItemToIndex"}),
    modules=frozenset({"config", "eval_frame"}),
    values={
        "allow_in_graph": _marking("allow_in_graph"),
        "assume_constant_result": _marking("assume_constant_result"),
        "disable": _disable,
        "error_on_nested_fx_trace": True,  # a setting, which gradient checkpointing hands on
        "graph_break": lambda msg="": None,
    },
    loaded=_tell,
)
"""What is told of the compiler without loading it."""


def use_deterministic(deterministic: bool) -> None:
    """Refuses kernels whose result varies from call to call, or lets them be used again.

    As `torch.use_deterministic_algorithms`, which loads the compiler in order to tell it.
    """
    import torch

    torch.set_deterministic_debug_mode("error" if deterministic else "default")
    if DYNAMO in sys.modules and not deferring.is_waiting(DYNAMO):
        torch.use_deterministic_algorithms(deterministic)
