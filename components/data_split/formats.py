"""Shapes of a row: finding out which one a source has, and bringing rows to one of three."""

from __future__ import annotations

from typing import Any

from components.shared.errors import UserError
from components.shared.recipe import Data

ALPACA = (
    "Below is an instruction that describes a task{and_input}. "
    "Write a response that appropriately completes the request."
)
"""Prompt of the Stanford Alpaca project, which instruction/input/output data is usually trained with."""

NEEDED = {
    "text": ("text",),
    "prompt-completion": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "messages": ("messages",),
}
"""Columns each format needs; `instruction` may have `input` as well."""


def detect(data: Data, columns: list[str]) -> str:
    """Returns the format of a source, named in the recipe or found from its columns.

    Raises:
        UserError: the columns fit no format.
    """
    if data.format != "auto":
        return data.format
    present = set(columns) | {ours for ours, theirs in data.columns.items() if theirs in columns}
    for name in ("messages", "prompt-completion", "instruction", "text"):
        if present >= set(NEEDED[name]):
            return name
    shapes = "; ".join(f"{name}: {', '.join(needed)}" for name, needed in NEEDED.items())
    raise UserError(
        f"data.source has columns {', '.join(sorted(columns))}, which fit no format ({shapes}).",
        remedy="Map them with data.columns, for example {prompt: question, completion: answer}.",
    )


def normalise(values: dict[str, Any], data: Data, row_format: str) -> dict[str, Any] | str:
    """Brings a row to `{text}`, `{prompt, completion}` or `{messages}`.

    Returns:
        The row, or the reason why it cannot be used.
    """
    row: dict[str, Any] = {}
    for ours in (*NEEDED[row_format], "input"):
        theirs = data.columns.get(ours, ours)
        if theirs in values and values[theirs] is not None:
            row[ours] = values[theirs]
        elif ours != "input":
            return f"column {theirs!r} is missing"
    if row_format == "messages":
        return _messages(row["messages"])
    for ours, value in row.items():
        if not isinstance(value, str):
            return f"column {data.columns.get(ours, ours)!r} is a {type(value).__name__}, expected text"
        if not _encodable(value):
            return f"column {data.columns.get(ours, ours)!r} holds a lone surrogate"
    if row_format == "text":
        return {"text": row["text"]} if row["text"].strip() else "text is empty"
    if row_format == "instruction":
        row = {"prompt": _alpaca(row["instruction"], row.get("input", "")), "completion": row["output"]}
    if not row["completion"].strip():
        return "completion is empty"
    return {"prompt": row["prompt"], "completion": row["completion"]}


def _alpaca(instruction: str, given: str) -> str:
    head = ALPACA.format(and_input=", paired with an input that provides further context" if given else "")
    context = f"\n\n### Input:\n{given}" if given else ""
    return f"{head}\n\n### Instruction:\n{instruction}{context}\n\n### Response:"


def _messages(messages: Any) -> dict[str, Any] | str:
    if not isinstance(messages, list) or not messages:
        return f"messages is a {type(messages).__name__}, expected a non-empty list"
    for position, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not _encodable(message["role"]):
            return f"message {position} has no role"
        if not isinstance(message.get("content"), str) or not _encodable(message["content"]):
            return f"message {position} has no text content"
    if not any(message["role"] == "assistant" for message in messages):
        return "messages has no assistant turn"
    return {"messages": [{"role": message["role"], "content": message["content"]} for message in messages]}


def _encodable(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)
