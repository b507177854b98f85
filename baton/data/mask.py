"""Finds the assistant's turns in a rendered conversation, by a skeleton with placeholders for its texts.

A template treats skeleton and conversation alike but for the texts. If the conversation's rendering is the skeleton's
with texts filled in, every place is known; if not, nothing is concluded.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from baton.errors import RowError
from baton.models.chat_template import ChatTemplate, Conversation, Message, RenderedConversation

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
        parts = enumerate(TAGS.split(value))
        return "".join(part if number % 2 else put(message, part) for number, part in parts)

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
            # The prompt's text beside its header, such as `<think>`, may be missing before the answer.
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
        place = f"message {number + 1} in what the chat template makes of the conversation"
        own = self._own(number)
        message = self._skeleton.conversation.messages[number]
        if not own and message["content"].strip():
            return f"the chat template leaves message {number + 1} out"
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
    """Finds turns in one template's renderings; skeletons are looked at once."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._skeletons: dict[str, RenderedSkeleton | None] = {}

    def find(self, rendered: RenderedConversation, numbers: list[int]) -> list[AssistantSpan]:
        """Returns messages' turns, in characters of the rendering; raises RowError where they are unknown."""
        reason = "cannot tell which of its texts went where in what the chat template makes of it"
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
        raise RowError("cannot tell where the answer begins in what the chat template makes of the conversation")

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
