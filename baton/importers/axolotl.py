"""axolotl's training files as recipes: data sets, keys, methods, weights and precision."""

import os
import re
from typing import Literal

from baton.errors import UserError
from baton.importers import common
from baton.importers.common import FORMS, DataSet, RowShape, speaks_as
from baton.importers.draft import Document, KeyResult, OtherTrainer, RecipeDraft, boolean
from baton.importers.parse import choice, non_negative_int, number, numbers, positive_int, tables, text, words
from baton.recipe.data import Columns
from baton.recipe.methods import GRPO, SPECS

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
"""The same with messages."""

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
    for name, entry in TABLES["unread"].items():
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
            if draft.get("chat_template") == template:  # where the type of rows sets it, too
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
        return name, draft.read(name, text, "")
    return (own, draft.read(own, text, "")) if draft.has(own) else None


def _by_type(draft: RecipeDraft, start: str, shape: RowShape) -> tuple[str, str] | None:
    """Returns the key and the template that a type such as `llama3.ultra` names."""
    key = f"{start}.type"
    style, dot, _ = str(draft.get(key, "")).partition(".")
    known = dot and style in common.NAMED_TEMPLATES and shape.format in ("preference", "rated")
    return (key, style) if known else None


def _handle_rest(draft: RecipeDraft, prefix: str, chosen: str | None) -> None:
    """Handles the keys without effect with the chosen template."""
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
        common.named_template(draft, key, template, str(draft.get("base_model")))


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
    "texts longer than sequence_len are cut into rows of that length there, and truncated here; "
    "data.packing: true joins texts and cuts without loss"
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
    common.put(draft, sets)
    common.rendering(draft, sets)
    row_template(draft, shapes)
    common.loss(draft, "train_on_inputs", method, shapes[starts[0]])
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
    path = draft.read(key, text)
    if not path:
        raise UserError(f"{draft.origin}: {start} has no path.", remedy="Give the path of its rows.")
    files = draft.read(f"{start}.data_files", words, [])
    draft.carry("data.source", key, f"{start}.data_files", f"{start}.ds_type")
    if (path in HUB or draft.relative(path) != path) and draft.has(split := f"{start}.split"):
        common.side(draft, split, draft.get(split))  # files have one side, whatever it is called
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
    side = common.side(draft, split, draft.get(split, "test" if start.startswith(HELD_OUT) else "train"))
    draft.carry("data.source", config, split, revision)
    version = draft.get(revision) if draft.has(revision) else None
    return common.on_hub(path, revision=version, config=draft.get(config), split=side)


def _weight(draft: RecipeDraft, start: str, *, trains: bool) -> float:
    """Returns a source's weight: one of N shards is 1/N of its rows."""
    key, index = f"{start}.shards", f"{start}.shards_idx"
    shards = draft.read(key, positive_int, 1)
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
    if draft.read(key, boolean, False) and SPECS[method].rows != "sequences":
        draft.unsupported(key, common.UNPACKED)
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


ORDER = "the order of rows is drawn from seed"

START = choice(Literal["gaussian", "orthogonal"], "no such start; adapter.init has others")

TABLES = tables(
    "axolotl",
    {
        "dtype": lambda value: text(value).removeprefix("torch."),
        "fix": lambda value: "fix" if boolean(value) else None,
        "grpo_loss": choice(GRPO.model_fields["loss"].annotation, "no such loss; dapo is used"),
        "layers": lambda value: [non_negative_int(layer) for layer in words(value)],
        "merged": lambda value: ["safetensors"] if boolean(value) else None,
        "scale": lambda value: {True: "group", False: "none"}[value] if isinstance(value, bool) else text(value),
        "start": lambda value: None if value is True else START(value),
        "top_k": lambda value: non_negative_int(max(number(value), 0)),
    },
)
PLUGINS = ("liger", "lm_eval", "cut_cross_entropy", "kernels", "swanlab")
"""Parts of the names of plugins that nothing is lost without, or that have a setting here."""


def _plugins(draft: RecipeDraft, key: str) -> None:
    names = draft.read(key, words, [])
    others = [name for name in names if not any(known in name.lower() for known in PLUGINS)]
    if any("liger" in name.lower() for name in names):
        draft.put("training.liger", True, key)
    if any("lm_eval" in name.lower() for name in names):
        draft.carry("evaluation.tasks", key)
    if others:
        draft.unsupported(key, f"{', '.join(others)}: Baton runs no plugins; the user's own code goes into hooks")
    elif not draft.is_handled(key):
        draft.not_needed(key, "kernels: they change the speed, not the result; see training.liger")


def _shuffled(draft: RecipeDraft, key: str) -> None:
    draft.not_needed(key, ORDER) if draft.get(key) else draft.unsupported(key, ORDER)


METHODS: dict[str, tuple[str, Document]] = {
    "dpo": ("dpo", {}),
    "ipo": ("dpo", {"loss": ["ipo"]}),
    "kto": ("kto", {}),
    "orpo": ("orpo", {}),
    "simpo": ("cpo", {"loss": "simpo"}),
    "grpo": ("grpo", {}),
}
"""`rl` → method and settings."""

MICRO = "micro_batch_size"
RATE = 2e-5
"""Default learning rate."""

ATTENTION = {"flash": "flash_attention_2", "sdp": "sdpa", "flex": "flex_attention", "eager": "eager"}
"""Short name → attention; the short name and `_attention` make the key that turns it on."""


def _choose(draft: RecipeDraft) -> tuple[str, Document]:
    """Returns the training method, and the settings that its name implies."""
    rl = str(draft.get("rl") or "")
    if draft.has("process_reward_model"):
        raise draft.wrong("process_reward_model", "no reward per step, which Baton does not train", "Remove it.")
    if rl and rl not in METHODS:
        raise draft.wrong(
            "rl", f"one of {', '.join(METHODS)}", "See training.method in docs/reference/recipe for others."
        )
    draft.carry("training.method", "rl", "reward_model")
    if rl:
        return METHODS[rl]
    if draft.has("reward_model"):
        return "reward", {}
    return ("pretrain" if draft.keys("pretraining_dataset") else "sft"), {}


def _dpo(draft: RecipeDraft) -> None:
    losses = draft.peek("training.dpo.loss", ["sigmoid"])
    share = draft.read("rpo_alpha", number, 0.0)
    if share:
        shares = draft.peek("training.dpo.loss_weights", [1.0] * len(losses))
        losses = [*losses, "sft"]
        draft.put("training.dpo.loss", losses, "rpo_alpha")
        draft.put("training.dpo.loss_weights", [*shares, share])
    key = "dpo_label_smoothing"
    if draft.has(key) and ("robust" in losses or "exo_pair" in losses):
        draft.put("training.dpo.label_smoothing", draft.read(key, number), key)
    elif draft.has(key):
        draft.unsupported(key, f"has an effect only with training.dpo.loss robust or exo_pair, not {', '.join(losses)}")


def _grpo(draft: RecipeDraft) -> None:
    """Sets the rewards: axolotl finds functions by `module.function`, in the folder it runs in."""
    key = "trl.reward_funcs"
    names = draft.read(key, words, [])
    if not names or not all("." in name.strip(".") for name in names):
        raise UserError(
            f"{draft.origin}: {key} is {draft.get(key)!r}, expected functions as module.function.",
            remedy="Name what judges completions; Baton needs it too.",
        )
    shares = draft.read("trl.reward_weights", numbers, [1.0] * len(names))
    if len(shares) != len(names):
        raise draft.wrong("trl.reward_weights", f"a number for each of the {len(names)} functions")
    rewards = [
        {"use": ":".join(name.rsplit(".", 1)), "weight": share} for name, share in zip(names, shares, strict=True)
    ]
    draft.put("training.grpo.rewards", rewards, key, "trl.reward_weights")
    modules = sorted({name.rsplit(".", 1)[0].split(".")[0] for name in names})
    paths = [draft.relative(f"{name}.py") for name in modules]
    files = [path for path in paths if os.path.exists(os.path.join(draft.target, path))]
    if len(files) == len(modules) == 1:
        draft.put("hooks.source", files[0])
    else:
        imported = ", ".join(modules)
        draft.changed(key, f"the code of {imported} must be in the image, or in the file or folder of hooks.source")
    sync, steps, share = "trl.sync_ref_model", "trl.ref_model_sync_steps", "trl.ref_model_mixup_alpha"
    if draft.has(sync) and (draft.has("adapter") or not draft.peek("training.grpo.beta")):
        draft.unsupported(sync, "the reference follows only full weights, with beta above 0")
    elif draft.has(sync):
        every, mix = draft.read(steps, positive_int, 64), draft.read(share, number, 0.9)
        draft.put("training.grpo.sync_reference", {"every": every, "mix": mix}, sync, steps, share)
    common.fit_generations(draft, draft.peek("training.grpo.num_generations", 8), MICRO)


def _weights(draft: RecipeDraft, method: str) -> None:
    if method == "dpo":
        _dpo(draft)
    if method == "grpo":
        _grpo(draft)
    _adapter(draft)
    _precision(draft)
    keys = [key for key in ("load_in_8bit", "load_in_4bit") if draft.read(key, boolean, False)]
    bits = 8 if "load_in_8bit" in keys else 4 if keys or draft.get("adapter") == "qlora" else None
    if common.quantization(draft, bits, "load_in_8bit", "load_in_4bit"):
        draft.fill(TABLES["four_bits"])
    if draft.has("unfrozen_parameters"):
        _unfrozen(draft)
    _groups(draft)


def _adapter(draft: RecipeDraft) -> None:
    kind = draft.get("adapter")
    if not kind:
        draft.ignore("adapter")
        return
    if kind not in ("lora", "qlora"):
        raise draft.wrong("adapter", "lora or qlora, which Baton has", "Choose one of them, or leave adapter empty.")
    common.lora(draft, "adapter", "lora_r", alpha=8, rate=RATE)
    linear, modules = "lora_target_linear", "lora_target_modules"
    if draft.read(linear, boolean, False):
        draft.put("adapter.target_modules", "all-linear", linear)
        if draft.has(modules):
            draft.not_needed(modules, f"{linear} takes all linear layers")
    elif draft.has(modules):
        pattern = draft.get(modules)
        target = pattern if isinstance(pattern, str) else draft.read(modules, words)
        draft.put("adapter.target_modules", target, modules)


def _precision(draft: RecipeDraft) -> None:
    """Sets types: axolotl holds all weights in the type it computes in."""
    pure = next((name for name in ("bfloat16", "float16", "float32") if draft.is_on(name)), None)
    keys = ("bf16", "fp16")
    if pure and not any(map(draft.has, keys)):
        draft.put("model.dtype", pure, pure)
        common.precision(draft, "fp32", *keys)
        return
    auto = draft.get("bf16", "auto") == "auto"
    half = draft.read("fp16", boolean, False)
    wanted = "bf16" if not auto and draft.read("bf16", boolean) else "fp16" if half else "bf16" if auto else "fp32"
    common.precision(draft, wanted, *keys)
    if wanted == "bf16" or (wanted == "fp16" and draft.peek("adapter") is not None):
        draft.put("model.dtype", common.DTYPES[wanted])
    if wanted == "bf16" and draft.get("bf16") == "auto":
        draft.changed("bf16", "taken as bf16, which needs an Ampere GPU or a newer one; fp16 for older ones")
    elif wanted == "bf16" and auto:
        draft.assumed.append("training.precision bf16, model.dtype bfloat16")


def _groups(draft: RecipeDraft) -> None:
    """Sets the parameters with their own learning rate."""
    rate = draft.read("learning_rate", number, RATE)
    groups: list[Document] = [*draft.peek("training.groups", [])]
    if draft.has("lr_groups"):
        groups += draft.read("lr_groups", _groups_of, [])
        draft.carry("training.groups", "lr_groups")
    own = draft.read("embedding_lr", number) or rate * draft.read("embedding_lr_scale", number, 0)
    if own:
        groups.append({"pattern": "embed_tokens|lm_head", "learning_rate": float(f"{own:.12g}")})
        draft.carry("training.groups", "embedding_lr", "embedding_lr_scale")
    if groups:
        draft.put("training.groups", groups)


def _groups_of(value: object) -> list[Document]:
    """Returns groups of parameters from axolotl's: name, parts of parameter names, rate."""
    keys = {"modules", "lr"}
    if not isinstance(value, list) or not all(isinstance(group, dict) and keys <= group.keys() for group in value):
        raise ValueError("groups of name, modules and lr")
    patterns = ["|".join(re.escape(name) for name in words(group["modules"])) for group in value]
    return [
        {"pattern": pattern, "name": str(group.get("name", pattern)), "learning_rate": number(group["lr"])}
        for pattern, group in zip(patterns, value, strict=True)
    ]


def _unfrozen(draft: RecipeDraft) -> None:
    """Sets the trained parameters: axolotl matches its patterns at the start of a name."""
    key = "unfrozen_parameters"
    if draft.peek("adapter") is not None:
        draft.unsupported(key, "an adapter freezes the weights; for whole layers, use adapter.modules_to_save")
        return
    patterns = []
    for pattern in draft.read(key, words, []):
        whole_name = re.sub(r"\[\d*:?\d*\]$", "", pattern)
        if whole_name != pattern:
            draft.changed(key, f"{pattern}: a part of a parameter cannot be trained alone, so all of it is")
        patterns.append(whole_name if whole_name.startswith("^") else f"^{whole_name}")
    draft.put("training.trainable.patterns", patterns, key)


def _arithmetic(draft: RecipeDraft, method: str) -> None:
    """Sets attention, recomputation, and the floor of a cosine."""
    for short, name in ATTENTION.items():
        if draft.is_on(f"{short}_attention"):
            draft.put("model.attention", name, f"{short}_attention")
    for key in ("attn_implementation", "attention"):
        value = str(draft.get(key, ""))
        name = ATTENTION.get(value, value)
        if name in ("flash_attention_3", *ATTENTION.values()):
            draft.put("model.attention", name, key)
    _recomputation(draft, method)
    key = "cosine_min_lr_ratio"
    if draft.has(key) and draft.get("lr_scheduler", "cosine") != "cosine":
        draft.not_needed(key, "lr_scheduler is not cosine")
    elif draft.has(key):
        draft.put("training.lr_scheduler", "cosine_with_min_lr", "lr_scheduler", key)
        draft.put("training.lr_scheduler_options", {"min_lr_rate": draft.read(key, number)})


def _recomputation(draft: RecipeDraft, method: str) -> None:
    """Sets recomputation and offloading of activations, where the method's trainer has them."""
    key, asked = "gradient_checkpointing", "activation_offloading"
    value = draft.get(key)
    offloads = value in ("offload", "offload_disk", "unsloth")
    if value is not None:
        draft.put("training.gradient_checkpointing", offloads or draft.read(key, boolean, False), key)
    if SPECS[method].offloads_activations:
        if offloads or draft.has(asked):
            draft.put("training.activation_offloading", True, asked)
        if value == "offload_disk":
            draft.changed(key, "activations go to the host's memory, not to a disk")
        return
    if offloads:
        draft.changed(key, f"activations are computed again, not offloaded: {method}'s trainer keeps them there")
    if draft.has(asked):
        draft.unsupported(asked, f"{method}'s trainer does not offload; take gradient_checkpointing: true")


METRICS = {"sacrebleu": "bleu", "chrf": "chrf"}


def _samples(draft: RecipeDraft) -> None:
    """Sets the samples that the model writes, in axolotl at each evaluation."""
    if draft.is_on("generate_samples"):
        draft.fill(TABLES["samples"])
        if not draft.read("generation_do_sample", boolean, True):
            draft.put("evaluation.temperature", 0.0)
        draft.carry("evaluation.temperature", "generation_do_sample")
        _sample_every(draft, "generate_samples")
    draft.ignore("generate_samples")
    if draft.has("eval_table_size") and not draft.peek("evaluation.samples"):
        draft.put("evaluation.samples", draft.read("eval_table_size", positive_int), "eval_table_size")
        _sample_every(draft, "eval_table_size")
    else:
        draft.drop("eval_table_size", "generate_samples decides", KeyResult.not_needed)


def _sample_every(draft: RecipeDraft, key: str) -> None:
    draft.carry("evaluation.samples", key)
    if every := draft.peek("evaluation.every"):
        draft.put("evaluation.sample_every", every)
    else:
        draft.changed(key, "written before and after training; in between: evaluation.sample_every in steps")


def _metrics(draft: RecipeDraft, method: str) -> None:
    key, which = "do_causal_lm_eval", "eval_causal_lm_metrics"
    if not draft.is_on(key) or SPECS[method].rows != "sequences":
        draft.drop(key, f"has no effect with {method}", KeyResult.not_needed)
        return
    wanted = draft.read(which, words, []) or ["sacrebleu", "comet", "ter", "chrf"]
    metrics = [METRICS[name] for name in wanted if name in METRICS]
    if metrics:
        draft.put("evaluation.metrics", list(dict.fromkeys(metrics)))
        draft.changed(key, "over evaluation.samples held-out rows, before and after training, not at each evaluation")
    draft.carry("evaluation.metrics", key, which)
    if others := [name for name in wanted if name not in (*METRICS, "perplexity")]:  # which every evaluation has
        draft.unsupported(
            which if draft.has(which) else key,
            f"{', '.join(others)}: Baton has none; functions of your own go into evaluation.functions",
        )


def _evaluation_tasks(draft: RecipeDraft) -> None:
    """Sets the harness's tasks, `name` or `name:examples` in axolotl."""
    key = "lm_eval_tasks"
    tasks = [task.partition(":") for task in draft.read(key, words, [])]
    if not tasks:
        draft.ignore(key)
        return
    draft.put("evaluation.tasks.names", list(dict.fromkeys(name for name, _, _ in tasks)), key)
    shots = {examples for _, _, examples in tasks}
    if len(shots) > 1 or not all(examples.isdecimal() for examples in shots - {""}):
        draft.changed(key, "one number of examples is for all tasks: evaluation.tasks.few_shot; their own are used")
    elif examples := "".join(shots):
        draft.put("evaluation.tasks.few_shot", int(examples))


KEYS = {
    **common.TABLES["keys"],
    **TABLES["keys"],
    **dict.fromkeys(("special_tokens", "tokens", "added_tokens_overrides", "eot_tokens"), common.settle_tokens),
    "plugins": _plugins,
    "shuffle_merged_datasets": _shuffled,
}
"""All keys but those of the methods' own settings."""


def _convert(draft: RecipeDraft) -> None:
    # In this order: later steps read the recipe that earlier ones have begun.
    method = common.begin(draft, *_choose(draft), TABLES["methods"])
    common.batch(draft, MICRO, 1, "batch_size")
    common.fit_memory(draft, method)
    common.length(draft, "num_epochs", 1.0)
    common.warmup(draft)
    draft.assume("training.warmup_steps", 0.03)
    if method == "kto":
        common.fit_kto(draft, MICRO)
    _weights(draft, method)
    data(draft, method)
    common.held_out(draft, "val_set_size")
    common.by_epoch(draft, "evals_per_epoch", "saves_per_epoch")
    common.evaluations(draft, by_default=True)
    common.checkpoints(draft)
    common.early_stopping(draft, "early_stopping_patience")
    common.best(draft)
    common.order(draft, method)
    _arithmetic(draft, method)
    common.betas(draft)
    common.compilation(draft)
    _samples(draft)
    _metrics(draft, method)
    _evaluation_tasks(draft)
    if draft.has("hub_model_id"):
        common.push(draft, "hub_model_id")
    assumed = {"training.lr_scheduler": "cosine", "training.optimizer": "adamw_torch_fused"}
    common.finish(draft, KEYS, "lr_scheduler", assumed)


TRAINER = OtherTrainer(
    tool="axolotl",
    model="base_model",
    nested=("datasets", "test_datasets", "pretraining_dataset", "trl", "bnb_config_kwargs"),
    convert=_convert,
)
