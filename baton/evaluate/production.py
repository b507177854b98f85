"""The model now in use: where it is, and in what it can be compared."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.errors import UserError
from baton.models import loading, user_code
from baton.recipe.evaluation import REGISTERED
from baton.recipe.recipe import Recipe
from baton.recipe.search import ACCEPTED
from baton.runs import lineage
from baton.runs.outcomes import RetrainNote
from baton.runs.run import Run
from baton.tracking import servers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SETTING = "evaluation.production"
ABSENT = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
"""Codes with which MLflow says that there is no such model, or no such alias."""

WRITERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
SCORERS = ("ForSequenceClassification",)
"""What the classes of models that write, and of those that score, end on."""


@dataclass(frozen=True)
class Production:
    """The model now in use.

    Attributes:
        folder: Its files; None where there is none yet.
        words: What it is, or why there is none.
    """

    folder: str | None
    words: str


def find(run: Run, recipe: Recipe, scratch: str) -> Production | None:
    """Returns the model that `evaluation.production` stands for, None where nothing is said of one.

    Raises:
        UserError: it is gone, or is another kind of model than the run trains.
    """
    reference = recipe.evaluation.production
    if reference is None:
        return None
    if reference == ACCEPTED:
        production = _accepted(run, recipe)
    elif reference.startswith("models:"):
        production = _registered(run, recipe, reference, scratch)
    else:
        production = Production(loading.local_model(reference), reference)
    if production.folder:
        _check(production.folder, reference, recipe)
    return production


def load(folder: str, recipe: Recipe) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a model as the recipe's own are, with its tokenizer; an adapter is put on its base.

    Raises:
        UserError: it cannot be loaded, or nobody has consented to code that comes with it.
    """
    user_code.trusted_model(recipe, SETTING, folder)
    try:
        tokenizer = loading.load_tokenizer(
            _holding(folder, "tokenizer_config.json") or folder, trust_remote_code=recipe.model.trust_remote_code
        )
        if whole := _holding(folder, "config.json"):
            return loading.load_model(whole, recipe), tokenizer
        adapter = _holding(folder, "adapter_config.json") or folder
        named = loading.local_model(_read(adapter, "adapter_config.json")["base_model_name_or_path"])
        base = user_code.trusted_model(recipe, SETTING, named)
        return loading.adapted(loading.load_model(base, recipe), adapter, tokenizer), tokenizer
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(
            f"evaluation.production {recipe.evaluation.production!r} cannot be loaded: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}",
            remedy="Name a model in Hugging Face format, of the kind that the run trains.",
        ) from None


def same_tokens(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Tells whether two tokenizers have the same vocabulary, so that losses per token can be compared."""
    return bool(one.get_vocab() == other.get_vocab())


def _accepted(run: Run, recipe: Recipe) -> Production:
    note = run.read(RetrainNote)
    name = note.model if note else recipe.name  # a phase has its own name
    in_use = lineage.newest_accepted(run.storage, name)
    if in_use.model_uri is None:
        return Production(None, f"{ACCEPTED}: there is none yet")
    return Production(loading.local_model(in_use.model_uri), f"{ACCEPTED}, model {in_use.number} of {name}")


def _registered(run: Run, recipe: Recipe, reference: str, scratch: str) -> Production:
    match = REGISTERED.fullmatch(reference)
    if match is None:
        raise UserError(f"evaluation.production {reference!r} is not of the form models:/NAME@ALIAS.")
    uri = servers.server_address(run, recipe)
    if uri is None:
        raise UserError(
            f"evaluation.production {reference!r} is in MLflow's registry, and the run has no MLflow.",
            remedy="Set tracking.mlflow, or name a folder, s3://… or a hub id.",
        )
    import mlflow
    from mlflow.exceptions import MlflowException

    mlflow.set_tracking_uri(uri)
    name, alias, version = match["name"], match["alias"], match["version"]
    try:
        if alias:
            version = str(mlflow.MlflowClient(uri).get_model_version_by_alias(name, alias).version)
        folder = os.path.join(scratch, "production")
        os.makedirs(folder, exist_ok=True)
        folder = mlflow.artifacts.download_artifacts(
            artifact_uri=f"models:/{name}/{version}", dst_path=folder, tracking_uri=uri
        )
    except (MlflowException, ImportError, OSError) as error:
        # The alias was asked for and is not there. A version that is known and cannot be had is an error.
        if version is None and getattr(error, "error_code", None) in ABSENT:
            return Production(None, f"{reference}: there is none yet")
        raise UserError(
            f"evaluation.production {reference!r} cannot be had from {uri}: {' '.join(str(error).split())[:300]}",
            remedy="Check the name and the tracking server.",
        ) from None
    return Production(folder, f"{reference}, version {version}" if alias else reference)


def _check(folder: str, reference: str, recipe: Recipe) -> None:
    """Raises an error for a model that does something else than the run's."""
    where = _holding(folder, "config.json")
    if where is None:
        if _holding(folder, "adapter_config.json"):
            return
        raise UserError(
            f"evaluation.production {reference!r} holds no config.json.", remedy="Name a model in Hugging Face format."
        )
    kinds = _read(where, "config.json").get("architectures") or []
    wanted = SCORERS if recipe.training.spec.scores else WRITERS
    if kinds and not any(kind.endswith(wanted) for kind in kinds):
        raise UserError(
            f"evaluation.production {reference!r} is a {', '.join(kinds)}; "
            f"expected …{wanted[0]}, as the run trains one.",
            remedy="Name a model of the same kind.",
        )


def _holding(folder: str, name: str) -> str | None:
    """Returns the folder nearest to the top that has a file: MLflow keeps model and tokenizer apart."""
    holding = [parent for parent, _, names in os.walk(folder) if name in names]
    return min(holding, key=lambda parent: (parent.count(os.sep), parent), default=None)


def _read(folder: str, name: str) -> dict[str, Any]:
    with open(os.path.join(folder, name), encoding="utf-8") as file:
        document: dict[str, Any] = json.load(file)
    return document
