"""axolotl's data sets: row shapes by `type`, chat templates, addresses of rows, and the loss."""

from __future__ import annotations

import os
import re
from typing import Literal

from baton.errors import UserError
from baton.importers import sources
from baton.importers.draft import KeyResult, RecipeDraft
from baton.importers.parse import boolean, positive_int, read, tables, text, words
from baton.importers.sources import FORMS, DataSet, RowShape, speaks_as
from baton.recipe.data import Columns
from baton.recipe.methods import SPECS

SFT: dict[str, str] = {
    "alpaca": "instruction",
    "completion": "text",
    "chat_template": "messages",
    "sharegpt": "sharegpt",
    "pretrain": "text",
}
"""`type` → format, for learning from texts."""

ROWS: dict[str, Columns] = {
    "icr": {"prompt": "input"},
    "intel": {"prompt": "question"},
    "chat_template": {"prompt": "input"},
    **{last: {} for last in ("argilla", "argilla_chat", "default", "prompt_pairs", "ultra", "passthrough")},
}
"""Last part of `type`, as in `chatml.intel` → columns, for pairs and rated answers."""

_ALIKE = "prompt chosen rejected completion label messages instruction input output"
FIELDS = {**{f"field_{name}": name for name in _ALIKE.split()}, "field": "text", "text_column": "text"}
"""Key that names a column of the source → our column."""
BESIDE = {"field_tools": "tools", "field_system": "system"}
"""The same beside messages."""

OTHERWISE = {
    "prompt-completion": {"field_instruction": "prompt", "field_output": "completion"},
    "preference": {"field_messages": "prompt"},
    "sharegpt": {"field_messages": "conversations"},
}
"""Format → its exceptions from `FIELDS`."""

FORMAT = re.compile(r"\{instruction\}(?P<join>[^{}]*)\{input\}(?P<separator>[^{}]*)")
"""A prompt format that joined columns can express."""

NO_INPUT = re.compile(r"\{instruction\}(?P<separator>[^{}]*)")

THOUGHTS = ("thinking", "reasoning", "reasoning_content")
CARRIED = {
    "train_on_eos": ("data.train_on", ("turn",)),
    "train_on_eot": ("data.train_on", ("turn",)),
    "message_field_training": ("data.train_on", ("train", "training", "weight")),
    "field_thinking": ("data.reasoning", THOUGHTS),
    "template_thinking_key": ("data.reasoning", THOUGHTS),
}
"""Key of a data set → its place in the recipe, and the values that Baton's behaviour amounts to."""

UNREAD = tables("axolotl_rows", {})["unread"]


def row_shape(draft: RecipeDraft, start: str, method: str) -> RowShape:
    """Returns the shape of the data set whose keys begin with `start`."""
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
            # The answers of these types are lists of messages.
            talks = method != "kto" and (kind == "chat_template.default" or kind.endswith(("ultra", "argilla_chat")))
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
    return RowShape(format=shape, columns=columns, talks=talks, renders=renders)


def _texts(draft: RecipeDraft, start: str, kind: str) -> str:
    """Returns the format of rows to learn from, by the name of axolotl's type."""
    key = f"{start}.type"
    name = re.split("[.:]", kind)[0]
    if name not in SFT:
        draft.unsupported(key, "Baton has no such prompt; the shape is found from the columns: write text or messages")
        return "auto"
    draft.carry("data.format", key)
    if name != kind:
        draft.changed(key, f"taken as {SFT[name]}; check the prompt that it is written with")
    elif name == "sharegpt" and not draft.has(f"{start}.conversation") and not draft.has("chat_template"):
        draft.changed(key, "written with the tokenizer's own chat template, not with Vicuna's: model.chat_template")
    return SFT[name]


def _rows(draft: RecipeDraft, key: str, kind: str, method: str) -> Columns:
    """Returns the columns of pairs or rated answers."""
    last = kind.rpartition(".")[2]
    if last not in ROWS or (method == "kto" and last == "argilla_chat"):
        draft.unsupported(key, "its own transform; the rows must have the columns that data.format needs already")
        return {}
    draft.carry("data.columns", key)
    if kind == "chat_template.default":
        return {"prompt": "messages"}
    if last == "passthrough":
        draft.changed(key, "texts go in as they are, without a chat template; data.render_as: chat uses one")
    return {"prompt": "instruction"} if (method, last) == ("kto", "argilla") else ROWS[last]


def _join(draft: RecipeDraft, key: str, columns: Columns) -> None:
    """Sets the parts of a custom prompt, in which an input follows the instruction."""
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


def _spoken(draft: RecipeDraft, start: str, shape: str) -> str:
    """Handles the keys for roles and contents, and returns the format of messages."""
    keys = {
        name: (f"{start}.message_property_mappings.{name}", f"{start}.message_field_{name}")
        for name in ("role", "content")
    }
    role, content = (str(draft.get(next(filter(draft.has, parts), ""), name)) for name, parts in keys.items())
    for part in (*keys["role"], *keys["content"]):
        if (role, content) in FORMS:
            draft.carry("data.format", part)
        elif draft.has(part):
            draft.unsupported(
                part, f"Baton reads role and content, or from and value; rename {draft.get(part)!r} there"
            )
    for part in draft.keys(f"{start}.message_property_mappings."):
        if draft.get(part) == part.rpartition(".")[2] or draft.get(part) in THOUGHTS:
            draft.carry("data.format", part)
    for part in draft.keys(f"{start}.roles."):
        value = draft.get(part)
        names = value if isinstance(value, list) else [value]
        if shape in ("messages", "sharegpt", "preference") and _all_speak_as(names, part.rpartition(".")[2]):
            draft.carry("data.format", part)
        else:
            draft.unsupported(
                part, "Baton knows user or human, assistant or gpt, system, tool; rename others in the rows"
            )
    return FORMS.get((role, content), "messages")


def _all_speak_as(names: list[object], role: str) -> bool:
    return bool(names) and all(speaks_as(name, role) for name in names)


FALLBACK = "tokenizer_default_fallback_"
WITH_TEMPLATE = ("messages", "sharegpt", "preference", "prompt", "rated", "auto")
"""Formats of rows that may be conversations."""


def row_template(draft: RecipeDraft, shapes: dict[str, RowShape]) -> None:
    """Sets the recipe's one `model.chat_template` from the first data set that has one; `shapes` are by prefix."""
    for start in shapes:  # a conversation's style, once an option of sharegpt
        style = f"{start}.conversation"
        if draft.get(style) == "chatml" and not draft.has("chat_template"):
            draft.put("model.chat_template", "chatml")
            draft.changed(style, "without the system message that axolotl puts before conversations which have none")
        else:
            draft.drop(style, "conversations are written with model.chat_template, or the tokenizer's own")
    starts = [start for start, shape in shapes.items() if shape.format in WITH_TEMPLATE]
    if not starts and draft.has("chat_template"):
        draft.not_needed("chat_template", f"{next(iter(shapes.values())).format} has no chat template")
    chosen: str | None = None
    for start in starts:
        given = (_by_type(draft, start, shapes[start]), _given(draft, f"{start}."), _given(draft, ""))
        key, template = next(filter(None, given), ("", ""))
        if key and chosen is None:
            chosen = template
            _own(draft, key, template) if key.endswith("_jinja") else _named(draft, key, template)
            if draft.get("chat_template") == template:  # where the type of rows says it, too
                draft.carry("model.chat_template", "chat_template")
        elif key and template != chosen:
            draft.unsupported(key, "one recipe has one chat template; that of the first data set is used")
        else:
            draft.carry("model.chat_template", key)
    for prefix in (*(f"{start}." for start in shapes), ""):
        _handle_rest(draft, prefix, chosen)


def _given(draft: RecipeDraft, prefix: str) -> tuple[str, str] | None:
    """Returns the key that names or holds a template, and its value."""
    name, own = f"{prefix}chat_template", f"{prefix}chat_template_jinja"
    if draft.has(name) and draft.get(name) != "jinja":
        return name, read(draft, name, text, "")
    return (own, read(draft, own, text, "")) if draft.has(own) else None


def _by_type(draft: RecipeDraft, start: str, shape: RowShape) -> tuple[str, str] | None:
    """Returns the key and the template that a type such as `llama3.ultra` names."""
    key = f"{start}.type"
    style, dot, _ = str(draft.get(key, "")).partition(".")
    known = dot and style in sources.NAMED_TEMPLATES and shape.format in ("preference", "rated")
    return (key, style) if known else None


def _handle_rest(draft: RecipeDraft, prefix: str, chosen: str | None) -> None:
    """Handles the keys without effect beside the chosen template."""
    name, own = f"{prefix}chat_template", f"{prefix}chat_template_jinja"
    for key in (name, own):
        if draft.is_handled(key) or not draft.has(key):
            draft.ignore(key)
        elif draft.get(key) == "jinja" and draft.has(own):
            draft.carry("model.chat_template", key)
        else:
            why = "no data set has conversations" if chosen is None else "another template is given, and decides"
            draft.not_needed(key, why)


def _named(draft: RecipeDraft, key: str, template: str) -> None:
    """Sets a template by name, where Baton's writes the same text or nearly so."""
    if template == "tokenizer_default":
        draft.carry("model.chat_template", key)
    elif template.startswith(FALLBACK):
        name = template.removeprefix(FALLBACK)
        none = f"the tokenizer's own chat template is used; where it has none, set model.chat_template: {name}"
        draft.unsupported(key, none)
    else:
        sources.named_template(draft, key, template, str(draft.get("base_model")))


def _own(draft: RecipeDraft, key: str, template: str) -> None:
    """Sets a custom template: the path of its file, or its text."""
    paths = (os.path.join(folder, template) for folder in draft.folders)
    path = next(filter(os.path.isfile, paths), "")
    if path and template.endswith(".jinja"):
        draft.put("model.chat_template", draft.relative(template), key)
        return
    if path:
        try:
            with open(path, encoding="utf-8") as file:
                template = file.read()
        except (OSError, ValueError):
            draft.unsupported(key, "cannot be read as text; give a .jinja file in model.chat_template")
            return
    if "{" in template or template.endswith(".jinja"):
        draft.put("model.chat_template", template, key)
    else:
        draft.unsupported(key, "neither a template nor a file that is there; give one in model.chat_template")


HUB = ("json", "csv", "parquet", "text")
"""Paths that name a reader, with the files in `data_files`."""

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
"""`excess_length_strategy` → settings of `data.quality`."""


def data(draft: RecipeDraft, method: str) -> None:
    """Sets source, format and columns, and the part of a row that counts."""
    name = "pretraining_dataset" if draft.keys("pretraining_dataset") else "datasets"
    starts = _entries(draft, name)
    if not starts and draft.has("pretraining_dataset"):
        raise draft.wrong("pretraining_dataset", "an address, or data sets with a path each")
    if not starts:
        raise UserError(f"{draft.origin}: datasets is missing.", remedy="Name the data sets to train on.")
    held_out = _entries(draft, HELD_OUT)
    addresses = {start: _sources(draft, start) for start in (*starts, *held_out)}
    shapes = {start: row_shape(draft, start, method) for start in addresses}
    sets = [
        DataSet(
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
    row_template(draft, shapes)
    sources.loss(draft, "train_on_inputs", method, shapes[starts[0]])
    _packing(draft, method)
    _length(draft, method, shapes[starts[0]])


def _entries(draft: RecipeDraft, name: str) -> list[str]:
    """Returns the prefix of each data set's keys, such as `datasets[0]`."""
    if isinstance(draft.get(name), str):  # the short form of one address
        return [name]
    sections = [key.partition(".")[0] for key in draft.given if key.startswith((f"{name}[", f"{name}."))]
    return list(dict.fromkeys(sections))


def _sources(draft: RecipeDraft, start: str) -> list[str]:
    key = start if isinstance(draft.get(start), str) else f"{start}.path"
    path = read(draft, key, text)
    if not path:
        raise UserError(f"{draft.origin}: {start} has no path.", remedy="Say where its rows are.")
    files = read(draft, f"{start}.data_files", words, [])
    draft.carry("data.source", key, f"{start}.data_files", f"{start}.ds_type")
    if (path in HUB or draft.relative(path) != path) and draft.has(split := f"{start}.split"):
        sources.side(draft, split, draft.get(split))  # files have one side, whatever it is called
        draft.carry("data.source", split)
    if path in HUB:
        return [draft.relative(file) for file in files] or [path]
    local = draft.relative(path)
    if local != path or os.path.exists(path) or "://" in path or path.startswith((".", "/", "~")) or "/" not in path:
        return [f"{local.rstrip('/')}/{file}" for file in files] or [local]
    return [f"hf://datasets/{path}/{file}" for file in files] or [_hub(draft, start, path)]


def _hub(draft: RecipeDraft, start: str, path: str) -> str:
    """Returns a hub data set's address, with config, split and revision."""
    config, split, revision = (f"{start}.{name}" for name in ("name", "split", "revision"))
    side = sources.side(draft, split, draft.get(split, "test" if start.startswith(HELD_OUT) else "train"))
    draft.carry("data.source", config, split, revision)
    version = draft.get(revision) if draft.has(revision) else None
    return sources.on_hub(path, revision=version, config=draft.get(config), split=side)


def _weight(draft: RecipeDraft, start: str, *, trains: bool) -> float:
    """Returns a source's weight: one of N shards is 1/N of its rows."""
    key, index = f"{start}.shards", f"{start}.shards_idx"
    shards = read(draft, key, positive_int, 1)
    if shards > 1 and not trains:
        draft.unsupported(key, "all rows that are held out are read")
        draft.drop(index, "all rows that are held out are read")
        return 1.0
    draft.carry("data.source", key)
    if shards > 1:
        draft.changed(key, f"a weight: 1/{shards} of the training rows, which their content chooses, not their place")
    draft.drop(index, "the rows of a shard are chosen by content", KeyResult.not_needed)
    return float(f"{1 / shards:.12g}")


def _packing(draft: RecipeDraft, method: str) -> None:
    key = "sample_packing"
    if read(draft, key, boolean, False) and SPECS[method].rows != "sequences":
        draft.unsupported(key, sources.UNPACKED)
    elif method == "pretrain":
        draft.put("data.packing", True, key)
        if draft.has(key):
            draft.changed(key, "texts are joined and cut, so that nothing of long ones is lost; they see each other")
    elif draft.has(key):
        draft.put("data.packing", "best-fit", key)
    draft.ignore(key)


def _length(draft: RecipeDraft, method: str, shape: RowShape) -> None:
    """Handles rows longer than a sequence; axolotl drops them by default."""
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
