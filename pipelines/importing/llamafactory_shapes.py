"""LLaMA-Factory's data sets: what `dataset_info.json` says of their rows, and the template these are written with."""

from __future__ import annotations

from typing import Any

from baton.components.shared.recipe import SPECS
from baton.components.shared.recipe.data import Columns
from baton.pipelines.importing import templates
from baton.pipelines.importing.draft import Draft
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

BESIDE = {"system": "system", "tools": "tools"}
"""Our columns and theirs for what goes with messages."""

UNREAD = {
    "system": "text that is written without a chat template has no system message; put it into the prompt",
    "tools": "text that is written without a chat template has no tools",
    "history": "call it history in the rows: earlier rounds are found by that name",
    "images": "Baton learns from text alone",
    "videos": "Baton learns from text alone",
    "audios": "Baton learns from text alone",
}
"""Columns that Baton has no place for."""

ALIKE = {
    "chatml": "the same text; the tokenizer is taken as it is, so its marks are single tokens only where it has them",
    "llama3": "the same text, but for white space around a message, which is taken off as Meta's own template does",
}
"""In what a template differs from Baton's of the same name, where it is little enough."""

NOT_ALIKE = {
    "zephyr": "LLaMA-Factory's has no line break after the end of a text and its own system message; the "
    "tokenizer's own is used; model.chat_template: zephyr is Hugging Face's",
    "alpaca": "LLaMA-Factory's puts Stanford's preamble before conversations without a system message; the tokenizer's "
    "own is used; model.chat_template: alpaca has the system message of the row alone",
}
"""In what a template differs from Baton's of the same name, where it is too much."""

SYSTEMS = {
    "chatml_de": "Du bist ein freundlicher und hilfsbereiter KI-Assistent.",
    "qwen": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "qwen2_vl": "You are a helpful assistant.",
}
"""System message of conversations that have none, by template, where it has one of its own."""

UNTHINKING, TAUGHT = "_nothink", "instruct"
AS_TEXT = ("empty", "fewshot")
"""Templates that put nothing around what is said."""

PREAMBLE = "written with Stanford's prompt: an input stands under its own heading, and no empty line at the end"
NOTHING_AROUND = "prompt and answer without anything between them, and the end of the text after the answer"


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
    as_text = template in AS_TEXT or (template == "alpaca" and shape == "instruction")
    names = TALKS.get(shape, COLUMNS[shape]) if talks else COLUMNS[shape]
    if talks or not (as_text or shape == "text"):  # texts become turns, which have a place for them
        names = {**names, **BESIDE}
    columns: Columns = {ours: str(theirs[name]) for ours, name in names.items() if theirs.get(name)}
    if theirs.get("query") and shape != "instruction" and not talks:
        ours = "text" if shape == "text" else "prompt"
        columns[ours] = [str(theirs[name]) for name in ("prompt", "query") if theirs.get(name)]
    return Shape(
        format=shape,
        columns={ours: name for ours, name in columns.items() if ours != name},
        talks=talks,
        renders="text" if as_text and not talks else None,
    )


def _tags(entry: Entry) -> Entry:
    return {**TAGS, **{key: value for key, value in (entry.get("tags") or {}).items() if value}}


def _form(entry: Entry) -> tuple[str, str]:
    tags = _tags(entry)
    return str(tags["role_tag"]), str(tags["content_tag"])


def unread(entry: Entry, shape: Shape) -> list[str]:
    """Returns a line for each thing in a data set's description that Baton does not read."""
    given, tags = entry.get("columns") or {}, _tags(entry)
    read = {} if shape.renders == "text" or shape.format == "text" else {**BESIDE}
    if given.get("history") == "history" and not shape.talks:
        read["history"] = "history"
    lines = [f"column {given[key]!r}: {why}" for key, why in UNREAD.items() if given.get(key) and key not in read]
    if shape.talks:
        if _form(entry) not in FORMS:
            lines.append("Baton reads messages with from and value, or role and content: rename their keys")
        if strange := [str(tags[tag]) for tag, role in SPEAKING.items() if not speaks_as(tags[tag], role)]:
            names = ", ".join(strange)
            lines.append(f"messages from {names}: Baton knows human, gpt, system and the like; rename them")
        if shape.format == "text":
            lines.append("conversations: rows of format text are text; write them out")
        if entry.get("formatting") == "openai":
            lines.append("no 'detailed thinking off' is put in front")
    return [*lines, "folder is not read"] if entry.get("folder") else lines


def template(draft: Draft, shape: Shape | None) -> None:
    """Sets the chat template of conversations and of rows that become some, from the first data set's shape."""
    key = "template"
    name = str(draft.get(key, ""))
    if not draft.has(key):
        draft.rest(key)
    elif shape and shape.format == "text":
        draft.needless(key, "plain text has no template")
    elif shape and shape.renders == "text":
        draft.put("data.render_as", "text", key)
        if name in AS_TEXT:
            draft.put("data.separator", "")
        draft.changed(key, NOTHING_AROUND if name in AS_TEXT else PREAMBLE)
    else:
        if shape and not shape.talks:
            draft.put("data.render_as", "chat")
        _named(draft, key, name)


def _named(draft: Draft, key: str, name: str) -> None:
    """Sets a template by its name, and the system message that comes with it."""
    model = str(draft.get("model_name_or_path"))
    plain = name.removesuffix(UNTHINKING)
    if name in ALIKE:
        draft.put("model.chat_template", name, key)
        draft.changed(key, ALIKE[name])
    elif name in NOT_ALIKE:
        draft.left(key, NOT_ALIKE[name])
    elif name in ("default", "llama2"):
        draft.put("model.chat_template", templates.WRITTEN_OUT[name], key)
    elif name != plain and TAUGHT not in model.lower():
        draft.put("model.chat_template", "chatml", key)
        draft.changed(key, "the same text without tools, for which the tokenizer's own template is needed")
    elif name != "fewshot":
        templates.named(draft, key, "chatml" if name == "chatml_de" else plain, model)
    else:
        draft.left(key, templates.OTHER)
    if name in SYSTEMS and not draft.has("default_system"):
        draft.put("data.system", SYSTEMS[name])
