"""Tools that rows declare and call, in the forms that data sets have them, brought to OpenAI's.

A declaration is `{"type": "function", "function": {"name", …}}`, a call is the same with `arguments`, an object. Either
may come as JSON text, bare, or in a list. Where it comes as objects, keys that are null are left out: Parquet gives
each object the keys of all of them.
"""

from __future__ import annotations

import json
from typing import Any

from baton.components.data_split.rows import loads

Call = dict[str, Any]
Tool = dict[str, Any]

ARGUMENTS = ("arguments", "parameters", "args")
"""What the arguments of a call are called."""


def is_encodable(value: Any) -> bool:
    """Tells whether all texts of a value can be written as UTF-8."""
    return "\\ud" not in json.dumps(value).lower() or _is_utf8(json.dumps(value, ensure_ascii=False))


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def calls(value: Any) -> list[Call] | str:
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


def declared(value: Any) -> list[Tool] | str:
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
