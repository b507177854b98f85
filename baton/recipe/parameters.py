"""Changes to a recipe by the parameters of its compiled pipeline, checked by the first stage."""

import copy
from collections.abc import Mapping
from typing import Any

from baton.errors import UserError
from baton.recipe import explain, load
from baton.recipe.recipe import Recipe
from baton.recipe.search import MERGED_SECTIONS, RecipePhase, phase_document

# Dotted path → parameter.
NAMES = {
    "store.uri": "store",
    "data.source": "source",
    "model.base": "base_model",
    "seed": "seed",
    "training.batch_size": "batch_size",
    "training.learning_rate": "learning_rate",
    "training.epochs": "epochs",
    "training.max_steps": "max_steps",
}
LENGTH = ("training.epochs", "training.max_steps")

# Dotted path, with all below it → the reason why a compiled pipeline fixes it.
FIXED = {
    "name": "the pipeline and its pods are named so",
    "store": "the parameter store sets the location of runs, and pods mount the rest",
    "phases": "each is a graph of the pipeline; one is changed by PHASE.SECTION.KEY",
    "sweep": "its rungs are stages of the pipeline",
    "resources": "it is what the pods ask for",
    "data.shards": "each shard is a stage of the pipeline",
    "chunks.count": "each chunk is a stage of the pipeline",
    "chunks.spare": "each chunk is a stage of the pipeline",
    "chunks.preemption.node_taints": "the pods are given the name of their node for it",
    "training.lr_find": "it is a stage of the pipeline",
    "tracking.prometheus_port": "the pods announce it",
}
REMEDY = "Change it in the recipe or by --set, and submit or compile that."
ORIGIN = "pipeline parameters"


def given_parameters(
    *,
    store: str = "",
    source: list[str | dict[str, Any]] | None = None,
    base_model: str = "",
    seed: int = -1,
    batch_size: int = 0,
    learning_rate: float = 0.0,
    epochs: float = 0.0,
    max_steps: int = 0,
) -> dict[str, object]:
    """Returns dotted path → value of the parameters that are given; others leave the recipe as it is."""
    values: dict[str, object] = {
        "store.uri": store or None,
        "data.source": source or None,
        "model.base": base_model or None,
        "seed": seed if seed >= 0 else None,
        "training.batch_size": batch_size or None,
        "training.learning_rate": learning_rate or None,
    }
    values = {path: value for path, value in values.items() if value is not None}
    if epochs or max_steps:
        values |= dict(zip(LENGTH, (epochs or None, max_steps or None), strict=True))
    return values


def apply_parameters(recipe: Recipe, values: Mapping[str, object], overrides: Mapping[str, object]) -> Recipe:
    """Returns a recipe with the values of a pipeline's parameters.

    Args:
        recipe: The compiled recipe.
        values: From `given_parameters`.
        overrides: Dotted path → value, as for `--set`. With phases, `path` changes the top level and `PHASE.path` one
            of them. Engines may have made floats of whole numbers.
    """
    document = recipe.model_dump(mode="json")
    names = [phase.name for phase in recipe.phases]
    overrides = {_field_path(key, names): restore_ints(value) for key, value in overrides.items()}
    given = {path: value for path, value in values.items() if value != _compiled(recipe, path)}
    for path in given.keys() & overrides.keys():
        if given[path] != overrides[path]:
            raise UserError(
                f"{path} is {overrides[path]!r} in overrides, and {given[path]!r} in the parameter {NAMES[path]}.",
                remedy="Give one of the two.",
            )
    for path, value in values.items():
        # An unchanged length yields to one in overrides: a recipe has epochs or steps, not both.
        if path in given or not (path in LENGTH and overrides.keys() & set(LENGTH)):
            load.set_path(document, path, value)
    for path in given:
        if recipe.phases and path.partition(".")[0] in MERGED_SECTIONS:
            raise UserError(
                f"{NAMES[path]} is given, and the recipe has phases.",
                remedy=f"Give it in overrides: {path}, or {recipe.phases[0].name}.{path} for one of them.",
            )
    if "model.base" in given:
        if recipe.model.base is None:
            raise UserError(
                "base_model is given, and the recipe's model is trained from scratch.",
                remedy="Leave it empty, or give the recipe a model.base instead of model.from_scratch.",
            )
        document["model"]["revision"] = None  # a commit of the other one
    # Shared settings first: a phase copies the neighbours of its own.
    for key in sorted(overrides, key=lambda key: _phase_of(key, names) is not None):
        _override(document, key, overrides[key], names)
    phases = document["phases"]
    for position, phase in enumerate(phases):  # so that a problem of a phase is told as that of a recipe is
        part = phase_document(document, RecipePhase.model_validate(phase), position, last=position == len(phases) - 1)
        load.validate(part, origin=f"{ORIGIN}, phase {phase['name']}")
    result = load.validate(document, origin=ORIGIN)
    _require_same_graph(recipe, result)
    if overrides:
        load.require_effects(result, origin=ORIGIN)
    return result


def _require_same_graph(before: Recipe, after: Recipe) -> None:
    """Makes sure that the compiled pipeline has the chunks and stages of the changed recipe."""
    for old, new in zip(before.phase_recipes() or [before], after.phase_recipes() or [after], strict=True):
        was, now = (part.training.epochs or 1.0 for part in (old, new))
        if new.chunks.count == "per-epoch" and was != now:
            raise UserError(
                f"training.epochs is {now:g}, and chunks.count is per-epoch: this pipeline was compiled with the "
                f"chunks of {was:g} epoch(s).",
                remedy=REMEDY,
            )
        if bool(old.evaluation.gate) != bool(new.evaluation.gate):
            raise UserError(
                "overrides: evaluation.gate cannot appear or go in a compiled pipeline: the gate is a stage; its "
                "limits can be changed.",
                remedy=REMEDY,
            )


def of_phase(recipe: Recipe, name: str) -> Recipe:
    """Returns a phase's recipe, the whole for an empty name, always with a length of training."""
    if name:
        recipe = recipe.phase_recipes()[[phase.name for phase in recipe.phases].index(name)]
    training = recipe.training
    if training.epochs is None and training.max_steps is None:
        training = training.model_copy(update={"epochs": 1.0})
    return recipe.model_copy(update={"training": training})


def require_undrawn(recipe: Recipe, values: Mapping[str, object], overrides: Mapping[str, object]) -> None:
    """Makes sure that no parameter sets a value that a sweep draws for each trial."""
    assert recipe.sweep
    given = [path for path, value in values.items() if value != _compiled(recipe, path)]
    for path in (*given, *overrides):
        for drawn in recipe.sweep.parameters:
            if f"{path}.".startswith(f"{drawn}.") or f"{drawn}.".startswith(f"{path}."):
                raise UserError(
                    f"{path} is given, and the sweep draws {drawn} for each trial.",
                    remedy="Leave it out, or leave it out of sweep.parameters.",
                )


def restore_ints(value: object) -> object:
    """Returns a value with whole numbers as such: engines make floats of all numbers in a dictionary."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: restore_ints(inner) for key, inner in value.items()}
    return [restore_ints(inner) for inner in value] if isinstance(value, list) else value


def _compiled(recipe: Recipe, path: str) -> object:
    """Returns a parameter's default in the compiled pipeline."""
    node: Any = recipe.model_dump(mode="json")
    for key in path.split("."):
        node = node[key]
    if path == "training.epochs" and node is None and recipe.training.max_steps is None:
        return 1.0
    return node


def _field_path(key: str, names: list[str]) -> str:
    """Returns the field's path for a key, perhaps of a phase, in people's names."""
    phase = "" if _phase_of(key, names) is None else f"{key.partition('.')[0]}."
    path = key.removeprefix(phase)
    return phase + explain.renamed().get(path, path)


def _phase_of(key: str, names: list[str]) -> int | None:
    """Returns the index of a key's phase, None for the top level."""
    first, _, rest = key.partition(".")
    return names.index(first) if first in names and rest.partition(".")[0] in Recipe.model_fields else None


def _override(document: dict[str, Any], key: str, value: object, names: list[str]) -> None:
    position = _phase_of(key, names)
    path = key if position is None else key.partition(".")[2]
    keys = path.split(".")
    if not all(keys):
        raise UserError(f"overrides: {key!r} is not a dotted path, for example training.weight_decay.")
    for fixed, reason in FIXED.items():
        if f"{path}.".startswith(f"{fixed}."):
            raise UserError(f"overrides: {key} cannot be changed in a compiled pipeline: {reason}.", remedy=REMEDY)
    if len(keys) == 1 and isinstance(document.get(path), dict):
        raise UserError(
            f"overrides: {key} is a section; expected the paths of settings, such as "
            f"{key}.{next(iter(document[path]))}."
        )
    if position is None:
        _require_effect(document, path, names)
        target = document
    else:
        target = _own(document, document["phases"][position], keys, key)
    try:
        load.set_path(target, path, value)
    except KeyError as error:
        raise UserError(f"overrides: {key}: {error.args[0]!r} is a value, it has no keys below it.") from None


def _require_effect(document: dict[str, Any], path: str, names: list[str]) -> None:
    """Makes sure that some phase has no value of its own at a path."""
    section, _, rest = path.partition(".")
    if not names or section not in MERGED_SECTIONS:
        return
    own = [phase[section] is None or rest.partition(".")[0] in phase[section] for phase in document["phases"]]
    if all(own):
        raise UserError(
            f"overrides: {path} changes nothing, as each phase has its own.",
            remedy=f"Name the phase: {names[0]}.{path}; phases: {', '.join(names)}.",
        )


def _own(document: dict[str, Any], phase: dict[str, Any], keys: list[str], key: str) -> dict[str, Any]:
    """Returns a phase with a section of its own, in which a setting keeps its neighbours."""
    section, *rest = keys
    if section not in MERGED_SECTIONS:
        raise UserError(f"overrides: {key}: phases share {section}; expected one of {', '.join(MERGED_SECTIONS)}.")
    own = phase[section] = dict(phase[section] or {})
    shared = (document[section] or {}).get(rest[0])
    if len(rest) > 1 and rest[0] not in own and isinstance(shared, dict):
        own[rest[0]] = copy.deepcopy(shared)
    return phase
