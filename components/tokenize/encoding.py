"""One row to tokens, for each of the shapes that methods learn from: the same ids that TRL's own preparation gives."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from components.shared.errors import UserError
from components.shared.recipe import Data, Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]
Ids = list[int]

IGNORED = -100
"""Label of a token that does not count in the loss."""


def encoder(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Callable[[Row], list[Row]]:
    """Returns what turns a normalised row into the rows that the recipe's method trains on.

    The columns are `input_ids` and `labels` for `sft` and `pretrain`; `prompt_ids`, `chosen_ids` and `rejected_ids` for
    `dpo`, `orpo` and `cpo`; `chosen_ids` and `rejected_ids`, prompt included, for `reward`; `prompt_ids`,
    `completion_ids` and `label` for `kto`, two rows of each pair; and for `grpo` and `rloo` the `prompt` as it is with
    the columns that reward functions look at, and its `length` in tokens.
    """
    data, method = recipe.data, recipe.training.method
    encode: dict[str, Callable[[Row], list[Row]]] = {
        "reward": lambda row: [_scored(row, tokenizer, data)],
        "kto": lambda row: _rated(row, tokenizer, data),
        **dict.fromkeys(("dpo", "orpo", "cpo"), lambda row: [_pair(row, tokenizer, data)]),
        **dict.fromkeys(("grpo", "rloo"), lambda row: [_prompt(row, tokenizer, data)]),
    }
    chosen = encode.get(method, lambda row: [_text(row, tokenizer, data)])

    def with_extras(row: Row) -> list[Row]:
        extras = {name: row[name] for name in data.extra_columns}
        return [{**extras, **encoded} for encoded in chosen(row)]

    return with_extras


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


def _text(row: Row, tokenizer: PreTrainedTokenizerBase, data: Data) -> Row:
    if "messages" in row:
        return _conversation(row["messages"], tokenizer, data.assistant_only_loss)
    return encode(row, tokenizer, data.separator, data.completion_only_loss)


def _conversation(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, assistant_only: bool) -> Row:
    rendered = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=assistant_only
    )
    ids = list(rendered["input_ids"])
    if not assistant_only:
        return {"input_ids": ids, "labels": ids}
    marked = rendered["assistant_masks"]
    return {"input_ids": ids, "labels": [x if mark else IGNORED for x, mark in zip(ids, marked, strict=True)]}


def encode(row: Row, tokenizer: PreTrainedTokenizerBase, separator: str, completion_only: bool) -> Row:
    """Turns text, or prompt and completion, into token ids and labels.

    The completion starts where the tokens of the prompt alone and of prompt and completion diverge,
    as in TRL, so that a merge across the boundary counts as completion.

    Returns:
        `input_ids` and `labels`, each of the row's length; labels of the prompt are -100 where
        `completion_only`.
    """
    if "text" in row:
        ids = tokenizer(_ended(row["text"], tokenizer))["input_ids"]
        return {"input_ids": ids, "labels": ids}
    prompt, whole = _prompt_and_whole(row["prompt"], row["completion"], tokenizer, separator)
    length = common_prefix_length(prompt, whole) if completion_only else 0
    return {"input_ids": whole, "labels": [IGNORED] * length + whole[length:]}


def _pair(row: Row, tokenizer: PreTrainedTokenizerBase, data: Data) -> Row:
    prompt, chosen = _prompt_and_whole(row["prompt"], row["chosen"], tokenizer, data.separator)
    _, rejected = _prompt_and_whole(row["prompt"], row["rejected"], tokenizer, data.separator)
    length = min(common_prefix_length(prompt, chosen), common_prefix_length(prompt, rejected))
    return {"prompt_ids": prompt[:length], "chosen_ids": chosen[length:], "rejected_ids": rejected[length:]}


def _scored(row: Row, tokenizer: PreTrainedTokenizerBase, data: Data) -> Row:
    sides = ("chosen", "rejected")
    return {f"{x}_ids": _prompt_and_whole(row["prompt"], row[x], tokenizer, data.separator)[1] for x in sides}


def _rated(row: Row, tokenizer: PreTrainedTokenizerBase, data: Data) -> list[Row]:
    single = "completion" in row
    answers = [(row["completion"], row["label"])] if single else [(row["chosen"], True), (row["rejected"], False)]
    found = []
    for answer, label in answers:
        prompt, whole = _prompt_and_whole(row["prompt"], answer, tokenizer, data.separator)
        length = common_prefix_length(prompt, whole)
        found.append({"prompt_ids": prompt[:length], "completion_ids": whole[length:], "label": label})
    return found


def _prompt(row: Row, tokenizer: PreTrainedTokenizerBase, data: Data) -> Row:
    if isinstance(row["prompt"], list):
        rendered = tokenizer.apply_chat_template(
            row["prompt"], tokenize=True, return_dict=True, add_generation_prompt=True
        )
        return {**row, "length": len(rendered["input_ids"])}
    prompt = row["prompt"] + data.separator
    return {**row, "prompt": prompt, "length": len(tokenizer(prompt)["input_ids"])}


def _prompt_and_whole(prompt: Any, answer: Any, tokenizer: PreTrainedTokenizerBase, separator: str) -> tuple[Ids, Ids]:
    """Returns the tokens of a prompt alone, and of prompt and answer."""
    if isinstance(prompt, list):
        head = tokenizer.apply_chat_template(prompt, tokenize=True, return_dict=True, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(prompt + answer, tokenize=True, return_dict=True)
        return list(head["input_ids"]), list(whole["input_ids"])
    prompt = prompt + separator
    return tokenizer(prompt)["input_ids"], tokenizer(prompt + _ended(answer, tokenizer))["input_ids"]


def common_prefix_length(a: Ids, b: Ids) -> int:
    """Returns how many elements two lists share from the start."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _ended(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    end = str(tokenizer.eos_token)
    return text if text.endswith(end) else text + end
