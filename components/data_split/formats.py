"""Shapes of a row: bringing each to the one its method learns from."""

from __future__ import annotations

import json
from typing import Any

from baton.components.data_split import conversations, paths, rankings
from baton.components.data_split.columns import OPTIONAL, SIDE_BY_SIDE
from baton.components.data_split.conversations import is_encodable
from baton.components.data_split.layouts import Layout

ALPACA = (
    "Below is an instruction that describes a task{and_input}. "
    "Write a response that appropriately completes the request."
)
"""Prompt of the Stanford Alpaca project, which instruction/input/output data is usually trained with."""

TRUE, FALSE = ("true", "yes", "good", "1", "1.0"), ("false", "no", "bad", "0", "0.0")


def normalise(values: dict[str, object], layout: Layout) -> dict[str, Any] | str:
    """Brings a row to `{text}`, `{prompt, completion}`, `{messages}`, `{prompt, chosen, rejected}`,
    `{prompt, completion, label}` or `{prompt, answer}`, with `extra_columns` beside it.

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
    normal = _shape(row, layout)
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


def _shape(row: dict[str, Any], layout: Layout) -> dict[str, Any] | str:
    row_format = layout.format
    if row_format in ("messages", "sharegpt"):
        name = "messages" if row_format == "messages" else "conversations"
        return conversations.conversation(row[name], name)
    if row_format == "ranked":
        names = layout.columns.get("responses")
        pair = rankings.pair(row, names if isinstance(names, list) else None)
        if isinstance(pair, str):
            return pair
        row, row_format = pair, "preference"
    if row_format == "preference" and any(map(conversations.is_conversation, row.values())):
        return conversations.preference(row)
    if row_format == "preference" and "prompt" not in row:
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
        return conversations.prompt(row)
    if row_format == "rated" and any(map(conversations.is_conversation, row.values())):
        answered = conversations.answered(row)
        return answered if isinstance(answered, str) else {**answered, "label": label}
    for ours, value in row.items():
        if not isinstance(value, str):
            return f"column {layout.name(ours)} is a {type(value).__name__}, expected text"
        if not is_encodable(value):
            return f"column {layout.name(ours)} holds a lone surrogate"
    return _texts(row, row_format, label)


def _texts(row: dict[str, str], row_format: str, label: bool | None) -> dict[str, Any] | str:
    if row_format == "text":
        return row if row["text"].strip() else "text is empty"
    if row_format == "instruction":
        context = f"\n\n### Input:\n{row['input']}" if row.get("input") else ""
        head = ALPACA.format(and_input=", paired with an input that provides further context" if context else "")
        row = {
            "prompt": f"{head}\n\n### Instruction:\n{row['instruction']}{context}\n\n### Response:",
            "completion": row["output"],
        }
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
