"""The models that a recipe names, held to the content that the run began with.

Roles are `base`, the start of training, and that of a method's second model, such as `teacher`. Tokenize writes each
one's digest to `model.json`; later stages fetch them and compare.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from baton.errors import ExactnessError, UserError
from baton.models import loading, user_code
from baton.recipe.recipe import Recipe
from baton.runs.documents import PinnedModels
from baton.runs.run import Run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BASE = "base"
# Folders that this process has compared, by address, revision and digests: gigabytes are not read twice.
_compared: dict[tuple[str, str | None, str | None, str | None], str] = {}


class ModelOrigin(NamedTuple):
    setting: str
    base: str
    revision: str | None
    runs_code: bool

    @property
    def pin(self) -> str:
        return "model.revision" if self.setting == "model.base" else f"{self.setting}.revision"


def origins(recipe: Recipe) -> dict[str, ModelOrigin]:
    """Returns the models that a recipe names, by role; no base for a model from scratch."""
    by_role = {}
    if recipe.model.base:
        model = recipe.model
        by_role[BASE] = ModelOrigin("model.base", recipe.model.base, model.revision, model.trust_remote_code)
    if second := recipe.training.second_model:
        role, named = second
        setting = f"training.{recipe.training.method}.{role}"
        by_role[role] = ModelOrigin(setting, named.base, named.revision, named.trust_remote_code)
    return by_role


def fetch(recipe: Recipe) -> dict[str, str]:
    """Fetches the models that a recipe names, side by side, and returns their local folders by role."""
    named = origins(recipe)
    with ThreadPoolExecutor(max(1, len(named))) as pool:
        return dict(zip(named, pool.map(lambda origin: _trusted(origin, recipe), named.values()), strict=True))


def document(recipe: Recipe, folders: dict[str, str], known: PinnedModels | None = None) -> PinnedModels:
    """Returns the content of `model.json`: digests of each model's files, and of its code where that runs."""
    digests = {f"{role}_sha256": loading.model_identity(folder) for role, folder in folders.items()}
    for role, origin in origins(recipe).items():
        # A run begun by a Baton that noted no digest of code goes on without.
        if origin.runs_code and (known is None or known.digest(f"{role}_code")):
            digests[f"{role}_code_sha256"] = user_code.model_digest(folders[role])
    return PinnedModels.model_validate({f"{BASE}_sha256": None, **digests})


def compared(run: Run, recipe: Recipe) -> dict[str, str]:
    """Fetches the models that a recipe names, if they are those of the run, and returns their folders by role."""
    pins = run.need(PinnedModels)
    named = origins(recipe)

    def compare(role: str) -> str:
        origin, digest, code_digest = named[role], pins.digest(role), pins.digest(f"{role}_code")
        key = (origin.base, origin.revision, digest, code_digest)
        if key not in _compared:
            folder = _trusted(origin, recipe)
            is_other = loading.model_identity(folder) != digest
            if is_other or (origin.runs_code and code_digest and user_code.model_digest(folder) != code_digest):
                what = "is not the model" if is_other else "comes with other Python code than"
                raise ExactnessError(
                    f"{origin.setting} {origin.base!r} {what} that this run began with.",
                    remedy=f"Put it back, pin {origin.pin}, or start another run.",
                )
            _compared[key] = folder
        return _compared[key]

    with ThreadPoolExecutor(max(1, len(named))) as pool:
        return dict(zip(named, pool.map(compare, named), strict=True))


def require_same_tokens(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, student: int, folder: str) -> None:
    """Checks that a second model has the tokens of the trained one, whose embedding has `student` rows."""
    assert recipe.training.second_model
    role, named = recipe.training.second_model
    origin = origins(recipe)[role]
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    remedy = f"Take a {role} of the same family, with the same tokenizer."
    if size != student:
        hint = f" Or set model.from_scratch.vocab_size to {size}." if recipe.model.from_scratch else ""
        raise UserError(
            f"{origin.setting} {origin.base!r} has a vocabulary of {size} tokens, and the model that is trained one of "
            f"{student}; the two are compared token by token.",
            remedy=remedy + hint,
        )
    if not any(name.startswith(("tokenizer", "vocab")) for name in os.listdir(folder)):
        return  # weights alone: their number of tokens is all there is to compare
    theirs = loading.load_tokenizer(folder, trust_remote_code=named.trust_remote_code).get_vocab()
    differing = sorted(token for token, number in tokenizer.get_vocab().items() if theirs.get(token) != number)
    if differing:
        shown = ", ".join(repr(token) for token in differing[:3])
        raise UserError(
            f"{origin.setting} {origin.base!r} has another tokenizer: {len(differing)} tokens have another number or "
            f"none there, such as {shown}.",
            remedy=remedy,
        )


def check_second_model(recipe: Recipe, folders: dict[str, str]) -> None:
    """Checks that a second model has the tokens of the trained one, before anything takes time."""
    if recipe.training.second_model is None:
        return
    base, (role, _) = folders.get(BASE), recipe.training.second_model
    tokenizer = loading.build_tokenizer(recipe, base)
    require_same_tokens(recipe, tokenizer, loading.vocabulary_size(recipe, tokenizer, base), folders[role])


def _trusted(origin: ModelOrigin, recipe: Recipe) -> str:
    folder = loading.local_model(origin.base, origin.revision, store=recipe.store)
    if origin.runs_code:
        user_code.require_model_trusted(recipe.trust, origin.setting, folder)
    return folder
