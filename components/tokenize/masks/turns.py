"""Where the turns of a shape are in its rendering: after their header, up to and with the token that ends them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baton.components.tokenize.masks.shapes import Leaf, Place, Shape, literals, places
from baton.components.tokenize.masks.template import Conversation, Message, Template


@dataclass(frozen=True)
class Turn:
    """A turn in a rendering.

    Attributes:
        spans: What of it was said, in characters: from after its header up to and with its end token, what the template
            puts after that not; of that, what a template's own marks name where it has them.
        is_ended: Whether something ends it.
    """

    spans: list[tuple[int, int]]
    is_ended: bool


class Located:
    """A shape, rendered, with its turns.

    Args:
        shape: The shape.
        text: Its rendering.
        template: Who rendered it.
    """

    def __init__(self, shape: Shape, text: str, template: Template) -> None:
        self.text = text
        self.places = places(text, shape.stem)
        self.literals = literals(text, self.places)
        self._shape = shape
        self._template = template
        self._turns: dict[int, Turn | str] = {}
        self._unwritten: dict[int, str] = {}
        self._marks = template.marks(shape.conversation) if template.is_marked else None

    def turn(self, number: int) -> Turn | str:
        """Returns where a message's turn is, or why that cannot be told."""
        if number not in self._turns:
            self._turns[number] = self._locate(number)
        return self._turns[number]

    def unwritten(self, number: int) -> str:
        """Returns what the template makes the model begin a turn with and does not write there of itself."""
        return self._unwritten.get(number, "")

    def start(self, number: int) -> int | None:
        """Returns where what an assistant's message says begins, after what the template puts before it."""
        start, own, prompt = self._start(number), self._own(number), self._template.prompt
        if start is None:
            return None
        # A header that the template writes here though it does not make the model begin with it, as after a result.
        shared = self._template.common(prompt, self.text[start:])
        if self._template.tells_apart(prompt[:shared]):
            start += shared
        return None if own and own[0].start < start else start

    def _start(self, number: int) -> int | None:
        whole, template, talk = self.text, self._template, self._shape.conversation
        before = template.render(talk.upto(number), prompt=True) if number else None
        is_prompted = before is None or before != template.render(talk.upto(number))
        follows = bool(number) and talk.messages[number - 1]["role"] == "assistant"
        if before is None or (not template.is_older and follows and not is_prompted and template.leaves_open):
            return self._search(number, template.prompt)
        before += template.header
        if whole.startswith(before):
            return len(before)
        # Earlier turns are written otherwise once there are later ones: only what follows the last text counts.
        anchors = self._after_last_text(number, before)
        if anchors is None:
            return None
        since, at = anchors
        if whole.startswith(before[since:], at):
            return at + len(before) - since
        begins = max(template.common(before, template.render(talk.upto(number)) or ""), since)
        if whole.startswith(before[since:begins], at):
            # What the prompt says besides its header, such as `<think>`, may be missing before what was said.
            shared = template.common(before[since:], whole[at:])
            if template.tells_apart(before[begins : since + shared]):
                self._unwritten[number] = before[since + shared :]
                return at + shared
        return self._search(number, before[begins:])

    def _after_last_text(self, number: int, before: str) -> tuple[int, int] | None:
        """Returns where the last text before a turn ends, in the rendering up to it and in the whole one."""
        texts = places(before, self._shape.stem)
        if not texts:
            return 0, 0
        own = self._own(number)
        until = own[0].start if own else len(self.text)
        ends = [place.end for place in self.places if place.leaf == texts[-1].leaf and place.end <= until]
        return (texts[-1].end, ends[-1]) if ends else None

    def _locate(self, number: int) -> Turn | str:
        place = f"message {number + 1} in what the chat template makes of the conversation"
        own = self._own(number)
        message = self._shape.conversation.messages[number]
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
            return Turn([], is_ended)  # there would be nothing but its end, which is not what was said
        if self._marks is None or message["role"] != "assistant":
            return Turn([(start, end)], is_ended)
        spans = [(max(a, start), min(b, end)) for a, b in self._marks if a < end and b > start]
        if spans and is_ended:
            spans[-1] = (spans[-1][0], end)
        return Turn(spans, is_ended)

    def _end(self, number: int, own: list[Place]) -> tuple[int, bool] | None:
        """Returns where a turn ends, by what stands after the last of its texts, whatever follows the turn."""
        template, whole, talk = self._template, self.text, self._shape.conversation
        after = own[-1].end
        is_last = number + 1 == len(talk.messages)
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
        # Whichever is the turn that ends the conversation has to end there; or it is written otherwise when it is last.
        ending = whole[after + len(tail) :] if is_last else other[there + len(tail) :]
        is_otherwise = bool(ending.strip()) or template.always_prompts
        if not template.is_older and (is_otherwise or (template.leaves_open and not is_last)):
            closed = self._closed(number, after, own)
            if closed and (is_otherwise or self._has_token(after + len(tail), closed)):
                return closed, True
            rest = whole[after:].rstrip()
            if is_last and is_otherwise and not template.always_prompts and self._has_token(after, after + len(rest)):
                return after + len(rest), True
        end = after + len(tail.rstrip())
        if end > after and not template.leaves_open:
            return end, True
        if template.leaves_open and not is_last and talk.messages[number + 1]["role"] == "assistant":
            return end, False
        if other[there + len(tail) :]:  # another end, such as that of the last turn; white space is the text's own
            end = after + len(tail)
        token = template.added_token(whole, end)
        return end + len(token), bool(token)

    def _closed(self, number: int, after: int, own: list[Place]) -> int | None:
        """Returns where a turn ends by what the template writes after it whoever speaks next; None where that is not
        there, or holds no token of the tokenizer's own."""
        template, whole, talk = self._template, self.text, self._shape.conversation
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
        """Tells whether a part of the rendering holds a token of the tokenizer's own list."""
        return any(map(self._template.is_token, self._template.atoms(self.text[start:end])))

    def _end_if_filled(self, number: int, start: int) -> tuple[int, bool] | None:
        """Returns where a turn ends that has no text, or none that is always written: where it would with one."""
        filler = f"{self._shape.stem}{len(self._shape.leaves):05d}"
        leaves = [*self._shape.leaves, Leaf(number, filler)]
        talk = self._shape.conversation
        for message in _filled(talk.messages[number], filler):
            filled = Conversation([*talk.messages[:number], message, *talk.messages[number + 1 :]], talk.tools)
            text = self._template.render(filled)
            if text is None or filler not in text:
                continue
            other = Located(Shape(filled, leaves, self._shape.stem), text, self._template)
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
            if not self._template.tells_apart(beginning):
                return None
            if count := between.count(beginning):
                return since + between.index(beginning) + len(beginning) if count == 1 else None
        return None

    def _own(self, number: int) -> list[Place]:
        return [place for place in self.places if self._owner(place) == number]

    def _owner(self, place: Place) -> int:
        return self._shape.leaves[place.leaf].message


def _filled(message: Message, filler: str) -> Iterator[Message]:
    """Yields a message without texts with one: in its last call, where it has any, or as its content."""
    if calls := message.get("tool_calls"):
        function = calls[-1]["function"]
        arguments = function.get("arguments") or {}
        if isinstance(arguments, dict):
            last = {**calls[-1], "function": {**function, "arguments": {**arguments, "zz": filler}}}
            yield {**message, "tool_calls": [*calls[:-1], last]}
    yield {**message, "content": filler}
