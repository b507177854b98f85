"""Rows to tokens, for each shape that methods learn from, and the tokenizer of a run.

The ids equal those of TRL's own preparation of the same rows. Texts that become turns equal rows written as messages.
`ChatEncoder` tells which tokens count in the loss. A byte-level BPE tokenizer can be learned from the training split.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from baton.data.conversations import shared_length
from baton.data.mask import AssistantSpans
from baton.errors import RowError, UserError
from baton.models import chat, loading
from baton.models.chat import CHATML, OWN_TOKENS
from baton.models.chat_template import ChatTemplate, Conversation, Message, RenderedConversation, left_out
from baton.models.train_rows import IGNORED
from baton.recipe.methods import Rows
from baton.recipe.model import TrainTokenizer
from baton.recipe.recipe import Recipe
from baton.runs.versions import FORMATS

if TYPE_CHECKING:
    from transformers import BatchEncoding

Row = dict[str, Any]
Ids = list[int]
Span = tuple[int, int]
T = TypeVar("T")


def each(make: Callable[..., T], *columns: list[Any]) -> list[T | RowError]:
    """Returns for each row's values the made value, or the error, made now or among the values."""
    made: list[T | RowError] = []
    for values in zip(*columns, strict=True):
        earlier = next((value for value in values if isinstance(value, RowError)), None)
        try:
            made.append(earlier or make(*values))
        except RowError as error:
            made.append(error.with_traceback(None))  # its frames hold the batch
    return made


class AnswerTokens(NamedTuple):
    """Tokens of a prompt with an answer; `length` counts the prompt's."""

    ids: Ids
    length: int


def common_prefix_length(a: Ids, b: Ids) -> int:
    return len(a) if b[: len(a)] == a else shared_length(a, b)  # mostly the prompt's tokens begin both


def ids_of(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Returns the tokens of texts with special ones, as a call of the tokenizer does."""
    options = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    by_call: list[list[int]]
    own = type(tokenizer)
    has_own_code = not isinstance(tokenizer, PreTrainedTokenizerFast) or any(
        getattr(own, name) is not getattr(PreTrainedTokenizerFast, name)
        for name in ("__call__", "_encode_plus", "set_truncation_and_padding")
    )
    if has_own_code:
        by_call = tokenizer(texts, **options)["input_ids"]
        return by_call
    # The first by the tokenizer, which tells the library whether to cut and to pad; the others without their places in
    # the text, which take the library a third of the time.
    by_call = tokenizer(texts[:1], **options)["input_ids"]
    library = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    return by_call + [encoding.ids for encoding in library.encode_batch_fast(texts[1:], add_special_tokens=True)]


def encoded(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> BatchEncoding:
    """Returns the tokens of renderings, which hold their special tokens."""
    from transformers import BatchEncoding

    if not texts:
        return BatchEncoding({"input_ids": []})
    return tokenizer(
        texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )


def tokens_of(encoding: BatchEncoding, index: int, text: str, span: Span, count: int) -> Span:
    """Returns the token range of a span of a text.

    A token across the beginning is left out, unless it only brings white space to the first word; one across the end is
    taken if it only brings white space along.
    """
    start, end = span
    first, last = token_at(encoding, index, text, start, count), token_at(encoding, index, text, end, count)
    places = encoding[index]
    if first < count and (reach := places.token_to_chars(first)) and reach[0] < start:
        first += bool(text[reach[0] : start].strip() or not text[start : reach[1]].strip())
    if last < count and (over := places.token_to_chars(last)) and over[0] < end and not text[end : over[1]].strip():
        last += 1
    return first, max(first, last)


def token_at(encoding: BatchEncoding, index: int, text: str, at: int, count: int) -> int:
    """Returns the first token of a character, or of the next one that has any."""
    places = encoding[index]
    while at < len(text):
        token: int | None = places.char_to_token(at)
        if token is not None:
            return token
        at += 1
    return count


UNENDED = "answers that the chat template ends with no token"


class ChatEncoder:
    """Conversations to tokens, `data.train_on` of which count in the loss; `told` counts losses worth telling."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, train_on: str | None, number: int = FORMATS["tokens"].number
    ) -> None:
        self.told: Counter[str] = Counter()
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, number)
        self._turns = AssistantSpans(self._template)
        self._train_on = train_on

    def sequences(self, rows: list[Row]) -> list[Row | RowError]:
        """Returns `input_ids` and `labels` of `messages`, or `prompt` and `completion`, or an error."""
        counted = each(self._counted, rows, self._template.render_each([conversation_of(row) for row in rows]))
        # In the order of the rows without an error, as they are taken below.
        labelled = self._labelled([found for found in counted if not isinstance(found, RowError)])
        return [found if isinstance(found, RowError) else next(labelled) for found in counted]

    def answers(self, rows: list[Row], name: str, *, with_prompt_length: bool) -> list[AnswerTokens | RowError]:
        """Returns each prompt with the answer in column `name`, or an error.

        The answer starts where the tokens of the prompt, as the model would continue it, and of both diverge, so that a
        merge across the boundary counts as answer. Where the template writes that prompt otherwise once it is answered,
        it starts with the answer's first turn. Without `with_prompt_length` the prompt's length is 0.
        """
        wholes = prompts = self._template.render_each([conversation_of(row, name) for row in rows])
        if with_prompt_length:
            prompts = self._template.render_each([conversation_of(row, None) for row in rows], prompts=True)
        pairs = [
            (whole, prompt)
            for whole, prompt in zip(wholes, prompts, strict=True)
            if not isinstance(whole, RowError) and not isinstance(prompt, RowError)
        ]
        encoding = encoded(self._tokenizer, [whole.text for whole, _ in pairs])
        heads = iter(self._ids([prompt.text for _, prompt in pairs]) if with_prompt_length else [])
        places = iter(range(len(pairs)))
        # `each` skips rows with an error, so that both iterators keep in step with the rendered pairs.

        def answer(row: Row, whole: RenderedConversation, prompt: RenderedConversation) -> AnswerTokens:
            index = next(places)
            ids = encoding["input_ids"][index]
            self.told.update(left_out(whole))
            if not with_prompt_length:
                return AnswerTokens(ids, 0)
            head = next(heads)
            if whole.text.startswith(prompt.text):
                return AnswerTokens(ids, common_prefix_length(head, ids))
            self._require_places()
            start = self._turns.start(whole, len(row["prompt"]))
            return AnswerTokens(ids, token_at(encoding, index, whole.text, start, len(ids)))

        return each(answer, rows, wholes, prompts)

    def prompts(self, rows: list[Row]) -> list[tuple[list[Message], int] | RowError]:
        """Returns each prompt as rendered and its number of tokens with the answer's header, or an error."""
        rendered = self._template.render_each([conversation_of(row, None) for row in rows], prompts=True)
        usable = [found for found in rendered if not isinstance(found, RowError)]
        for found in usable:
            self.told.update(left_out(found))
        lengths = iter(map(len, self._ids([found.text for found in usable])))
        return each(lambda found: (found.conversation.messages, next(lengths)), rendered)

    def _counted(self, row: Row, rendered: RenderedConversation) -> tuple[str, list[Span] | None]:
        """Returns a row's text and its spans that count, None where all does."""
        spans = self._spans(row, rendered)
        self.told.update(left_out(rendered))
        return rendered.text, spans

    def _spans(self, row: Row, rendered: RenderedConversation) -> list[Span] | None:
        flags = {at: bool(message["train"]) for at, message in enumerate(messages_of(row)) if "train" in message}
        wanted = self._wanted(row, flags)
        if wanted is None:
            left = [number for number in sorted(flags) if not flags[number]]
            if not left:
                return None
            turns = self._turns.find(rendered, left)
            return list(_between(sorted(span for turn in turns for span in turn.spans), len(rendered.text)))
        if not wanted:
            raise RowError("none of its messages counts in the loss")
        turns = self._turns.find(rendered, wanted)
        if unended := sum(not turn.is_ended for turn in turns):
            self.told[UNENDED] += unended
        spans = [span for turn in turns for span in turn.spans]
        if not spans:
            raise RowError("the chat template leaves out what counts of it")
        return spans

    def _wanted(self, row: Row, flags: dict[int, bool]) -> list[int] | None:
        """Returns the messages that count, None where all do but flagged ones."""
        if self._train_on == "all" or (self._train_on in (None, "completions") and "messages" in row):
            return None
        said = [number for number, message in enumerate(messages_of(row)) if message["role"] == "assistant"]
        if self._train_on == "last":
            said = said[-1:]
        elif self._train_on != "assistant":
            said = [number for number in said if number >= len(row["prompt"])]
        return sorted(number for number in {*said, *flags} if flags.get(number, True))

    def _labelled(self, counted: list[tuple[str, list[Span] | None]]) -> Iterator[Row]:
        if any(spans is not None for _, spans in counted):
            self._require_places()
        encoding = encoded(self._tokenizer, [text for text, _ in counted])
        for index, (ids, (text, spans)) in enumerate(zip(encoding["input_ids"], counted, strict=True)):
            if spans is None:
                yield {"input_ids": ids, "labels": ids}
                continue
            labels = [IGNORED] * len(ids)
            for span in spans:
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
    return row["messages"] if "messages" in row else row["prompt"] + (row[answer] if answer else [])


def conversation_of(row: Row, answer: str | None = "completion") -> Conversation:
    """Returns a row's conversation as templates read it, without the messages' flags."""
    messages = messages_of(row, answer)
    if any("train" in message for message in messages):
        messages = [{key: value for key, value in message.items() if key != "train"} for message in messages]
    return Conversation(messages, row.get("tools") or None)


def _between(spans: list[Span], length: int) -> Iterator[Span]:
    """Yields the gaps between ordered spans."""
    at = 0
    for start, end in [*spans, (length, length)]:
        if start > at:
            yield at, start
        at = end


UNPLACED = "columns {!r} of rows that are trained as text, which has no place for them"
Made = list[Row] | RowError  # the rows made of one row, or an error


class BatchEncoder:
    """Turns normalised rows of one shape into rows that the recipe's method trains on.

    Columns by the method's `rows`: `input_ids` and `labels` for `sequences`; `prompt_ids`, `chosen_ids` and
    `rejected_ids` for `pairs`; `chosen_ids` and `rejected_ids`, prompt included, for `scored`; `prompt_ids`,
    `completion_ids` and `label` for `rated`, two rows of each pair; and for `prompts` the `prompt` with the columns
    that reward functions look at, and its `length` in tokens.
    """

    def __init__(
        self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, number: int = FORMATS["tokens"].number
    ) -> None:
        self._recipe, self._data = recipe, recipe.data
        self._tokenizer = tokenizer
        self._talk = ChatEncoder(tokenizer, recipe.data.train_on, number)
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
        """Parts of rows that the chat template leaves out, and answers that it does not end → how often."""
        return dict(+self._talk.told)

    def __call__(self, rows: list[Row]) -> list[Made]:
        if not rows:
            return []
        conversed = chat.apply_chat(rows, self._recipe, self._tokenizer)
        for before, after in zip(rows, conversed, strict=True):
            for name in chat.unplaced(before):
                # An extra column is kept for reward functions in any case.
                if name not in after and name not in self._data.extra_columns and isinstance(after["prompt"], str):
                    self._talk.told[UNPLACED.format(name)] += 1
        made = self._make(conversed)
        if not self._data.extra_columns:
            return made
        extras = [{name: row[name] for name in self._data.extra_columns} for row in rows]
        return each(lambda extra, some: [{**extra, **new} for new in some], extras, made)

    def _learned(self, rows: list[Row]) -> list[Made]:
        if "messages" in rows[0] or isinstance(rows[0].get("prompt"), list):
            return each(lambda row: [row], self._talk.sequences(rows))
        columns = encode_texts(rows, self._tokenizer, self._data.separator, self._data.train_on != "all")
        return [[row] for row in columns]

    def _pairs(self, rows: list[Row]) -> list[Made]:
        return each(_pair, *(self._answers(rows, side) for side in ("chosen", "rejected")))

    def _scored(self, rows: list[Row]) -> list[Made]:
        both = (self._answers(rows, side, with_prompt_length=False) for side in ("chosen", "rejected"))
        return each(lambda chosen, rejected: [{"chosen_ids": chosen.ids, "rejected_ids": rejected.ids}], *both)

    def _rated(self, rows: list[Row]) -> list[Made]:
        single = "completion" in rows[0]
        names = ("completion",) if single else ("chosen", "rejected")

        def rated(row: Row, *answers: AnswerTokens) -> list[Row]:
            return [
                {
                    "prompt_ids": answer.ids[: answer.length],
                    "completion_ids": answer.ids[answer.length :],
                    "label": row["label"] if single else name == "chosen",
                }
                for name, answer in zip(names, answers, strict=True)
            ]

        return each(rated, rows, *(self._answers(rows, name) for name in names))

    def _prompts(self, rows: list[Row]) -> list[Made]:
        if isinstance(rows[0]["prompt"], list):
            return each(
                lambda row, written: [{**row, "prompt": written[0], "length": written[1]}],
                rows,
                self._talk.prompts(rows),
            )
        texts = [row["prompt"] + self._data.separator for row in rows]
        return [
            [{**row, "prompt": text, "length": len(ids)}]
            for row, text, ids in zip(rows, texts, ids_of(self._tokenizer, texts), strict=True)
        ]

    def _answers(self, rows: list[Row], name: str, *, with_prompt_length: bool = True) -> list[AnswerTokens | RowError]:
        if isinstance(rows[0]["prompt"], list):
            return self._talk.answers(rows, name, with_prompt_length=with_prompt_length)
        return [*_answer_texts(rows, name, self._tokenizer, self._data.separator, with_prompt_length)]


def id_columns(row: Row) -> list[str]:
    return [name for name in row if name.endswith("_ids")]


def require_template(tokenizer: PreTrainedTokenizerBase, row: Row) -> None:
    if tokenizer.chat_template is None and any(isinstance(row.get(name), list) for name in ("messages", "prompt")):
        raise UserError(
            "data has conversations, but the tokenizer has no chat template.",
            remedy="Use an instruct model, or set model.chat_template.",
        )


def encode_texts(
    rows: list[Row], tokenizer: PreTrainedTokenizerBase, separator: str, completion_only: bool
) -> list[dict[str, Ids]]:
    """Returns `input_ids` and `labels` of texts; with `completion_only`, labels of the prompt are -100."""
    if "text" in rows[0]:
        texts = ids_of(tokenizer, [_ended(row["text"], tokenizer) for row in rows])
        return [{"input_ids": ids, "labels": ids} for ids in texts]
    return [
        {"input_ids": found.ids, "labels": [IGNORED] * found.length + found.ids[found.length :]}
        for found in _answer_texts(rows, "completion", tokenizer, separator, completion_only)
    ]


def _answer_texts(
    rows: list[Row], name: str, tokenizer: PreTrainedTokenizerBase, separator: str, with_prompt_length: bool
) -> list[AnswerTokens]:
    """As in TRL, an answer starts where the tokens of the prompt alone and of both diverge, so that a merge across the
    boundary counts as answer."""
    wholes = ids_of(tokenizer, [row["prompt"] + separator + _ended(row[name], tokenizer) for row in rows])
    if not with_prompt_length:
        return [AnswerTokens(whole, 0) for whole in wholes]
    lengths = map(common_prefix_length, ids_of(tokenizer, [row["prompt"] + separator for row in rows]), wholes)
    return [AnswerTokens(whole, length) for whole, length in zip(wholes, lengths, strict=True)]


def _pair(chosen: AnswerTokens, rejected: AnswerTokens) -> list[Row]:
    length = min(chosen.length, rejected.length)
    if chosen.ids[:length] != rejected.ids[:length]:
        raise RowError("the chat template writes the prompt otherwise before the one answer than before the other")
    row = {"prompt_ids": chosen.ids[:length], "chosen_ids": chosen.ids[length:], "rejected_ids": rejected.ids[length:]}
    return [row]


def _ended(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    end = str(tokenizer.eos_token)
    return text if text.endswith(end) else text + end


def train_bpe(train_file: str, spec: TrainTokenizer, max_length: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level tokenizer on a split's JSON lines: the same rows give the same vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=spec.vocab_size,
        min_frequency=spec.min_frequency,
        special_tokens=list(OWN_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(train_file), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=OWN_TOKENS[0], pad_token=OWN_TOKENS[1], model_max_length=max_length
    )
    fast.chat_template = CHATML
    return fast


def run_tokenizer(recipe: Recipe, base: str | None, train_file: str) -> PreTrainedTokenizerBase:
    """Returns a run's tokenizer, trained on a file of the split if asked; `base` is the folder of `model.base`."""
    spec = recipe.model.tokenizer
    learned = train_bpe(train_file, spec.train, recipe.data.max_length) if spec and spec.train else None
    return loading.build_tokenizer(recipe, base, learned)


def _texts(train_file: str) -> Iterator[str]:
    with open(train_file, encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            for name in ("messages", "text", "prompt", "completion", "chosen", "rejected", "answer"):
                value = row.get(name, ())
                yield from [value] if isinstance(value, str) else (text for turn in value for text in _said(turn))


def _said(message: dict[str, Any]) -> Iterator[str]:
    yield message["content"]
    if "reasoning_content" in message:
        yield message["reasoning_content"]
    for call in message.get("tool_calls", ()):
        yield json.dumps(call["function"], ensure_ascii=False)
