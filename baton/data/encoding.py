"""Rows to tokens, for each shape that methods learn from, and the tokenizer of a run.

The ids equal those of TRL's own preparation of the same rows. Texts that become turns equal rows written as messages.
`ChatEncoder` tells which tokens count in the loss. A byte-level BPE tokenizer can be learned from the training split.

The assistant's turns are found in a rendered conversation by a skeleton with placeholders for its texts. A template
treats skeleton and conversation alike but for the texts. If the conversation's rendering is the skeleton's with texts
filled in, every place is known; if not, nothing is concluded.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import BatchEncoding, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from baton.data.normalize import shared_length
from baton.errors import RowError, UserError
from baton.models import chat, loading
from baton.models.chat import CHATML, OWN_TOKENS, ChatTemplate, Conversation, Message, RenderedConversation, left_out
from baton.models.train_rows import IGNORED
from baton.recipe.methods import Rows
from baton.recipe.model import TrainTokenizer
from baton.recipe.recipe import Recipe
from baton.runs.versions import FORMATS

STEMS = ("Zxqj", "Qwvz", "Jkqx", "Vhzq")  # beginnings of placeholders; one that the conversation does not hold is used
TAGS = re.compile(r"((?:(?<!\s)\s+)?(?:<[^<>]*>|\[/?[A-Z_]+\])\s*)")
"""Tags that a template may look for within a text, such as `</think>`."""


class TextSlot(NamedTuple):
    """A text of a message, by its number, behind a placeholder."""

    message: int
    text: str


@dataclass(frozen=True)
class Skeleton:
    """A conversation with placeholders, which begin with a stem; slots are their texts, by number."""

    conversation: Conversation
    slots: list[TextSlot]
    stem: str


class SlotSpan(NamedTuple):
    """A slot, by its number, in a rendering, in characters."""

    slot: int
    start: int
    end: int


def skeleton_of(conversation: Conversation, text: str, *, fine: bool) -> Skeleton | None:
    """Returns a conversation's skeleton, None where its rendering holds all the stems.

    With `fine`, tags within a text stay, for templates that look for them.
    """
    stem = next((stem for stem in STEMS if stem not in text), None)
    if stem is None:
        return None
    slots: list[TextSlot] = []

    def put(message: int, part: str) -> str:
        if not (inner := part.strip()):
            return part
        placeholder = f"{stem}{len(slots):05d}"
        slots.append(TextSlot(message, inner))
        return placeholder if len(inner) == len(part) else part.replace(inner, placeholder, 1)

    def placed(message: int, value: str) -> str:
        if not fine:
            return put(message, value)
        return "".join(part if number % 2 else put(message, part) for number, part in enumerate(TAGS.split(value)))

    messages = [_with_slots(message, number, placed) for number, message in enumerate(conversation.messages)]
    return Skeleton(Conversation(messages, conversation.tools), slots, stem)


def slot_spans(text: str, stem: str) -> list[SlotSpan]:
    return [SlotSpan(int(match[1]), match.start(), match.end()) for match in re.finditer(rf"{stem}(\d{{5}})", text)]


Alignment = Callable[[int], int]  # maps a place in a skeleton's rendering to the conversation's


def align(text: str, between: list[str], found: list[SlotSpan], slots: list[TextSlot]) -> Alignment | None:
    """Returns how a rendering follows its skeleton's placeholders and the text between them, None if it does not."""
    written = [slots[place.slot].text for place in found]
    if text != "".join([part for pair in zip(between, written, strict=False) for part in pair] + between[-1:]):
        escaped = _as_written(text, between, written)
        if escaped is None:
            return None
        written = escaped
    # How much further on a place is: before the first placeholder, and after each.
    shifts = [0]
    for place, each in zip(found, written, strict=True):
        shifts.append(shifts[-1] + len(each) - (place.end - place.start))
    ends = [place.end for place in found]
    return lambda at: at + shifts[bisect_right(ends, at)]


def _as_written(text: str, between: list[str], texts: list[str]) -> list[str] | None:
    """Returns texts as the template wrote them, None where they are not between its own words."""
    at = len(between[0])
    if not text.startswith(between[0]):
        return None
    written = []
    for each, following in zip(texts, between[1:], strict=True):
        form = next(
            (x for x in _forms(each) if text.startswith(x, at) and text.startswith(following, at + len(x))), None
        )
        if form is None:
            return None
        written.append(form)
        at += len(form) + len(following)
    return written if at == len(text) else None


def _forms(text: str) -> Iterator[str]:
    """Yields the ways a template may write a text: as it is, or within a string of JSON or of Python."""
    yield text
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield json.dumps(text)[1:-1]
    yield repr(text)[1:-1]


def _with_slots(message: Message, number: int, placed: Callable[[int, str], str]) -> Message:
    slotted = dict(message)
    for name in ("reasoning_content", "content"):
        if isinstance(message.get(name), str):
            slotted[name] = placed(number, message[name])
    if message.get("tool_calls"):
        slotted["tool_calls"] = [
            {**call, "function": _arguments(call["function"], lambda text: placed(number, text))}
            for call in message["tool_calls"]
        ]
    return slotted


def _arguments(function: dict[str, Any], placed: Callable[[str], str]) -> dict[str, Any]:
    def each(value: Any) -> Any:
        if isinstance(value, str):
            return placed(value)
        if isinstance(value, dict):
            return {key: each(item) for key, item in value.items()}
        return [each(item) for item in value] if isinstance(value, list) else value

    return {**function, "arguments": each(function.get("arguments"))}


@dataclass(frozen=True)
class AssistantSpan:
    """A turn in a rendering; `is_ended` tells whether something ends it.

    Spans are in characters: from after the header to the end token, nothing that follows it; within that, the
    template's own marks where it has them.
    """

    spans: list[tuple[int, int]]
    is_ended: bool


class RenderedSkeleton:
    """A skeleton, rendered by a template, with its turns."""

    def __init__(self, skeleton: Skeleton, text: str, template: ChatTemplate) -> None:
        self.text = text
        self.places = slot_spans(text, skeleton.stem)
        edges = [0, *(edge for place in self.places for edge in (place.start, place.end)), len(text)]
        self.between = [text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]
        self._skeleton = skeleton
        self._template = template
        self._turns: dict[int, AssistantSpan | str] = {}
        self._unwritten: dict[int, str] = {}
        self._marks = template.marks(skeleton.conversation) if template.is_marked else None

    def turn(self, number: int) -> AssistantSpan | str:
        if number not in self._turns:
            self._turns[number] = self._locate(number)
        return self._turns[number]

    def unwritten(self, number: int) -> str:
        """Returns the part of the answer's prompt that the template does not write in this turn."""
        return self._unwritten.get(number, "")

    def start(self, number: int) -> int | None:
        """Returns where an assistant's own words begin, after all that the template puts before them."""
        start, own, prompt = self._start(number), self._own(number), self._template.prompt
        if start is None:
            return None
        # A header that the template writes here though it does not make the model begin with it, as after a result.
        shared = self._template.common(prompt, self.text[start:])
        if self._template.is_distinct_prefix(prompt[:shared]):
            start += shared
        return None if own and own[0].start < start else start

    def _start(self, number: int) -> int | None:
        whole, template, talk = self.text, self._template, self._skeleton.conversation
        # The conversation up to the turn, as the model would be asked: where the whole begins with that, it is exact.
        before = template.render(talk.upto(number), prompt=True) if number else None
        is_prompted = before is None or before != template.render(talk.upto(number))
        follows = bool(number) and talk.messages[number - 1]["role"] == "assistant"
        if before is None or (not template.is_older and follows and not is_prompted and template.lacks_end_token):
            return self._search(number, template.prompt)
        before += template.header
        if whole.startswith(before):
            return len(before)
        # Earlier turns are written otherwise once there are later ones: only the text after the last slot counts.
        anchors = self._after_last_text(number, before)
        if anchors is None:
            return None
        since, at = anchors
        if whole.startswith(before[since:], at):
            return at + len(before) - since
        begins = max(template.common(before, template.render(talk.upto(number)) or ""), since)
        if whole.startswith(before[since:begins], at):
            # The prompt's text other than its header, such as `<think>`, may be missing before the answer.
            shared = template.common(before[since:], whole[at:])
            if template.is_distinct_prefix(before[begins : since + shared]):
                self._unwritten[number] = before[since + shared :]
                return at + shared
        return self._search(number, before[begins:])

    def _after_last_text(self, number: int, before: str) -> tuple[int, int] | None:
        """Returns the end of the last text before a turn, in the rendering up to it and in the whole."""
        texts = slot_spans(before, self._skeleton.stem)
        if not texts:
            return 0, 0
        own = self._own(number)
        until = own[0].start if own else len(self.text)
        ends = [place.end for place in self.places if place.slot == texts[-1].slot and place.end <= until]
        return (texts[-1].end, ends[-1]) if ends else None

    def _locate(self, number: int) -> AssistantSpan | str:
        place = f"message {number + 1} in the rendered conversation"
        own = self._own(number)
        message = self._skeleton.conversation.messages[number]
        if not own and message["content"].strip():
            return f"the chat template omits message {number + 1}"
        if message["role"] == "assistant":
            start = self.start(number)
        else:
            start = own[0].start if own else None
        if start is None:
            return f"cannot tell where to begin with {place}"
        ended = (self._end(number, own) if own else None) or self._end_if_filled(number, start)
        if ended is None or any(start <= x.start < ended[0] and self._owner(x) != number for x in self.places):
            return f"cannot tell where to end with {place}"
        end, is_ended = ended
        calls = message.get("tool_calls") or ()
        written = self.text[start:end]
        if calls and not own and not any(call["function"]["name"] in written for call in calls):
            return AssistantSpan([], is_ended)  # only its end would be left, which is not the assistant's
        if self._marks is None or message["role"] != "assistant":
            return AssistantSpan([(start, end)], is_ended)
        spans = [(max(a, start), min(b, end)) for a, b in self._marks if a < end and b > start]
        if spans and is_ended:
            spans[-1] = (spans[-1][0], end)
        return AssistantSpan(spans, is_ended)

    def _end(self, number: int, own: list[SlotSpan]) -> tuple[int, bool] | None:
        """Returns where a turn ends, by what follows its last text whatever comes after the turn."""
        template, whole, talk = self._template, self.text, self._skeleton.conversation
        after = own[-1].end
        is_last = number + 1 == len(talk.messages)
        # The same turn continued otherwise, by a question or by nothing: the text that both share is the turn's own.
        other = template.render(talk.upto(number + 1, *([{"role": "user", "content": "Q"}] if is_last else [])))
        if other is None:
            rest = whole[after:]
            blank = len(rest) - len(rest.lstrip())
            if template.closing and rest.startswith(template.closing, blank):
                return after + blank + len(template.closing), True
            return (after + len(rest.rstrip()), True) if is_last and rest.strip() else None
        there = other.rfind(whole[own[-1].start : after])
        if there < 0:
            return None
        there += after - own[-1].start
        tail = whole[after : after + template.common(whole[after:], other[there:])]
        # The turn that ends its conversation has to end there; or it is written otherwise when it is last.
        ending = whole[after + len(tail) :] if is_last else other[there + len(tail) :]
        is_otherwise = bool(ending.strip()) or template.always_prompts
        if not template.is_older and (is_otherwise or (template.lacks_end_token and not is_last)):
            closed = self._closed(number, after, own)
            if closed and (is_otherwise or self._has_token(after + len(tail), closed)):
                return closed, True
            rest = whole[after:].rstrip()
            if is_last and is_otherwise and not template.always_prompts and self._has_token(after, after + len(rest)):
                return after + len(rest), True
        end = after + len(tail.rstrip())
        if end > after and not template.lacks_end_token:
            return end, True
        if template.lacks_end_token and not is_last and talk.messages[number + 1]["role"] == "assistant":
            return end, False
        if other[there + len(tail) :]:  # another end, such as that of the last turn; white space is the text's own
            end = after + len(tail)
        token = template.added_token(whole, end)
        return end + len(token), bool(token)

    def _closed(self, number: int, after: int, own: list[SlotSpan]) -> int | None:
        """Returns where a turn ends, by the shared text before any next speaker; None without an added token."""
        template, whole, talk = self._template, self.text, self._skeleton.conversation
        tails = [] if number + 1 == len(talk.messages) else [whole[after:]]
        for role in ("user", "assistant", "system", "tool"):
            text = template.render(talk.upto(number + 1, {"role": role, "content": "Q"}))
            there = -1 if text is None else text.rfind(whole[own[-1].start : after])
            if text is not None and there >= 0:
                tails.append(text[there + after - own[-1].start :])
        if len(tails) < 2:
            return None
        shared = tails[0][: min(template.common(tails[0], other) for other in tails[1:])].rstrip()
        # Headers of all roles may begin with one token, which is the next turn's.
        shared = shared.removesuffix(template.opening).rstrip() if template.opening else shared
        is_there = whole.startswith(shared, after) and self._has_token(after, after + len(shared))
        return after + len(shared) if is_there else None

    def _has_token(self, start: int, end: int) -> bool:
        return any(map(self._template.is_token, self._template.atoms(self.text[start:end])))

    def _end_if_filled(self, number: int, start: int) -> tuple[int, bool] | None:
        """Returns the end of a turn without text, or with none always written: where it would be with one."""
        # Such a turn has no slot to look from. With a filler it has one, and the rest is as far from the end of
        # that rendering as it is from the end of this one.
        filler = f"{self._skeleton.stem}{len(self._skeleton.slots):05d}"
        slots = [*self._skeleton.slots, TextSlot(number, filler)]
        talk = self._skeleton.conversation
        for message in _filled(talk.messages[number], filler):
            filled = Conversation([*talk.messages[:number], message, *talk.messages[number + 1 :]], talk.tools)
            text = self._template.render(filled)
            if text is None or filler not in text:
                continue
            other = RenderedSkeleton(Skeleton(filled, slots, self._skeleton.stem), text, self._template)
            ended = other._end(number, other._own(number))
            if ended is None:
                continue
            *_, token = ["", *self._template.atoms(text[: ended[0]])[-1:]] if ended[1] else [""]
            end = len(self.text) - len(text) + ended[0]
            if end >= start + len(token) and self.text.endswith(token + text[ended[0] :]):
                return end, ended[1]
        return None

    def _search(self, number: int, prompt: str) -> int | None:
        """Returns where a turn's header ends, by looking for it between the texts before and after."""
        own = self._own(number)
        if own:
            until = own[0].start
            since = max((place.end for place in self.places if place.end <= until), default=0)
        else:
            since = max((place.end for place in self.places if self._owner(place) < number), default=0)
            later = (x.start for x in self.places if self._owner(x) > number and x.start >= since)
            until = min(later, default=len(self.text))
        between = self.text[since:until]
        for beginning in self._template.starting(prompt):
            if not self._template.is_distinct_prefix(beginning):
                return None
            if count := between.count(beginning):
                return since + between.index(beginning) + len(beginning) if count == 1 else None
        return None

    def _own(self, number: int) -> list[SlotSpan]:
        return [place for place in self.places if self._owner(place) == number]

    def _owner(self, place: SlotSpan) -> int:
        return self._skeleton.slots[place.slot].message


def _filled(message: Message, filler: str) -> Iterator[Message]:
    """Yields a message without texts with one: in its last call, where it has any, or as its content."""
    if calls := message.get("tool_calls"):
        function = calls[-1]["function"]
        arguments = function.get("arguments") or {}
        if isinstance(arguments, dict):
            last = {**calls[-1], "function": {**function, "arguments": {**arguments, "zz": filler}}}
            yield {**message, "tool_calls": [*calls[:-1], last]}
    yield {**message, "content": filler}


MOST_SKELETONS = 2000  # skeletons kept


class AssistantSpans:
    """Finds turns in one template's renderings; skeletons are inspected once."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._skeletons: dict[str, RenderedSkeleton | None] = {}

    def find(self, rendered: RenderedConversation, numbers: list[int]) -> list[AssistantSpan]:
        """Returns messages' turns, in characters of the rendering; raises RowError where they are unknown."""
        reason = "cannot align its texts with the rendered conversation"
        for located, alignment in self._followed(rendered):
            turns: list[AssistantSpan] = []
            for number in numbers:
                turn = located.turn(number)
                if isinstance(turn, str):
                    reason = turn
                    break
                spans = [(alignment(start), alignment(end)) for start, end in turn.spans]
                if spans and (unwritten := located.unwritten(number)):
                    spans[0] = (_after(rendered.text, spans[0][0], unwritten), spans[0][1])
                turns.append(AssistantSpan(spans, turn.is_ended))
            else:
                return turns
        raise RowError(reason)

    def start(self, rendered: RenderedConversation, number: int) -> int:
        """Returns where an assistant's words begin, in characters; raises RowError where unknown."""
        for located, alignment in self._followed(rendered):
            start = located.start(number)
            if start is not None:
                return _after(rendered.text, alignment(start), located.unwritten(number))
        raise RowError("cannot tell where the answer begins in the rendered conversation")

    def _followed(self, rendered: RenderedConversation) -> Iterator[tuple[RenderedSkeleton, Alignment]]:
        """Yields the skeletons that a rendering follows, the one without tags in texts first."""
        for fine in (False, True):
            skeleton = skeleton_of(rendered.conversation, rendered.text, fine=fine)
            if skeleton is None:
                return
            key = json.dumps([skeleton.conversation.messages, skeleton.conversation.tools])
            for _ in range(2):
                is_new = key not in self._skeletons
                if is_new:
                    self._skeletons = self._skeletons if len(self._skeletons) < MOST_SKELETONS else {}
                    text = self._template.render(skeleton.conversation)
                    self._skeletons[key] = (
                        RenderedSkeleton(skeleton, text, self._template) if text is not None else None
                    )
                located = self._skeletons[key]
                alignment = located and align(rendered.text, located.between, located.places, skeleton.slots)
                if located and alignment:
                    yield located, alignment
                    break
                if is_new:
                    break
                del self._skeletons[key]  # a template may write the date, which has changed


def _after(text: str, start: int, unwritten: str) -> int:
    """Returns where a turn starts whose own text may begin with the template's prompt for an answer."""
    return start + len(unwritten) if text.startswith(unwritten, start) else start


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
    """Conversations to tokens, with `data.train_on` in the loss; `told` counts losses worth telling."""

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
        merge across the boundary counts as answer. If the template writes that prompt differently once it is answered,
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
            raise RowError("the chat template omits the part that counts")
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
    that reward functions take, and its `length` in tokens.
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
        """Parts of rows that the chat template omits, and answers that it does not end → how often."""
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
