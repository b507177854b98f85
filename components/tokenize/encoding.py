"""Rows to tokens, for each of the shapes that methods learn from: the same ids that TRL's own preparation gives."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from baton.components.shared.core.errors import UserError
from baton.components.shared.core.labels import IGNORED
from baton.components.shared.recipe import Data, Recipe
from baton.components.shared.recipe.methods.spec import Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]
Ids = list[int]


def batch_encoder(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Callable[[list[Row]], list[list[Row]]]:
    """Returns what turns normalised rows of one shape into those that the recipe's method trains on.

    For each row there are the rows made of it. Their columns go by the method's `rows`: `input_ids` and `labels` for
    `sequences`; `prompt_ids`, `chosen_ids` and `rejected_ids` for `pairs`; `chosen_ids` and `rejected_ids`, prompt
    included, for `scored`; `prompt_ids`, `completion_ids` and `label` for `rated`, two rows of each pair; and for
    `prompts` the `prompt` as it is with the columns that reward functions look at, and its `length` in tokens.
    """
    data = recipe.data
    makers: dict[Rows, Callable[[list[Row], PreTrainedTokenizerBase, Data], list[list[Row]]]] = {
        "sequences": _learned,
        "scored": _scored,
        "rated": _rated,
        "pairs": _pairs,
        "prompts": _prompts,
    }
    make = makers[recipe.training.spec.rows]

    def encode_batch(rows: list[Row]) -> list[list[Row]]:
        if not rows:
            return []
        made = make(rows, tokenizer, data)
        if not data.extra_columns:
            return made
        extras = [{name: row[name] for name in data.extra_columns} for row in rows]
        return [[{**extra, **new} for new in made_rows] for extra, made_rows in zip(extras, made, strict=True)]

    return encode_batch


def encoder(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Callable[[Row], list[Row]]:
    """Returns `batch_encoder` for one row at a time."""
    encode_batch = batch_encoder(recipe, tokenizer)
    return lambda row: encode_batch([row])[0]


def id_columns(row: Row) -> list[str]:
    """Returns the names of the columns that hold a sequence's tokens."""
    return [name for name in row if name.endswith("_ids")]


def require_template(tokenizer: PreTrainedTokenizerBase, row: Row, data: Data) -> None:
    """Checks that conversations can be rendered.

    Raises:
        UserError: there is no chat template, or it does not mark what the assistant says where that is asked for.
    """
    if not any(isinstance(value, list) for value in row.values()):
        return
    if tokenizer.chat_template is None:
        raise UserError(
            "data has conversations, but the tokenizer has no chat template.", remedy="Use an instruct model."
        )
    if data.assistant_only_loss and not re.search(r"{%-?\s*generation\s*-?%}", str(tokenizer.chat_template)):
        raise UserError(
            "data.assistant_only_loss: the tokenizer's chat template does not mark what the assistant says "
            "({% generation %}).",
            remedy="Set it to false, or take a tokenizer whose template has the mark.",
        )


def encode(
    rows: list[Row], tokenizer: PreTrainedTokenizerBase, separator: str, completion_only: bool
) -> list[dict[str, Ids]]:
    """Turns texts, or prompts and completions, into token ids and labels.

    The completion starts where the tokens of the prompt alone and of prompt and completion diverge,
    as in TRL, so that a merge across the boundary counts as completion.

    Returns:
        `input_ids` and `labels` for each row, each of the row's length; labels of the prompt are -100 where
        `completion_only`.
    """
    if "text" in rows[0]:
        return [
            {"input_ids": ids, "labels": ids} for ids in _ids([_ended(x["text"], tokenizer) for x in rows], tokenizer)
        ]
    wholes = _ids([x["prompt"] + separator + _ended(x["completion"], tokenizer) for x in rows], tokenizer)
    if not completion_only:
        return [{"input_ids": ids, "labels": ids} for ids in wholes]
    columns = []
    for prompt, whole in zip(_heads(rows, tokenizer, separator), wholes, strict=True):
        length = common_prefix_length(prompt, whole)
        columns.append({"input_ids": whole, "labels": [IGNORED] * length + whole[length:]})
    return columns


def common_prefix_length(a: Ids, b: Ids) -> int:
    """Returns how many elements two lists share from the start."""
    if b[: len(a)] == a:
        return len(a)
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _learned(rows: list[Row], tokenizer: PreTrainedTokenizerBase, data: Data) -> list[list[Row]]:
    if "messages" in rows[0]:
        return [[row] for row in _conversations(rows, tokenizer, data.assistant_only_loss)]
    return [[row] for row in encode(rows, tokenizer, data.separator, data.completion_only_loss)]


def _conversations(rows: list[Row], tokenizer: PreTrainedTokenizerBase, assistant_only: bool) -> list[dict[str, Ids]]:
    conversations = [row["messages"] for row in rows]
    if not assistant_only:
        return [{"input_ids": ids, "labels": ids} for ids in _rendered(conversations, tokenizer)]
    rendered = tokenizer.apply_chat_template(
        conversations, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    encoded = []
    for ids, marked in zip(rendered["input_ids"], rendered["assistant_masks"], strict=True):
        labels = [x if mark else IGNORED for x, mark in zip(ids, marked, strict=True)]
        encoded.append({"input_ids": list(ids), "labels": labels})
    return encoded


def _pairs(rows: list[Row], tokenizer: PreTrainedTokenizerBase, data: Data) -> list[list[Row]]:
    prompts = _heads(rows, tokenizer, data.separator)
    both = (_wholes(rows, side, tokenizer, data.separator) for side in ("chosen", "rejected"))
    encoded: list[list[Row]] = []
    for prompt, chosen, rejected in zip(prompts, *both, strict=True):
        length = min(common_prefix_length(prompt, chosen), common_prefix_length(prompt, rejected))
        row = {"prompt_ids": prompt[:length], "chosen_ids": chosen[length:], "rejected_ids": rejected[length:]}
        encoded.append([row])
    return encoded


def _scored(rows: list[Row], tokenizer: PreTrainedTokenizerBase, data: Data) -> list[list[Row]]:
    both = (_wholes(rows, side, tokenizer, data.separator) for side in ("chosen", "rejected"))
    return [[{"chosen_ids": chosen, "rejected_ids": rejected}] for chosen, rejected in zip(*both, strict=True)]


def _rated(rows: list[Row], tokenizer: PreTrainedTokenizerBase, data: Data) -> list[list[Row]]:
    single = "completion" in rows[0]
    answers = ("completion",) if single else ("chosen", "rejected")
    prompts = _heads(rows, tokenizer, data.separator)
    encoded: list[list[Row]] = [[] for _ in rows]
    for answer in answers:
        for made, row, prompt, whole in zip(
            encoded, rows, prompts, _wholes(rows, answer, tokenizer, data.separator), strict=True
        ):
            length = common_prefix_length(prompt, whole)
            label = row["label"] if single else answer == "chosen"
            made.append({"prompt_ids": prompt[:length], "completion_ids": whole[length:], "label": label})
    return encoded


def _prompts(rows: list[Row], tokenizer: PreTrainedTokenizerBase, data: Data) -> list[list[Row]]:
    prompts = _heads(rows, tokenizer, data.separator)
    if isinstance(rows[0]["prompt"], list):
        return [[{**row, "length": len(ids)}] for row, ids in zip(rows, prompts, strict=True)]
    return [
        [{**row, "prompt": row["prompt"] + data.separator, "length": len(ids)}]
        for row, ids in zip(rows, prompts, strict=True)
    ]


def _heads(rows: list[Row], tokenizer: PreTrainedTokenizerBase, separator: str) -> list[Ids]:
    """Returns the tokens of each prompt alone, as the model would continue it."""
    prompts = [row["prompt"] for row in rows]
    if isinstance(prompts[0], list):
        return _rendered(prompts, tokenizer, add_generation_prompt=True)
    return _ids([prompt + separator for prompt in prompts], tokenizer)


def _wholes(rows: list[Row], answer: str, tokenizer: PreTrainedTokenizerBase, separator: str) -> list[Ids]:
    """Returns the tokens of each prompt and one of its answers."""
    if isinstance(rows[0]["prompt"], list):
        return _rendered([row["prompt"] + row[answer] for row in rows], tokenizer)
    return _ids([row["prompt"] + separator + _ended(row[answer], tokenizer) for row in rows], tokenizer)


def _ids(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[Ids]:
    encoded: list[Ids] = tokenizer(texts, return_attention_mask=False, return_token_type_ids=False, verbose=False)[
        "input_ids"
    ]
    return encoded


def _rendered(conversations: list[Any], tokenizer: PreTrainedTokenizerBase, **options: bool) -> list[Ids]:
    rendered = tokenizer.apply_chat_template(conversations, tokenize=True, return_dict=True, **options)
    return [list(ids) for ids in rendered["input_ids"]]


def _ended(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    end = str(tokenizer.eos_token)
    return text if text.endswith(end) else text + end
