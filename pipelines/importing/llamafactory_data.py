"""LLaMA-Factory's data sets: names that its `dataset_info.json` explains."""

from __future__ import annotations

import json
import os
from typing import Any

from baton.components.shared.core.errors import UserError
from baton.components.shared.recipe.data import Side
from baton.components.shared.store.registry import STORES
from baton.pipelines.importing import llamafactory_shapes, sources
from baton.pipelines.importing.draft import Draft, Fate
from baton.pipelines.importing.kinds import flag, is_on, read, text, whole, words
from baton.pipelines.importing.llamafactory_shapes import Entry
from baton.pipelines.importing.sources import Rows, Shape
from baton.pipelines.importing.table import Carried, fill, table

LEFT = table(
    {},
    left={
        "the chat template says how tools are written": "tool_format",
        "the chat template says what becomes of earlier thoughts": "preserve_thinking",
    },
)
"""Keys of how rows are read that Baton has no place for."""

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
    sides: tuple[tuple[str, list[str], Side | None], ...] = (
        ("dataset", names, "train" if held_out else None),
        ("eval_dataset", held_out, "eval"),
    )
    sets = [_rows(draft, method, folder, name, key, entries, side) for key, group, side in sides for name in group]
    draft.carry("data.source", "dataset", "eval_dataset", "dataset_dir")
    sources.put(draft, sets)
    shapes = [rows.shape for rows in sets if rows.shape]
    if any(isinstance(column, list) for shape in shapes for column in shape.columns.values()):
        draft.put("data.join", llamafactory_shapes.JOIN)
    _samples(draft, len(sets), {name: entries[name] for name in (*names, *held_out) if name in entries})
    shape = shapes[0] if shapes else None
    llamafactory_shapes.template(draft, shape)
    sources.loss(draft, "train_on_prompt", method, shape)
    _turns(draft, method, shape)
    _packing(draft, method)
    _mix(draft)
    fill(draft, LEFT)


def _find(draft: Draft, names: list[str]) -> tuple[str | None, Entry]:
    """Returns where `dataset_info.json` lies, and what it holds."""
    dataset_dir = os.path.expanduser(str(draft.get("dataset_dir", "data")))
    if dataset_dir == "ONLINE":
        return dataset_dir, {name: {"hf_hub_url": name} for name in names}
    for folder in (*(os.path.join(folder, dataset_dir) for folder in draft.folders), draft.folders[1]):
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
    """Returns where a data set's rows are: its name where that is in no place that Baton reads."""
    if hub := entry.get("hf_hub_url"):
        split = entry.get("split") and sources.side(draft, _about(name), entry["split"])
        where = {"revision": entry.get("revision"), "config": entry.get("subset"), "split": split}
        return sources.on_hub(hub, **where)
    if "file_name" in entry:
        return draft.reach(str(entry["file_name"]), folder or "")
    address = str(entry.get("cloud_file_name", ""))
    if "://" in address and address.partition("://")[0] in STORES:
        return address
    draft.left(_about(name), "comes from no file, store or Hugging Face's hub; put its address into data.source")
    return name


def _about(name: str) -> str:
    return f"dataset_info.json: {name}"


def _samples(draft: Draft, sets: int, entries: Entry) -> None:
    """Sets how many rows are used: the first, or of a data set with its own number those that are drawn."""
    key = "max_samples"
    Carried("data.max_samples", whole)(draft, key)
    if sets > 1 and draft.has(key):
        draft.changed(key, "counts all rows together, taken from the start, not those of each data set")
    for name, entry in entries.items():
        wanted = entry.get("num_samples")
        if wanted and (sets > 1 or draft.has(key)):
            draft.left(_about(name), "num_samples is not read: data.max_samples and shuffle are for all rows together")
        elif wanted:
            draft.put("data.max_samples", wanted)
            draft.put("data.shuffle", True)
            draft.changed(_about(name), "num_samples: rows are drawn, and none is used twice where there are fewer")


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


def _turns(draft: Draft, method: str, shape: Shape | None) -> None:
    """Sets what of conversations counts, is thought and is said in front."""
    last, system, thinks = "mask_history", "default_system", "enable_thinking"
    if not is_on(draft, last):
        draft.rest(last)
    elif method != "sft" or not (shape and shape.talks):
        draft.needless(last, "each row has one answer")
    else:
        draft.put("data.train_on", "last", last)
    if not draft.has(system):
        draft.rest(system)
    elif shape and (shape.format == "text" or shape.renders == "text"):
        draft.left(system, "text that is written without a chat template has no system message")
    else:
        draft.put("data.system", read(draft, system, text), system)
    if method == "sft" and draft.get(thinks) is not None:
        draft.put("data.reasoning", "keep" if read(draft, thinks, flag) else "drop", thinks)
    else:
        draft.drop(thinks, f"has no effect with {method}", Fate.needless)


def _packing(draft: Draft, method: str) -> None:
    packing, neat = "packing", "neat_packing"
    if method == "pretrain":
        draft.put("data.packing", read(draft, packing, flag, True), packing, neat)
        return
    for key in filter(draft.has, (packing, neat)):
        if method != "sft":
            draft.left(key, sources.UNPACKED)
            continue
        draft.put("data.packing", "best-fit", key)
        if not draft.has(neat):
            draft.changed(key, "rows that share a sequence do not see each other, as with neat_packing")
    draft.rest(packing)
    draft.rest(neat)
