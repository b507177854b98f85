"""axolotl's data sets: where rows are, and what part of them counts."""

from __future__ import annotations

import os

from baton.components.shared.core.errors import UserError
from baton.components.shared.recipe import SPECS
from baton.pipelines.importing import axolotl_shapes, axolotl_templates, sources
from baton.pipelines.importing.draft import Draft, Fate
from baton.pipelines.importing.kinds import flag, read, text, whole, words
from baton.pipelines.importing.sources import Rows, Shape

HUB = ("json", "csv", "parquet", "text")
"""Paths that name a reader; the files are in `data_files`."""

HELD_OUT = "test_datasets"
PIECES = (
    "texts longer than sequence_len are cut into rows of that length there; here their rest is lost: "
    "data.packing: true joins texts and cuts, so that nothing is"
)

TOO_LONG: dict[str, dict[str, object]] = {
    "truncate": {},
    "raise": {"truncation": "fail", "truncated_share": 0.0},
    "drop": {"truncation": "fix"},
}
"""Settings of `data.quality` by `excess_length_strategy`."""


def data(draft: Draft, method: str) -> None:
    """Sets source, format and columns, and what part of a row counts.

    Raises:
        UserError: there is no data set.
    """
    name = "pretraining_dataset" if draft.keys("pretraining_dataset") else "datasets"
    starts = _entries(draft, name)
    if not starts and draft.has("pretraining_dataset"):
        raise draft.wrong("pretraining_dataset", "an address, or data sets with a path each")
    if not starts:
        raise UserError(f"{draft.origin}: datasets is missing.", remedy="Name the data sets to train on.")
    held_out = _entries(draft, HELD_OUT)
    addresses = {start: _sources(draft, start) for start in (*starts, *held_out)}
    shapes = {start: axolotl_shapes.shape(draft, start, method) for start in addresses}
    sets = [
        Rows(
            key=f"{start}.type",
            uris=uris,
            shape=shapes[start],
            side="eval" if start in held_out else "train" if held_out else None,
            weight=_weight(draft, start, trains=start in starts),
        )
        for start, uris in addresses.items()
    ]
    sources.put(draft, sets)
    sources.rendering(draft, sets)
    axolotl_templates.template(draft, shapes)
    sources.loss(draft, "train_on_inputs", method, shapes[starts[0]])
    _packing(draft, method)
    _length(draft, method, shapes[starts[0]])


def _entries(draft: Draft, name: str) -> list[str]:
    """Returns how the keys of each data set begin, such as `datasets[0]`."""
    if isinstance(draft.get(name), str):  # the short form of one address
        return [name]
    sections = [key.partition(".")[0] for key in draft.given if key.startswith((f"{name}[", f"{name}."))]
    return list(dict.fromkeys(sections))


def _sources(draft: Draft, start: str) -> list[str]:
    key = start if isinstance(draft.get(start), str) else f"{start}.path"
    path = read(draft, key, text)
    if not path:
        raise UserError(f"{draft.origin}: {start} has no path.", remedy="Say where its rows are.")
    files = read(draft, f"{start}.data_files", words, [])
    draft.carry("data.source", key, f"{start}.data_files", f"{start}.ds_type")
    if (path in HUB or draft.reach(path) != path) and draft.has(split := f"{start}.split"):
        sources.side(draft, split, draft.get(split))  # files have one side, whatever it is called
        draft.carry("data.source", split)
    if path in HUB:
        return [draft.reach(file) for file in files] or [path]
    local = draft.reach(path)
    if local != path or os.path.exists(path) or "://" in path or path.startswith((".", "/", "~")) or "/" not in path:
        return [f"{local.rstrip('/')}/{file}" for file in files] or [local]
    return [f"hf://datasets/{path}/{file}" for file in files] or [_hub(draft, start, path)]


def _hub(draft: Draft, start: str, path: str) -> str:
    """Returns a hub data set's address, with what the file says of config, split and revision."""
    config, split, revision = (f"{start}.{name}" for name in ("name", "split", "revision"))
    side = sources.side(draft, split, draft.get(split, "test" if start.startswith(HELD_OUT) else "train"))
    draft.carry("data.source", config, split, revision)
    version = draft.get(revision) if draft.has(revision) else None
    return sources.on_hub(path, revision=version, config=draft.get(config), split=side)


def _weight(draft: Draft, start: str, *, trains: bool) -> float:
    """Returns a source's weight: one of so many shards is that share of its rows."""
    key, index = f"{start}.shards", f"{start}.shards_idx"
    shards = read(draft, key, whole, 1)
    if shards > 1 and not trains:
        draft.left(key, "all rows that are held out are read")
        draft.drop(index, "all rows that are held out are read")
        return 1.0
    draft.carry("data.source", key)
    if shards > 1:
        draft.changed(key, f"a weight: 1/{shards} of the training rows, which their content chooses, not their place")
    draft.drop(index, "the rows of a shard are chosen by content", Fate.needless)
    return float(f"{1 / shards:.12g}")


def _packing(draft: Draft, method: str) -> None:
    key = "sample_packing"
    if read(draft, key, flag, False) and SPECS[method].rows != "sequences":
        draft.left(key, sources.UNPACKED)
    elif method == "pretrain":
        draft.put("data.packing", True, key)
        if draft.has(key):
            draft.changed(key, "texts are joined and cut, so that nothing of long ones is lost; they see each other")
    elif draft.has(key):
        draft.put("data.packing", "best-fit", key)
    draft.rest(key)


def _length(draft: Draft, method: str, shape: Shape) -> None:
    """Sets what becomes of rows longer than a sequence: axolotl leaves them out where it is not told."""
    key = "excess_length_strategy"
    wanted = str(draft.get(key) or "").lower()
    if wanted in TOO_LONG:
        for name, value in TOO_LONG[wanted].items():
            draft.put(f"data.quality.{name}", value, key)
        draft.carry("data.max_length", key)
    elif draft.has(key):
        raise draft.wrong(key, "drop, truncate or raise")
    elif method not in ("pretrain", "grpo") and shape.format != "text":
        draft.assume("data.quality.truncation", "fix")
    for start in _entries(draft, "datasets") if method == "sft" else ():
        if str(draft.get(f"{start}.type")).partition(":")[0] == "completion":
            draft.changed(f"{start}.type", PIECES)
