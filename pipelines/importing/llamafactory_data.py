"""LLaMA-Factory's data sets: names that its `dataset_info.json` explains."""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.parse import urlencode

from components.shared.errors import UserError
from pipelines.importing.draft import Draft
from pipelines.importing.rules import carry, flag, read, whole, words

Entry = dict[str, Any]

FORMATS = {"pretrain": "text", "reward": "preference", "dpo": "preference", "orpo": "preference", "cpo": "preference",
           "kto": "rated"}  # fmt: skip
"""Shape of a row by method; `sft` has several."""

COLUMNS = {
    "text": {"text": "prompt"},
    "instruction": {"instruction": "prompt", "input": "query", "output": "response"},
    "prompt-completion": {"prompt": "prompt", "completion": "response"},
    "messages": {"messages": "messages"},
    "preference": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
    "rated": {"prompt": "prompt", "completion": "response", "label": "kto_tag"},
}
"""Our columns and their names for them, by shape."""

ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
"""The columns that alpaca data has where nothing is said; the last two are none where something is."""

OPENAI = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
"""The tags of messages as Baton reads them."""

UNREAD = {
    "system": "system prompts are not read; put them into the conversation or the prompt",
    "tools": "tool descriptions are not read",
    "history": "earlier rounds are not read; give the rows as messages",
    "images": "Baton learns from text alone",
    "videos": "Baton learns from text alone",
    "audios": "Baton learns from text alone",
}
"""Columns that Baton has no place for."""

PLAIN = "rows of instruction and output are written out as text, without a chat template; give messages to use one"

_MAX_SAMPLES = carry("data.max_samples", whole)


def data(draft: Draft, method: str) -> None:
    """Sets source, format and columns, and what part of a row counts.

    Raises:
        UserError: there is no data set, or `dataset_info.json` is broken.
    """
    names = read(draft, "dataset", words, [])
    if not names:
        raise UserError(f"{draft.origin}: dataset is missing.", remedy="Name the data sets to train on.")
    folder, found = _find(draft)
    entries = {name: _checked(name, found[name]) for name in names if name in found}
    for name in names:
        if name not in entries:
            place = folder or f"{draft.get('dataset_dir', 'data')!r} or beside the file"
            draft.left("dataset", f"{name!r} is in no dataset_info.json in {place}; put its address into data.source")
    draft.put("data.source", [_source(draft, folder, name, entries.get(name)) for name in names], "dataset")
    draft.carry("data.source", "dataset_dir")
    shape = _shape(draft, method, entries)
    _MAX_SAMPLES(draft, "max_samples")
    if len(names) > 1 and draft.has("max_samples"):
        draft.changed("max_samples", "counts all rows together, taken from the start, not those of each data set")
    _template(draft, shape)
    _loss(draft, method, shape)
    _packing(draft, method)
    for key, why in LEFT.items():
        draft.left(key, why) if draft.has(key) else draft.rest(key)


LEFT = {
    "eval_dataset": "rows are held out of data.source by their content: data.split.eval",
    "mix_strategy": "data sets are joined; repeat rows in the source to weigh them",
    "interleave_probs": "data sets are joined; repeat rows in the source to weigh them",
    "tool_format": "tool calls are not read",
    "mask_history": "give data.assistant_only_loss; all of the assistant's turns count then",
}


def _find(draft: Draft) -> tuple[str | None, Entry]:
    """Returns where `dataset_info.json` lies, and what it holds."""
    beside = os.path.dirname(os.path.abspath(draft.origin))
    given = os.path.expanduser(str(draft.get("dataset_dir", "data")))
    if given == "ONLINE":
        return given, {name: {"hf_hub_url": name} for name in read(draft, "dataset", words, [])}
    for folder in (os.path.join(os.getcwd(), given), os.path.join(beside, given), beside):
        path = os.path.join(folder, "dataset_info.json")
        if not os.path.isfile(path):
            continue
        try:
            with open(path, encoding="utf-8") as file:
                document = json.load(file)
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{path!r} is not JSON: {error}", remedy="Correct it, or move it away.") from None
        if not isinstance(document, dict):
            raise UserError(f"{path!r} holds a {type(document).__name__}, expected data sets by their names.")
        return folder, document
    return None, {}


def _checked(name: str, entry: Any) -> Entry:
    parts = [entry, *(entry.get(key) or {} for key in ("columns", "tags"))] if isinstance(entry, dict) else [entry]
    if not all(isinstance(part, dict) for part in parts):
        raise UserError(
            f"dataset_info.json: {name!r} is {entry!r}, expected keys and values, in columns and tags too.",
            remedy="Correct it.",
        )
    return dict(entry)


def _source(draft: Draft, folder: str | None, name: str, entry: Entry | None) -> str:
    if entry is None:
        return name
    if hub := entry.get("hf_hub_url"):
        options = {"config": entry.get("subset"), "split": entry.get("split")}
        query = urlencode(
            {key: value for key, value in options.items() if value and (key, value) != ("split", "train")}
        )
        revision = f"@{entry['revision']}" if entry.get("revision") else ""
        return f"hf://datasets/{hub}{revision}{'?' if query else ''}{query}"
    if "file_name" in entry:
        return draft.reach(str(entry["file_name"]), folder or "")
    draft.left(_about(name), "comes from neither a file nor Hugging Face's hub; put its address into data.source")
    return name


def _about(name: str) -> str:
    return f"dataset_info.json: {name}"


def _columns(entry: Entry) -> dict[str, str]:
    """Returns their names for columns → the source's."""
    given = entry.get("columns")
    if entry.get("formatting", "alpaca") == "sharegpt":
        return {"messages": "conversations", **(given or {})}
    return {**ALPACA, **{key: "" for key in ("query", "response") if given}, **(given or {})}


def _shape(draft: Draft, method: str, entries: dict[str, Entry]) -> str:
    """Sets format and columns from the first data set, and notes what the others have of their own."""
    shapes = {name: _entry_shape(method, entry) for name, entry in entries.items()}
    if not shapes:
        return "auto"
    first = next(iter(shapes))
    shape, columns = shapes[first]
    draft.put("data.format", shape)
    if columns:
        draft.put("data.columns", columns)
    for name, other in shapes.items():
        if other != shapes[first]:
            draft.left(_about(name), f"has another shape than {first!r}; a recipe reads one: bring both to the same")
        for line in _unread(entries[name], shape):
            draft.left(_about(name), line)
    return shape


def _entry_shape(method: str, entry: Entry) -> tuple[str, dict[str, str]]:
    theirs = _columns(entry)
    shape = FORMATS.get(method)
    if shape is None and entry.get("formatting") == "sharegpt":
        shape = "messages"
    elif shape is None:
        shape = "instruction" if theirs.get("query") else "prompt-completion"
    names = {ours: theirs.get(key) for ours, key in COLUMNS[shape].items()}
    return shape, {ours: str(name) for ours, name in names.items() if name and name != ours}


def _unread(entry: Entry, shape: str) -> list[str]:
    """Returns a line for each thing in a data set's description that Baton does not read."""
    given = entry.get("columns") or {}
    lines = [f"column {given[key]!r}: {why}" for key, why in UNREAD.items() if given.get(key)]
    if shape in ("preference", "rated") and given.get("query"):
        lines.append(f"column {given['query']!r} is not read beside the prompt; join them in the source")
    if entry.get("formatting") == "sharegpt":
        tags = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt",
                **(entry.get("tags") or {})}  # fmt: skip
        if any(tags.get(tag) != expected for tag, expected in OPENAI.items()):
            lines.append("messages have from and value; Baton reads role and content: convert the rows")
        if shape in ("preference", "rated"):
            lines.append("conversations: Baton reads lists of messages in chosen and rejected, not a single one")
    lines += [f"{key} is not read" for key in ("folder", "num_samples") if entry.get(key)]
    return lines


def _template(draft: Draft, shape: str) -> None:
    key = "template"
    if not draft.has(key):
        draft.rest(key)
    elif shape == "messages":
        draft.left(key, "the tokenizer's own chat template is used; check that it is this one")
    elif shape == "text":
        draft.needless(key, "plain text has no template")
    else:
        draft.left(key, PLAIN)


def _loss(draft: Draft, method: str, shape: str) -> None:
    """Sets what counts: by default all that the assistant says, and nothing of the prompt."""
    key = "train_on_prompt"
    whole_row = read(draft, key, flag, False)
    if method != "sft":
        draft.rest(key)
    elif shape == "messages":
        draft.put("data.assistant_only_loss", not whole_row, key)
        if not whole_row:
            draft.assumed.append("data.assistant_only_loss true, which needs a chat template with the generation mark")
    else:
        draft.put("data.completion_only_loss", not whole_row, key)


def _packing(draft: Draft, method: str) -> None:
    keys = [key for key in ("packing", "neat_packing") if draft.has(key)]
    if method == "pretrain":
        wanted = read(draft, "packing", flag, True)
        draft.put("data.packing", wanted, "packing")
        draft.carry("data.packing", "neat_packing")
        return
    for key in keys:
        if method != "sft":
            draft.left(key, "pairs are not packed; training.group_by_length saves padding")
            continue
        draft.put("data.packing", "best-fit", key)
        if "neat_packing" not in keys:
            draft.changed(key, "rows that share a sequence do not see each other, as with neat_packing")
    draft.rest("packing")
    draft.rest("neat_packing")
