"""axolotl's data sets: where rows are, and what part of them counts."""

from __future__ import annotations

import os
from urllib.parse import urlencode

from baton.components.shared.core.errors import UserError
from baton.pipelines.importing import axolotl_shapes, axolotl_templates, sources
from baton.pipelines.importing.draft import Draft
from baton.pipelines.importing.kinds import flag, read, text, whole, words
from baton.pipelines.importing.sources import Rows, Shape

HUB = ("json", "csv", "parquet", "text")
"""Paths that name a reader; the files are in `data_files`."""

HELD_OUT = "test_datasets"


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
    shapes = {start: axolotl_shapes.shape(draft, start, method) for start in (*starts, *held_out)}
    sets = [
        Rows(
            key=f"{start}.type",
            uris=addresses[start],
            shape=shapes[start],
            side="eval" if start in held_out else "train" if held_out else None,
            weight=_weight(draft, start, trains=start in starts),
        )
        for start in (*starts, *held_out)
    ]
    sources.put(draft, sets)
    axolotl_templates.template(draft, shapes)
    _loss(draft, method, shapes[starts[0]])
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
    draft.carry("data.source", key)
    beside = os.path.dirname(os.path.abspath(draft.origin))
    files = read(draft, f"{start}.data_files", words, [])
    draft.carry("data.source", f"{start}.data_files", f"{start}.ds_type")
    if path in HUB:
        return [draft.reach(file, os.getcwd(), beside) for file in files] or [path]
    local = draft.reach(path, os.getcwd(), beside)
    if local != path or os.path.exists(path) or "://" in path or path.startswith((".", "/", "~")) or "/" not in path:
        return [f"{local.rstrip('/')}/{file}" for file in files] or [local]
    return [f"hf://datasets/{path}/{file}" for file in files] or [_hub(draft, start, path)]


def _hub(draft: Draft, start: str, path: str) -> str:
    """Returns a hub data set's address, with what the file says of config, split and revision."""
    split = str(draft.get(f"{start}.split", "test" if start.startswith(HELD_OUT) else "train"))
    side, bracket, _ = split.partition("[")
    if bracket:
        draft.changed(f"{start}.split", f"all of {side} is read; data.max_samples takes so many rows from the start")
    options = {"config": draft.get(f"{start}.name"), "split": None if side == "train" else side}
    query = urlencode({key: value for key, value in options.items() if value})
    draft.carry("data.source", *(f"{start}.{name}" for name in ("name", "split", "revision")))
    revision = f"@{draft.get(f'{start}.revision')}" if draft.has(f"{start}.revision") else ""
    return f"hf://datasets/{path}{revision}{'?' if query else ''}{query}"


def _weight(draft: Draft, start: str, *, trains: bool) -> float:
    """Returns a source's weight: one of so many shards is that share of its rows."""
    key, index = f"{start}.shards", f"{start}.shards_idx"
    shards = read(draft, key, whole, 1)
    if shards > 1 and not trains:
        draft.left(key, "all rows that are held out are read")
        draft.left(index, "all rows that are held out are read") if draft.has(index) else draft.rest(index)
        return 1.0
    draft.carry("data.source", key)
    if shards > 1:
        draft.changed(key, f"a weight: 1/{shards} of the training rows, which their content chooses, not their place")
    draft.needless(index, "the rows of a shard are chosen by content") if draft.has(index) else draft.rest(index)
    return float(f"{1 / shards:.12g}")


def _loss(draft: Draft, method: str, shape: Shape) -> None:
    """Sets what counts: by default all that the assistant says, and nothing of the prompt."""
    key = "train_on_inputs"
    whole_row = read(draft, key, flag, False)
    if method != "sft":
        draft.rest(key) if not whole_row else draft.needless(key, f"has no effect with {method}")
    elif shape.talks:
        draft.put("data.assistant_only_loss", not whole_row, key)
        if not whole_row and draft.look("model.chat_template") not in axolotl_templates.NAMES:
            draft.assumed.append("data.assistant_only_loss true, which needs a chat template with the generation mark")
    else:
        draft.put("data.completion_only_loss", not whole_row, key)


def _packing(draft: Draft, method: str) -> None:
    key = "sample_packing"
    if read(draft, key, flag, False) and method not in ("sft", "pretrain"):
        draft.left(key, "pairs are not packed; training.group_by_length saves padding")
    elif draft.has(key):
        draft.put("data.packing", "best-fit", key)
    elif method == "pretrain":
        draft.put("data.packing", True, key)
    draft.rest(key)


def _length(draft: Draft, method: str, shape: Shape) -> None:
    """Sets what becomes of rows longer than a sequence: axolotl leaves them out where it is not told."""
    key = "excess_length_strategy"
    wanted = str(draft.get(key) or "").lower()
    if wanted == "truncate":
        draft.carry("data.max_length", key)
    elif wanted == "raise":
        draft.put("data.quality.truncation", "fail", key)
        draft.put("data.quality.truncated_share", 0.0)
    elif wanted == "drop":
        draft.put("data.quality.truncation", "fix", key)
    elif draft.has(key):
        raise draft.wrong(key, "drop, truncate or raise")
    elif method not in ("pretrain", "grpo") and shape.format != "text":  # texts it cuts into sequences
        draft.assume("data.quality.truncation", "fix")
