"""From a recipe file to a recipe that can run: overrides, absolute paths, and checks that need no GPU."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.checkpoint.store import CheckpointStore
from baton.errors import DamagedError, StoreError, UserError
from baton.export import exportable
from baton.models import chat, loading
from baton.recipe import load as recipe_file
from baton.recipe.data import OLDER
from baton.recipe.model import Model
from baton.recipe.recipe import Recipe
from baton.recipe.search import ACCEPTED
from baton.runs.documents import RunInfo
from baton.runs.plan import Plan
from baton.runs.run import Run, check_name, chosen_name
from baton.source import consent, credentials, hardware, origin, paths
from baton.source.origin import RecipeSource
from baton.store.clouds import environment_of
from baton.store.storage import Storage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe that was read and checked.

    Attributes:
        recipe: Its values, typed; see docs/recipe.md.
        origin: Its source, with the folder where relative paths start.
        choices: The values that its profile chose.
    """

    recipe: Recipe
    origin: RecipeSource
    choices: tuple[hardware.Choice, ...] = ()

    @property
    def name(self) -> str:
        """The recipe's name."""
        return self.recipe.name

    def localised(self) -> Recipe:
        """Returns the recipe as it runs on this machine, with absolute paths."""
        recipe, folder = self.recipe, self.origin.folder
        document: dict[str, Any] = recipe.model_dump(mode="json")
        phases = recipe.phase_recipes()
        for section, part in zip(document["phases"] or [document], phases or [recipe], strict=True):
            section["data"]["source"] = paths.data_sources(part, folder)
            if part.training.second_model and part.training.settings:
                role, named = part.training.second_model
                method = part.training.method
                path = paths.model(named.base, folder, f"training.{method}.{role}", revision=named.revision)
                section["training"][method] = part.training.settings.model_dump(mode="json")
                section["training"][method][role]["base"] = path or named.base
        if recipe.model.base and (path := paths.model(recipe.model.base, folder, revision=recipe.model.revision)):
            document["model"]["base"] = path
        for section, part in zip([document, *document["phases"]], [recipe, *phases], strict=True):
            if part.hooks.source:
                section["hooks"]["source"] = paths.code(part.hooks.source, folder)
            _localise_evaluation(section["evaluation"], folder)
        if "://" not in recipe.store.uri:
            document["store"]["uri"] = os.path.abspath(os.path.expanduser(recipe.store.uri))
        prefix = "sqlite:///"
        if recipe.tracking.mlflow and recipe.tracking.mlflow.startswith(prefix):
            document["tracking"]["mlflow"] = prefix + os.path.abspath(recipe.tracking.mlflow.removeprefix(prefix))
        # On the absolute path: config.json is read from there.
        for part in phases or [recipe]:
            exportable.check(part, _architecture(document["model"]))
            exportable.check_registry(part, recipe.tracking.mlflow)
            for name in part.export.formats:
                exportable.require_packages(name)
        return recipe_file.validate(document, origin=self.origin.name)


def load(
    given: str | RecipeSource,
    overrides: Sequence[str] | None = None,
    *,
    store: str | None = None,
    chunks: int | None = None,
    image: str | None = None,
    here: bool = True,
) -> LoadedRecipe:
    """Reads a recipe with the command line's changes and its profile's choices, and checks it.

    `here` tells whether it runs on this machine, so that the profile `auto` can look at it.
    """
    source, changes = origin.find(given), list(overrides or ())
    if store:
        changes.append(f"store.uri={json.dumps(store)}")
    if chunks is not None:
        changes.append(f"chunks.count={chunks}")
    if image:
        changes.append(f"resources.image={json.dumps(image)}")
    document, choices = hardware.apply_profile(source.document(changes), here=here)
    recipe = recipe_file.validate(document, origin=source.name)
    for part in (document, *(phase for phase in document.get("phases") or () if isinstance(phase, dict))):
        for key in OLDER & (part.get("data") or {}).keys():
            logging.getLogger("baton").warning("note: data.%s is read as data.train_on, which has replaced it", key)
    for former, today in recipe_file.former_names(document):
        logging.getLogger("baton").warning("note: %s is called %s now", former, today)
    recipe_file.require_effects(recipe, origin=source.name)
    credentials.require_none(recipe)
    recipe = consent.require_consent(recipe, source)
    if template := recipe.model.chat_template:
        is_file = template.endswith(".jinja") and "://" not in template and "\n" not in template
        beside = os.path.join(source.folder, os.path.expanduser(template))
        text = chat.chat_template(beside if is_file and os.path.isfile(beside) else template)
        if is_file:  # the recipe carries its text, which pods have too
            model = recipe.model.model_copy(update={"chat_template": text})
            recipe = recipe.model_copy(update={"model": model})
    return LoadedRecipe(recipe, source, tuple(choices))


def rendering_report(recipe: Recipe) -> Iterator[str]:
    """Yields a line for each training whose rows may be texts: whether they become turns of a conversation."""
    for part in recipe.phase_recipes() or [recipe]:
        asked = part.data.render_as != "auto" or part.model.base
        has_choice = part.training.method != "pretrain" and part.data.format not in ("text", "messages", "sharegpt")
        if not asked or not has_choice:
            continue
        prefix = f"{part.name}: " if recipe.phases else ""
        is_chat = _is_chat(part, recipe.model)
        if is_chat is None:
            depends = f"if {_origin(recipe.model)} has a chat template, which cannot be seen from here"
            yield f"{prefix}{chat.TURNS} {depends} (data.render_as: {part.data.render_as})"
        else:
            yield prefix + chat.describe(_with_base(part, recipe.model.base), chat=is_chat)


def check_rendering(recipe: Recipe) -> None:
    """Checks that a required chat template exists, if the tokenizer is here."""
    for part in recipe.phase_recipes() or [recipe]:
        if part.data.render_as == "chat" and (tokenizer := _tokenizer(recipe.model)) is not None:
            chat.require_template(_with_base(part, recipe.model.base), tokenizer)


def check_rows(part: Recipe, start: Model, rows: list[dict[str, Any]]) -> None:
    """Checks that rows of the split can be rendered, if the tokenizer of the recipe's first model is here."""
    is_chat = _is_chat(part, start)
    if is_chat is not None:
        for row in rows:
            chat.rendering_changes(row, part, chat=is_chat)


def _with_base(part: Recipe, base: str | None) -> Recipe:
    """Returns a training with the first one's model, for its tokenizer."""
    return part.model_copy(update={"model": part.model.model_copy(update={"base": base})})


def _is_chat(part: Recipe, start: Model) -> bool | None:
    """Returns whether texts become turns, None where the tokenizer is not here."""
    if part.data.render_as == "text":
        return False
    if start.tokenizer and start.tokenizer.train:
        return part.data.render_as == "chat"
    tokenizer = _tokenizer(start)
    return None if tokenizer is None else chat.uses_chat(part, tokenizer)


def _tokenizer(start: Model) -> PreTrainedTokenizerBase | None:
    """Returns the tokenizer of a recipe's first training, if it is on this machine; it runs no code."""
    origin, revision = _origin(start), None if start.tokenizer and start.tokenizer.base else start.revision
    if origin is None or "://" in origin:
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = (
            loading.load_tokenizer(origin)
            if os.path.isdir(origin)
            else AutoTokenizer.from_pretrained(
                origin, revision=revision, local_files_only=True, trust_remote_code=False
            )
        )
    except Exception:  # it is not here, or of a kind that only its own code reads; the tokenize stage tells which
        return None
    if start.chat_template:
        tokenizer.chat_template = chat.chat_template(start.chat_template)
    return tokenizer


def _origin(start: Model) -> str | None:
    return start.tokenizer.base if start.tokenizer and start.tokenizer.base else start.base


def check_model(recipe: Recipe) -> None:
    """Checks that Transformers can build a model from scratch, and that a local tokenizer takes the changes."""
    check_rendering(recipe)
    base, spec = recipe.model.base, recipe.model.tokenizer
    if spec and spec.changes and not spec.train and all(os.path.isdir(x) for x in (base, spec.base) if x):
        loading.build_tokenizer(recipe, base)
    if recipe.model.from_scratch:  # importing Transformers takes seconds
        loading.scratch_config(recipe.model.from_scratch, None, recipe.data.max_length)


def require_single(recipe: Recipe, what: str) -> None:
    """Refuses a recipe of several phases, for commands that run one training."""
    if recipe.phases:
        names = ", ".join(phase.name for phase in recipe.phases)
        raise UserError(
            f"recipe {recipe.name!r} has phases ({names}), and {what} takes one training.",
            remedy="Write the phase you mean as its own recipe.",
        )


def last_run_name(recipe: Recipe, run_name: str) -> str:
    """Returns the name of the run with the final model: the last phase's, where there are phases."""
    return f"{run_name}-{recipe.phases[-1].name}" if recipe.phases else run_name


def check_store(recipe: Recipe) -> Storage:
    """Opens the store and writes to it; `StoreError` where that fails."""
    storage = Storage(recipe.store.uri)
    storage.check()
    return storage


def parts_of(recipe: Recipe) -> Iterator[tuple[Recipe, str, bool]]:
    """Yields a recipe's trainings, each with the suffix of its page and whether its tokens can be counted here."""
    if not recipe.phases:
        yield recipe, "", True
    model = recipe.model
    # Later phases have the first one's tokenizer; one that the first phase learns does not exist yet.
    base = model.base or (model.tokenizer and model.tokenizer.base)
    for phase, part in zip(recipe.phases, recipe.phase_recipes(), strict=True):
        is_first = phase is recipe.phases[0]
        yield part if is_first or not base else _with_base(part, base), f"-{phase.name}", is_first or bool(base)


def new_run_name(recipe: Recipe) -> str:
    """Returns the name of a new run: the recipe's and the time."""
    return f"{recipe.name}-{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}"


def _localise_evaluation(section: dict[str, Any], base_dir: str) -> None:
    for name in ("production", "bertscore_model"):
        value = section.get(name)
        if value and value != ACCEPTED and not value.startswith("models:"):
            section[name] = paths.model(value, base_dir, f"evaluation.{name}") or value
    tasks = section.get("tasks") or {}
    if path := tasks.get("include_path"):
        tasks["include_path"] = paths.model(path, base_dir, "evaluation.tasks.include_path") or path


def _architecture(model: dict[str, Any]) -> str | None:
    """Returns Transformers' name of the model type, None where it is not known here."""
    if model["from_scratch"]:
        return str(model["from_scratch"]["architecture"])
    try:
        with open(os.path.join(model["base"], "config.json"), encoding="utf-8") as file:
            return str(json.load(file).get("model_type"))
    except OSError:
        return None


def check_resumable(recipe: Recipe, storage: Storage, name: str) -> None:
    """Checks that this Baton continues a name's runs, of all phases; `FormatError` where it does not."""
    for phase in [phase.name for phase in recipe.phases] or [""]:
        run = Run(storage, chosen_name(name, "", "", phase))
        if head := run.read(RunInfo):
            run.require_continued(head)
            newest, plan = CheckpointStore(run).newest(), run.read(Plan)
            if newest and plan and newest.step < plan.num_steps and not newest.meta.finished:
                newest.require_continued()


def run_name_for_pods(recipe: Recipe, name: str | None) -> str:
    """Returns the name of a run in pods, a new one by default, checked as far as the store answers."""
    if name is None:
        return new_run_name(recipe)
    check_name(name)
    variables = environment_of(recipe.store.uri)
    # Pods may have credentials where this machine has none, and reach a store that it does not.
    if not variables or any(variable.startswith(variables) for variable in os.environ):
        with contextlib.suppress(StoreError, DamagedError):
            check_resumable(recipe, Storage(recipe.store.uri, patience=3.0), name)  # seconds: a person is waiting
    return name
