"""Conversations to tokens by a chat template: what of them counts in the loss, and where answers begin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from baton.components.shared.core.errors import UserError
from baton.components.shared.core.labels import IGNORED
from baton.components.shared.runs.formats import FORMATS
from baton.components.tokenize.masks.answers import Answer, Ids, Row, common_prefix_length
from baton.components.tokenize.masks.following import Turns
from baton.components.tokenize.masks.left_out import left_out
from baton.components.tokenize.masks.template import Conversation, Message, Rendered, Template
from baton.components.tokenize.masks.tokens import Span, encoded, token_at, tokens_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPEN = "answers that the chat template ends with no token"


class Talk:
    """Conversations to tokens.

    Args:
        tokenizer: Whose template and tokens.
        train_on: `data.train_on`.
        number: Of the format of tokens.

    Attributes:
        told: What is worth telling → how often: what the template leaves out, answers that nothing ends.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, train_on: str | None, number: int = FORMATS["tokens"].number
    ) -> None:
        self.told: Counter[str] = Counter()
        self._tokenizer = tokenizer
        self._template = Template(tokenizer, number)
        self._turns = Turns(self._template)
        self._train_on = train_on

    def sequences(self, rows: list[Row]) -> list[Row | str]:
        """Returns `input_ids` and `labels` of `messages`, or `prompt` and `completion`, or why there are none."""
        made: list[Row | str] = []
        texts: list[str] = []
        spans: list[list[Span] | None] = []
        each = self._template.render_each([conversation_of(row) for row in rows])
        for row, rendered in zip(rows, each, strict=True):
            counted = rendered if isinstance(rendered, str) else self._counted(row, rendered)
            if isinstance(rendered, str) or isinstance(counted, str):
                made.append(str(counted))
                continue
            self.told.update(left_out(rendered))
            made.append({})
            texts.append(rendered.text)
            spans.append(counted)
        labelled = self._labelled(texts, spans)
        return [row if isinstance(row, str) else next(labelled) for row in made]

    def answers(self, rows: list[Row], name: str, *, apart: bool) -> list[Answer | str]:
        """Returns each prompt with one of its answers, or why there is none.

        The answer starts where the tokens of the prompt, as the model would continue it, and of both diverge, so that
        a merge across the boundary counts as answer; or, where the template writes that prompt otherwise once it is
        answered, where the answer's first turn begins.

        Args:
            rows: With `prompt` and the answer as messages.
            name: The answer's column.
            apart: Whether it matters where the answer starts.
        """
        wholes = self._template.render_each([conversation_of(row, name) for row in rows])
        prompts = wholes
        if apart:
            prompts = self._template.render_each([conversation_of(row, None) for row in rows], prompts=True)
        usable = [
            (row, whole, prompt)
            for row, whole, prompt in zip(rows, wholes, prompts, strict=True)
            if isinstance(whole, Rendered) and isinstance(prompt, Rendered)
        ]
        encoding = encoded(self._tokenizer, [whole.text for _, whole, _ in usable])
        heads = self._ids([prompt.text for *_, prompt in usable]) if apart else [[] for _ in usable]
        found: list[Answer | str] = []
        for index, ((row, whole, prompt), head) in enumerate(zip(usable, heads, strict=True)):
            ids = encoding["input_ids"][index]
            self.told.update(left_out(whole))
            if not apart or whole.text.startswith(prompt.text):
                found.append(Answer(ids, common_prefix_length(head, ids)))
                continue
            self._require_places()
            start = self._turns.start(whole, len(row["prompt"]))
            found.append(
                "cannot tell where the answer begins in what the chat template makes of the conversation"
                if start is None
                else Answer(ids, token_at(encoding, index, whole.text, start, len(ids)))
            )
        made = iter(found)
        return [
            whole if isinstance(whole, str) else prompt if isinstance(prompt, str) else next(made)
            for whole, prompt in zip(wholes, prompts, strict=True)
        ]

    def prompts(self, rows: list[Row]) -> list[tuple[list[Message], int] | str]:
        """Returns each prompt as it can be written, and how many tokens it is as the model would continue it; or why it
        cannot be written."""
        rendered = self._template.render_each([conversation_of(row, None) for row in rows], prompts=True)
        usable = [each for each in rendered if isinstance(each, Rendered)]
        for each in usable:
            self.told.update(left_out(each))
        lengths = iter(map(len, self._ids([each.text for each in usable])))
        return [each if isinstance(each, str) else (each.conversation.messages, next(lengths)) for each in rendered]

    def _counted(self, row: Row, rendered: Rendered) -> list[Span] | str | None:
        """Returns the spans that count, None where all does, or why that cannot be told."""
        messages = messages_of(row)
        flags = {number: bool(message["train"]) for number, message in enumerate(messages) if "train" in message}
        wanted = self._wanted(row, flags)
        if wanted is None:
            left = [number for number in sorted(flags) if not flags[number]]
            turns = self._turns.find(rendered, left) if left else []
            if isinstance(turns, str):
                return turns
            if not turns:
                return None
            return list(_between(sorted(span for turn in turns for span in turn.spans), len(rendered.text)))
        if not wanted:
            return "none of its messages counts in the loss"
        turns = self._turns.find(rendered, wanted)
        if isinstance(turns, str):
            return turns
        if unended := sum(not turn.is_ended for turn in turns):
            self.told[OPEN] += unended
        return [span for turn in turns for span in turn.spans] or "the chat template leaves out what counts of it"

    def _wanted(self, row: Row, flags: dict[int, bool]) -> list[int] | None:
        """Returns the messages that count, None where all does but those that are flagged."""
        if self._train_on == "all" or (self._train_on in (None, "completions") and "messages" in row):
            return None
        said = [number for number, message in enumerate(messages_of(row)) if message["role"] == "assistant"]
        if self._train_on == "last":
            said = said[-1:]
        elif self._train_on != "assistant":
            said = [number for number in said if number >= len(row["prompt"])]
        counted = {number for number in {*said, *flags} if flags.get(number, True)}
        return sorted(counted)

    def _labelled(self, texts: list[str], spans: list[list[Span] | None]) -> Iterator[Row]:
        if any(span is not None for span in spans):
            self._require_places()
        encoding = encoded(self._tokenizer, texts)
        for index, (ids, text, counted) in enumerate(zip(encoding["input_ids"], texts, spans, strict=True)):
            if counted is None:
                yield {"input_ids": ids, "labels": ids}
                continue
            labels = [IGNORED] * len(ids)
            for span in counted:
                first, last = tokens_of(encoding, index, text, span, len(ids))
                labels[first:last] = ids[first:last]
            yield {"input_ids": ids, "labels": labels}

    def _ids(self, texts: list[str]) -> list[Ids]:
        ids: list[Ids] = encoded(self._tokenizer, texts)["input_ids"]
        return ids

    def _require_places(self) -> None:
        if not self._tokenizer.is_fast:
            raise UserError(
                f"the tokenizer ({type(self._tokenizer).__name__}) does not tell which text its tokens are of, which "
                "is needed to train on parts of a conversation.",
                remedy="Set data.train_on to all, or take a model with a fast tokenizer.",
            )


def messages_of(row: Row, answer: str | None = "completion") -> list[Row]:
    """Returns a row's messages: all of them, or its prompt's and an answer's."""
    return row["messages"] if "messages" in row else row["prompt"] + (row[answer] if answer else [])


def conversation_of(row: Row, answer: str | None = "completion") -> Conversation:
    """Returns a row's conversation as templates read it, without the messages' flags."""
    messages = messages_of(row, answer)
    if any("train" in message for message in messages):
        messages = [{key: value for key, value in message.items() if key != "train"} for message in messages]
    return Conversation(messages, row.get("tools") or None)


def _between(spans: list[Span], length: int) -> Iterator[Span]:
    """Yields what lies between spans that are in order."""
    at = 0
    for start, end in [*spans, (length, length)]:
        if start > at:
            yield at, start
        at = end
