"""The tokenizer of a run: the base's, another model's or one of its own, changed as the recipe says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.components.shared.core.errors import UserError
from baton.components.shared.models import chat_templates, loading, vocabulary
from baton.components.shared.models.own_code import remote
from baton.components.shared.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def make(recipe: Recipe, base: str | None, learned: PreTrainedTokenizerBase | None = None) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a run, changed as its recipe says.

    Args:
        recipe: The recipe.
        base: Local files of `model.base`.
        learned: One that was learned from the training split, where the recipe asks for it.

    Raises:
        UserError: there is none, or it lacks a token that it needs.
    """
    spec = recipe.model.tokenizer
    if learned is not None:
        tokenizer = learned
    else:
        folder = loading.local_model(spec.base) if spec and spec.base else base
        if folder is None:
            raise UserError("model.tokenizer is missing.", remedy="Give tokenizer: {train: …} or {base: …}.")
        if spec and spec.base:
            remote.required(recipe, "model.tokenizer.base", folder)
        tokenizer = loading.load_tokenizer(folder, trust_remote_code=recipe.model.trust_remote_code)
    before = tokenizer.get_vocab()
    if spec:
        vocabulary.change(tokenizer, spec)
    if learned is None:
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if tokenizer.eos_token is None:
            raise UserError(f"the tokenizer in {folder!r} has no end-of-sequence token.", remedy="Choose another one.")
        vocabulary.note_new(tokenizer, before, loading.base_rows(recipe, base) if spec and base else None)
        _require_trainable(recipe, vocabulary.new_ids(tokenizer))
    if recipe.model.chat_template:
        tokenizer.chat_template = chat_templates.chat_template(recipe.model.chat_template)
    return tokenizer


def other_identity(recipe: Recipe) -> str | None:
    """Returns the identity of the files of `model.tokenizer.base`, None where there is none."""
    other = recipe.model.tokenizer and recipe.model.tokenizer.base
    return loading.model_identity(loading.local_model(other)) if other else None


def _require_trainable(recipe: Recipe, new: list[int]) -> None:
    """Refuses new tokens whose rows could not be trained.

    Raises:
        UserError: their rows would lie in shards, beside an adapter.
    """
    saved = {name.rpartition(".")[2] for name in (recipe.adapter and recipe.adapter.modules_to_save) or []}
    is_sharded = recipe.world_size > 1 and recipe.parallel.is_sharded
    if new and recipe.adapter and is_sharded and not {"embed_tokens", "lm_head"} <= saved:
        raise UserError(
            f"model.tokenizer: an adapter and the rows of {len(new)} new tokens do not go with training.parallel."
            f"strategy {recipe.parallel.strategy}: PEFT replaces rows while it computes, and shards are no whole "
            "embedding.",
            remedy="Use ddp, or train the embeddings in full: adapter.modules_to_save: [embed_tokens, lm_head].",
        )
