"""Rows to tokens, for each of the shapes that methods learn from.

The ids are those that TRL's own preparation gives to the same rows; where texts become turns of a conversation, to the
rows written as messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.components.shared.core.errors import UserError
from baton.components.shared.core.labels import IGNORED
from baton.components.shared.models import conversing
from baton.components.shared.recipe import Recipe
from baton.components.shared.recipe.methods.spec import Rows
from baton.components.shared.runs.formats import FORMATS
from baton.components.tokenize.masks.answers import Answer, Ids, Row, common_prefix_length
from baton.components.tokenize.masks.talk import Talk
from baton.components.tokenize.masks.tokens import ids_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNPLACED = "columns {!r} of rows that are trained as text, which has no place for them"
Made = list[Row] | str
"""The rows made of one row, or why there are none."""


class BatchEncoder:
    """Turns normalised rows of one shape into those that the recipe's method trains on.

    For each row there are the rows made of it, or why there are none. Their columns go by the method's `rows`:
    `input_ids` and `labels` for `sequences`; `prompt_ids`, `chosen_ids` and `rejected_ids` for `pairs`; `chosen_ids`
    and `rejected_ids`, prompt included, for `scored`; `prompt_ids`, `completion_ids` and `label` for `rated`, two rows
    of each pair; and for `prompts` the `prompt` as it is with the columns that reward functions look at, and its
    `length` in tokens.

    Args:
        recipe: The recipe.
        tokenizer: The tokenizer.
        number: Of the format of tokens.
    """

    def __init__(
        self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, number: int = FORMATS["tokens"].number
    ) -> None:
        self._recipe, self._data = recipe, recipe.data
        self._tokenizer = tokenizer
        self._talk = Talk(tokenizer, recipe.data.train_on, number)
        makers: dict[Rows, Callable[[list[Row]], list[Made]]] = {
            "sequences": self._learned,
            "scored": self._scored,
            "rated": self._rated,
            "pairs": self._pairs,
            "prompts": self._prompts,
        }
        self._make = makers[recipe.training.spec.rows]

    @property
    def told(self) -> dict[str, int]:
        """What the chat template leaves out of the rows so far, and answers that it does not end → how often."""
        return dict(+self._talk.told)

    def __call__(self, rows: list[Row]) -> list[Made]:
        if not rows:
            return []
        conversed = conversing.conversed(rows, self._recipe, self._tokenizer)
        for before, after in zip(rows, conversed, strict=True):
            for name in conversing.unplaced(before):
                # An extra column is kept for reward functions in any case.
                if name not in after and name not in self._data.extra_columns and isinstance(after["prompt"], str):
                    self._talk.told[UNPLACED.format(name)] += 1
        made = self._make(conversed)
        if not self._data.extra_columns:
            return made
        extras = [{name: row[name] for name in self._data.extra_columns} for row in rows]
        return [
            some if isinstance(some, str) else [{**extra, **new} for new in some]
            for extra, some in zip(extras, made, strict=True)
        ]

    def _learned(self, rows: list[Row]) -> list[Made]:
        if "messages" in rows[0] or isinstance(rows[0].get("prompt"), list):
            return [row if isinstance(row, str) else [row] for row in self._talk.sequences(rows)]
        columns = encode(rows, self._tokenizer, self._data.separator, self._data.train_on != "all")
        return [[row] for row in columns]

    def _pairs(self, rows: list[Row]) -> list[Made]:
        both = (self._answers(rows, side) for side in ("chosen", "rejected"))
        return [
            chosen if isinstance(chosen, str) else rejected if isinstance(rejected, str) else _pair(chosen, rejected)
            for chosen, rejected in zip(*both, strict=True)
        ]

    def _scored(self, rows: list[Row]) -> list[Made]:
        both = (self._answers(rows, side, apart=False) for side in ("chosen", "rejected"))
        return [
            chosen
            if isinstance(chosen, str)
            else rejected
            if isinstance(rejected, str)
            else [{"chosen_ids": chosen.ids, "rejected_ids": rejected.ids}]
            for chosen, rejected in zip(*both, strict=True)
        ]

    def _rated(self, rows: list[Row]) -> list[Made]:
        single = "completion" in rows[0]
        encoded: list[Made] = [[] for _ in rows]
        for name in ("completion",) if single else ("chosen", "rejected"):
            for at, (row, answer) in enumerate(zip(rows, self._answers(rows, name), strict=True)):
                made = encoded[at]
                if isinstance(answer, str) or isinstance(made, str):
                    encoded[at] = made if isinstance(made, str) else str(answer)
                    continue
                label = row["label"] if single else name == "chosen"
                made.append({"prompt_ids": answer.prompt, "completion_ids": answer.answer, "label": label})
        return encoded

    def _prompts(self, rows: list[Row]) -> list[Made]:
        if isinstance(rows[0]["prompt"], list):
            written = self._talk.prompts(rows)
            return [
                x if isinstance(x, str) else [{**row, "prompt": x[0], "length": x[1]}]
                for row, x in zip(rows, written, strict=True)
            ]
        separator = self._data.separator
        prompts = ids_of(self._tokenizer, [row["prompt"] + separator for row in rows])
        return [
            [{**row, "prompt": row["prompt"] + separator, "length": len(ids)}]
            for row, ids in zip(rows, prompts, strict=True)
        ]

    def _answers(self, rows: list[Row], name: str, *, apart: bool = True) -> list[Answer | str]:
        """Returns each prompt with one of its answers; apart from each other, where that is wanted."""
        if isinstance(rows[0]["prompt"], list):
            return self._talk.answers(rows, name, apart=apart)
        separator = self._data.separator
        texts = [row["prompt"] + separator + _ended(row[name], self._tokenizer) for row in rows]
        wholes = ids_of(self._tokenizer, texts)
        if not apart:
            return [Answer(whole, 0) for whole in wholes]
        prompts = ids_of(self._tokenizer, [row["prompt"] + separator for row in rows])
        return [
            Answer(whole, common_prefix_length(prompt, whole)) for prompt, whole in zip(prompts, wholes, strict=True)
        ]


def id_columns(row: Row) -> list[str]:
    """Returns the names of the columns that hold a sequence's tokens."""
    return [name for name in row if name.endswith("_ids")]


def require_template(tokenizer: PreTrainedTokenizerBase, row: Row) -> None:
    """Checks that there is a chat template where rows are conversations.

    Raises:
        UserError: there is none.
    """
    if tokenizer.chat_template is None and any(isinstance(row.get(name), list) for name in ("messages", "prompt")):
        raise UserError(
            "data has conversations, but the tokenizer has no chat template.",
            remedy="Use an instruct model, or set model.chat_template.",
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
            {"input_ids": ids, "labels": ids} for ids in ids_of(tokenizer, [_ended(x["text"], tokenizer) for x in rows])
        ]
    wholes = ids_of(tokenizer, [x["prompt"] + separator + _ended(x["completion"], tokenizer) for x in rows])
    if not completion_only:
        return [{"input_ids": ids, "labels": ids} for ids in wholes]
    columns = []
    prompts = ids_of(tokenizer, [row["prompt"] + separator for row in rows])
    for prompt, whole in zip(prompts, wholes, strict=True):
        length = common_prefix_length(prompt, whole)
        columns.append({"input_ids": whole, "labels": [IGNORED] * length + whole[length:]})
    return columns


def _pair(chosen: Answer, rejected: Answer) -> Made:
    length = min(chosen.length, rejected.length)
    if chosen.ids[:length] != rejected.ids[:length]:
        return "the chat template writes the prompt otherwise before the one answer than before the other"
    row = {"prompt_ids": chosen.ids[:length], "chosen_ids": chosen.ids[length:], "rejected_ids": rejected.ids[length:]}
    return [row]


def _ended(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    end = str(tokenizer.eos_token)
    return text if text.endswith(end) else text + end
