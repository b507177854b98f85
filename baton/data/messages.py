"""One message of a conversation: its role, text, reasoning and tool calls, in OpenAI's form.

A tool is declared as `{"type": "function", "function": {"name", …}}`; a call is the same with `arguments`, an object.
Data sets may give either as JSON text, bare, or in a list; keys that are null are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from baton.data.rows import loads

# --- Tools that rows declare and call, in the forms that data sets have them, brought to OpenAI's.
#
# A declaration is `{"type": "function", "function": {"name", …}}`, a call is the same with `arguments`, an object.
# Either may come as JSON text, bare, or in a list. Where it comes as objects, keys that are null are left out: Parquet
# gives each object the keys of all of them.


Call = dict[str, Any]
Tool = dict[str, Any]

ARGUMENTS = ("arguments", "parameters", "args")
"""What the arguments of a call are called."""


def all_encodable(value: Any) -> bool:
    """Tells whether all texts of a value can be written as UTF-8."""
    return "\\ud" not in json.dumps(value).lower() or _is_utf8(json.dumps(value, ensure_ascii=False))


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_tool_calls(value: Any) -> list[Call] | str:
    """Returns tool calls, none where the value is empty, or what is wrong with them, to follow "which"."""
    listed = _listed(value)
    if listed is None:
        return "are no JSON of a name and arguments"
    made = []
    for each in listed:
        if isinstance(call := _call(each), str):
            return call
        made.append(call)
    return made


def parse_tools(value: Any) -> list[Tool] | str:
    """Returns declarations of tools, none where the value is empty, or what is wrong with them, to follow "which"."""
    listed = _listed(value)
    if listed is None:
        return "are no JSON of functions"
    made: list[Tool] = []
    for each in listed:
        each = _parsed(each)
        kind = each.get("type") if isinstance(each, dict) else None
        function = _parsed(each.get("function")) if isinstance(each, dict) and "function" in each else each
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            return "are not all functions with a name"
        if "function" not in each and kind == "function":
            function = {key: part for key, part in function.items() if key != "type"}
        made.append({"type": "function", "function": function})
    return made


def _call(value: Any) -> Call | str:
    value = _parsed(value)
    function = _parsed(value.get("function")) if isinstance(value, dict) and value.get("function") else value
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(value, dict) or not isinstance(function, dict) or not isinstance(name, str) or not name:
        return "are no JSON of a name and arguments"
    kind = value.get("type") if function is not value else None
    if kind not in (None, "function"):
        return f"have type {kind!r}, expected function"
    given = next((function[key] for key in ARGUMENTS if function.get(key) is not None), None)
    arguments = {} if given is None or given == "" else _parsed(given)
    if not isinstance(arguments, dict):
        return f"call {name} with arguments that are no JSON object"
    call: Call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if isinstance(value.get("id"), str) and value["id"]:
        call["id"] = value["id"]
    return call


def _listed(value: Any) -> list[Any] | None:
    """Returns the members of a list or of its JSON, one object as a list; None of what is neither."""
    value = _parsed(value)
    if isinstance(value, dict):
        return [value]
    if value is None or value == "":
        return []
    return value if isinstance(value, list) else None


def _parsed(value: Any) -> Any:
    """Returns what a JSON text holds, or an object without keys that are null; a text that is no JSON as it is."""
    if not isinstance(value, str):
        return _plain(value)
    try:
        return loads(value) if value.strip() else None
    except ValueError:
        return value


def _plain(value: Any) -> Any:
    """Returns a value as JSON can hold it."""
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items() if part is not None}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


# --- One message of a conversation: who says it, what is said, and what it holds beside that.


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


def parse_message(raw: Any, *, has_tools: bool = False) -> Message | str:
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
        written = parse_tool_calls(content)
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
    if not is_encodable(whole["content"]) or (len(whole) > 2 and not all_encodable(whole)):
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


def _calls(raw: dict[str, Any], role: str) -> list[Call] | str | None:
    """Returns the tool calls of a message, why they cannot be used, or None where it has none."""
    key = next((key for key in ("tool_calls", "function_call") if raw.get(key)), None)
    if key is None:
        return None
    calls = parse_tool_calls(raw[key])
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
