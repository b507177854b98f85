"""axolotl's data sets: which shape of rows their `type` stands for."""

from __future__ import annotations

import re
from collections.abc import Mapping

from baton.components.shared.recipe.data import Columns
from baton.pipelines.importing.draft import Draft
from baton.pipelines.importing.sources import FORMS, Shape, speaks_as

SFT: dict[str, str] = {
    "alpaca": "instruction",
    "completion": "text",
    "chat_template": "messages",
    "sharegpt": "sharegpt",
    "pretrain": "text",
}
"""Format by `type`, for learning from texts."""

ROWS: dict[str, Columns] = {
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

FORMATS = {"kto": "rated", "grpo": "prompt", "reward": "preference", "dpo": "preference", "orpo": "preference",
           "cpo": "preference"}  # fmt: skip

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

OTHERWISE = {
    "prompt-completion": {"field_instruction": "prompt", "field_output": "completion"},
    "preference": {"field_messages": "prompt"},
    "sharegpt": {"field_messages": "conversations"},
}
"""What keys of `FIELDS` are by format, where it is something else."""

FORMAT = re.compile(r"\{instruction\}(?P<join>[^{}]*)\{input\}(?P<separator>[^{}]*)")
"""A prompt of the user's own that columns, joined, come to."""

NO_INPUT = re.compile(r"\{instruction\}(?P<separator>[^{}]*)")
PLAIN = "texts go in as they are, without a chat template; give lists of messages to use one"
PROMPT = "prompts go in as the rows have them; write them out there"

UNREAD = {
    "roles_to_train": "what the assistant says counts, or everything: data.assistant_only_loss",
    "train_on_eos": "the template says which marks count",
    "train_on_eot": "the template says which marks count",
    "message_field_training": "no turn is left out by its own mark",
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
    "preprocess_shards": "rows are tokenized a batch at a time",
    "skip": "every row is read",
    "trust_remote_code": "data sets that are programs are not run",
}
"""Keys of a data set that Baton has no place for."""


def shape(draft: Draft, start: str, method: str) -> Shape:
    """Returns a data set's shape, from its type and the keys that name columns.

    Args:
        draft: The recipe in the making.
        start: How the data set's keys begin.
        method: The training method.
    """
    key = f"{start}.type"
    kind = str(draft.get(key, "pretrain" if start.startswith("pre") else ""))
    fields = {name: draft.get(f"{where}.{name}") for where in (start, key) for name in FIELDS
              if draft.has(f"{where}.{name}")}  # fmt: skip
    own = any(name.startswith(f"{key}.") for name in draft.given)
    talks = False
    if method in FORMATS:
        shape, columns = FORMATS[method], {} if own else _rows(draft, key, kind, method)
        talks = not own and method != "kto" and (kind == "chat_template.default" or kind.endswith(CONVERSATIONS))
    elif own:
        shape, columns = "prompt-completion", {}
    else:
        shape, columns = _texts(draft, start, kind), {}
    spoken = _spoken(draft, start, shape)
    if shape == "messages":
        shape = spoken
    columns = {**columns, **_named(draft, start, key, fields, shape)}
    if shape == "sharegpt" and kind.startswith("chat_template"):
        columns.setdefault("conversations", "messages")
    if own and shape == "prompt-completion":
        columns = _joined(draft, key, columns)
    _handle_rest(draft, start, shape)
    return Shape(
        format=shape,
        columns={ours: theirs for ours, theirs in columns.items() if ours != theirs},
        talks=talks or shape in ("messages", "sharegpt"),
    )


def _texts(draft: Draft, start: str, kind: str) -> str:
    """Returns the format of rows to learn from, of a type that axolotl has a name for."""
    key = f"{start}.type"
    name = re.split("[.:]", kind)[0]
    if name not in SFT:
        draft.left(key, "Baton has no such prompt; the shape is found from the columns: write text or messages")
        return "auto"
    draft.carry("data.format", key)
    if name != kind:
        draft.changed(key, f"taken as {SFT[name]}; check the prompt that it is written with")
    elif name == "sharegpt" and not draft.has(f"{start}.conversation") and not draft.has("chat_template"):
        draft.changed(key, "written with the tokenizer's own chat template, not with Vicuna's: model.chat_template")
    return SFT[name]


def _rows(draft: Draft, key: str, kind: str, method: str) -> Columns:
    """Returns the columns of pairs or rated answers, and notes how their text is used."""
    last = kind.rpartition(".")[2]
    if last not in ROWS or (method == "kto" and last == "argilla_chat"):
        draft.left(key, "its own transform; the rows must have the columns that data.format needs already")
        return {}
    draft.carry("data.columns", key)
    if kind == "chat_template.default":
        return {"prompt": "messages"}
    if method == "kto" or last not in CONVERSATIONS:
        draft.changed(key, PLAIN)
    return {"prompt": "instruction"} if (method, last) == ("kto", "argilla") else ROWS[last]


def _named(draft: Draft, start: str, key: str, fields: Mapping[str, object], shape: str) -> Columns:
    """Returns the columns that a data set's keys name."""
    names = FIELDS | OTHERWISE.get(shape, {})
    columns: Columns = {}
    for name, theirs in fields.items():
        columns[names[name]] = str(theirs)
        draft.carry("data.columns", f"{start}.{name}", f"{key}.{name}")
    return columns


def _joined(draft: Draft, key: str, columns: Columns) -> Columns:
    """Returns the columns of a prompt of the user's own, in which an input follows the instruction."""
    second = columns.pop("input", None)
    if isinstance(second, str):
        columns["prompt"] = [str(columns.get("prompt", "instruction")), second]
    keys = (f"{key}.format", f"{key}.no_input_format")
    pattern, usual = (FORMAT, "{instruction} {input} ") if second else (NO_INPUT, "{instruction} ")
    match = pattern.fullmatch(str(draft.get(keys[0 if second else 1], usual)))
    several = any(name.startswith("datasets[1]") for name in draft.given)
    if match is None or several:
        if several and match is not None:
            draft.changed(f"{key}.field_instruction", "data.join and data.separator are the same for all data sets")
        return columns
    for name, value in match.groupdict().items():
        draft.put(f"data.{name}", value, keys[0 if second else 1])
    short = NO_INPUT.fullmatch(str(draft.get(keys[1], "{instruction} ")))
    if second and short and short["separator"] == match["separator"]:
        draft.carry("data.separator", keys[1])
    return columns


def _spoken(draft: Draft, start: str, shape: str) -> str:
    """Settles how messages name who says what, and returns the format that this is."""
    keys = {
        name: [f"{start}.message_property_mappings.{name}", f"{start}.message_field_{name}"]
        for name in ("role", "content")
    }
    role, content = (
        next((str(draft.get(key)) for key in keys[name] if draft.has(key)), name) for name in ("role", "content")
    )
    for parts in keys.values():
        for part in parts:
            if (role, content) in FORMS:
                draft.carry("data.format", part)
            elif draft.has(part):
                draft.left(part, f"Baton reads role and content, or from and value; rename {draft.get(part)!r} there")
    for part in draft.keys(f"{start}.roles."):
        role_name, value = part.rpartition(".")[2], draft.get(part)
        names = value if isinstance(value, list) else [value]
        if shape in ("messages", "sharegpt", "preference") and all(speaks_as(name, role_name) for name in names):
            draft.carry("data.format", part)
        else:
            draft.left(part, "Baton knows user or human, assistant or gpt, system, tool; rename others in the rows")
    return FORMS.get((role, content), "messages")


def _handle_rest(draft: Draft, start: str, shape: str) -> None:
    """Handles the keys of a data set that are left."""
    trained = draft.get(f"{start}.roles_to_train")
    only = isinstance(trained, list) and trained and all(speaks_as(name, "assistant") for name in trained)
    if shape in ("messages", "sharegpt") and only:
        draft.carry("data.assistant_only_loss", f"{start}.roles_to_train")
    for name, why in UNREAD.items():
        for part in (f"{start}.{name}", f"{start}.type.{name}"):
            if draft.is_handled(part):
                continue
            draft.left(part, why) if draft.has(part) else draft.rest(part)
