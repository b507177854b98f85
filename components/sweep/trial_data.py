"""The data of a sweep's trials: split and tokenized once for all that have the same."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from baton.components.shared.core.document import Json
from baton.components.shared.forks import forking
from baton.components.shared.pages import quality_checks
from baton.components.shared.recipe import Recipe, recipe_file
from baton.components.shared.runs.documents.data import OwnCode, PinnedModels, RunHead, SplitData
from baton.components.shared.runs.formats import Made
from baton.components.shared.runs.run import Run
from baton.components.shared.sweeps.sweep import Sweep

CARRIED = (*forking.CARRIED, quality_checks.QUALITY)
"""What split and tokenize have found for one run, and holds for every trial on the same data."""

DECIDING = (SplitData.NAME, PinnedModels.NAME, OwnCode.NAME)
"""Those of them by which a run's checkpoints know each other."""


def preparation_name(sweep: Sweep, recipe: Recipe) -> str:
    """Returns the name of the run that a trial's data is split and tokenized in: the same for the same data."""
    document = recipe.model_dump(mode="json")
    del document["model"]["from_scratch"], document["data"]["workers"], document["data"]["shards"]
    if recipe.data.csv is None:  # preparations of before it was a setting are the same ones
        del document["data"]["csv"]
    decides = [recipe.seed, document["model"], document["data"], recipe.training.method, recipe.hooks.source]
    if recipe.training.second_model:  # its digest is found with the data
        decides.append(recipe.training.second_model[1].model_dump(mode="json"))
    digest = hashlib.sha256(json.dumps([*decides, recipe.needs_all_rows is None], sort_keys=True).encode()).hexdigest()
    return f"{sweep.name}-data-{digest[:8]}"


def preparing(recipe: Recipe, own: Recipe) -> Recipe:
    """Returns the recipe by which a trial's data is made, in a run that trains nothing and is not tracked."""
    document = own.model_dump(mode="json")
    document["training"] |= {name: getattr(recipe.training, name) for name in ("learning_rate", "epochs", "max_steps")}
    document["tracking"]["mlflow"] = None
    return recipe_file.validate(document, origin=recipe.name)


@dataclass(frozen=True)
class Prepared:
    """Data that was made for trials.

    Attributes:
        rows: Training sequences.
        documents: What its stages have found, by name of the document.
        made: What it was made with.
    """

    rows: int
    documents: dict[str, Json]
    made: Made


def prepared(sweep: Sweep, name: str) -> Prepared:
    """Returns the data that was made in a run."""
    run = Run(sweep.storage, name)
    documents = {document: run.get(document) for document in CARRIED}
    there = {document: content for document, content in documents.items() if content is not None}
    return Prepared(run.plan().rows, there, run.need(RunHead).made)
