"""Shapes of a row: bringing each to the one its method learns from."""

from __future__ import annotations

import json
from typing import Any

from baton.components.data_split import conversations, glaive, messages, paths, rankings, tools
from baton.components.data_split.columns import OPTIONAL, SIDE_BY_SIDE
from baton.components.data_split.layouts import Layout
from baton.components.data_split.messages import is_encodable
from baton.components.shared.models import conversing

TURNS = ("messages", "prompt", "completion", "chosen", "rejected")
"""Columns that are messages, where a row is a conversation."""
SAID = ("completion", "output", "chosen", "rejected")
"""Columns that the assistant says, where a row is texts."""

MEDIA = ("images", "image", "videos", "video", "audios", "audio")
"""Columns beside messages that hold what is no text."""

TRUE, FALSE = ("true", "yes", "good", "1", "1.0"), ("false", "no", "bad", "0", "0.0")


def normalise(
    values: dict[str, object], layout: Layout, *, reasoning: bool = True, chat: bool = False
) -> dict[str, Any] | str:
    """Brings a row to `{text}`, `{prompt, completion}`, `{messages}`, `{prompt, chosen, rejected}`,
    `{prompt, completion, label}` or `{prompt, answer}`, with `extra_columns` beside it, and `tools` where the row is
    messages and declares some.

    Args:
        values: The row.
        layout: Which of its columns hold what.
        reasoning: Whether to keep what the assistant thought.
        chat: Whether a row of texts may become turns, which have a place for tools and a system message.

    Returns:
        The row, or the reason why it cannot be used.
    """
    row: dict[str, Any] = {}
    for ours in (*layout.needed, *OPTIONAL.get(layout.format, ())):
        theirs = layout.columns.get(ours, ours)
        value = _side_by_side(values, theirs) if ours in SIDE_BY_SIDE else _joined(values, theirs, layout.join)
        if value is not None:
            row[ours] = value
        elif ours in layout.needed:
            return f"column {layout.name(ours)} is missing"
    beside = {ours: _joined(values, theirs, layout.join) for ours, theirs in layout.beside.items()}
    earlier = conversations.rounds(paths.get(values, layout.earlier)) if layout.earlier else None
    if isinstance(earlier, str):
        return f"column {layout.earlier!r} {earlier}"
    normal = _shape(row, layout, beside, reasoning, earlier)
    is_talk = isinstance(normal, dict) and isinstance(normal.get("messages", normal.get("prompt")), list)
    media = next((name for name in MEDIA if values.get(name) and name not in layout.extra_columns), None)
    if is_talk and media:
        return f"column {media!r} holds pictures or sound, and only text is learned"
    if isinstance(normal, dict) and (is_talk or (chat and "prompt" in normal)):
        normal = _equipped(normal, beside, reasoning)
        if not isinstance(normal, str) and "tools" in normal and "tools" in layout.extra_columns:
            return "column 'tools' declares the row's tools, which are kept without data.extra_columns"
    if isinstance(normal, str):
        return normal
    for name in layout.extra_columns:
        if name in normal:
            continue
        value = paths.get(values, name)
        if value is None:
            return f"column {name!r} is missing"
        normal[name] = as_text(value)
        if not is_encodable(normal[name]):
            return f"column {name!r} holds a lone surrogate"
    return normal


def _joined(values: dict[str, object], theirs: str | list[str], join: str) -> Any:
    if isinstance(theirs, str):
        return paths.get(values, theirs)
    parts = [as_text(value) for value in (paths.get(values, name) for name in theirs) if value is not None]
    return join.join(part for part in parts if part.strip()) or None


def _side_by_side(values: dict[str, object], theirs: str | list[str]) -> Any:
    if isinstance(theirs, str):
        return paths.get(values, theirs)
    parts = [paths.get(values, name) for name in theirs]
    return None if None in parts else parts


def _equipped(row: dict[str, Any], beside: dict[str, Any], reasoning: bool) -> dict[str, Any] | str:
    """Returns a row of messages, or one that is to be, with its tools, and its system message where it has none."""
    if not reasoning:
        row = {
            name: messages.without_reasoning(value) if name in TURNS and isinstance(value, list) else value
            for name, value in row.items()
        }
    declared, system = tools.declared(beside.get("tools")), beside.get("system")
    system = system if isinstance(system, str) and system.strip() else None
    if isinstance(declared, str):
        return f"tools {declared}"
    if not tools.is_encodable([declared, system]):
        return "tools or system holds a lone surrogate"
    first = "messages" if "messages" in row else "prompt"
    if system and isinstance(row[first], str):
        row = {**row, conversing.SYSTEM: system}
    elif system and row[first][0]["role"] not in ("system", "developer"):
        row = {**row, first: [{"role": "system", "content": system}, *row[first]]}
    return {**row, "tools": declared} if declared else row


def _shape(
    row: dict[str, Any],
    layout: Layout,
    beside: dict[str, Any],
    reasoning: bool,
    earlier: list[dict[str, Any]] | None = None,
) -> dict[str, Any] | str:
    row_format, has_tools = layout.format, bool(beside.get("tools"))
    if earlier is not None:
        if row_format == "instruction" and all(isinstance(value, str) for value in row.values()):
            asked = conversing.asked(conversing.alpaca(row["instruction"], row.get("input")))
            row, row_format = {"prompt": asked, "completion": row["output"]}, "prompt-completion"
        if isinstance(row.get("prompt"), str):
            row["prompt"] = [*earlier, {"role": "user", "content": row["prompt"]}]
    if row_format in ("messages", "sharegpt"):
        name = "messages" if row_format == "messages" else "conversations"
        if isinstance(row[name], str) and (written := glaive.conversation(row[name], beside.get("system"))):
            row[name] = written.pop("messages")
            beside |= written
        return conversations.conversation(row[name], name, has_tools=bool(beside.get("tools")))
    if row_format == "tool-calls":
        calls = tools.calls(row["calls"])
        if not isinstance(calls, list) or not calls:
            return f"{layout.name('calls')} {calls or 'are none'}"
        completion = {"role": "assistant", "content": "", "tool_calls": calls}
        return conversations.answered({"prompt": row["prompt"], "completion": completion})
    if row_format == "ranked":
        names = layout.columns.get("responses")
        pair = rankings.pair(row, names if isinstance(names, list) else None)
        if isinstance(pair, str):
            return pair
        row, row_format = pair, "preference"
    if row_format == "preference" and any(map(conversations.is_conversation, row.values())):
        return conversations.preference(row, has_tools=has_tools)
    if row_format == "preference" and "prompt" not in row and all(isinstance(side, str) for side in row.values()):
        row = conversations.texts(row)
        if not row["prompt"]:
            return "chosen and rejected are texts that share no first words, but there is no prompt"
    if row_format == "prompt" and "answer" in row:
        row["answer"] = as_text(row["answer"])
        if not is_encodable(row["answer"]):
            return f"column {layout.name('answer')} holds a lone surrogate"
    label = _label(row.pop("label")) if row_format == "rated" else None
    if isinstance(label, str):
        return label
    if row_format == "prompt" and conversations.is_conversation(row["prompt"]):
        return conversations.prompt(row, has_tools=has_tools)
    talks = conversations.has_speakers if row_format == "prompt-completion" else conversations.is_conversation
    if row_format in ("rated", "prompt-completion") and any(map(talks, row.values())):
        answered = conversations.answered(row, has_tools=has_tools)
        return answered if isinstance(answered, str) or label is None else {**answered, "label": label}
    for ours, value in row.items():
        if not isinstance(value, str):
            return f"column {layout.name(ours)} is a {type(value).__name__}, expected text"
        if not is_encodable(value):
            return f"column {layout.name(ours)} holds a lone surrogate"
    if not reasoning:
        row = {ours: messages.without_reasoning(value) if ours in SAID else value for ours, value in row.items()}
    return _texts(row, row_format, label)


def _texts(row: dict[str, str], row_format: str, label: bool | None) -> dict[str, Any] | str:
    if row_format == "text":
        return row if row["text"].strip() else "text is empty"
    if row_format == "instruction":
        row = {"prompt": conversing.alpaca(row["instruction"], row.get("input")), "completion": row["output"]}
    if row_format in ("prompt", "preference") and not row["prompt"].strip():
        return "prompt is empty"
    if "completion" in row and not row["completion"].strip():
        return "completion is empty"
    if row_format == "preference":
        for side in ("chosen", "rejected"):
            if not row[side].strip():
                return f"{side} is empty"
    return {**row, "label": label} if row_format == "rated" else row


def as_text(value: Any) -> str:
    """Returns a value as text, as JSON where it is none."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def as_json(values: dict[str, object]) -> str:
    """Returns a row as it was read, for people."""
    return json.dumps(values, ensure_ascii=True, default=str)


def _label(value: Any) -> bool | str:
    text = str(value).strip().lower()
    if text in TRUE or text in FALSE:
        return text in TRUE
    return f"label is {value!r}, expected true or false"
