"""Baton: language models trained as a Kubeflow pipeline, in chunks that end on the same bits.

What a program or a notebook calls is here by name, and imported when it is first used; docs/python.md shows it.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own would have to be imported, before a stage asks the disk for what it reads
if TYPE_CHECKING:
    from typing import Any

    from baton.components.shared.checkpoints.store import Checkpoint as Checkpoint
    from baton.components.shared.core.errors import BatonError as BatonError
    from baton.components.shared.core.errors import UserError as UserError
    from baton.components.shared.recipe import Recipe as Recipe
    from baton.components.train_chunk.attached.attach import attach as attach
    from baton.components.train_chunk.attached.chunk import Chunk as Chunk
    from baton.components.train_chunk.outcome import Ending as Ending
    from baton.components.train_chunk.outcome import Outcome as Outcome
    from baton.pipelines.api.checkpoints import Checkpoints as Checkpoints
    from baton.pipelines.api.checkpoints import checkpoints as checkpoints
    from baton.pipelines.api.cluster import Compiled as Compiled
    from baton.pipelines.api.cluster import compile as compile
    from baton.pipelines.api.cluster import submit as submit
    from baton.pipelines.api.recipes import LoadedRecipe as LoadedRecipe
    from baton.pipelines.api.recipes import load as load
    from baton.pipelines.api.running import LocalRun as LocalRun
    from baton.pipelines.api.running import Report as Report
    from baton.pipelines.api.running import report as report
    from baton.pipelines.api.running import result as result
    from baton.pipelines.api.running import run as run
    from baton.pipelines.kubeflow.submit import Submission as Submission
    from baton.pipelines.local.results import Result as Result

_PLACES = {
    "BatonError": "components.shared.core.errors",
    "Checkpoint": "components.shared.checkpoints.store",
    "Checkpoints": "pipelines.api.checkpoints",
    "Chunk": "components.train_chunk.attached.chunk",
    "Compiled": "pipelines.api.cluster",
    "Ending": "components.train_chunk.outcome",
    "LoadedRecipe": "pipelines.api.recipes",
    "LocalRun": "pipelines.api.running",
    "Outcome": "components.train_chunk.outcome",
    "Recipe": "components.shared.recipe",
    "Report": "pipelines.api.running",
    "Result": "pipelines.local.results",
    "Submission": "pipelines.kubeflow.submit",
    "UserError": "components.shared.core.errors",
    "attach": "components.train_chunk.attached.attach",
    "checkpoints": "pipelines.api.checkpoints",
    "compile": "pipelines.api.cluster",
    "load": "pipelines.api.recipes",
    "report": "pipelines.api.running",
    "result": "pipelines.api.running",
    "run": "pipelines.api.running",
    "submit": "pipelines.api.cluster",
}
"""Name → the module below this package that has it."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'baton' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"baton.{_PLACES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
