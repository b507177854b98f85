"""Rows for training: labels, messages as Arrow columns, and packing into sequences."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from baton.recipe.data import Data

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset


IGNORED = -100  # label of a token outside the loss, as in torch's cross entropy


Row = dict[str, Any]

PLAIN = ("role", "content")
TEXTS = (*PLAIN, "name", "tool_call_id", "reasoning_content")
JSON = "tool_calls"
FLAG = "train"
TOOLS = "tools"

# In all rows that hold more, and in a few others, so that few rows have to be parsed.
_MAYBE = re.compile(rb'"(?:name|tool_call_id|reasoning_content|train|tool_calls|tools)"')


def hold_more(paths: Iterable[str]) -> bool:
    """Tells whether a row of the split's files holds more than messages of role and content."""
    for path in paths:
        with open(path, "rb") as file:
            if any(_holds_more(json.loads(line)) for line in file if _MAYBE.search(line)):
                return True
    return False


def _holds_more(row: Row) -> bool:
    prompt = row.get("prompt")
    # A text becomes a turn where the tokenizer has a template, and the tools go with it.
    messages = prompt if isinstance(prompt, list) else []
    return row.get(TOOLS) is not None or any(
        value is not None and key not in PLAIN for message in messages for key, value in message.items()
    )


def message_kind(*, wide: bool) -> pa.DataType:
    """Returns the Arrow type of a message."""
    import pyarrow as pa

    # Arrow gives each message the keys of all, so arguments and declarations of tools are JSON in a column.
    texts = {key: pa.string() for key in (TEXTS if wide else PLAIN)}
    return pa.struct({**texts, JSON: pa.string(), FLAG: pa.bool_()} if wide else texts)


def stored(row: Row) -> Row:
    """Returns a row as wide columns have it."""
    if isinstance(row["prompt"], str):
        return row
    prompt = [
        {**message, JSON: json.dumps(message[JSON], ensure_ascii=False)} if JSON in message else message
        for message in row["prompt"]
    ]
    tools = json.dumps(row[TOOLS], ensure_ascii=False) if row.get(TOOLS) else None
    # Last, whichever rows have some: batches and files have the same columns in the same order.
    return {**{name: value for name, value in row.items() if name != TOOLS}, "prompt": prompt, TOOLS: tools}


def restored(batch: Row) -> Row:
    """Returns columns of rows as before `stored`: lists of values, by name."""
    batch = dict(batch)
    if "prompt" in batch:
        batch["prompt"] = [[_message(message) for message in prompt] for prompt in batch["prompt"]]
    if TOOLS in batch:
        batch[TOOLS] = [tools and json.loads(tools) for tools in batch[TOOLS]]
    return batch


def readable(rows: Dataset) -> Dataset:
    """Returns a data set whose rows come as before `stored`."""
    if is_wide(rows.data.schema):
        rows.set_transform(restored)
    return rows


def is_wide(schema: pa.Schema) -> bool:
    """Tells whether rows are in wide columns."""
    import pyarrow as pa

    kind = schema.field("prompt").type if "prompt" in schema.names else None
    return isinstance(kind, pa.ListType) and pa.types.is_struct(kind.value_type) and kind.value_type.num_fields > 2


def _message(message: Row) -> Row:
    kept = {key: value for key, value in message.items() if value is not None}
    return {**kept, JSON: json.loads(kept[JSON])} if JSON in kept else kept


def packs_rows(data: Data, side: str) -> bool:
    """Tells whether the rows of a side are joined."""
    return data.packing is True or (data.packing == "best-fit" and side == "train")


def pack_rows(rows: pa.Table, data: Data, *, is_all: bool) -> pa.Table:
    """Joins rows to sequences of `data.max_length`, a thousand at a time, by their lengths alone.

    With `best-fit`, `seq_lengths` has the rows' lengths in each sequence. Else a thousand's incomplete last sequence is
    left out, unless there is nothing else in the side (`is_all`).
    """
    import datasets
    import pyarrow.compute as pc
    from trl import pack_dataset

    datasets.disable_progress_bars()
    strategy = "bfd" if data.packing == "best-fit" else "wrapped"
    table: pa.Table = pack_dataset(datasets.Dataset(rows), data.max_length, strategy=strategy).data.table
    if strategy == "wrapped" and not (is_all and len(table) == 1):
        table = table.filter(pc.equal(pc.list_value_length(table["input_ids"]), data.max_length))
    return table.replace_schema_metadata(None)
