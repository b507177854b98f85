"""What a chat template does not write of a conversation."""

from __future__ import annotations

import json
from collections import Counter

from baton.components.tokenize.masks.template import Message, Rendered


def left_out(rendered: Rendered) -> Counter[str]:
    """Counts what a conversation holds that its template does not write, by looking for it in the rendering."""
    text, talk = rendered.text, rendered.conversation
    counted: Counter[str] = Counter()
    at, has_calls = 0, any("tool_calls" in message for message in talk.messages)
    for number, message in enumerate(talk.messages):
        content = message["content"].strip()
        if content and message["role"] != "assistant" and not _is_in(content, text):
            counted["messages"] += 1
        if calls := message.get("tool_calls"):
            # Between what was said before and after: the tools' own list has the name as well.
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
    """Returns where the first of messages begins whose text is found, the end where none is."""
    found = (text.find(message["content"].strip(), at) for message in messages if message["content"].strip())
    return next((begin for begin in found if begin >= 0), len(text))
