"""One message of a conversation: who says it, what is said, and what it holds beside that."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from baton.components.data_split import tools

Message = dict[str, Any]
"""`role` and `content`, and what the source has beside them: `tool_calls`, `tool_call_id`, `name`, `reasoning_content`
and `train`."""

ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "function_call"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
"""What speakers are called → their roles."""

REASONING = ("reasoning_content", "thinking", "reasoning")
FLAGS = ("train", "training", "weight")
"""Keys of a message that say what the assistant thought, and whether it is learned."""

PARTS = ("text", "input_text", "output_text")
"""Types of the parts of a content that are text."""

THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)
"""What a content begins with where the thinking is written into it."""


def is_encodable(text: str) -> bool:
    """Tells whether a text can be written as UTF-8: a lone surrogate cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def message(raw: Any, *, has_tools: bool = False) -> Message | str:
    """Returns a message as it is written, or what is wrong with it; keys that mean nothing to us are left out.

    Args:
        raw: With role and content, or with ShareGPT's from and value.
        has_tools: Whether the row declares tools: a `function_call` turn must then be one. Else it stays text where it
            is no JSON of a name and arguments.
    """
    if not isinstance(raw, dict):
        return "has no role"
    role, content = raw.get("role"), raw.get("content")
    if role is None and "from" in raw:
        role, content = raw["from"], raw.get("value")
        if isinstance(role, str) and role.lower() not in ROLES:
            return f"is from {role!r}, expected {', '.join(ROLES)}"
    if not isinstance(role, str) or not is_encodable(role):
        return "has no role"
    said = ROLES.get(role.lower(), role)
    content = _text(content)
    calls = _calls(raw, said)
    if role.lower() == "function_call" and not calls and isinstance(content, str):
        written = tools.calls(content)
        if not isinstance(written, str) and written:
            content, calls = "", written
        elif has_tools:
            return f"is from 'function_call', and its calls {written or 'are none'}"
    if isinstance(calls, str):
        return calls
    if isinstance(content, _Part):
        return f"has a part of type {content.kind!r}, and only text is learned"
    if not isinstance(content, str) and not (calls and content is None):
        return "has no text content"
    more = _beside(raw, said)
    if isinstance(more, str):
        return more
    whole = {"role": said, "content": content or "", **({"tool_calls": calls} if calls else {}), **more}
    if not is_encodable(whole["content"]) or (len(whole) > 2 and not tools.is_encodable(whole)):
        return "has no text content" if not is_encodable(whole["content"]) else "holds a lone surrogate"
    return whole


class _Part:
    """A part of a content that is not text.

    Attributes:
        kind: Its type.
    """

    def __init__(self, kind: object) -> None:
        self.kind = kind


def _text(content: Any) -> Any:
    """Returns a content that is a list of text parts as text, the first part that is none, or what it is."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if isinstance(part, dict) and part.get("type", "text") in PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(part, dict) and part.get("type", "text") not in PARTS:
            return _Part(part["type"])
        else:
            return content
    return "".join(texts) if texts else content


def _calls(raw: dict[str, Any], role: str) -> list[tools.Call] | str | None:
    """Returns the tool calls of a message, why they cannot be used, or None where it has none."""
    key = next((key for key in ("tool_calls", "function_call") if raw.get(key)), None)
    if key is None:
        return None
    calls = tools.calls(raw[key])
    if isinstance(calls, str):
        return f"has {key} that {calls}"
    if calls and role != "assistant":
        return f"has {key}, and is not the assistant's"
    return calls


def _beside(raw: dict[str, Any], role: str) -> Message | str:
    """Returns what a message holds beside role, content and tool calls, or what is wrong with it."""
    more: Message = {}
    for key in ("name", "tool_call_id"):
        if isinstance(raw.get(key), str) and raw[key] and (key == "name" or role == "tool"):
            more[key] = raw[key]
    if role == "assistant":
        thoughts = (_text(raw[key]) for key in REASONING if raw.get(key))
        if thought := next((text for text in thoughts if isinstance(text, str) and text.strip()), None):
            more["reasoning_content"] = thought
    flags = {key: raw[key] for key in FLAGS if raw.get(key) is not None}
    for key, flag in flags.items():
        if not isinstance(flag, bool | int | float) or flag not in (0, 1):
            return f"has {key} {flag!r}, expected 0 or 1, false or true"
    if len({bool(flag) for flag in flags.values()}) > 1:
        return f"has {' and '.join(f'{key} {flag!r}' for key, flag in flags.items())}, which contradict each other"
    for flag in flags.values():
        more["train"] = bool(flag)
    return more


def without_reasoning(value: Any) -> Any:
    """Returns what is said, a text or messages, without what the assistant thought before."""
    if isinstance(value, str):
        return THOUGHT.sub("", value, count=1) if THOUGHT.match(value) else value
    return list(_unthinking(value))


def _unthinking(turns: list[Message]) -> Iterator[Message]:
    for turn in turns:
        if turn["role"] != "assistant":
            yield turn
            continue
        kept = {key: value for key, value in turn.items() if key != "reasoning_content"}
        yield {**kept, "content": without_reasoning(turn["content"])}
