"""A tokenizer's chat template: one way to render conversations, for training, evaluation, export and chat."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from baton.errors import RowError
from baton.models import vocabulary
from baton.runs.versions import FORMATS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
MARK = re.compile(r"{%-?\s*generation\s*-?%}")  # opens the assistant's text in a template


@dataclass(frozen=True)
class Conversation:
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None

    def upto(self, count: int, *more: Message) -> Conversation:
        return Conversation([*self.messages[:count], *more], self.tools)

    def with_text_arguments(self) -> Conversation:
        """Returns it with arguments of calls as JSON text, which some templates need."""

        def written(call: Message) -> Message:
            arguments = call["function"].get("arguments")
            if isinstance(arguments, str):
                return call
            return {**call, "function": {**call["function"], "arguments": json.dumps(arguments, ensure_ascii=False)}}

        messages = [
            {**each, "tool_calls": list(map(written, each["tool_calls"]))} if each.get("tool_calls") else each
            for each in self.messages
        ]
        return Conversation(messages, self.tools)


@dataclass(frozen=True)
class RenderedConversation:
    conversation: Conversation  # with its calls' arguments as the template takes them
    text: str


class ChatTemplate:
    """A tokenizer's chat template.

    `number` is that of the tokens' format. Runs of format 1 go on as they were: turns that are written differently when
    last, and prompts after each conversation, are followed as then.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, number: int = FORMATS["tokens"].number) -> None:
        self.tokenizer = tokenizer
        self.is_older = number < 2
        self.is_marked = bool(MARK.search(str(tokenizer.chat_template)))
        added = sorted(filter(str.strip, tokenizer.get_added_vocab()), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, added)) or r"(?!)")
        self._atom = re.compile("|".join([*map(re.escape, added), r"<[^<>\s]*>", r"\s", r"\w+", "."]), re.DOTALL)

    def render_each(
        self, conversations: Sequence[Conversation], *, prompts: bool = False
    ) -> list[RenderedConversation | RowError]:
        """Renders conversations, all at once where the template takes them all; `prompts` makes the model answer."""
        if all(not conversation.tools for conversation in conversations):
            try:
                texts = self._apply([x.messages for x in conversations], None, prompts)
                return [RenderedConversation(x, text) for x, text in zip(conversations, texts, strict=True)]
            except _refusals():
                pass  # one of them: each alone tells which
        return [self._render_or_why(conversation, prompts) for conversation in conversations]

    def marks(self, conversation: Conversation) -> list[tuple[int, int]]:
        """Returns the spans of text that the template marks as the assistant's, in characters."""
        from transformers.utils.chat_template_utils import render_jinja_template

        _, spans = render_jinja_template(
            conversations=[conversation.messages],
            tools=conversation.tools,
            chat_template=self.tokenizer.get_chat_template(tools=conversation.tools),
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        return [(start, end) for start, end in spans[0] if end > start]

    def render(self, conversation: Conversation, *, prompt: bool = False) -> str | None:
        """Returns a conversation's text, None where the template refuses it."""
        try:
            return self._apply([conversation.messages], conversation.tools, prompt)[0]
        except _refusals():
            return None

    def common(self, a: str, b: str) -> int:
        """Returns how many characters two renderings share from the start, up to a whole token, tag or word."""
        at = 0
        for x, y in zip(self._atom.finditer(a), self._atom.finditer(b), strict=False):
            if x[0] != y[0]:
                break
            at = x.end()
        return at

    def atoms(self, text: str) -> list[str]:
        """Returns a text's own tokens of the tokenizer, tags, words and other characters."""
        return self._atom.findall(text)

    def starting(self, prompt: str) -> list[str]:
        """Returns beginnings of a text that end with a whole token, tag or word, the longest first."""
        return [prompt[: atom.end()] for atom in self._atom.finditer(prompt)][::-1]

    def added_token(self, text: str, at: int) -> str:
        """Returns the tokenizer's own token at a place, empty where there is none."""
        match = self._added.match(text, at)
        return match[0] if match else ""

    def is_token(self, text: str) -> bool:
        return self._added.fullmatch(text) is not None

    def is_distinct_prefix(self, beginning: str) -> bool:
        """Tells whether a beginning of an answer's header is none of a question's."""
        asked = self._asked.removesuffix(self.prompt) if self.always_prompts else self._asked
        return bool(beginning.strip()) and beginning not in asked

    @cached_property
    def prompt(self) -> str:
        """The text after a question that makes the model answer."""
        with_prompt = self.render(ASKED, prompt=True) or ""
        if self.always_prompts:
            alone, again, _ = self._after_question
            return alone[len(alone[: self.common(alone, again)].rstrip().removesuffix(self.opening)) :]
        return with_prompt[self.common(with_prompt, self._asked) :] + self.header

    @cached_property
    def header(self) -> str:
        """The text before an answer in a template that knows no prompts."""
        before, answered = self.render(ASKED, prompt=True) or "", self._answered
        if self.always_prompts:
            return ""
        if before != self._asked or not answered.startswith(before) or ANSWER not in answered:
            return ""
        header = answered[len(before) : answered.index(ANSWER)]
        return header if header.strip() else ""

    @cached_property
    def always_prompts(self) -> bool:
        """Whether it makes the model answer after every question, asked to or not."""
        alone, again, answered = (tail.rstrip() for tail in self._after_question)
        return not self.is_older and bool(again) and not again.startswith(alone) and answered.startswith(alone)

    @cached_property
    def opening(self) -> str:
        """The tokenizer's own token that a rendering begins with, whoever speaks first; empty where there is none."""
        match = self._added.match(self._asked.removeprefix(str(self.tokenizer.bos_token or "")).lstrip())
        return match[0] if match else ""

    @cached_property
    def lacks_end_token(self) -> bool:
        """Whether only the next turn's first token ends an answer."""
        return self._answered.rstrip().endswith(ANSWER)

    @cached_property
    def closing(self) -> str:
        """The text after every answer, whatever follows; empty where that differs."""
        tails = [
            text.partition(ANSWER)[2] for text in (self._answered, self.render(ANSWERED.upto(2, *ASKED.messages)) or "")
        ]
        return tails[0][: self.common(*tails)].strip()

    @cached_property
    def end_of_turn(self) -> int | None:
        """The added token that closes an answer, if any."""
        if not self.tokenizer.chat_template:
            return None
        talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": SPOKEN}]
        try:
            text = str(self.tokenizer.apply_chat_template(talk, tokenize=False))
        except Exception:  # a template may raise anything, for example for unknown roles
            return None
        tail = text.rpartition(SPOKEN)[2].strip()
        ids = self.tokenizer(tail, add_special_tokens=False)["input_ids"] if tail else []
        return int(ids[0]) if ids and ids[0] in self.tokenizer.added_tokens_decoder else None

    @cached_property
    def _after_question(self) -> tuple[str, str, str]:
        """The text after a question alone, before another one and before an answer; empty where refused."""
        asked = Conversation([{"role": "user", "content": QUESTION}])
        texts = (self.render(asked.upto(1, *more)) or "" for more in ((), ASKED.messages, ANSWERED.messages[1:]))
        alone, again, answered = (text.partition(QUESTION)[2] for text in texts)
        return alone, again, answered

    @cached_property
    def _asked(self) -> str:
        return self.render(ASKED) or ""

    @cached_property
    def _answered(self) -> str:
        return self.render(ANSWERED) or ""

    def _render_or_why(self, conversation: Conversation, prompts: bool) -> RenderedConversation | RowError:
        reason = ""
        for talk in (conversation, conversation.with_text_arguments()):
            try:
                return RenderedConversation(talk, self._apply([talk.messages], talk.tools, prompts)[0])
            except _refusals() as error:
                reason = reason or " ".join(str(error).split()) or type(error).__name__
        if conversation.tools is None and self.render(Conversation(conversation.messages, [])) is not None:
            reason = "it wants tools, and the row declares none; give them in a column tools"
        return RowError(f"the chat template refuses it: {reason}")

    def _apply(self, messages: list[list[Message]], tools: list[dict[str, Any]] | None, prompts: bool) -> list[str]:
        rendered: list[str] = self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=prompts
        )
        return rendered


# Probes of a template.
QUESTION, ANSWER, SPOKEN = "Jkqx", "Zxqj", "baton"
ASKED = Conversation([{"role": "user", "content": "Q"}])
ANSWERED = ASKED.upto(1, {"role": "assistant", "content": ANSWER})


def _refusals() -> tuple[type[Exception], ...]:
    """Returns the errors of templates: on purpose, for rows they were not written for, or out of bounds."""
    from jinja2 import TemplateError

    wanting = (TypeError, ValueError, LookupError, AttributeError)
    return TemplateError, *wanting, ArithmeticError, RecursionError, MemoryError


def end_tokens(tokenizer: PreTrainedTokenizerBase, own: Sequence[int | None]) -> list[int]:
    """Returns the tokens that end an answer: a model's own, the chat template's and the recipe's."""
    known = (*own, ChatTemplate(tokenizer).end_of_turn, vocabulary.end_of_turn(tokenizer))
    return list(dict.fromkeys(token for token in known if token is not None))


def left_out(rendered: RenderedConversation) -> Counter[str]:
    """Counts the parts of a conversation that its rendering lacks."""
    text, talk = rendered.text, rendered.conversation
    counted: Counter[str] = Counter()
    at, has_calls = 0, any("tool_calls" in message for message in talk.messages)
    for number, message in enumerate(talk.messages):
        content = message["content"].strip()
        if content and message["role"] != "assistant" and not _is_in(content, text):
            counted["messages"] += 1
        if calls := message.get("tool_calls"):
            # Between the texts before and after, as the tools' own list has the name as well.
            until = _begin(talk.messages[number + 1 :], text, at)
            counted["tool calls"] += sum(call["function"]["name"] not in text[at:until] for call in calls)
        if message.get("reasoning_content"):
            counted["texts of reasoning"] += not _is_in(message["reasoning_content"].strip(), text)
        if message.get("name") and message["role"] != "tool":
            counted["names"] += not _is_in(message["name"], text)
        if content and has_calls and not calls and (found := text.find(content, at)) >= 0:
            at = found + len(content)
    for tool in talk.tools or ():
        counted["tools"] += not _is_in(tool["function"]["name"], text)
    return +counted if counted else counted


def _is_in(value: str, text: str) -> bool:
    return value in text or json.dumps(value, ensure_ascii=False)[1:-1] in text


def _begin(messages: list[Message], text: str, at: int) -> int:
    """Returns the place of the first message whose text is found, the end where none is."""
    found = (text.find(message["content"].strip(), at) for message in messages if message["content"].strip())
    return next((begin for begin in found if begin >= 0), len(text))
