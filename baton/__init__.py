"""Baton: language models trained as a Kubeflow pipeline, in chunks that end on the same bits.

Names for programs and notebooks, each imported at its first use: docs/reference/python.md.
"""

TYPE_CHECKING = False  # nothing is imported here before a stage asks the disk for its files, not even `__future__`
if TYPE_CHECKING:
    from typing import Any

    from baton.api import Checkpoints as Checkpoints
    from baton.api import Compiled as Compiled
    from baton.api import LocalRun as LocalRun
    from baton.api import Report as Report
    from baton.api import checkpoints as checkpoints
    from baton.api import compile as compile
    from baton.api import load as load
    from baton.api import report as report
    from baton.api import result as result
    from baton.api import run as run
    from baton.api import submit as submit
    from baton.checkpoint.store import Checkpoint as Checkpoint
    from baton.errors import BatonError as BatonError
    from baton.errors import UserError as UserError
    from baton.kubeflow.submit import Submission as Submission
    from baton.local.results import Result as Result
    from baton.recipe.recipe import Recipe as Recipe
    from baton.source.prepare import LoadedRecipe as LoadedRecipe
    from baton.train.attach import Chunk as Chunk
    from baton.train.attach import attach as attach
    from baton.train.chunk import Ending as Ending
    from baton.train.chunk import Outcome as Outcome

_PLACES = {
    "BatonError": "errors",
    "Checkpoint": "checkpoint.store",
    "Checkpoints": "api",
    "Chunk": "train.attach",
    "Compiled": "api",
    "Ending": "train.chunk",
    "LoadedRecipe": "source.prepare",
    "LocalRun": "api",
    "Outcome": "train.chunk",
    "Recipe": "recipe.recipe",
    "Report": "api",
    "Result": "local.results",
    "Submission": "kubeflow.submit",
    "UserError": "errors",
    "attach": "train.attach",
    "checkpoints": "api",
    "compile": "api",
    "load": "api",
    "report": "api",
    "result": "api",
    "run": "api",
    "submit": "api",
}
"""Name → the module below this package that has it."""


def __getattr__(name: str) -> "Any":
    if name not in _PLACES:
        raise AttributeError(f"module 'baton' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"baton.{_PLACES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
