"""Conversations with tools that are written into two texts, as in glaive-function-calling."""

from __future__ import annotations

import json
import re
from typing import Any

from baton.components.data_split import tools

TURN = re.compile(r"(?:\A|\n)[^\S\n]*(USER|ASSISTANT|FUNCTION RESPONSE):")
"""Of one line: over empty ones the time would grow with the square of their number."""
SPEAKERS = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
END, CALL = "<|endoftext|>", "<functioncall>"
QUOTED = re.compile(r"\{\s*\"name\":\s*\"([^\"]+)\",\s*\"arguments\":\s*'(.*)'\s*\}", re.DOTALL)
"""A call whose arguments are JSON in single quotes, which JSON does not have."""


def conversation(chat: str, system: object) -> dict[str, Any] | None:
    """Returns `messages`, `tools` and `system`, None where the text is no such conversation.

    Nothing is left of what the system says where it declares functions: they are `tools`, which a template writes in
    its own words.
    """
    pieces = TURN.split(chat)
    if len(pieces) == 1 or pieces[0].strip():
        return None
    turns: list[dict[str, Any]] = []
    for speaker, text in zip(pieces[1::2], pieces[2::2], strict=True):
        said, called, call = text.replace(END, "").partition(CALL)
        turn: dict[str, Any] = {"role": SPEAKERS[speaker], "content": said.strip()}
        if called and turn["role"] == "assistant":
            quoted = QUOTED.fullmatch(call.strip())
            turn["tool_calls"] = (
                [{"name": quoted[1], "arguments": quoted[2].replace("\\'", "'")}] if quoted else call.strip()
            )
        turns.append(turn)
    words = system.strip().removeprefix("SYSTEM:").strip() if isinstance(system, str) else ""
    functions = _objects(words)
    return {"messages": turns, "tools": functions, "system": None if functions else words}


def _objects(text: str) -> list[tools.Tool]:
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
