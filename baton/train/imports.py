"""Imports the training stack, and defers what libraries import beside it; what stands for it is written here.

Read in torch 2.13, transformers 5.23, accelerate 1.15, peft 0.21 and TRL 1.16; in other releases a name that is not
known here loads its package, which takes time and changes nothing.

torch asks whether numbers are symbols wherever it makes a tensor without memory, as all weights of a model are before
they are read from its files; here the answer for plain numbers loads nothing. Most chunks never load torch's compiler:
what it is told before is kept, and told once it is loaded.
"""

from __future__ import annotations

import functools
import gc
import importlib
import operator
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from baton.recipe.recipe import Recipe
from baton.train import lazy_imports, methods
from baton.train.lazy_imports import LazySpec

SYMBOLS = "torch.fx.experimental.symbolic_shapes"
Function = Callable[..., Any]


def _asking(name: str, is_plain: Callable[[Any], bool], answer: Function) -> Function:
    """Returns what stands for a function of `symbolic_shapes`, and answers where `is_plain` holds for all arguments."""

    def ask(*values: Any) -> Any:
        if all(map(is_plain, values)):
            return answer(*values)
        package: Any = importlib.import_module(SYMBOLS)
        assert package.ShapeEnv  # which nothing is told of: so it is loaded
        return getattr(package, name)(*values)

    return ask


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _is_number(value: Any) -> bool:
    return type(value) in (bool, int)


def _is_shape(value: Any) -> bool:
    return type(value) is tuple and all(map(_is_number, value))


SYMBOL_QUESTIONS: dict[str, tuple[Callable[[Any], bool], Function]] = {
    "expect_true": (_is_bool, lambda value: value),
    "guard_or_false": (_is_bool, lambda value: value),
    "guard_or_true": (_is_bool, lambda value: value),
    "guard_size_oblivious": (_is_bool, lambda value: value),
    "guarding_hint_or_throw": (_is_number, lambda value: value),
    "has_guarding_hint": (_is_number, lambda _: True),
    "is_nested_int": (_is_number, lambda _: False),
    "statically_known_true": (_is_bool, lambda value: value),
    "sym_and": (_is_bool, lambda *values: all(values)),
    "sym_eq": (_is_shape, operator.eq),
    "sym_or": (_is_bool, lambda *values: any(values)),
}
"""Of each function of `symbolic_shapes`: what it can be told without symbols, and what it returns then."""
SYMBOLS_SPEC = LazySpec(values={name: _asking(name, *question) for name, question in SYMBOL_QUESTIONS.items()})


DYNAMO = "torch._dynamo"
_marked: list[tuple[str, Function]] = []
"""What the compiler is told before it is loaded, which most chunks never do."""


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
        if lazy_imports.is_waiting(DYNAMO):
            return function(*args, **kwargs)
        if disabled is None:
            import torch._dynamo

            disabled = torch._dynamo.disable(function, recursive, **options)  # type: ignore[no-untyped-call]
        return disabled(*args, **kwargs)

    return call


DYNAMO_SPEC = LazySpec(
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
    if DYNAMO in sys.modules and not lazy_imports.is_waiting(DYNAMO):
        torch.use_deterministic_algorithms(deterministic)


_SHARDED = frozenset(
    (
        *("CPUOffloadPolicy", "DTensor", "FSDPModule", "FullyShardedDataParallel", "HuggingFaceStorageReader"),
        *("HuggingFaceStorageWriter", "MixedPrecisionPolicy", "_StridedShard", "distribute_tensor", "fully_shard"),
        "compute_local_shape_and_global_offset",
    )
)
_ADAPTERS = frozenset(
    (
        *("BaseTunerLayer", "LoraConfig", "PeftConfig", "PeftMixedModel", "PeftModel", "PrefixTuningConfig"),
        *("PromptLearningConfig", "get_peft_model"),
    )
)
DEFERRED: lazy_imports.Packages = {
    "boto3": LazySpec(),
    "mlflow": LazySpec(),
    "peft": LazySpec(_ADAPTERS),
    "scipy": LazySpec(frozenset({"linear_sum_assignment"})),
    "sklearn": LazySpec(frozenset({"roc_curve"})),
    "wandb": LazySpec(values={"run": None}),
}
"""Packages that libraries import and a chunk may never use."""
UNTRACED: lazy_imports.Packages = {
    DYNAMO: DYNAMO_SPEC,
    SYMBOLS: SYMBOLS_SPEC,
    "sympy": LazySpec(frozenset({"Basic"})),
    "torch.distributed._composable": LazySpec(_SHARDED),
    "torch.distributed.checkpoint": LazySpec(_SHARDED),
    "torch.distributed.fsdp": LazySpec(_SHARDED),
    "torch.distributed.tensor": LazySpec(_SHARDED, made=frozenset({"Partial", "Replicate", "Shard"})),
}
"""Those whose names the compiler would find in what it traces."""


def import_training_stack(recipe: Recipe) -> ModuleType:
    """Returns the module of a recipe's method, imported with all that it trains with."""
    is_compiled = recipe.training.compile or recipe.training.compile_optimizer
    lazy_imports.defer(DEFERRED if is_compiled else {**DEFERRED, **UNTRACED})
    # No search for garbage meanwhile: what modules define stays, and would be gone through a hundred times.
    collects = gc.isenabled()
    gc.disable()
    try:
        with lazy_imports.looked_up_once():
            return methods.load(recipe.training.method)
    finally:
        if collects:
            gc.enable()
