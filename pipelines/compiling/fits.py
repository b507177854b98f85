"""Whether the workflow of a compiled recipe fits Kubeflow, and what is to be said about it before it runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import yaml

from baton.components.shared.core import machine
from baton.components.shared.core.errors import UserError
from baton.components.shared.recipe import Recipe
from baton.components.shared.sweeps.rungs import brackets
from baton.pipelines.compiling.package import Pipeline

if TYPE_CHECKING:
    from baton.pipelines.compiling.workflow_size import WorkflowSize

LIMIT = "BATON_WORKFLOW_BYTES"
"""Environment variable: bytes that the cluster takes for one workflow, more where Argo keeps states in a database."""


def check_fits(path: str, recipe: Recipe, pipeline: Pipeline = Pipeline.finetune) -> WorkflowSize:
    """Returns how large the workflow of a compiled recipe grows.

    Args:
        path: The file that it was compiled to.
        recipe: The recipe.
        pipeline: The kind of pipeline.

    Raises:
        UserError: the workflow would outgrow Kubernetes before its last stage ends.
    """
    from baton.pipelines.compiling import conformance
    from baton.pipelines.compiling.workflow_size import predict

    with open(path, "rb") as file:
        documents = list(yaml.load_all(file, conformance.LOADER))
    size = predict(documents, _iterations(recipe) if pipeline is Pipeline.sweep else None)
    size = replace(size, limit=int(machine.number_of(LIMIT, size.limit)))
    if not size.ends:
        remedy = "Use fewer, longer chunks (chunks.count); chunks.checkpoint_every saves in between."
        if pipeline is Pipeline.sweep:
            remedy = "Lower the number of trials or chunks, or raise eta; `baton sweep run` has no limit."
        raise UserError(
            f"at least {size.pods} stages do not fit one workflow: their states would take "
            f"{_kb(size.spec + size.compressed)} compressed, Kubernetes takes {_kb(size.limit)}, and the run "
            f"would fail at about stage {size.possible_stages}.",
            remedy=remedy,
        )
    return size


def frozen_note(size: WorkflowSize) -> str:
    """Returns from where on Kubeflow's API will not tell how the stages are, empty where it always does."""
    if size.readable:
        return ""
    return (
        f"Kubeflow's API shows stages only until about {size.readable_stages} of {size.pods} have ended: then the "
        "workflow is too large for it. The run goes on, and `baton status` asks the store."
    )


def _iterations(recipe: Recipe) -> dict[str, int]:
    """Returns how many trials run in each loop of a sweep, by the loop's name."""
    loops = {"data": 1}
    for bracket in brackets(recipe):
        trials = bracket.trials
        for rung in bracket.rungs:
            loops[f"rung {rung.number}"], trials = trials, rung.keep
    return loops


def _kb(size: int) -> str:
    return f"{size / 1000:,.0f} kB"
