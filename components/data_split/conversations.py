"""Rows that are conversations: lists of messages with role and content."""

from __future__ import annotations

from typing import Any

Message = dict[str, str]


def is_conversation(value: Any) -> bool:
    """Tells whether a value is meant as messages, not as text."""
    return isinstance(value, list)


def is_encodable(text: str) -> bool:
    """Tells whether a text can be written as UTF-8: a lone surrogate cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def conversation(messages: Any) -> dict[str, Any] | str:
    """Returns `{messages}`, or the reason why they cannot be used."""
    found = _messages(messages, "messages")
    if isinstance(found, str):
        return found
    if not any(message["role"] == "assistant" for message in found):
        return "messages has no assistant turn"
    return {"messages": found}


def preference(row: dict[str, Any]) -> dict[str, Any] | str:
    """Returns `{prompt, chosen, rejected}`, each a list of messages, or the reason why the row cannot be used.

    Without a prompt, it is what the two conversations share from the start.
    """
    sides: dict[str, list[Message]] = {}
    for side in ("chosen", "rejected"):
        found = _messages(row[side], side)
        if isinstance(found, str):
            return found
        sides[side] = found
    if isinstance(row.get("prompt"), str):
        row["prompt"] = [{"role": "user", "content": row["prompt"]}]
    head = _messages(row["prompt"], "prompt") if "prompt" in row else _shared(sides["chosen"], sides["rejected"])
    if isinstance(head, str):
        return head
    if not head:
        return "chosen and rejected share no first message, and there is no prompt"
    answers = {side: found[len(head) :] if found[: len(head)] == head else found for side, found in sides.items()}
    for side, found in answers.items():
        if not found or found[-1]["role"] != "assistant":
            return f"{side} does not end on an assistant turn"
    if answers["chosen"] == answers["rejected"]:
        return "chosen and rejected are the same"
    return {"prompt": head, **answers}


def prompt(row: dict[str, Any]) -> dict[str, Any] | str:
    """Returns a row whose prompt is messages: `{prompt, answer}`, or `{prompt, completion, label}` for rated ones."""
    head = _messages(row["prompt"], "prompt")
    if isinstance(head, str):
        return head
    if head[-1]["role"] == "assistant":
        return "prompt ends on an assistant turn"
    if "label" in row:
        return "a rated row's prompt is a conversation, expected text"
    return {**row, "prompt": head}


def _shared(a: list[Message], b: list[Message]) -> list[Message]:
    count = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:count]


def _messages(messages: Any, name: str) -> list[Message] | str:
    if not isinstance(messages, list) or not messages:
        return f"{name} is a {type(messages).__name__}, expected a non-empty list"
    for position, message in enumerate(messages, 1):
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("role"), str)
            or not is_encodable(message["role"])
        ):
            return f"message {position} has no role"
        if not isinstance(message.get("content"), str) or not is_encodable(message["content"]):
            return f"message {position} has no text content"
    return [{"role": message["role"], "content": message["content"]} for message in messages]
