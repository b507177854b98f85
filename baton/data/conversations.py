"""Rows that are conversations: lists of messages, ShareGPT's turns, and glaive's two texts."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from baton.data import messages
from baton.data import messages as single
from baton.data.messages import Message
from baton.data.rows import loads

# --- Conversations with tools that are written into two texts, as in glaive-function-calling.


GLAIVE_TURN = re.compile(r"(?:\A|\n)[^\S\n]*(USER|ASSISTANT|FUNCTION RESPONSE):")
"""Of one line: over empty ones the time would grow with the square of their number."""
GLAIVE_SPEAKERS = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
GLAIVE_END, GLAIVE_CALL = "<|endoftext|>", "<functioncall>"
GLAIVE_QUOTED_CALL = re.compile(r"\{\s*\"name\":\s*\"([^\"]+)\",\s*\"arguments\":\s*'(.*)'\s*\}", re.DOTALL)
"""A call whose arguments are JSON in single quotes, which JSON does not have."""


def parse_glaive(chat: str, system: object) -> dict[str, Any] | None:
    """Returns `messages`, `tools` and `system`, None where the text is no such conversation.

    Nothing is left of what the system says where it declares functions: they are `tools`, which a template writes in
    its own words.
    """
    pieces = GLAIVE_TURN.split(chat)
    if len(pieces) == 1 or pieces[0].strip():
        return None
    turns: list[dict[str, Any]] = []
    for speaker, text in zip(pieces[1::2], pieces[2::2], strict=True):
        said, called, call = text.replace(GLAIVE_END, "").partition(GLAIVE_CALL)
        turn: dict[str, Any] = {"role": GLAIVE_SPEAKERS[speaker], "content": said.strip()}
        if called and turn["role"] == "assistant":
            quoted = GLAIVE_QUOTED_CALL.fullmatch(call.strip())
            turn["tool_calls"] = (
                [{"name": quoted[1], "arguments": quoted[2].replace("\\'", "'")}] if quoted else call.strip()
            )
        turns.append(turn)
    words = system.strip().removeprefix("SYSTEM:").strip() if isinstance(system, str) else ""
    functions = _objects(words)
    return {"messages": turns, "tools": functions, "system": None if functions else words}


def _objects(text: str) -> list[messages.Tool]:
    """Returns the JSON objects that stand at the beginnings of a text's lines."""
    objects, decoder, at = [], json.JSONDecoder(), 0
    while match := re.compile(r"^[^\S\n]*(?=\{)", re.MULTILINE).search(text, at):
        try:
            value, at = decoder.raw_decode(text, match.end())
        except ValueError:
            at = match.end() + 1
            continue
        objects.append(value)
    return objects


# --- Rows that are conversations: lists of messages with role and content, or with ShareGPT's from and value.


TURNS = (("input", "output"), ("human", "assistant"), ("user", "assistant"), ("instruction", "response"))
"""Keys of a mapping that is a question and its answer."""
LEARNED = "output_with_loss"
"""XTuner's key of such a mapping that says whether its answer is learned."""

ANSWER = re.compile(r".*\n\n(?:Assistant|ASSISTANT|assistant):", re.DOTALL)
"""A conversation written into a text, up to its last answer: the turns of Anthropic's hh-rlhf."""

UNSAID = ("name", "train")
"""Keys of a message in which two that say the same may differ."""


def is_conversation(value: Any) -> bool:
    """Tells whether a value is meant as messages, not as text."""
    return isinstance(value, list | dict)


def has_speakers(value: Any) -> bool:
    """Tells whether a value is messages, or one of them."""
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, dict) and not {"role", "from"}.isdisjoint(first)


def shared_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Returns how many elements two texts or lists share from the start."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def conversation(messages: Any, name: str = "messages", *, has_tools: bool = False) -> dict[str, object] | str:
    """Returns `{messages}`, or the reason why they cannot be used; they may be JSON text."""
    if isinstance(messages, str) and messages.lstrip().startswith("["):
        try:
            messages = loads(messages)
        except ValueError:
            return f"{name} is a text that is no JSON"
    turns = _messages(_spoken(messages), name, has_tools)
    if isinstance(turns, str):
        first = messages[0] if isinstance(messages, list) and messages else None
        if isinstance(first, dict) and {"role", "from"}.isdisjoint(first):
            turns += f" but {', '.join(map(str, first))}; if the list holds rows, write each on a line of its own"
        return turns
    if not any(message["role"] == "assistant" for message in turns):
        return f"{name} has no assistant turn"
    return {"messages": turns}


def texts(row: dict[str, str]) -> dict[str, str]:
    """Returns `{prompt, chosen, rejected}` of two texts, the prompt being what they share from the start.

    It is what TRL's `extract_prompt` takes out, to the end of a word and before the white space behind it; and where
    `\n\nAssistant:` is shared, up to the last of these, though the answers begin alike. Text is not changed: prompt
    and answer together are what was there.
    """
    shared = row["chosen"][: shared_length(row["chosen"], row["rejected"])]
    if written := ANSWER.match(shared):
        end = written.end()
    else:
        whole = all(side[len(shared) : len(shared) + 1].isspace() for side in row.values()) and shared
        end = len(shared) if whole else max((at for at, mark in enumerate(shared) if mark.isspace()), default=0)
        end = len(shared[:end].rstrip())
    return {"prompt": shared[:end], "chosen": row["chosen"][end:], "rejected": row["rejected"][end:]}


def preference(row: dict[str, object], *, has_tools: bool = False) -> dict[str, object] | str:
    """Returns `{prompt, chosen, rejected}`, each a list of messages, or the reason why the row cannot be used.

    Without a prompt, it is what the two conversations share from the start. An answer may also be one message, or a
    text after a prompt of messages.
    """
    sides: dict[str, list[Message]] = {}
    for side in ("chosen", "rejected"):
        # A text alone may hold the prompt as well: only after one is it an answer.
        one = "prompt" in row or isinstance(row[side], dict)
        messages = _messages(_answer(row[side]) if one else row[side], side, has_tools)
        if isinstance(messages, str):
            return messages
        sides[side] = messages
    if isinstance(row.get("prompt"), str):
        row["prompt"] = [{"role": "user", "content": row["prompt"]}]
    shared = _shared(sides["chosen"], sides["rejected"])
    head = _messages(row["prompt"], "prompt", has_tools) if "prompt" in row else shared
    if isinstance(head, str):
        return head
    if len(head) == 1 and not _begins(shared, head) and any(_begins([turn], head) for turn in shared):
        head = shared  # one turn of what both begin with, beside the whole
    if not head:
        return "chosen and rejected share no first message, and there is no prompt"
    answers = {side: messages[len(head) :] if _begins(messages, head) else messages for side, messages in sides.items()}
    for side, messages in answers.items():
        if not messages or messages[-1]["role"] != "assistant":
            return f"{side} does not end on an assistant turn"
    return {"prompt": head, **answers}


def answered(row: dict[str, object], *, has_tools: bool = False) -> dict[str, object] | str:
    """Returns `{prompt, completion}`, each a list of messages, or the reason why the row cannot be used.

    Without a prompt, it is what the conversation has before its last message.
    """
    completion = _messages(_spoken(_answer(row["completion"])), "completion", has_tools)
    if isinstance(completion, str):
        return completion
    given = row.get("prompt", completion[:-1])
    asked = [{"role": "user", "content": given}] if isinstance(given, str) else given
    head = _messages(asked, "prompt", has_tools)
    if isinstance(head, str):
        return head
    if _begins(completion, head):
        completion = completion[len(head) :]
    if not completion or completion[-1]["role"] != "assistant":
        return "completion does not end on an assistant turn"
    return {"prompt": head, "completion": completion}


def prompt(row: dict[str, object], *, has_tools: bool = False) -> dict[str, object] | str:
    """Returns a row whose prompt is messages."""
    head = _messages(row["prompt"], "prompt", has_tools)
    if isinstance(head, str):
        return head
    if head[-1]["role"] == "assistant":
        return "prompt ends on an assistant turn"
    return {**row, "prompt": head}


def _answer(value: Any) -> Any:
    """Returns an answer as messages where it is a text or one message."""
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    return [value] if isinstance(value, dict) else value


def _spoken(value: Any) -> Any:
    """Returns a conversation as messages where it is texts in turn, user first, or mappings of a question and its
    answer (`TURNS`)."""
    if not isinstance(value, list) or len(value) == 0:
        return value
    if len(value) > 1 and all(isinstance(each, str) for each in value):
        return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(value)]
    for keys in TURNS:
        if all(
            isinstance(each, dict) and "role" not in each and all(isinstance(each.get(key), str) for key in keys)
            for each in value
        ):
            return [turn for each in value for turn in _round(each, keys)]
    return value


def _round(each: dict[str, Any], keys: tuple[str, str]) -> list[Message]:
    """Returns a question and its answer, after the system message that they may come with."""
    system, asked, said = each.get("system"), *(each[key] for key in keys)
    before = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
    learned = {"train": bool(each[LEARNED])} if isinstance(each.get(LEARNED), bool) else {}
    return [*before, {"role": "user", "content": asked}, {"role": "assistant", "content": said, **learned}]


def rounds(value: Any) -> list[Message] | str:
    """Returns the rounds before a prompt as messages, or why they are none; they are pairs of question and answer."""
    if value is None:
        return []
    pairs = value if isinstance(value, list) else [value]
    if all(isinstance(pair, list) and len(pair) == 2 and all(isinstance(x, str) for x in pair) for pair in pairs):
        return [
            {"role": role, "content": x} for pair in pairs for role, x in zip(("user", "assistant"), pair, strict=True)
        ]
    turns = _messages(_spoken(value), "history", False)
    return turns if isinstance(turns, list) else "is no list of questions and their answers"


def _shared(a: list[Message], b: list[Message]) -> list[Message]:
    if a == b:  # for the check of same answers to judge
        return a[:-1]
    return a[: shared_length(list(map(_said, a)), list(map(_said, b)))]


def _begins(messages: list[Message], head: list[Message]) -> bool:
    """Tells whether messages begin with what others say."""
    return list(map(_said, messages[: len(head)])) == list(map(_said, head))


def _said(message: Message) -> Message:
    return {key: value for key, value in message.items() if key not in UNSAID}


def _messages(messages: Any, name: str, has_tools: bool) -> list[Message] | str:
    if not isinstance(messages, list) or not messages:
        return f"{name} is a {type(messages).__name__}, expected a non-empty list"
    turns = []
    for position, raw in enumerate(messages, 1):
        message = single.parse_message(raw, has_tools=has_tools)
        if isinstance(message, str):
            return f"message {position} {message}"
        turns.append(message)
    return turns
