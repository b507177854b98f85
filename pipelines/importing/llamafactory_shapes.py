"""LLaMA-Factory's data sets: what `dataset_info.json` says of their rows, and the template these are written with."""

from __future__ import annotations

from typing import Any

from baton.components.shared.recipe import SPECS
from baton.components.shared.recipe.data import Columns
from baton.pipelines.importing.draft import Draft, Fate
from baton.pipelines.importing.sources import FORMS, Shape, speaks_as

Entry = dict[str, Any]

COLUMNS = {
    "text": {"text": "prompt"},
    "instruction": {"instruction": "prompt", "input": "query", "output": "response"},
    "prompt-completion": {"prompt": "prompt", "completion": "response"},
    "messages": {"messages": "messages"},
    "sharegpt": {"conversations": "messages"},
    "preference": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
    "ranked": {"prompt": "prompt", "responses": "response"},
    "rated": {"prompt": "prompt", "completion": "response", "label": "kto_tag"},
}
"""Our columns and their names for them, by shape."""

TALKS = {
    "preference": COLUMNS["preference"] | {"prompt": "messages"},
    "rated": {"completion": "messages", "label": "kto_tag"},
}
"""The same for conversations, where it is something else; rated ones hold their prompt."""

ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
"""The columns that alpaca data has where nothing is said; the last two are none where something is."""

TALKING = ("sharegpt", "openai")
"""Values of `formatting` for rows that are conversations."""

TAGS = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt",
        "observation_tag": "observation", "function_tag": "function_call", "system_tag": "system"}  # fmt: skip
"""Tags of messages where nothing is said."""

SPEAKING = {"user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool", "function_tag": "assistant",
            "system_tag": "system"}  # fmt: skip
"""Role by the tag that names it."""

JOIN = "\n"
"""What LLaMA-Factory puts between the columns of a prompt."""

UNREAD = {
    "system": "system prompts are not read; put them into the conversation or the prompt",
    "tools": "tool descriptions are not read",
    "history": "earlier rounds are not read; give the rows as messages",
    "images": "Baton learns from text alone",
    "videos": "Baton learns from text alone",
    "audios": "Baton learns from text alone",
}
"""Columns that Baton has no place for."""

TEMPLATES = {
    "chatml": "the same text; the tokenizer is taken as it is, so its marks are single tokens only where it has them",
    "llama3": "the same text, but for white space around a message, which is taken off as Meta's own template does",
}
"""In what a template differs from Baton's of the same name, where it is little enough."""

OTHERS = {
    "zephyr": "LLaMA-Factory's has no line break after the end of a text and its own system message; the "
    "tokenizer's own is used; model.chat_template: zephyr is Hugging Face's",
    "alpaca": "LLaMA-Factory's puts Stanford's preamble before conversations without a system message; the tokenizer's "
    "own is used; model.chat_template: alpaca has the system message of the row alone",
}
"""In what a template differs from Baton's of the same name, where it is too much."""

OWN = "the tokenizer's own chat template is used; check that it is this one, or give it as a file: model.chat_template"
PLAIN = "rows of instruction and output are written out as text, without a chat template; give messages to use one"
WRITTEN = {
    "text": (Fate.needless, "plain text has no template"),
    "instruction": (
        Fate.changed,
        "written with Stanford's prompt: an input stands under its own heading, and no empty line at the end",
    ),
}
"""What becomes of the template of rows that are no conversations, by their format."""


def shape(method: str, entry: Entry, template: str) -> Shape:
    """Returns what rows of a data set look like.

    Args:
        method: The training method.
        entry: What `dataset_info.json` says of it.
        template: Name of the template.
    """
    talks = entry.get("formatting") in TALKING
    given = entry.get("columns") or {}
    silent = {"query": "", "response": ""} if given else {}
    theirs: Entry = {**({"messages": "conversations"} if talks else {**ALPACA, **silent}), **given}
    shape: str = SPECS[method].formats[0]
    if method == "sft" and talks:
        shape = FORMS.get(_form(entry), "sharegpt")
    elif method == "sft":
        shape = "instruction" if template == "alpaca" else "prompt-completion"
    elif shape == "preference" and entry.get("ranking") and not (theirs.get("chosen") or theirs.get("rejected")):
        shape = "ranked"  # once, answers were a list, the better one first
    names = TALKS.get(shape, COLUMNS[shape]) if talks else COLUMNS[shape]
    columns: Columns = {ours: str(theirs[name]) for ours, name in names.items() if theirs.get(name)}
    if theirs.get("query") and shape != "instruction" and not talks:
        ours = "text" if shape == "text" else "prompt"
        columns[ours] = [str(theirs[name]) for name in ("prompt", "query") if theirs.get(name)]
    return Shape(format=shape, columns={ours: name for ours, name in columns.items() if ours != name}, talks=talks)


def _tags(entry: Entry) -> Entry:
    return {**TAGS, **{key: value for key, value in (entry.get("tags") or {}).items() if value}}


def _form(entry: Entry) -> tuple[str, str]:
    tags = _tags(entry)
    return str(tags["role_tag"]), str(tags["content_tag"])


def unread(entry: Entry, shape: Shape) -> list[str]:
    """Returns a line for each thing in a data set's description that Baton does not read."""
    given, tags = entry.get("columns") or {}, _tags(entry)
    lines = [f"column {given[key]!r}: {why}" for key, why in UNREAD.items() if given.get(key)]
    if shape.talks:
        if _form(entry) not in FORMS:
            lines.append("Baton reads messages with from and value, or role and content: rename their keys")
        if strange := [str(tags[tag]) for tag, role in SPEAKING.items() if not speaks_as(tags[tag], role)]:
            names = ", ".join(strange)
            lines.append(f"messages from {names}: Baton knows human, gpt, system and the like; rename them")
        if shape.format == "text":
            lines.append("conversations: rows of format text are text; write them out")
        if entry.get("formatting") == "openai":
            lines.append("messages with tool_calls are rejected, and no 'detailed thinking off' is put in front")
    return [*lines, "folder is not read"] if entry.get("folder") else lines


def template(draft: Draft, shape: Shape | None) -> None:
    """Sets `model.chat_template` where Baton's is the same for the first data set, and says what differs else."""
    key = "template"
    name = str(draft.get(key, ""))
    if not draft.has(key):
        draft.rest(key)
    elif shape and shape.talks and name in TEMPLATES:
        draft.put("model.chat_template", name)
        draft.changed(key, TEMPLATES[name])
    elif shape is None or shape.talks:
        draft.left(key, OTHERS.get(name, OWN))
    else:
        fate, why = WRITTEN.get(shape.format, (Fate.left, PLAIN))
        draft.note(fate, key, why)
