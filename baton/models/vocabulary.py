"""The vocabulary as a recipe changes it: added tokens, the embedding's rows for them, and tokens' tasks.

The tokenizer's own `tokenizer_config.json` notes the tokens that the base lacks (`new_tokens`) and the end of a
turn (`eot_token`). So its files, with a checkpoint or an adapter, are enough to make the same rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from baton.errors import UserError, suggest
from baton.recipe.model import Tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NEW = "new_tokens"  # setting of a tokenizer: tokens without a row in the base, or without a learned one
END_OF_TURN = "eot_token"  # setting of a tokenizer: the token that ends an assistant's turn
BLOCK = 4096  # rows of an embedding that are added up at a time


def change(tokenizer: PreTrainedTokenizerBase, spec: Tokenizer) -> None:
    """Adds the tokens that a recipe names, and gives tokens their tasks."""
    from transformers import AddedToken

    vocabulary = tokenizer.get_vocab()
    ids, bos, eos = tokenizer("a")["input_ids"], tokenizer.bos_token_id, tokenizer.eos_token_id
    begins, ends = ids[0] == bos, ids[-1] == eos
    lacking = [token for token in dict.fromkeys(spec.add_tokens) if token not in vocabulary]
    # Not normalized: a normalizer that puts a blank in front, for example, would keep them from being found.
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in lacking])
    special = spec.special_tokens
    tokenizer.add_special_tokens(
        {**special.named, "additional_special_tokens": special.additional_special_tokens},
        replace_extra_special_tokens=False,
    )
    vocabulary = tokenizer.get_vocab()
    for name in ("eos", "pad", "end_of_turn"):
        token = getattr(spec, name)
        if token and token not in vocabulary:
            raise UserError(
                f"model.tokenizer.{name}: {token!r} is not in the vocabulary.{suggest(token, vocabulary)}",
                remedy="Name one that it has, or add it with model.tokenizer.add_tokens.",
            )
        if token and name != "end_of_turn":
            tokenizer.add_special_tokens({f"{name}_token": token})
    if spec.end_of_turn:
        tokenizer.add_tokens([spec.end_of_turn], special_tokens=True)
        if hasattr(tokenizer, END_OF_TURN):
            setattr(tokenizer, END_OF_TURN, spec.end_of_turn)
        tokenizer.init_kwargs[END_OF_TURN] = spec.end_of_turn
    if (begins and tokenizer.bos_token_id != bos) or (ends and tokenizer.eos_token_id != eos):
        # The post-processor knows the old tokens by their numbers; setting these rebuilds it.
        tokenizer.add_bos_token, tokenizer.add_eos_token = begins, ends


def record_new_tokens(tokenizer: PreTrainedTokenizerBase, before: dict[str, int], rows: int | None) -> None:
    """Notes in a tokenizer, which had the vocabulary `before`, its tokens without a learned row in the base."""
    tokenizer.init_kwargs.pop(NEW, None)  # of a base that Baton trained: new then, learned by now
    if rows is None:  # from scratch: no row is learned yet
        return
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if new := [token for token, number in vocabulary if token not in before or number >= rows]:
        tokenizer.init_kwargs[NEW] = new


def new_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the numbers of the tokens that the base has no learned row for, the lowest first."""
    return sorted(tokenizer.convert_tokens_to_ids(tokenizer.init_kwargs.get(NEW) or []))


def resize_embeddings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Gives a base the rows of a tokenizer's new tokens, each the mean of the old tokens' rows."""
    new = new_ids(tokenizer)
    if new:
        rows = int(model.get_input_embeddings().weight.shape[0])
        old = sorted(number for number in {*tokenizer.get_vocab().values()} - {*new} if number < rows)
        if new[-1] >= rows:  # spare rows of the base are used first
            model.resize_token_embeddings(new[-1] + 1, mean_resizing=False)
        by_token = [value for layer in layers(model).values() for value in layer.parameters(recurse=False)]
        for weight in {id(value): value for value in by_token}.values():  # one that both layers share, once
            weight.data[new] = _mean(weight, old)
    return model


def align(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Tells a model which tokens begin, end and fill up a text, and where to stop writing."""
    from transformers.trainer_utils import align_special_tokens

    align_special_tokens(model, tokenizer)
    settings, end = getattr(model, "generation_config", None), end_of_turn(tokenizer)
    if settings is not None and end is not None:
        known = settings.eos_token_id if isinstance(settings.eos_token_id, list) else [settings.eos_token_id]
        settings.eos_token_id = list(dict.fromkeys([*(token for token in known if token is not None), end]))


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Returns the token that ends an assistant's turn by the recipe."""
    token = getattr(tokenizer, END_OF_TURN, None) or tokenizer.init_kwargs.get(END_OF_TURN)
    return int(tokenizer.convert_tokens_to_ids(token)) if token else None


def layers(model: PreTrainedModel) -> dict[str, Any]:
    """Returns the layers with a row for each token by name: the input, and the output of a model that writes."""
    embeddings = [model.get_input_embeddings(), model.get_output_embeddings()]
    named = {id(layer): name for name, layer in model.named_modules()}
    return {named[id(layer)]: layer for layer in embeddings if layer is not None}


def _mean(weight: torch.Tensor, rows: list[int]) -> torch.Tensor:
    import numpy as np
    import torch

    total = np.zeros(weight.shape[1:], dtype=np.float64)
    for first in range(0, len(rows), BLOCK):
        block = weight.data[rows[first : first + BLOCK]].double().cpu().numpy()
        # Row after row: torch would divide the rows between as many threads as it happens to have.
        total = np.add.reduce(np.concatenate([total[None], block]), axis=0)
    return torch.from_numpy(np.asarray(total / max(1, len(rows)))).to(weight)
