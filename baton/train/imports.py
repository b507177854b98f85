"""Imports the training stack, and defers packages that libraries import with it; stand-ins are defined here.

Derived from torch 2.13, transformers 5.23, accelerate 1.15, peft 0.21 and TRL 1.16. In other releases a name unknown
here loads its package, which takes time and changes nothing.

torch checks for symbolic numbers wherever it makes a tensor without memory, such as a model's weights before they are
read; for plain numbers the stand-in answers without loading anything. Most chunks never load torch's compiler: calls
that register functions with it are kept, and replayed once it is loaded.
"""

import functools
import gc
import importlib
import operator
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from baton.recipe import extras
from baton.recipe.recipe import Recipe
from baton.train import lazy_imports, methods
from baton.train.lazy_imports import LazySpec

SYMBOLS = "torch.fx.experimental.symbolic_shapes"
Function = Callable[..., Any]


def _asking(name: str, is_plain: Callable[[Any], bool], answer: Function) -> Function:
    """Returns a stand-in for a function of `symbolic_shapes` that answers if `is_plain` holds for all arguments."""

    def ask(*values: Any) -> Any:
        if all(map(is_plain, values)):
            return answer(*values)
        package: Any = importlib.import_module(SYMBOLS)
        assert package.ShapeEnv  # has no stand-in: the access loads the package
        return getattr(package, name)(*values)

    return ask


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _is_number(value: Any) -> bool:
    return type(value) in (bool, int)


def _is_shape(value: Any) -> bool:
    return type(value) is tuple and all(map(_is_number, value))


# Functions of `symbolic_shapes`: test for arguments without symbols, and the result for them.
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
SYMBOLS_SPEC = LazySpec(values={name: _asking(name, *question) for name, question in SYMBOL_QUESTIONS.items()})


DYNAMO = "torch._dynamo"
_marked: list[tuple[str, Function]] = []  # functions to register with the compiler once it is loaded


def _marking(name: str) -> Function:
    """Returns a stand-in for a decorator that registers a function with the compiler and returns it unchanged."""

    def mark(function: Function) -> Function:
        _marked.append((name, function))
        return function

    return mark


def _tell(dynamo: ModuleType) -> None:
    for name, function in _marked:
        getattr(dynamo, name)(function)
    _marked.clear()
    import torch

    # `use_deterministic` has set this without telling the compiler: tell it now.

    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=warn_only)


def _disable(function: Function | None = None, recursive: bool = True, **options: Any) -> Function:
    """Replaces `torch._dynamo.disable`: nothing is compiled before the compiler is loaded."""
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
        "error_on_nested_fx_trace": True,  # a setting, which gradient checkpointing passes through
        "graph_break": lambda msg="": None,
    },
    loaded=_tell,
)


def use_deterministic(deterministic: bool) -> None:
    """Does what `torch.use_deterministic_algorithms` does, which would load the compiler only to tell it."""
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
# Packages that libraries import, and that a chunk may never use.
DEFERRED: lazy_imports.Packages = {
    "bitsandbytes": LazySpec(frozenset({"Linear4bit", "Linear8bitLt"}), modules=frozenset({"nn"})),
    "boto3": LazySpec(),
    "mlflow": LazySpec(),
    "peft": LazySpec(_ADAPTERS),
    "scipy": LazySpec(frozenset({"linear_sum_assignment"})),
    "sklearn": LazySpec(frozenset({"roc_curve"})),
    "wandb": LazySpec(values={"run": None}),
}
# Packages that must be real in a compiled run: the compiler would meet their stand-ins in the code that it traces.
UNTRACED: lazy_imports.Packages = {
    DYNAMO: DYNAMO_SPEC,
    SYMBOLS: SYMBOLS_SPEC,
    "sympy": LazySpec(frozenset({"Basic"})),
    "torch.distributed._composable": LazySpec(_SHARDED),
    "torch.distributed.checkpoint": LazySpec(_SHARDED),
    "torch.distributed.fsdp": LazySpec(_SHARDED),
    "torch.distributed.tensor": LazySpec(_SHARDED, made=frozenset({"Partial", "Replicate", "Shard"})),
}


def import_training_stack(recipe: Recipe) -> ModuleType:
    """Imports the training stack, and returns the module of a recipe's method."""
    extras.require_bitsandbytes(recipe)
    is_compiled = recipe.training.compile or recipe.training.compile_optimizer
    lazy_imports.defer(DEFERRED if is_compiled else {**DEFERRED, **UNTRACED})
    # No garbage collection meanwhile: it would go a hundred times through modules' objects, which all stay.
    collects = gc.isenabled()
    gc.disable()
    try:
        with lazy_imports.looked_up_once():
            return methods.load(recipe.training.method)
    finally:
        if collects:
            gc.enable()
