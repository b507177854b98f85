"""Tool calls as chat templates take them."""

from __future__ import annotations

import json
from typing import Any

Message = dict[str, Any]


def with_text_arguments(messages: list[Message]) -> list[Message]:
    """Returns messages with the arguments of calls as JSON text, which some templates ask for."""
    return [
        {**message, "tool_calls": [_written(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _written(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}
