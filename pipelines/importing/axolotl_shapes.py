"""axolotl's data sets: which shape of rows their `type` stands for."""

from __future__ import annotations

import re
from typing import Literal

from baton.components.shared.recipe import SPECS
from baton.components.shared.recipe.data import Columns
from baton.pipelines.importing.draft import Draft
from baton.pipelines.importing.sources import FORMS, Shape, speaks_as
from baton.pipelines.importing.table import table

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
    "chat_template": {"prompt": "input"},
    **{last: {} for last in ("argilla", "argilla_chat", "default", "prompt_pairs", "ultra", "passthrough")},
}
"""Columns by the last part of `type`, such as `chatml.intel`, for pairs and rated answers."""

CONVERSATIONS = ("ultra", "argilla_chat")
"""Those whose answers are lists of messages."""

FIELD = "prompt chosen rejected completion label messages instruction input output"
"""Our columns that it names by `field_` and the same word."""
FIELDS = {**{f"field_{name}": name for name in FIELD.split()}, "field": "text", "text_column": "text"}
"""Our column by the key that names the source's."""
BESIDE = {"field_tools": "tools", "field_system": "system"}
"""The same for what goes with messages."""

OTHERWISE = {
    "prompt-completion": {"field_instruction": "prompt", "field_output": "completion"},
    "preference": {"field_messages": "prompt"},
    "sharegpt": {"field_messages": "conversations"},
}
"""What keys of `FIELDS` are by format, where it is something else."""

FORMAT = re.compile(r"\{instruction\}(?P<join>[^{}]*)\{input\}(?P<separator>[^{}]*)")
"""A prompt of the user's own that columns, joined, come to."""

NO_INPUT = re.compile(r"\{instruction\}(?P<separator>[^{}]*)")
PLAIN = "texts go in as they are, without a chat template; data.render_as: chat uses one"

THOUGHTS = ("thinking", "reasoning", "reasoning_content")
CARRIED = {
    "train_on_eos": ("data.train_on", ("turn",)),
    "train_on_eot": ("data.train_on", ("turn",)),
    "message_field_training": ("data.train_on", ("train", "training", "weight")),
    "field_thinking": ("data.reasoning", THOUGHTS),
    "template_thinking_key": ("data.reasoning", THOUGHTS),
}
"""Keys of a data set with the values that are what Baton does, and where the recipe says it."""

UNREAD = table(
    {},
    left={
        "what the assistant says counts, or everything: data.train_on": "roles_to_train",
        "the token that ends what the assistant says counts, no other one": "train_on_eos train_on_eot",
        "call it train in the rows' messages": "message_field_training",
        "no part of a turn is left out": "message_field_training_detail",
        "system messages stay; remove them from the rows": "drop_system_message",
        "messages go in as the rows have them": "split_thinking",
        "only conversations have tools": "field_tools",
        "call it reasoning_content in the rows' messages": "field_thinking template_thinking_key",
        "only conversations have a system message; put it into the prompt": "field_system",
        "prompts go in as the rows have them; write them out there": (
            "system_prompt system_format format no_input_format prompt_format chosen_format rejected_format "
            "completion_format input_format input_transform"
        ),
        "rows are tokenized a batch at a time": "preprocess_shards",
        "every row is read": "skip",
        "data sets that are programs are not run": "trust_remote_code",
    },
)
"""Keys of a data set that Baton has no place for."""


def shape(draft: Draft, start: str, method: str) -> Shape:
    """Returns the shape of the data set whose keys begin with `start`, from its type and those that name columns."""
    key = f"{start}.type"
    kind = str(draft.get(key, "pretrain" if start.startswith("pre") else ""))
    own = any(name.startswith(f"{key}.") for name in draft.given)
    columns: Columns = {}
    talks = False
    renders: Literal["chat", "text"] | None = "text" if own and method != "grpo" else None
    if SPECS[method].rows != "sequences":
        shape = SPECS[method].formats[0]
        if not own:
            columns.update(_rows(draft, key, kind, method))
            talks = method != "kto" and (kind == "chat_template.default" or kind.endswith(CONVERSATIONS))
            renders = "chat" if "." in kind and method != "grpo" and not talks else None
    else:
        shape = "prompt-completion" if own else _texts(draft, start, kind)
        renders = "text" if shape == "instruction" else renders
    spoken = _spoken(draft, start, shape)
    if shape == "messages":
        shape = spoken
    for where in (start, key):
        beside = BESIDE if talks or shape in ("messages", "sharegpt") else {}
        for name, ours in (FIELDS | OTHERWISE.get(shape, {}) | beside).items():
            if draft.has(named := f"{where}.{name}"):
                columns[ours] = str(draft.get(named))
                draft.carry("data.columns", named)
    if shape == "sharegpt" and kind.startswith("chat_template"):
        columns.setdefault("conversations", "messages")
    if own and shape == "prompt-completion":
        _join(draft, key, columns)
    trained = draft.get(f"{start}.roles_to_train")
    talks = talks or shape in ("messages", "sharegpt")
    if shape in ("messages", "sharegpt") and isinstance(trained, list) and _all_speak_as(trained, "assistant"):
        draft.carry("data.train_on", f"{start}.roles_to_train")
    for name, (path, known) in CARRIED.items():
        if draft.get(f"{start}.{name}") in known:
            draft.carry(path, f"{start}.{name}")
    for name, entry in UNREAD.items():
        for part in (f"{start}.{name}", f"{key}.{name}"):
            if not draft.is_handled(part):
                entry(draft, part)
    columns = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    return Shape(format=shape, columns=columns, talks=talks, renders=renders)


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
    if last == "passthrough":
        draft.changed(key, PLAIN)
    return {"prompt": "instruction"} if (method, last) == ("kto", "argilla") else ROWS[last]


def _join(draft: Draft, key: str, columns: Columns) -> None:
    """Sets how a prompt of the user's own is put together, in which an input follows the instruction."""
    second = columns.pop("input", None)
    if isinstance(second, str):
        columns["prompt"] = [str(columns.get("prompt", "instruction")), second]
    with_input, without = f"{key}.format", f"{key}.no_input_format"
    used, pattern, usual = (
        (with_input, FORMAT, "{instruction} {input} ") if second else (without, NO_INPUT, "{instruction} ")
    )
    match = pattern.fullmatch(str(draft.get(used, usual)))
    if match is None:
        return
    if any(name.startswith("datasets[1]") for name in draft.given):
        draft.changed(f"{key}.field_instruction", "data.join and data.separator are the same for all data sets")
        return
    for name, value in match.groupdict().items():
        draft.put(f"data.{name}", value, used)
    short = NO_INPUT.fullmatch(str(draft.get(without, "{instruction} ")))
    if second and short and short["separator"] == match["separator"]:
        draft.carry("data.separator", without)


def _spoken(draft: Draft, start: str, shape: str) -> str:
    """Settles how messages name who says what, and returns the format that this is."""
    keys = {
        name: (f"{start}.message_property_mappings.{name}", f"{start}.message_field_{name}")
        for name in ("role", "content")
    }
    role, content = (str(draft.get(next(filter(draft.has, parts), ""), name)) for name, parts in keys.items())
    for part in (*keys["role"], *keys["content"]):
        if (role, content) in FORMS:
            draft.carry("data.format", part)
        elif draft.has(part):
            draft.left(part, f"Baton reads role and content, or from and value; rename {draft.get(part)!r} there")
    for part in draft.keys(f"{start}.message_property_mappings."):
        if draft.get(part) == part.rpartition(".")[2] or draft.get(part) in THOUGHTS:
            draft.carry("data.format", part)
    for part in draft.keys(f"{start}.roles."):
        value = draft.get(part)
        names = value if isinstance(value, list) else [value]
        if shape in ("messages", "sharegpt", "preference") and _all_speak_as(names, part.rpartition(".")[2]):
            draft.carry("data.format", part)
        else:
            draft.left(part, "Baton knows user or human, assistant or gpt, system, tool; rename others in the rows")
    return FORMS.get((role, content), "messages")


def _all_speak_as(names: list[object], role: str) -> bool:
    return bool(names) and all(speaks_as(name, role) for name in names)
