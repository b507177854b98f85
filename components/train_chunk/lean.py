"""Imports what a chunk trains with, and defers what libraries import beside it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from types import ModuleType

from baton.components.shared.core import deferring, known
from baton.components.shared.core.deferring import Contents
from baton.components.shared.recipe import Recipe
from baton.components.train_chunk import methods, symbols, uncompiled

_SHARDED = frozenset(
    {
        "CPUOffloadPolicy",
        "DTensor",
        "FSDPModule",
        "FullyShardedDataParallel",
        "HuggingFaceStorageReader",
        "HuggingFaceStorageWriter",
        "MixedPrecisionPolicy",
        "_StridedShard",
        "compute_local_shape_and_global_offset",
        "distribute_tensor",
        "fully_shard",
    }
)
_ADAPTERS = frozenset(
    {
        "BaseTunerLayer",
        "LoraConfig",
        "PeftConfig",
        "PeftMixedModel",
        "PeftModel",
        "PrefixTuningConfig",
        "PromptLearningConfig",
        "get_peft_model",
    }
)
DEFERRED: deferring.Packages = {
    "boto3": Contents(),
    "mlflow": Contents(),
    "peft": Contents(_ADAPTERS),
    "scipy": Contents(frozenset({"linear_sum_assignment"})),
    "sklearn": Contents(frozenset({"roc_curve"})),
    "wandb": Contents(values={"run": None}),
}
"""Packages that libraries import and a chunk may never use."""
UNTRACED: deferring.Packages = {
    uncompiled.DYNAMO: uncompiled.CONTENTS,
    symbols.MODULE: symbols.CONTENTS,
    "sympy": Contents(frozenset({"Basic"})),
    "torch.distributed._composable": Contents(_SHARDED),
    "torch.distributed.checkpoint": Contents(_SHARDED),
    "torch.distributed.fsdp": Contents(_SHARDED),
    "torch.distributed.tensor": Contents(_SHARDED, made=frozenset({"Partial", "Replicate", "Shard"})),
}
"""Those whose names the compiler would find in what it traces."""


def load(recipe: Recipe) -> ModuleType:
    """Returns the module of a recipe's method, imported with all that it trains with."""
    is_compiled = recipe.training.compile or recipe.training.compile_optimizer
    deferring.defer(DEFERRED if is_compiled else {**DEFERRED, **UNTRACED})
    with _uncollected(), known.looked_up_once():
        return methods.load(recipe.training.method)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Leaves out the search for garbage: what modules define stays, and would be gone through a hundred times."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
