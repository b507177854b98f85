"""From a recipe file to a recipe that can run: overrides, absolute paths, and checks that need no GPU."""

from __future__ import annotations

import datetime
import json
import logging
import os
from collections.abc import Iterator, Sequence

from baton.components.shared.core.errors import UserError
from baton.components.shared.models import chat_templates, exportable, loading, own_tokenizer
from baton.components.shared.recipe import ACCEPTED, Recipe, recipe_file
from baton.components.shared.recipe.data import OLDER
from baton.components.shared.store.storage import Storage
from baton.pipelines.compiling import credentials, local_paths, origin, profiles, rendering, trust
from baton.pipelines.compiling.origin import Origin
from baton.pipelines.compiling.profiles import Document


def load(
    path: str | Origin,
    overrides: Sequence[str] = (),
    *,
    store: str | None = None,
    chunks: int | None = None,
    image: str | None = None,
    here: bool = True,
) -> Recipe:
    """Reads a recipe with the command line's changes and its profile's choices.

    Args:
        path: YAML file, pipe or name; see `origin.find`.
        overrides: Changes to it, `PATH=VALUE`.
        store: URI instead of the recipe's.
        chunks: Number of chunks instead of the recipe's.
        image: Container image instead of the recipe's.
        here: Whether it runs on this machine, so that the profile `auto` can look at it.

    Raises:
        UserError: see `origin.find`, `recipe_file.load` and `profiles.apply`, an address holds a
            credential, or nobody has consented to the code of a recipe from elsewhere.
    """
    return load_explained(path, [*overrides, *options(store, chunks, image)], here=here)[0]


def options(store: str | None = None, chunks: int | None = None, image: str | None = None) -> list[str]:
    """Returns the options that have a name of their own as changes to a recipe."""
    extra = [f"store.uri={json.dumps(store)}"] if store else []
    extra += [f"chunks.count={chunks}"] if chunks is not None else []
    extra += [f"resources.image={json.dumps(image)}"] if image else []
    return extra


def load_here(
    path: str | Origin,
    overrides: Sequence[str] | None = None,
    *,
    store: str | None = None,
    chunks: int | None = None,
    image: str | None = None,
) -> Recipe:
    """Reads a recipe for a run on this machine; see `load` and `localise`."""
    source = origin.find(path)
    return localise(load(source, overrides or (), store=store, chunks=chunks, image=image), source)


def load_explained(
    path: str | Origin, overrides: Sequence[str] = (), *, here: bool = True
) -> tuple[Recipe, list[profiles.Choice]]:
    """Reads a recipe, and tells what its profile chose; see `load`."""
    source = origin.find(path)
    document, chosen = profiles.apply(source.document(list(overrides)), here=here)
    recipe = recipe_file.validate(document, origin=source.name)
    for part in (document, *(phase for phase in document.get("phases") or () if isinstance(phase, dict))):
        for key in OLDER & (part.get("data") or {}).keys():
            logging.getLogger("baton").warning("note: data.%s is read as data.train_on, which has replaced it", key)
    recipe_file.require_effects(recipe, origin=source.name)
    credentials.require_none(recipe)
    recipe = trust.settle(recipe, source)
    if recipe.model.chat_template:
        template = _template(recipe.model.chat_template, source.folder)
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"chat_template": template})})
    return recipe, chosen


def localise(recipe: Recipe, path: str | Origin) -> Recipe:
    """Makes local paths absolute and checks that they exist, for a run on this machine.

    Args:
        recipe: The recipe.
        path: Its file, or where else it comes from.

    Raises:
        UserError: a source or base model is missing, or a format of export cannot be made of it.
    """
    base_dir = path.folder if isinstance(path, Origin) else os.path.dirname(os.path.abspath(path))
    document: Document = recipe.model_dump(mode="json")
    if not recipe.phases:
        document["data"]["source"] = local_paths.data_sources(recipe, base_dir)
    for phase, part in zip(document["phases"], recipe.phase_recipes(), strict=True):
        phase["data"]["source"] = local_paths.data_sources(part, base_dir)
        if part.hooks.source:
            phase["hooks"]["source"] = local_paths.code(part.hooks.source, base_dir)
    if "://" not in recipe.store.uri:
        document["store"]["uri"] = os.path.abspath(os.path.expanduser(recipe.store.uri))
    if recipe.model.base and (base := local_paths.model(recipe.model.base, base_dir, revision=recipe.model.revision)):
        document["model"]["base"] = base
    for section, part in zip(
        [phase["training"] for phase in document["phases"]] or [document["training"]],
        recipe.phase_recipes() or [recipe],
        strict=True,
    ):
        method = part.training.method
        if part.training.second_model and part.training.settings:
            role, named = part.training.second_model
            settings = part.training.settings.model_dump(mode="json")
            setting = f"training.{method}.{role}"
            path_here = local_paths.model(named.base, base_dir, setting, revision=named.revision)
            settings[role]["base"] = path_here or named.base
            section[method] = settings
    if recipe.hooks.source:
        document["hooks"]["source"] = local_paths.code(recipe.hooks.source, base_dir)
    prefix = "sqlite:///"
    if recipe.tracking.mlflow and recipe.tracking.mlflow.startswith(prefix):
        document["tracking"]["mlflow"] = prefix + os.path.abspath(recipe.tracking.mlflow.removeprefix(prefix))
    for section in (document["evaluation"], *(phase["evaluation"] for phase in document["phases"])):
        _localise_evaluation(section, base_dir)
    for part in recipe.phase_recipes() or [recipe]:
        exportable.check(part, _architecture(document["model"]))
        exportable.check_registry(part, recipe.tracking.mlflow)
        for name in part.export.formats:
            exportable.require_packages(name)
    return recipe_file.validate(document, origin=path.name if isinstance(path, Origin) else path)


def check_model(recipe: Recipe) -> None:
    """Checks that Transformers can make the model of a recipe that starts from scratch, and that a tokenizer which lies
    here can be changed as the recipe says; it takes seconds to import.

    Raises:
        UserError: the architecture or one of its settings does not exist, or a token, or a chat template that is asked
            for.
    """
    rendering.check(recipe)
    base, spec = recipe.model.base, recipe.model.tokenizer
    if spec and spec.changes and not spec.train and all(os.path.isdir(x) for x in (base, spec.base) if x):
        own_tokenizer.make(recipe, base)
    if recipe.model.from_scratch:
        loading.scratch_config(recipe.model.from_scratch, None, recipe.data.max_length)


def require_single(recipe: Recipe, what: str) -> None:
    """Refuses a recipe of several phases, for commands that run one training.

    Raises:
        UserError: it has phases.
    """
    if recipe.phases:
        names = ", ".join(phase.name for phase in recipe.phases)
        raise UserError(
            f"recipe {recipe.name!r} has phases ({names}), and {what} takes one training.",
            remedy="Write the phase you mean as its own recipe.",
        )


def last_run_name(recipe: Recipe, run_name: str) -> str:
    """Returns the name of the run whose model is the result: the last phase's, where there are phases."""
    return f"{run_name}-{recipe.phases[-1].name}" if recipe.phases else run_name


def check_store(recipe: Recipe) -> Storage:
    """Opens the store and writes to it.

    Raises:
        StoreError: it cannot be reached or written.
    """
    storage = Storage(recipe.store.uri)
    storage.check()
    return storage


def parts_of(recipe: Recipe) -> Iterator[tuple[Recipe, str, bool]]:
    """Yields the trainings of a recipe, each with the end of its page's name and whether its tokens can be counted.

    Later phases count by the model that the first starts from, as they have its tokenizer; one that the first phase
    learns is not known to them here.
    """
    if not recipe.phases:
        yield recipe, "", True
    model = recipe.model
    base = model.base or (model.tokenizer and model.tokenizer.base)
    for phase, part in zip(recipe.phases, recipe.phase_recipes(), strict=True):
        is_first = phase is recipe.phases[0]
        document = part.model_dump(mode="json")
        if not is_first and base:
            document["model"]["base"] = base
        yield recipe_file.validate(document, origin=part.name), f"-{phase.name}", is_first or bool(base)


def new_run_name(recipe: Recipe) -> str:
    """Returns a name for a new run: the recipe's and the time."""
    return f"{recipe.name}-{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}"


def _template(template: str, base_dir: str) -> str:
    """Returns a chat template as the recipe carries it: a file beside the recipe as its text, which pods have too.

    Raises:
        UserError: there is no such template.
    """
    if template.endswith(".jinja") and "://" not in template and "\n" not in template:
        beside = os.path.join(base_dir, os.path.expanduser(template))
        template = beside if os.path.isfile(beside) else template
        return chat_templates.chat_template(template)
    chat_templates.chat_template(template)
    return template


def _localise_evaluation(section: Document, base_dir: str) -> None:
    """Makes what a section `evaluation` names here absolute."""
    for name in ("production", "bertscore_model"):
        value = section.get(name)
        if value and value != ACCEPTED and not value.startswith("models:"):
            section[name] = local_paths.model(value, base_dir, f"evaluation.{name}") or value
    tasks = section.get("tasks") or {}
    if path := tasks.get("include_path"):
        tasks["include_path"] = local_paths.model(path, base_dir, "evaluation.tasks.include_path") or path


def _architecture(model: Document) -> str | None:
    """Returns Transformers' name of the model type, None where it is not known here."""
    if model["from_scratch"]:
        return str(model["from_scratch"]["architecture"])
    try:
        with open(os.path.join(model["base"], "config.json"), encoding="utf-8") as file:
            return str(json.load(file).get("model_type"))
    except OSError:
        return None
