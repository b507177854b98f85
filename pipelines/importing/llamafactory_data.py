"""LLaMA-Factory's data sets: names that its `dataset_info.json` explains."""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.parse import urlencode

from baton.components.shared.core.errors import UserError
from baton.components.shared.recipe.data import Side
from baton.pipelines.importing import llamafactory_shapes, sources
from baton.pipelines.importing.draft import Draft
from baton.pipelines.importing.kinds import flag, read, whole, words
from baton.pipelines.importing.llamafactory_shapes import Entry
from baton.pipelines.importing.sources import Rows, Shape
from baton.pipelines.importing.table import Carried, handle

_MAX_SAMPLES = Carried("data.max_samples", whole)

LEFT = {
    "tool_format": "tool calls are not read",
    "mask_history": "give data.assistant_only_loss; all of the assistant's turns count then",
    "default_system": "put it into the rows, as the system's message",
    "enable_thinking": "the chat template says what becomes of thoughts",
    "preserve_thinking": "the chat template says what becomes of thoughts",
}

MIXED = (
    "data sets are joined, each row once; a source's weight is how often each of its rows is used in a pass, not the "
    "probability of drawing from it: for probability p of n rows, out of N rows in all, give weight p·N/n"
)


def data(draft: Draft, method: str) -> None:
    """Sets source, format and columns, and what part of a row counts.

    Raises:
        UserError: there is no data set, or `dataset_info.json` is broken.
    """
    names = read(draft, "dataset", words, [])
    if not names:
        raise UserError(f"{draft.origin}: dataset is missing.", remedy="Name the data sets to train on.")
    held_out = read(draft, "eval_dataset", words, [])
    folder, entries = _find(draft, [*names, *held_out])
    sets: list[Rows] = []
    groups: tuple[tuple[str, list[str], Side | None], ...] = (
        ("dataset", names, "train" if held_out else None),
        ("eval_dataset", held_out, "eval"),
    )
    for key, group, side in groups:
        sets += [_rows(draft, method, folder, name, key, entries, side) for name in group]
        draft.carry("data.source", key)
    sources.put(draft, sets)
    draft.carry("data.source", "dataset_dir")
    shapes = [rows.shape for rows in sets if rows.shape]
    if any(isinstance(column, list) for shape in shapes for column in shape.columns.values()):
        draft.put("data.join", llamafactory_shapes.JOIN)
    _samples(draft, sets, {name: entries[name] for name in (*names, *held_out) if name in entries})
    shape = shapes[0] if shapes else None
    llamafactory_shapes.template(draft, shape)
    _loss(draft, method, shape)
    _packing(draft, method)
    _mix(draft)
    for key, why in LEFT.items():
        draft.left(key, why) if draft.has(key) else draft.rest(key)


def _find(draft: Draft, names: list[str]) -> tuple[str | None, Entry]:
    """Returns where `dataset_info.json` lies, and what it holds."""
    beside = os.path.dirname(os.path.abspath(draft.origin))
    dataset_dir = os.path.expanduser(str(draft.get("dataset_dir", "data")))
    if dataset_dir == "ONLINE":
        return dataset_dir, {name: {"hf_hub_url": name} for name in names}
    for folder in (os.path.join(os.getcwd(), dataset_dir), os.path.join(beside, dataset_dir), beside):
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


def _rows(
    draft: Draft, method: str, folder: str | None, name: str, key: str, entries: Entry, side: Side | None
) -> Rows:
    """Returns a data set by its name, and notes what it has that Baton does not read."""
    if name not in entries:
        place = folder or f"{draft.get('dataset_dir', 'data')!r} or beside the file"
        draft.left(key, f"{name!r} is in no dataset_info.json in {place}; put its address into data.source")
        return Rows(key=_about(name), uris=[name], side=side)
    entry = _checked(name, entries[name])
    shape = llamafactory_shapes.shape(method, entry, str(draft.get("template", "")))
    for line in llamafactory_shapes.unread(entry, shape):
        draft.left(_about(name), line)
    return Rows(key=_about(name), uris=[_source(draft, folder, name, entry)], shape=shape, side=side)


def _source(draft: Draft, folder: str | None, name: str, entry: Entry) -> str:
    if hub := entry.get("hf_hub_url"):
        options = {"config": entry.get("subset"), "split": entry.get("split")}
        query = urlencode(
            {key: value for key, value in options.items() if value and (key, value) != ("split", "train")}
        )
        revision = f"@{entry['revision']}" if entry.get("revision") else ""
        return f"hf://datasets/{hub}{revision}{'?' if query else ''}{query}"
    if "file_name" in entry:
        return draft.reach(str(entry["file_name"]), folder or "")
    if str(entry.get("cloud_file_name", "")).startswith("s3://"):
        return str(entry["cloud_file_name"])
    draft.left(_about(name), "comes from no file, S3 or Hugging Face's hub; put its address into data.source")
    return name


def _about(name: str) -> str:
    return f"dataset_info.json: {name}"


def _samples(draft: Draft, sets: list[Rows], entries: Entry) -> None:
    """Sets how many rows are used: the first, or of a data set with its own number those that are drawn."""
    handle(draft, "max_samples", _MAX_SAMPLES)
    if len(sets) > 1 and draft.has("max_samples"):
        draft.changed("max_samples", "counts all rows together, taken from the start, not those of each data set")
    for key, entry in entries.items():
        wanted = entry.get("num_samples")
        if not wanted:
            continue
        if len(sets) > 1 or draft.has("max_samples"):
            draft.left(_about(key), "num_samples is not read: data.max_samples and shuffle are for all rows together")
        else:
            draft.put("data.max_samples", wanted)
            draft.put("data.shuffle", True)
            draft.changed(_about(key), "num_samples: rows are drawn, and none is used twice where there are fewer")


def _mix(draft: Draft) -> None:
    """Settles how data sets are mixed: where each row is used once, they are joined."""
    strategy = str(draft.get("mix_strategy", "concat"))
    for key in ("mix_strategy", "interleave_probs"):
        if not draft.has(key):
            draft.rest(key)
        elif strategy == "concat":
            draft.carry("data.source", key)
        elif strategy == "interleave_once":
            draft.needless(key, "each row is used once in a pass, in an order that is drawn from seed")
        else:
            draft.left(key, MIXED if key == "mix_strategy" else "see mix_strategy")


def _loss(draft: Draft, method: str, shape: Shape | None) -> None:
    """Sets what counts: by default all that the assistant says, and nothing of the prompt."""
    key = "train_on_prompt"
    whole_row = read(draft, key, flag, False)
    if method != "sft":
        draft.rest(key)
    elif shape and shape.talks:
        draft.put("data.assistant_only_loss", not whole_row, key)
        if not whole_row and not draft.look("model.chat_template"):
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
