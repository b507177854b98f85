"""Brings a row to the shape that its method learns from, and ranked answers to one preference pair."""

from __future__ import annotations

import hashlib
import json
import math
import re
from typing import Any

from baton.data import conversations, schema
from baton.data.conversations import is_encodable, shared_length
from baton.data.rows import loads
from baton.errors import RowError
from baton.models import chat as chats

TEXTS = ("text", "response", "answer", "completion", "output", "content", "summary")
SCORES = ("score", "overall_score", "pm_score", "rating", "reward")
"""Keys of a response that is a mapping: its text, and how good it is. `rank` is best at 1."""

LEVEL = ("tie", "both", "neither", "none", "equal", "same", "draw")  # beginnings of words that prefer no response


def pair_of_ranked(row: dict[str, object], names: list[str] | None = None) -> dict[str, object]:
    """Returns `{prompt, chosen, rejected}`.

    The best response is preferred to a lower one, which the row's content draws: the rule of the binarized
    UltraFeedback that Zephyr was trained with (Tunstall et al. 2023, arXiv:2310.16944), whose authors draw and do not
    take the worst so that pairs are diverse and harder to tell apart. Without scores, the first is the best.

    Args:
        row: `responses`, `prompt` unless they begin with it, and one of `scores`, `ranks` (1 is best), `preferred` (the
            best one's name) and `margin` (of two; below 0 the first is better), or none where the best comes first.
        names: The responses' columns, where they are side by side.
    """
    responses = row["responses"]
    if not isinstance(responses, list) or len(responses) < 2:
        raise RowError("responses is not a list of at least two")
    if all(isinstance(each, dict) and not {"role", "from"} & each.keys() for each in responses):
        row = row | _parts(responses)
        responses = row["responses"]
        if not isinstance(responses, list):
            raise RowError(f"responses are mappings without {' or '.join(TEXTS)}")
    if names and (whole := _written_turns(row.get("prompt"), responses)):
        row, responses = {**row, "prompt": None}, whole
    numbers = _goodness(row, names or [str(at) for at in range(len(responses))])
    if numbers is None:
        if names:
            raise RowError("nothing says which of the responses is better (scores, ranks, preferred or margin)")
        best, lower = 0, [at for at in range(1, len(responses)) if responses[at] != responses[0]]
    else:
        best = max(range(len(numbers)), key=lambda at: numbers[at])  # the first of equal ones
        lower = [at for at, number in enumerate(numbers) if number < numbers[best] and responses[at] != responses[best]]
    if not lower:
        raise RowError("no response is better than another")
    prompt = row.get("prompt")
    content = json.dumps([prompt, responses], sort_keys=True, default=str)
    drawn = int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big")
    answers = {"chosen": responses[best], "rejected": responses[lower[drawn % len(lower)]]}
    return answers if prompt is None else {"prompt": prompt, **answers}


def _parts(responses: list[dict[str, object]]) -> dict[str, object]:
    """Returns `responses`, which all must have, and `scores` or `ranks`, of responses that are mappings."""
    row: dict[str, object] = {"responses": None}
    for ours, names in (("responses", TEXTS), ("scores", SCORES), ("ranks", ("rank",))):
        for name in reversed(names):
            values = [response.get(name) for response in responses]
            # One without a score is not taken for a list with the best first.
            if None not in values or (ours != "responses" and any(value is not None for value in values)):
                row[ours] = values
    return row


def _written_turns(prompt: object, responses: list[object]) -> list[object] | None:
    """Returns whole conversations of prompt and responses that are JSON lists, a text for each turn; else None."""
    values = [prompt, *responses]
    if not all(isinstance(value, str) and value.startswith("[") for value in values):
        return None
    try:
        asked, *answers = (loads(str(value)) for value in values)
    except ValueError:
        return None
    if any(len(turns) != len(asked) or not all(isinstance(turn, str) for turn in turns) for turns in (asked, *answers)):
        return None
    return [
        [
            {"role": role, "content": text}
            for question, answer in zip(asked, turns, strict=True)
            for role, text in (("user", question), ("assistant", answer))
        ]
        for turns in answers
    ]


def _goodness(row: dict[str, object], names: list[str]) -> list[float] | None:
    """Returns a number for each response, higher for a better one; None where none is known."""
    for ours, sign in (("scores", 1), ("ranks", -1)):
        if row.get(ours) is not None:
            return [sign * number for number in _numbers(row[ours], len(names), ours)]
    if row.get("preferred") is not None:
        return _preferred(row["preferred"], names)
    if row.get("margin") is not None:
        (margin,) = _numbers([row["margin"]], 1, "margin")
        if len(names) != 2:
            raise RowError("margin is between two responses")
        return [-margin, margin]
    return None


def _preferred(value: object, names: list[str]) -> list[float]:
    """Returns 1 for the response named by its column or the column's ending (`model_b` for `response_b`)."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    word = str(value).strip().lower()
    if not word or word.startswith(LEVEL):
        raise RowError("no response is better than another")
    lowered = [name.lower() for name in names]
    shared = shared_length(min(lowered), max(lowered))
    # `B`, `model_b` and `assistant 2` name the one that ends so; a word that merely has that last letter does not.
    named = [
        word in (name, name[shared:]) or re.search(rf"[^a-z0-9]{re.escape(name[shared:])}$", word) is not None
        for name in lowered
    ]
    if sum(named) != 1:
        raise RowError(f"preferred is {value!r}, expected one of {', '.join(names)}")
    return list(map(float, named))


def _numbers(values: object, count: int, name: str) -> list[float]:
    if not isinstance(values, list) or len(values) != count:
        raise RowError(f"{name} is not a list of {count}, one for each response")
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError, OverflowError):
        numbers = [math.nan]
    if any(map(math.isnan, numbers)):
        raise RowError(f"{name} are not numbers")
    return numbers


TURNS = ("messages", "prompt", "completion", "chosen", "rejected")  # columns of messages in a conversation
SAID = ("completion", "output", "chosen", "rejected")  # columns by the assistant in a row of texts
MEDIA = ("images", "image", "videos", "video", "audios", "audio")  # columns beside messages that are no text

TRUE, FALSE = ("true", "yes", "good", "1", "1.0"), ("false", "no", "bad", "0", "0.0")


def normalize_row(
    values: dict[str, object], layout: schema.ColumnMapping, *, reasoning: bool = True, chat: bool = False
) -> dict[str, Any]:
    """Returns a row in the shape of its method, such as `{prompt, completion}` or `{messages}`.

    With `extra_columns`, and with `tools` where messages declare some. `reasoning` keeps the assistant's thoughts; with
    `chat`, a row of texts may become turns, which have a place for tools and a system message. Raises RowError where
    the row cannot be used.
    """
    row: dict[str, Any] = {}
    for ours in (*layout.needed, *schema.OPTIONAL.get(layout.format, ())):
        theirs = layout.columns.get(ours, ours)
        value = _value(values, theirs, None if ours in schema.SIDE_BY_SIDE else layout.join)
        if value is not None:
            row[ours] = value
        elif ours in layout.needed:
            raise RowError(f"column {layout.name(ours)} is missing")
    beside = {ours: _value(values, theirs, layout.join) for ours, theirs in layout.beside.items()}
    name = layout.earlier
    earlier = conversations.rounds(schema.value_at(values, name), name) if name else None
    normal = _shape(row, layout, beside, reasoning, earlier)
    is_talk = isinstance(normal.get("messages", normal.get("prompt")), list)
    media = next((name for name in MEDIA if values.get(name) and name not in layout.extra_columns), None)
    if is_talk and media:
        raise RowError(f"column {media!r} holds pictures or sound, and only text is learned")
    if is_talk or (chat and "prompt" in normal):
        normal = _equipped(normal, beside, reasoning)
        if "tools" in normal and "tools" in layout.extra_columns:
            raise RowError("column 'tools' declares the row's tools, which are kept without data.extra_columns")
    for name in layout.extra_columns:
        if name not in normal:
            value = schema.value_at(values, name)
            if value is None:
                raise RowError(f"column {name!r} is missing")
            normal[name] = encodable_text(value, repr(name))
    return normal


def _value(values: dict[str, object], theirs: str | list[str], join: str | None) -> Any:
    """Returns a column's value; several columns are joined, or listed where `join` is None."""
    if isinstance(theirs, str):
        return schema.value_at(values, theirs)
    parts = [schema.value_at(values, name) for name in theirs]
    if join is None:
        return None if None in parts else parts
    texts = [as_text(part) for part in parts if part is not None]
    return join.join(text for text in texts if text.strip()) or None


def _equipped(row: dict[str, Any], beside: dict[str, Any], reasoning: bool) -> dict[str, Any]:
    """Returns a row of messages, present or future, with its tools, and its system message where it has none."""
    if not reasoning:
        row = {
            name: conversations.without_reasoning(value) if name in TURNS and isinstance(value, list) else value
            for name, value in row.items()
        }
    system = beside.get("system")
    system = system if isinstance(system, str) and system.strip() else None
    try:
        declared = conversations.parse_tools(beside.get("tools"))
    except RowError as error:
        raise RowError(f"tools {error}") from None
    if not conversations.all_encodable([declared, system]):
        raise RowError("tools or system holds a lone surrogate")
    first = "messages" if "messages" in row else "prompt"
    if system and isinstance(row[first], str):
        row = {**row, chats.SYSTEM: system}
    elif system and row[first][0]["role"] not in ("system", "developer"):
        row = {**row, first: [{"role": "system", "content": system}, *row[first]]}
    return {**row, "tools": declared} if declared else row


def _shape(
    row: dict[str, Any],
    layout: schema.ColumnMapping,
    beside: dict[str, Any],
    reasoning: bool,
    earlier: list[dict[str, Any]] | None,
) -> dict[str, Any]:
    row_format, has_tools = layout.format, bool(beside.get("tools"))
    if earlier is not None:
        if row_format == "instruction" and all(isinstance(value, str) for value in row.values()):
            asked = chats.strip_alpaca(chats.alpaca(row["instruction"], row.get("input")))
            row, row_format = {"prompt": asked, "completion": row["output"]}, "prompt-completion"
        if isinstance(row.get("prompt"), str):
            row["prompt"] = [*earlier, {"role": "user", "content": row["prompt"]}]
    if row_format in ("messages", "sharegpt"):
        name = "messages" if row_format == "messages" else "conversations"
        if isinstance(row[name], str) and (written := conversations.parse_glaive(row[name], beside.get("system"))):
            row[name] = written.pop("messages")
            beside |= written
        return conversations.conversation(row[name], name, has_tools=bool(beside.get("tools")))
    if row_format == "tool-calls":
        problem = "are none"
        try:
            calls = conversations.parse_tool_calls(row["calls"])
        except RowError as error:
            calls, problem = [], str(error)
        if not calls:
            raise RowError(f"{layout.name('calls')} {problem}")
        completion = {"role": "assistant", "content": "", "tool_calls": calls}
        return conversations.answered({"prompt": row["prompt"], "completion": completion})
    if row_format == "ranked":
        names = layout.columns.get("responses")
        row, row_format = pair_of_ranked(row, names if isinstance(names, list) else None), "preference"
    if row_format == "preference" and any(map(conversations.is_conversation, row.values())):
        return conversations.preference(row, has_tools=has_tools)
    if row_format == "preference" and "prompt" not in row and all(isinstance(side, str) for side in row.values()):
        row = conversations.texts(row)
        if not row["prompt"]:
            raise RowError("chosen and rejected are texts that share no first words, but there is no prompt")
    if row_format == "prompt" and "answer" in row:
        row["answer"] = encodable_text(row["answer"], layout.name("answer"))
    label = {"label": _label(row.pop("label"))} if row_format == "rated" else {}
    if row_format == "prompt" and conversations.is_conversation(row["prompt"]):
        return conversations.prompt(row, has_tools=has_tools)
    talks = conversations.has_speakers if row_format == "prompt-completion" else conversations.is_conversation
    if row_format in ("rated", "prompt-completion") and any(map(talks, row.values())):
        return conversations.answered(row, has_tools=has_tools) | label
    for ours, value in row.items():
        if not isinstance(value, str):
            raise RowError(f"column {layout.name(ours)} is a {type(value).__name__}, expected text")
        encodable_text(value, layout.name(ours))
    if not reasoning:
        row = {ours: conversations.without_reasoning(value) if ours in SAID else value for ours, value in row.items()}
    return _texts(row, row_format) | label


def _texts(row: dict[str, str], row_format: str) -> dict[str, Any]:
    if row_format == "instruction":
        row = {"prompt": chats.alpaca(row["instruction"], row.get("input")), "completion": row["output"]}
    # Of rated pairs and of completions the prompt may be empty.
    filled = {"text": ("text",), "prompt": ("prompt",), "preference": ("prompt", "chosen", "rejected")}
    for name in filled.get(row_format, ("completion",)):
        if not row[name].strip():
            raise RowError(f"{name} is empty")
    return row


def encodable_text(value: Any, column: str) -> str:
    text = as_text(value)
    if not is_encodable(text):
        raise RowError(f"column {column} holds a lone surrogate")
    return text


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _label(value: Any) -> bool:
    text = str(value).strip().lower()
    if text not in (*TRUE, *FALSE):
        raise RowError(f"label is {value!r}, expected true or false")
    return text in TRUE
