"""axolotl's data sets: where rows are, and which shape their `type` stands for."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlencode

from components.shared.errors import UserError
from pipelines.importing.draft import Draft
from pipelines.importing.rules import flag, read, text, words

Shape = tuple[str, dict[str, str]]
"""A format and its columns: ours → the source's."""

SFT: dict[str, Shape] = {
    "alpaca": ("instruction", {}),
    "completion": ("text", {}),
    "chat_template": ("messages", {}),
    "sharegpt": ("messages", {"messages": "conversations"}),
    "pretrain": ("text", {}),
}
"""Shape by `type`, for learning from texts."""

ROWS: dict[str, dict[str, str]] = {
    "icr": {"prompt": "input"},
    "intel": {"prompt": "question"},
    "argilla": {},
    "argilla_chat": {},
    "chat_template": {"prompt": "input"},
    "default": {},
    "prompt_pairs": {},
    "ultra": {},
    "passthrough": {},
}
"""Columns by the last part of `type`, such as `chatml.intel`, for pairs and rated answers."""

CONVERSATIONS = ("ultra", "argilla_chat")
"""Those whose answers are lists of messages."""

FORMATS = {"pretrain": "text", "kto": "rated", "grpo": "prompt", "reward": "preference", "dpo": "preference",
           "orpo": "preference", "cpo": "preference"}  # fmt: skip

FIELDS = {
    "field_prompt": "prompt",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
    "field_completion": "completion",
    "field_label": "label",
    "field_messages": "messages",
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "field": "text",
    "text_column": "text",
}
"""Our column by the key that names the source's."""

HUB = ("json", "csv", "parquet", "text")
"""Paths that name a reader; the files are in `data_files`."""

PROMPT = "prompts go in as the rows have them; write them out there"

UNREAD = {
    "conversation": "the tokenizer's own chat template is used",
    "chat_template": "the tokenizer's own chat template is used; check that it is this one",
    "chat_template_jinja": "the tokenizer's own chat template is used; save one with this, for model.tokenizer.base",
    "roles_to_train": "what the assistant says counts, or everything: data.assistant_only_loss",
    "train_on_eos": "the template says which marks count",
    "message_field_training": "no turn is left out by a mark of its own",
    "message_field_training_detail": "no part of a turn is left out",
    "drop_system_message": "system messages stay; remove them from the rows",
    "split_thinking": "messages go in as the rows have them",
    "field_tools": "tool descriptions are not read",
    "field_thinking": "reasoning is read as part of the content",
    "template_thinking_key": "reasoning is read as part of the content",
    "field_system": "system prompts are not read; put them into the prompt",
    "system_prompt": PROMPT,
    "system_format": PROMPT,
    "format": PROMPT,
    "no_input_format": PROMPT,
    "prompt_format": PROMPT,
    "chosen_format": PROMPT,
    "rejected_format": PROMPT,
    "completion_format": PROMPT,
    "input_format": PROMPT,
    "input_transform": PROMPT,
    "shards": "data.max_samples takes so many rows from the start",
    "shards_idx": "data.max_samples takes so many rows from the start",
    "preprocess_shards": "rows are tokenized a batch at a time",
    "skip": "every row is read",
    "trust_remote_code": "data sets that are programs are not run",
}
"""Keys of a data set that Baton has no place for."""


def data(draft: Draft, method: str) -> None:
    """Sets source, format and columns, and what part of a row counts.

    Raises:
        UserError: there is no data set.
    """
    starts = _entries(draft)
    if not starts and draft.has("pretraining_dataset"):
        raise draft.wrong("pretraining_dataset", "an address, or data sets with a path each")
    if not starts:
        raise UserError(f"{draft.origin}: datasets is missing.", remedy="Name the data sets to train on.")
    draft.put("data.source", [address for start in starts for address in _sources(draft, start)])
    shapes = {start: _shape(draft, start, method) for start in starts}
    first = starts[0]
    shape, columns = shapes[first]
    draft.put("data.format", shape)
    if columns:
        draft.put("data.columns", columns)
    for start in starts[1:]:
        if shapes[start] != shapes[first]:
            draft.left(f"{start}.type", f"another shape than {first}; a recipe reads one: bring both to the same")
    _loss(draft, method, shape)
    _packing(draft, method)
    _template(draft, shape)


def _entries(draft: Draft) -> list[str]:
    """Returns how the keys of each data set begin, such as `datasets[0]`."""
    name = "pretraining_dataset" if draft.keys("pretraining_dataset") else "datasets"
    if isinstance(draft.get(name), str):  # the short form of one address
        return [name]
    found = [key.partition(".")[0] for key in draft.given if key.startswith((f"{name}[", f"{name}."))]
    return list(dict.fromkeys(found))


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
    split = str(draft.get(f"{start}.split", "train"))
    side, bracket, _ = split.partition("[")
    if bracket:
        draft.changed(f"{start}.split", f"all of {side} is read; data.max_samples takes so many rows from the start")
    options = {"config": draft.get(f"{start}.name"), "split": None if side == "train" else side}
    query = urlencode({key: value for key, value in options.items() if value})
    draft.carry("data.source", *(f"{start}.{name}" for name in ("name", "split", "revision")))
    revision = f"@{draft.get(f'{start}.revision')}" if draft.has(f"{start}.revision") else ""
    return f"hf://datasets/{path}{revision}{'?' if query else ''}{query}"


def _shape(draft: Draft, start: str, method: str) -> Shape:
    """Returns a data set's shape, from its type and the keys that name columns."""
    key = f"{start}.type"
    kind = str(draft.get(key, "pretrain" if start.startswith("pre") else ""))
    fields = {name: draft.get(f"{where}.{name}") for where in (start, key) for name in FIELDS
              if draft.has(f"{where}.{name}")}  # fmt: skip
    own = any(name.startswith(f"{key}.") for name in draft.given)
    if method in FORMATS and method != "pretrain":
        shape, columns = FORMATS[method], {} if own else _rows(draft, key, kind, method)
    elif own:
        shape, columns = ("instruction" if "field_input" in fields else "prompt-completion"), {}
    elif kind.partition(".")[0] in SFT or kind.partition(":")[0] in SFT:
        name = kind.partition(".")[0].partition(":")[0]
        shape, columns = SFT[name]
        draft.carry("data.format", key)
        if name != kind or name == "sharegpt":
            draft.changed(key, _taken_as(shape))
    else:
        shape, columns = "auto", {}
        draft.left(key, "Baton has no such prompt; the shape is found from the columns: write text or messages")
    columns = {**columns, **_named(draft, start, key, fields, shape)}
    _messages(draft, start, shape)
    if shape == "messages" and draft.get(f"{start}.roles_to_train") == ["assistant"]:
        draft.carry("data.assistant_only_loss", f"{start}.roles_to_train")
    for name, why in UNREAD.items():
        for part in (f"{start}.{name}", f"{key}.{name}"):
            draft.left(part, why) if draft.has(part) and not draft.is_settled(part) else draft.rest(part)
    return shape, {ours: theirs for ours, theirs in columns.items() if ours != theirs}


def _rows(draft: Draft, key: str, kind: str, method: str) -> dict[str, str]:
    """Returns the columns of pairs or rated answers, and notes how their text is used."""
    last = kind.rpartition(".")[2]
    if last not in ROWS or (method == "kto" and last == "argilla_chat"):
        draft.left(key, "a transform of its own; the rows must have the columns that data.format needs already")
        return {}
    draft.carry("data.columns", key)
    if kind == "chat_template.default":
        draft.changed(key, "chosen and rejected must be lists of messages, not a single one")
        return {"prompt": "messages"}
    if method == "kto" or last not in CONVERSATIONS:
        draft.changed(key, "texts go in as they are, without a chat template; give lists of messages to use one")
    return {"prompt": "instruction"} if (method, last) == ("kto", "argilla") else ROWS[last]


def _taken_as(shape: str) -> str:
    if shape == "messages":
        return "Baton reads messages with role and content; convert rows that have from and value"
    return f"taken as {shape}; check the prompt that it is written with"


def _named(draft: Draft, start: str, key: str, fields: dict[str, Any], shape: str) -> dict[str, str]:
    """Returns the columns that a data set's keys name."""
    names = dict(FIELDS)
    if shape == "prompt-completion":
        names |= {"field_instruction": "prompt", "field_output": "completion"}
    if shape == "preference":
        names["field_messages"] = "prompt"
    columns = {}
    for name, theirs in fields.items():
        columns[names[name]] = str(theirs)
        draft.carry("data.columns", f"{start}.{name}", f"{key}.{name}")
    return columns


def _messages(draft: Draft, start: str, shape: str) -> None:
    """Settles how messages name who says what."""
    for name in ("role", "content"):
        for part in (f"{start}.message_property_mappings.{name}", f"{start}.message_field_{name}"):
            if draft.get(part, name) == name:
                draft.carry("data.format", part)
            else:
                draft.left(part, f"Baton reads {name!r}; rename it in the rows")
    for part in draft.keys(f"{start}.roles."):
        name, given = part.rpartition(".")[2], draft.get(part)
        if shape in ("messages", "preference") and given in (name, [name]):
            draft.carry("data.format", part)
        else:
            draft.left(part, "roles are taken as the rows name them")


def _loss(draft: Draft, method: str, shape: str) -> None:
    """Sets what counts: by default all that the assistant says, and nothing of the prompt."""
    key = "train_on_inputs"
    whole_row = read(draft, key, flag, False)
    if method != "sft":
        draft.rest(key) if not whole_row else draft.needless(key, f"has no effect with {method}")
    elif shape == "messages":
        draft.put("data.assistant_only_loss", not whole_row, key)
        if not whole_row:
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


def _template(draft: Draft, shape: str) -> None:
    key = "chat_template"
    if not draft.has(key):
        draft.rest(key)
    elif shape not in ("messages", "preference", "prompt", "rated", "auto"):
        draft.needless(key, f"{shape} has no chat template")
    elif draft.get(key) == "tokenizer_default":
        draft.carry("model.tokenizer", key)
    else:
        draft.left(key, "the tokenizer's own chat template is used for messages; check that it is this one")
