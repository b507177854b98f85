"""Rows that are conversations: lists of messages with role and content, or with ShareGPT's from and value."""

from __future__ import annotations

from typing import Any

Message = dict[str, str]

ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "function_call"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
"""What speakers are called → their roles. A `function_call` of ShareGPT is what the assistant says, as text."""

CALLS = ("tool_calls", "function_call")
"""Keys of a message that say more than its content, so that leaving them out would change what was said."""


def is_conversation(value: Any) -> bool:
    """Tells whether a value is meant as messages, not as text."""
    return isinstance(value, list | dict)


def is_encodable(text: str) -> bool:
    """Tells whether a text can be written as UTF-8: a lone surrogate cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def conversation(messages: Any, name: str = "messages") -> dict[str, object] | str:
    """Returns `{messages}`, or the reason why they cannot be used."""
    turns = _messages(messages, name)
    if isinstance(turns, str):
        return turns
    if not any(message["role"] == "assistant" for message in turns):
        return f"{name} has no assistant turn"
    return {"messages": turns}


def preference(row: dict[str, object]) -> dict[str, object] | str:
    """Returns `{prompt, chosen, rejected}`, each a list of messages, or the reason why the row cannot be used.

    Without a prompt, it is what the two conversations share from the start. An answer may also be one message, or a
    text after a prompt of messages.
    """
    sides: dict[str, list[Message]] = {}
    for side in ("chosen", "rejected"):
        messages = _messages(_answer(row[side]) if "prompt" in row else row[side], side)
        if isinstance(messages, str):
            return messages
        sides[side] = messages
    if isinstance(row.get("prompt"), str):
        row["prompt"] = [{"role": "user", "content": row["prompt"]}]
    head = _messages(row["prompt"], "prompt") if "prompt" in row else _shared(sides["chosen"], sides["rejected"])
    if isinstance(head, str):
        return head
    if not head:
        return "chosen and rejected share no first message, and there is no prompt"
    answers = {
        side: messages[len(head) :] if messages[: len(head)] == head else messages for side, messages in sides.items()
    }
    for side, messages in answers.items():
        if not messages or messages[-1]["role"] != "assistant":
            return f"{side} does not end on an assistant turn"
    return {"prompt": head, **answers}


def prompt(row: dict[str, object]) -> dict[str, object] | str:
    """Returns a row whose prompt is messages: `{prompt, answer}`, or `{prompt, completion, label}` for rated ones."""
    head = _messages(row["prompt"], "prompt")
    if isinstance(head, str):
        return head
    if head[-1]["role"] == "assistant":
        return "prompt ends on an assistant turn"
    if "label" in row:
        return "a rated row's prompt is a conversation, expected text"
    return {**row, "prompt": head}


def _answer(value: Any) -> Any:
    """Returns an answer as messages where it is a text or one message."""
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    return [value] if isinstance(value, dict) else value


def _shared(a: list[Message], b: list[Message]) -> list[Message]:
    if a == b:  # for the check of same answers to judge
        return a[:-1]
    count = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:count]


def _messages(messages: Any, name: str) -> list[Message] | str:
    if not isinstance(messages, list) or not messages:
        return f"{name} is a {type(messages).__name__}, expected a non-empty list"
    turns = []
    for position, raw in enumerate(messages, 1):
        message = _message(raw)
        if isinstance(message, str):
            return f"message {position} {message}"
        turns.append(message)
    return turns


def _message(message: Any) -> Message | str:
    """Returns a message's role and content, or what is wrong with it; further keys are left out."""
    if not isinstance(message, dict):
        return "has no role"
    role, content = message.get("role"), message.get("content")
    if role is None and "from" in message:
        role, content = message["from"], message.get("value")
        if isinstance(role, str) and role.lower() not in ROLES:
            return f"is from {role!r}, expected {', '.join(ROLES)}"
    if not isinstance(role, str) or not is_encodable(role):
        return "has no role"
    for key in CALLS:
        if message.get(key):
            return f"has {key}, which chat templates render each in their own way; expected text"
    if isinstance(content, list):
        texts = [
            part["text"] for part in content if isinstance(part, dict) and part.get("type") == "text" and "text" in part
        ]
        whole = len(texts) == len(content) > 0 and all(isinstance(text, str) for text in texts)
        content = "".join(texts) if whole else None
    if not isinstance(content, str) or not is_encodable(content):
        return "has no text content"
    return {"role": ROLES.get(role.lower(), role), "content": content}
