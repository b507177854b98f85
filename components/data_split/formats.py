"""Shapes of a row: finding out which one a source has, and bringing rows to the one their method learns from."""

from __future__ import annotations

import json
from typing import Any

from components.data_split import conversations
from components.data_split.conversations import is_encodable
from components.shared.errors import UserError
from components.shared.recipe import Data, Recipe
from components.shared.recipe.recipe import FORMATS

ALPACA = (
    "Below is an instruction that describes a task{and_input}. "
    "Write a response that appropriately completes the request."
)
"""Prompt of the Stanford Alpaca project, which instruction/input/output data is usually trained with."""

NEEDED = {
    "messages": ("messages",),
    "prompt-completion": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
    "rated": ("prompt", "completion", "label"),
    "preference": ("chosen", "rejected"),
    "prompt": ("prompt",),
}
"""Columns each format needs, in the order in which formats are tried."""

OPTIONAL = {"instruction": ("input",), "preference": ("prompt",), "prompt": ("answer",)}
"""Columns a format takes where they are there."""

TRUE, FALSE = ("true", "yes", "good", "1", "1.0"), ("false", "no", "bad", "0", "0.0")


def detect(recipe: Recipe, columns: list[str]) -> str:
    """Returns the format of a source, named in the recipe or found from its columns and the method.

    Raises:
        UserError: the columns fit no format that the method learns from.
    """
    data, method = recipe.data, recipe.training.method
    if data.format != "auto":
        return data.format
    present = set(columns) | {ours for ours, theirs in data.columns.items() if theirs in columns}
    for name, needed in NEEDED.items():
        if name in FORMATS[method] and present >= set(needed):
            return name
    shapes = "; ".join(f"{name}: {', '.join(NEEDED[name])}" for name in FORMATS[method])
    raise UserError(
        f"data.source has columns {', '.join(sorted(columns))}, which fit no format that {method} learns from "
        f"({shapes}).",
        remedy="Map them with data.columns, for example {prompt: question, completion: answer}.",
    )


def normalise(values: dict[str, Any], data: Data, row_format: str) -> dict[str, Any] | str:
    """Brings a row to `{text}`, `{prompt, completion}`, `{messages}`, `{prompt, chosen, rejected}`,
    `{prompt, completion, label}` or `{prompt, answer}`, with `data.extra_columns` beside it.

    Returns:
        The row, or the reason why it cannot be used.
    """
    row: dict[str, Any] = {}
    optional = OPTIONAL.get(row_format, ())
    for ours in (*NEEDED[row_format], *optional):
        theirs = data.columns.get(ours, ours)
        if theirs in values and values[theirs] is not None:
            row[ours] = values[theirs]
        elif ours not in optional:
            return f"column {theirs!r} is missing"
    normal = _shape(row, data, row_format)
    if isinstance(normal, str):
        return normal
    for name in data.extra_columns:
        value = values.get(name)
        if value is None:
            return f"column {name!r} is missing"
        normal[name] = _as_text(value)
        if not is_encodable(normal[name]):
            return f"column {name!r} holds a lone surrogate"
    return normal


def _shape(row: dict[str, Any], data: Data, row_format: str) -> dict[str, Any] | str:
    if row_format == "messages":
        return conversations.conversation(row["messages"])
    if row_format == "preference" and conversations.is_conversation(row["chosen"]):
        return conversations.preference(row)
    if row_format == "preference" and "prompt" not in row:
        return "chosen and rejected are texts, but there is no prompt"
    if row_format == "prompt" and "answer" in row:
        row["answer"] = _as_text(row["answer"])
        if not is_encodable(row["answer"]):
            return f"column {data.columns.get('answer', 'answer')!r} holds a lone surrogate"
    if row_format in ("prompt", "rated") and conversations.is_conversation(row["prompt"]):
        return conversations.prompt(row)
    label = _label(row.pop("label")) if row_format == "rated" else None
    if isinstance(label, str):
        return label
    for ours, value in row.items():
        if not isinstance(value, str):
            return f"column {data.columns.get(ours, ours)!r} is a {type(value).__name__}, expected text"
        if not is_encodable(value):
            return f"column {data.columns.get(ours, ours)!r} holds a lone surrogate"
    if row_format == "text":
        return {"text": row["text"]} if row["text"].strip() else "text is empty"
    return _texts(row, row_format, label)


def _texts(row: dict[str, str], row_format: str, label: bool | None) -> dict[str, Any] | str:
    if row_format == "instruction":
        row = {"prompt": _alpaca(row["instruction"], row.get("input", "")), "completion": row["output"]}
    if row_format in ("prompt", "preference") and not row["prompt"].strip():
        return "prompt is empty"
    if "completion" in row and not row["completion"].strip():
        return "completion is empty"
    if row_format == "preference":
        for side in ("chosen", "rejected"):
            if not row[side].strip():
                return f"{side} is empty"
        if row["chosen"] == row["rejected"]:
            return "chosen and rejected are the same"
    return {**row, "label": label} if row_format == "rated" else {**row}


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _label(value: Any) -> bool | str:
    text = str(value).strip().lower()
    if text in TRUE or text in FALSE:
        return text in TRUE
    return f"label is {value!r}, expected true or false"


def _alpaca(instruction: str, given: str) -> str:
    head = ALPACA.format(and_input=", paired with an input that provides further context" if given else "")
    context = f"\n\n### Input:\n{given}" if given else ""
    return f"{head}\n\n### Instruction:\n{instruction}{context}\n\n### Response:"
