"""From a recipe file to a recipe that can run: overrides, consent to its code, absolute paths, checks without a GPU."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.checkpoint import seals
from baton.checkpoint.store import CheckpointStore
from baton.errors import DamagedError, StoreError, UserError, suggest_path
from baton.export import exportable
from baton.models import chat, gguf_file, loading, pinned, user_code
from baton.recipe import load as recipe_file
from baton.recipe.data import OLDER
from baton.recipe.model import Model
from baton.recipe.recipe import Recipe
from baton.recipe.run import ASK, code_in
from baton.recipe.search import ACCEPTED, PREVIOUS
from baton.runs import objects
from baton.runs.documents import RunInfo
from baton.runs.plan import Plan
from baton.runs.run import Run, check_name, chosen_name
from baton.scratch import scratch_folder
from baton.source import credentials, hardware, origin, prices
from baton.source.origin import RecipeSource
from baton.store import sources
from baton.store.clouds import environment_of
from baton.store.storage import Storage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe that was read and checked.

    Attributes:
        recipe: Its values, typed; see docs/reference/recipe.
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
            section["data"]["source"] = data_sources(part, folder)
            if part.training.second_model and part.training.settings:
                role, named = part.training.second_model
                method = part.training.method
                path = model_path(named.base, folder, f"training.{method}.{role}", revision=named.revision)
                section["training"][method] = part.training.settings.model_dump(mode="json")
                section["training"][method][role]["base"] = path or named.base
        if recipe.model.base and (path := model_path(recipe.model.base, folder, revision=recipe.model.revision)):
            document["model"]["base"] = path
        for section, part in zip([document, *document["phases"]], [recipe, *phases], strict=True):
            if part.hooks.source:
                section["hooks"]["source"] = code_path(part.hooks.source, folder)
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

    `here` tells whether it runs on this machine, so that the profile `auto` can inspect it.
    """
    source, changes = origin.find(given), list(overrides or ())
    if store:
        changes.append(f"store.uri={json.dumps(store)}")
    if chunks is not None:
        changes.append(f"chunks.count={chunks}")
    if image:
        changes.append(f"resources.image={json.dumps(image)}")
    document, choices = hardware.apply_profile(source.document(changes), here=here)
    document = prices.apply_prices(document)
    recipe = recipe_file.validate(document, origin=source.name)
    for part in (document, *(phase for phase in document.get("phases") or () if isinstance(phase, dict))):
        for key in OLDER & (part.get("data") or {}).keys():
            logging.getLogger("baton").warning("note: data.%s is read as data.train_on, which has replaced it", key)
    for former, today in recipe_file.former_names(document):
        logging.getLogger("baton").warning("note: %s is called %s now", former, today)
    recipe_file.require_effects(recipe, origin=source.name)
    credentials.require_none(recipe)
    recipe = require_consent(recipe, source)
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
    if origin is None or not gguf_file.is_here(origin):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = (
            loading.load_tokenizer(loading.local_model(origin, revision, weights=False))
            if os.path.isdir(origin) or gguf_file.find(origin)
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
    if base and "://" in base and base.endswith(gguf_file.ENDING):
        with contextlib.suppress(StoreError):  # pods may reach a store that this machine does not
            if file := gguf_file.find(base):
                gguf_file.configuration(file)
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
            section[name] = _local(value, base_dir, f"evaluation.{name}")
    tasks = section.get("tasks") or {}
    if path := tasks.get("include_path"):
        tasks["include_path"] = _local(path, base_dir, user_code.TASKS_SETTING)


def _architecture(model: dict[str, Any]) -> str | None:
    """Returns Transformers' name of the model type, None where it is not known here."""
    if model["from_scratch"]:
        return str(model["from_scratch"]["architecture"])
    base = str(model["base"])
    if gguf_file.is_here(base) and (file := gguf_file.find(base)):
        return str(gguf_file.configuration(file).model_type)
    try:
        with open(os.path.join(base, "config.json"), encoding="utf-8") as config:
            return str(json.load(config).get("model_type"))
    except OSError:
        return None


def check_resumable(recipe: Recipe, storage: Storage, name: str) -> None:
    """Checks that this Baton continues a name's runs, of all phases; `FormatError` where it does not."""
    for phase in [phase.name for phase in recipe.phases] or [""]:
        run = Run(storage, chosen_name(name, "", "", phase))
        with seals.stage(run, objects.ADOPT, appends=False):  # damaged documents are written again
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


SHOWN = 6
"""Settings that a message names."""


def require_consent(recipe: Recipe, source: RecipeSource) -> Recipe:
    """Refuses a foreign recipe's code without consent, before any of it runs.

    With consent, the returned recipe has the digests of all code files; its stages run no other code.
    """
    if not source.is_foreign and recipe.trust != ASK:
        return recipe
    found = code_in(recipe.model_dump(mode="json", exclude_defaults=True))
    resources = source.document().get("resources")
    named = resources.get("image") if isinstance(resources, dict) else None
    if named and named == recipe.resources.image:  # the recipe itself names it, not a command's option
        found.append(f"resources.image: {named}")
    refuse_untrusted(source, found)
    return recipe.model_copy(update={"trust": sorted(set(_files(recipe, source))) if found else None})


def refuse_untrusted(source: RecipeSource, found: Sequence[str]) -> None:
    """Refuses a foreign recipe's settings that run code (`code_in`), unless somebody consented."""
    if found and not source.is_trusted:
        more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
        raise UserError(
            f"{source.name!r} comes from elsewhere and would run code: {'; '.join([*found[:SHOWN], *more])}.",
            remedy="Read that code, then give --trust (in Python, load with trust=True). It covers "
            "the code as it is now.",
        )


def _files(recipe: Recipe, source: RecipeSource) -> Iterator[str]:
    """Yields the digest of each file of code that a recipe names."""
    for part in recipe.phase_recipes() or [recipe]:
        if part.hooks.source:
            yield from user_code.files_of(code_path(part.hooks.source, source.folder))
        own = part.evaluation.tasks
        if own and own.include_path:
            path = _local(own.include_path, source.folder, user_code.TASKS_SETTING)
            with scratch_folder("trust") as scratch:
                fetched = user_code.fetch_tasks(path, scratch)
                yield from (digest for _, digest in user_code.files(fetched, user_code.TASK_ENDINGS))
        for setting, base, revision in _models(part):
            folder = loading.local_model(_local(base, source.folder, setting), revision, weights=False)
            yield from user_code.model_files(setting, folder)


def _models(recipe: Recipe) -> Iterator[tuple[str, str, str | None]]:
    """Yields setting, address and revision of each model whose own code would run."""
    for named in pinned.origins(recipe).values():
        if named.runs_code and named.base != PREVIOUS:
            yield named.setting, named.base, named.revision
    if not recipe.model.trust_remote_code:
        return
    if recipe.model.tokenizer and recipe.model.tokenizer.base:
        yield "model.tokenizer.base", recipe.model.tokenizer.base, None
    production = recipe.evaluation.production
    if production and production != ACCEPTED and not production.startswith("models:"):
        yield "evaluation.production", production, None


def model_path(base: str, base_dir: str, setting: str = "model.base", *, revision: str | None = None) -> str | None:
    """Returns the absolute path of a local model or other folder, None for a hub id or URI.

    Relative paths start at the recipe's folder `base_dir`, then at the current one; only a hub id has a `revision`.
    """
    if "://" in base:
        return None
    tried = [os.path.abspath(os.path.join(folder, os.path.expanduser(base))) for folder in (base_dir, os.getcwd())]
    is_file = base.endswith(gguf_file.ENDING)
    for path in tried:
        if os.path.isdir(path) or (is_file and os.path.isfile(path)):
            return path
    # The hub's are ORGANISATION/NAME, and ORGANISATION/NAME/FILE.gguf.
    is_id = base.count("/") == 2 if is_file else base.count("/") < 2
    if base.startswith((".", "/", "~")) or not is_id:
        near = suggest_path(base, (base_dir, os.getcwd()))
        kind = "file" if is_file else "folder"
        raise UserError(
            f"{setting} {base!r} is not a {kind} (looked for {' and '.join(dict.fromkeys(tried))}).",
            remedy=f"Did you mean {near!r}?" if near else None,
        )
    if not setting.startswith("evaluation."):  # where no revision could mark a hub id
        _refuse_near(base, (base_dir, os.getcwd()), setting, revision)
    return None


def data_sources(recipe: Recipe, base_dir: str) -> list[str | dict[str, Any]]:
    """Returns a recipe's sources with local paths made absolute."""
    resolved: list[str | dict[str, Any]] = []
    for entry, source in zip(recipe.data.source, recipe.data.sources, strict=True):
        uri = sources.resolve(source.uri, base_dir=base_dir)
        resolved.append(uri if isinstance(entry, str) else {**entry.model_dump(mode="json"), "uri": uri})
    return resolved


def _local(path: str, folder: str, setting: str) -> str:
    return model_path(path, folder, setting) or path


def _refuse_near(base: str, folders: tuple[str, str], setting: str, revision: str | None) -> None:
    """Refuses a hub id that differs by a few letters from the path of a model's folder here."""
    near = None if revision or "/" not in base else suggest_path(base, folders, cutoff=0.8)
    is_model = near and any(os.path.isfile(os.path.join(folder, near, "config.json")) for folder in folders)
    # Qwen3-1.7B is another model than its neighbour Qwen3-0.6B, and so is Qwen3-0.6B-Base.
    if near and is_model and abs(len(near) - len(base)) < 3 and _letters(near) != _letters(base):
        raise UserError(
            f"{setting} {base!r} is not a folder, and would be fetched from the hub.",
            remedy=f"Did you mean {near!r}? If the hub's {base} is meant, give its revision, such as main.",
        )


def _letters(path: str) -> str:
    return re.sub(r"[\W\d]", "", path)


def code_path(source: str, base_dir: str) -> str:
    """Returns the absolute path of the user's Python files, next to the recipe first, or their address."""
    if "://" in source:
        return source
    for folder in (base_dir, os.getcwd()):
        path = os.path.abspath(os.path.join(folder, os.path.expanduser(source)))
        if os.path.isdir(path) or (os.path.isfile(path) and path.endswith(".py")):
            return path
    near = suggest_path(source, (base_dir, os.getcwd()))
    raise UserError(
        f"hooks.source {source!r} is not a Python file or folder.",
        remedy=f"Did you mean {near!r}?" if near else "Check the path.",
    )
