"""LLaMA-Factory's training files as recipes: keys, data sets (`dataset_info.json`) and templates."""

import json
import os
import re
from typing import Any

from baton.errors import UserError
from baton.importers import common
from baton.importers.common import FORMS, DataSet, RowShape, speaks_as
from baton.importers.draft import Document, KeyResult, OtherTrainer, RecipeDraft, boolean, name_for
from baton.importers.parse import Carried, number, positive_int, tables, text, words
from baton.recipe.data import Columns, Side
from baton.recipe.methods import SPECS
from baton.store.clouds import CLOUDS

Entry = dict[str, Any]

COLUMNS = {
    "text": {"text": "prompt"},
    "instruction": {"instruction": "prompt", "input": "query", "output": "response"},
    "prompt-completion": {"prompt": "prompt", "completion": "response"},
    "messages": {"messages": "messages"},
    "sharegpt": {"conversations": "messages"},
    "preference": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
    "ranked": {"prompt": "prompt", "responses": "response"},
    "rated": {"prompt": "prompt", "completion": "response", "label": "kto_tag"},
}
"""Our columns → LLaMA-Factory's, by row shape."""

TALKS = {
    "preference": COLUMNS["preference"] | {"prompt": "messages"},
    "rated": {"completion": "messages", "label": "kto_tag"},
}
"""The same for conversations, where they differ: rated ones hold their prompt."""

ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
"""Default columns of alpaca rows."""

TAGS = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt",
        "observation_tag": "observation", "function_tag": "function_call", "system_tag": "system"}  # fmt: skip
"""Default tags of messages."""

SPEAKING = {"user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool", "function_tag": "assistant",
            "system_tag": "system"}  # fmt: skip

JOIN = "\n"
"""LLaMA-Factory's separator between the columns of a prompt."""

BESIDE = {"system": "system", "tools": "tools"}
"""Our columns → theirs, with messages."""

UNREAD = {
    "system": "text that is written without a chat template has no system message; put it into the prompt",
    "tools": "text that is written without a chat template has no tools",
    "history": "call it history in the rows: earlier rounds are found by that name",
    "images": "Baton learns from text alone",
    "videos": "Baton learns from text alone",
    "audios": "Baton learns from text alone",
}

ALIKE = {
    "chatml": "the same text; the tokenizer is taken as it is, so its marks are single tokens only where it has them",
    "llama3": "the same text, but for white space around a message, which is taken off as Meta's own template does",
}
"""Template → its small difference from Baton's of the same name."""

NOT_ALIKE = {
    "zephyr": "LLaMA-Factory's has no line break after the end of a text and its own system message. The "
    "tokenizer's own is used; model.chat_template: zephyr is Hugging Face's",
    "alpaca": "LLaMA-Factory's puts Stanford's preamble before conversations without a system message; the tokenizer's "
    "own is used; model.chat_template: alpaca has the system message of the row alone",
}
"""Template → its difference from Baton's of the same name, too large to take that."""

SYSTEMS = {
    "chatml_de": "Du bist ein freundlicher und hilfsbereiter KI-Assistent.",
    "qwen": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "qwen2_vl": "You are a helpful assistant.",
}
"""Template → its default system message."""

AS_TEXT = ("empty", "fewshot")
"""Templates that add nothing."""

PREAMBLE = "written with Stanford's prompt: an input has its own heading, and no empty line follows at the end"
NOTHING_AROUND = "prompt and answer without anything between them, and the end of the text after the answer"


def row_shape(method: str, entry: Entry, template: str) -> RowShape:
    """Returns the shape of a data set's rows; `entry` is its part of `dataset_info.json`."""
    talks = entry.get("formatting") in ("sharegpt", "openai")
    given = entry.get("columns") or {}
    silent = {"query": "", "response": ""} if given else {}  # these two have no default with given columns
    theirs: Entry = {**({"messages": "conversations"} if talks else {**ALPACA, **silent}), **given}
    shape: str = SPECS[method].formats[0]
    if method == "sft" and talks:
        shape = FORMS.get(_form(entry), "sharegpt")
    elif method == "sft":
        shape = "instruction" if template == "alpaca" else "prompt-completion"
    elif shape == "preference" and entry.get("ranking") and not (theirs.get("chosen") or theirs.get("rejected")):
        shape = "ranked"  # once, answers were a list, the better one first
    as_text = template in AS_TEXT or (template == "alpaca" and shape == "instruction")
    names = TALKS.get(shape, COLUMNS[shape]) if talks else COLUMNS[shape]
    if talks or not (as_text or shape == "text"):  # texts become turns, which have a place for them
        names = {**names, **BESIDE}
    columns: Columns = {ours: str(theirs[name]) for ours, name in names.items() if theirs.get(name)}
    if theirs.get("query") and shape != "instruction" and not talks:
        ours = "text" if shape == "text" else "prompt"
        columns[ours] = [str(theirs[name]) for name in ("prompt", "query") if theirs.get(name)]
    return RowShape(
        format=shape,
        columns={ours: name for ours, name in columns.items() if ours != name},
        talks=talks,
        renders="text" if as_text and not talks else None,
    )


def _tags(entry: Entry) -> Entry:
    return {**TAGS, **{key: value for key, value in (entry.get("tags") or {}).items() if value}}


def _form(entry: Entry) -> tuple[str, str]:
    tags = _tags(entry)
    return str(tags["role_tag"]), str(tags["content_tag"])


def unread_keys(entry: Entry, shape: RowShape) -> list[str]:
    """Returns a line for each part of a data set's description that Baton does not read."""
    given, tags = entry.get("columns") or {}, _tags(entry)
    read = {} if shape.renders == "text" or shape.format == "text" else {**BESIDE}
    if given.get("history") == "history" and not shape.talks:
        read["history"] = "history"
    lines = [f"column {given[key]!r}: {why}" for key, why in UNREAD.items() if given.get(key) and key not in read]
    if shape.talks:
        if _form(entry) not in FORMS:
            lines.append("Baton reads messages with from and value, or role and content: rename their keys")
        if strange := [str(tags[tag]) for tag, role in SPEAKING.items() if not speaks_as(tags[tag], role)]:
            names = ", ".join(strange)
            lines.append(f"messages from {names}: Baton knows human, gpt, system and the like; rename them")
        if shape.format == "text":
            lines.append("conversations: rows of format text are text; write them out")
        if entry.get("formatting") == "openai":
            lines.append("no 'detailed thinking off' is put in front")
    return [*lines, "folder is not read"] if entry.get("folder") else lines


def row_template(draft: RecipeDraft, shape: RowShape | None) -> None:
    """Sets the chat template by the first data set's shape."""
    key = "template"
    name = str(draft.get(key, ""))
    if not draft.has(key):
        draft.ignore(key)
    elif shape and shape.format == "text":
        draft.not_needed(key, "plain text has no template")
    elif shape and shape.renders == "text":
        draft.put("data.render_as", "text", key)
        if name in AS_TEXT:
            draft.put("data.separator", "")
        draft.changed(key, NOTHING_AROUND if name in AS_TEXT else PREAMBLE)
    else:
        if shape and not shape.talks:
            draft.put("data.render_as", "chat")
        _named(draft, key, name)


def _named(draft: RecipeDraft, key: str, name: str) -> None:
    """Sets a template by name, with its system message."""
    model = str(draft.get("model_name_or_path"))
    plain = name.removesuffix("_nothink")
    if name in ALIKE:
        draft.put("model.chat_template", name, key)
        draft.changed(key, ALIKE[name])
    elif name in NOT_ALIKE:
        draft.unsupported(key, NOT_ALIKE[name])
    elif name in ("default", "llama2"):
        draft.put("model.chat_template", common.WRITTEN_OUT_TEMPLATES[name], key)
    elif name != plain and "instruct" not in model.lower():
        draft.put("model.chat_template", "chatml", key)
        draft.changed(key, "the same text without tools, for which the tokenizer's own template is needed")
    elif name != "fewshot":
        common.named_template(draft, key, "chatml" if name == "chatml_de" else plain, model)
    else:
        draft.unsupported(key, common.OTHER_TEMPLATE)
    if name in SYSTEMS and not draft.has("default_system"):
        draft.put("data.system", SYSTEMS[name])


MIXED = (
    "datasets are joined, each row once. A weight is the number of uses of a row in a pass, not the probability of its "
    "source. For probability p of n rows, out of N in all, give weight p·N/n"
)


def data(draft: RecipeDraft, method: str) -> None:
    """Sets source, format and columns, and the part of a row that counts."""
    names = draft.read("dataset", words, [])
    if not names:
        raise UserError(f"{draft.origin}: dataset is missing.", remedy="Name the data sets to train on.")
    held_out = draft.read("eval_dataset", words, [])
    folder, entries = _find(draft, [*names, *held_out])
    sides: tuple[tuple[str, list[str], Side | None], ...] = (
        ("dataset", names, "train" if held_out else None),
        ("eval_dataset", held_out, "eval"),
    )
    sets = [_rows(draft, method, folder, name, key, entries, side) for key, group, side in sides for name in group]
    draft.carry("data.source", "dataset", "eval_dataset", "dataset_dir")
    common.put(draft, sets)
    shapes = [rows.shape for rows in sets if rows.shape]
    if any(isinstance(column, list) for shape in shapes for column in shape.columns.values()):
        draft.put("data.join", JOIN)
    _samples(draft, len(sets), {name: entries[name] for name in (*names, *held_out) if name in entries})
    shape = shapes[0] if shapes else None
    row_template(draft, shape)
    common.loss(draft, "train_on_prompt", method, shape)
    _turns(draft, method, shape)
    _packing(draft, method)
    _mix(draft)


def _find(draft: RecipeDraft, names: list[str]) -> tuple[str | None, Entry]:
    """Returns the folder of `dataset_info.json` and its content."""
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


def _rows(
    draft: RecipeDraft, method: str, folder: str | None, name: str, key: str, entries: Entry, side: Side | None
) -> DataSet:
    """Returns a data set, and notes the parts that Baton does not read."""
    if name not in entries:
        place = folder or f"{draft.get('dataset_dir', 'data')!r} or beside the file"
        draft.unsupported(key, f"{name!r} is in no dataset_info.json in {place}; put its address into data.source")
        return DataSet(key=_about(name), uris=[name], side=side)
    entry = entries[name]
    parts = [entry, *(entry.get(part) or {} for part in ("columns", "tags"))] if isinstance(entry, dict) else [entry]
    if not all(isinstance(part, dict) for part in parts):
        raise UserError(
            f"dataset_info.json: {name!r} is {entry!r}, expected keys and values, in columns and tags too.",
            remedy="Correct it.",
        )
    shape = row_shape(method, entry, str(draft.get("template", "")))
    for line in unread_keys(entry, shape):
        draft.unsupported(_about(name), line)
    return DataSet(key=_about(name), uris=[_source(draft, folder, name, entry)], shape=shape, side=side)


def _source(draft: RecipeDraft, folder: str | None, name: str, entry: Entry) -> str:
    """Returns the address of a data set's rows; its name where Baton cannot read them."""
    if hub := entry.get("hf_hub_url"):
        split = entry.get("split") and common.side(draft, _about(name), entry["split"])
        where = {"revision": entry.get("revision"), "config": entry.get("subset"), "split": split}
        return common.on_hub(hub, **where)
    if "file_name" in entry:
        return draft.relative(str(entry["file_name"]), folder or "")
    address = str(entry.get("cloud_file_name", ""))
    if "://" in address and address.partition("://")[0] in ("file", *CLOUDS):
        return address
    draft.unsupported(_about(name), "comes from no file, store or Hugging Face's hub; put its address into data.source")
    return name


def _about(name: str) -> str:
    return f"dataset_info.json: {name}"


def _samples(draft: RecipeDraft, sets: int, entries: Entry) -> None:
    """Sets how many rows are used: the first, or drawn ones where a data set has its own number."""
    key = "max_samples"
    Carried("data.max_samples", positive_int)(draft, key)
    if sets > 1 and draft.has(key):
        draft.changed(key, "counts all rows together, taken from the start, not those of each data set")
    for name, entry in entries.items():
        wanted = entry.get("num_samples")
        if wanted and (sets > 1 or draft.has(key)):
            draft.unsupported(
                _about(name), "num_samples is not read: data.max_samples and shuffle are for all rows together"
            )
        elif wanted:
            draft.put("data.max_samples", wanted)
            draft.put("data.shuffle", True)
            draft.changed(_about(name), "num_samples: rows are drawn, and none is used twice where there are fewer")


def _mix(draft: RecipeDraft) -> None:
    strategy = str(draft.get("mix_strategy", "concat"))
    for key in ("mix_strategy", "interleave_probs"):
        if not draft.has(key):
            draft.ignore(key)
        elif strategy == "concat":
            draft.carry("data.source", key)
        elif strategy == "interleave_once":
            draft.not_needed(key, "each row is used once in a pass, in an order that is drawn from seed")
        else:
            draft.unsupported(key, MIXED if key == "mix_strategy" else "see mix_strategy")


def _turns(draft: RecipeDraft, method: str, shape: RowShape | None) -> None:
    """Sets the loss, the reasoning and the system message of conversations."""
    last, system, thinks = "mask_history", "default_system", "enable_thinking"
    if not draft.is_on(last):
        draft.ignore(last)
    elif method != "sft" or not (shape and shape.talks):
        draft.not_needed(last, "each row has one answer")
    else:
        draft.put("data.train_on", "last", last)
    if not draft.has(system):
        draft.ignore(system)
    elif shape and (shape.format == "text" or shape.renders == "text"):
        draft.unsupported(system, "text that is written without a chat template has no system message")
    else:
        draft.put("data.system", draft.read(system, text), system)
    if method == "sft" and draft.get(thinks) is not None:
        draft.put("data.reasoning", "keep" if draft.read(thinks, boolean) else "drop", thinks)
    else:
        draft.drop(thinks, f"has no effect with {method}", KeyResult.not_needed)


def _packing(draft: RecipeDraft, method: str) -> None:
    packing, neat = "packing", "neat_packing"
    if method == "pretrain":
        draft.put("data.packing", draft.read(packing, boolean, True), packing, neat)
        return
    for key in filter(draft.has, (packing, neat)):
        if method != "sft":
            draft.unsupported(key, common.UNPACKED)
            continue
        draft.put("data.packing", "best-fit", key)
        if not draft.has(neat):
            draft.changed(key, "rows that share a sequence do not see each other, as with neat_packing")
    draft.ignore(packing)
    draft.ignore(neat)


TABLES = tables(
    "llamafactory",
    {
        "gigabytes": lambda value: f"{positive_int(value)}GB",
        "revision": lambda value: None if value == "main" else text(value),
    },
)
DRAWN = "samples are drawn by evaluation.temperature and top_p alone"


def _tracking(draft: RecipeDraft, key: str) -> None:
    names = draft.read(key, words, [])
    if names == ["none"]:
        draft.put("tracking.mlflow", None, key)
        return
    if "tensorboard" in names:
        draft.put("tracking.tensorboard", True, key)
    if "wandb" in names:
        draft.put("tracking.wandb", name_for(draft.origin), key)
        draft.changed(key, "the project of Weights & Biases has the recipe's name: change tracking.wandb")
    draft.carry("tracking.mlflow", *([key] if "mlflow" in names else []))
    if others := [name for name in names if name not in ("mlflow", "tensorboard", "wandb")]:
        logged = "Baton logs to MLflow, TensorBoard and Weights & Biases: tracking"
        draft.unsupported(key, f"{', '.join(others)}: {logged}")


def _beams(draft: RecipeDraft, key: str) -> None:
    if draft.read(key, positive_int, 1) > 1:
        draft.unsupported(key, f"{DRAWN}, 0 takes the likeliest token")
    else:
        draft.ignore(key)


ATTENTION = {"disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2", "fa3": "flash_attention_3"}

STAGES = {"pt": "pretrain", "sft": "sft", "rm": "reward", "kto": "kto", "dpo": "dpo"}

PREFERENCES: dict[str, tuple[str, Document]] = {
    "sigmoid": ("dpo", {}),
    "hinge": ("dpo", {"loss": ["hinge"]}),
    "ipo": ("dpo", {"loss": ["ipo"]}),
    "orpo": ("orpo", {}),
    "simpo": ("cpo", {"loss": "simpo", "likelihood": 0.0}),
}
"""`pref_loss` → method and settings."""

RATE = 5e-5
"""Default learning rate."""


def _choose(draft: RecipeDraft) -> tuple[str, Document]:
    """Returns the training method, and the settings that stage and loss imply."""
    stage = str(draft.get("stage", "sft"))
    if stage == "ppo":
        raise UserError(
            f"{draft.origin}: stage is 'ppo', and Baton has no PPO.",
            remedy="Take training.method grpo or rloo with a reward function; see docs/reference/recipe.",
        )
    if stage not in STAGES:
        raise draft.wrong("stage", f"one of {', '.join(STAGES)}")
    draft.carry("training.method", "stage")
    if stage == "rm":
        draft.changed("stage", "the score comes from a sequence classifier, not from a value head of the model")
    return _preference(draft) if stage == "dpo" else (STAGES[stage], {})


def _preference(draft: RecipeDraft) -> tuple[str, Document]:
    loss = str(draft.get("pref_loss", "sigmoid"))
    if loss not in PREFERENCES:
        draft.unsupported("pref_loss", f"no such loss; sigmoid is used. Baton has {', '.join(PREFERENCES)} and more")
        loss = "sigmoid"
    method, settings = PREFERENCES[loss]
    draft.carry(f"training.{method}", "pref_loss")
    if method != "dpo":
        return method, settings
    losses, shares = settings.get("loss", ["sigmoid"]), [1.0]
    for key, name in (("pref_bco_weight", "bco_pair"), ("pref_ftx", "sft")):
        share = draft.read(key, number, 0.0)
        if share:
            losses, shares = [*losses, name], [*shares, share]
            draft.changed(key, f"added as loss {name}, whose mean is TRL's: over the batch's tokens, not per answer")
    if draft.has("dpo_label_smoothing"):
        nearest = f"{{loss: robust, label_smoothing: {draft.get('dpo_label_smoothing')}}}"
        draft.unsupported("dpo_label_smoothing", f"sigmoid takes none here; training.dpo: {nearest} is the nearest")
    return method, {"loss": losses, "loss_weights": shares} if len(losses) > 1 else settings


def _weights(draft: RecipeDraft, method: str) -> None:
    kind = str(draft.get("finetuning_type", "lora"))
    if kind == "lora":
        common.lora(draft, "finetuning_type", "lora_rank", alpha=None, rate=RATE)
        target = draft.read("lora_target", words, ["all"])
        draft.put("adapter.target_modules", "all-linear" if target == ["all"] else target, "lora_target")
    elif kind == "freeze":
        _freeze(draft)
    elif kind == "full":
        draft.carry("adapter", "finetuning_type")
    else:
        raise draft.wrong("finetuning_type", "lora, freeze or full, which Baton has", "Choose one of them.")
    _precision(draft, kind)
    _quantization(draft)


def _freeze(draft: RecipeDraft) -> None:
    """Sets the trained blocks: the last by number, the first by name."""
    key, parts, extra = "freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules"
    count = int(draft.read(key, number, 2))
    if abs(count) > 1000:
        raise draft.wrong(key, "a number of layers")
    patterns = [re.escape(name) for name in draft.read(extra, words, [])]
    if count > 0:
        draft.put("training.trainable.last_layers", count, key, "finetuning_type")
    elif count < 0:
        first = "|".join(str(at) for at in range(-count))
        patterns.insert(0, rf"\.(layers|h|blocks)\.({first})\.")
        draft.changed(key, "the first blocks by their names; check the pattern against the model's parameter names")
    elif not patterns:
        raise draft.wrong(key, f"a number of layers other than 0, or {extra}")
    if patterns:
        draft.put("training.trainable.patterns", patterns, key, extra, "finetuning_type")
    if draft.get(parts, "all") == "all":
        draft.carry("training.trainable", parts)
    else:
        draft.unsupported(parts, "whole blocks are trained; give their parts in trainable.patterns")


def _precision(draft: RecipeDraft, kind: str) -> None:
    """Sets types: frozen weights in the short type, trained ones in 32 bits unless `pure_bf16`."""
    pure = draft.read("pure_bf16", boolean, False)
    short = next((name for name in ("bf16", "fp16") if draft.read(name, boolean, False)), "fp32")
    common.precision(draft, "fp32" if pure else short, "bf16", "fp16")
    if pure:
        draft.put("model.dtype", "bfloat16", "pure_bf16")
    elif kind == "lora" and short != "fp32":
        draft.put("model.dtype", common.DTYPES[short])
    draft.ignore("pure_bf16")


def _quantization(draft: RecipeDraft) -> None:
    key, method = "quantization_bit", "quantization_method"
    if draft.has(key) and str(draft.get(method, "bnb")) not in ("bnb", "bitsandbytes"):
        for named in (key, method):
            draft.unsupported(named, "only bitsandbytes is there: set model.quantization; weights are whole here")
        return
    bits = draft.read(key, positive_int)
    if bits not in (None, 4, 8):
        draft.unsupported(key, "bitsandbytes has 4 and 8 bits: set model.quantization; weights are whole here")
    elif common.quantization(draft, bits, key, method):
        draft.put("model.quantization.type", str(draft.get("quantization_type", "nf4")), "quantization_type")
        double = draft.read("double_quantization", boolean, True)
        draft.put("model.quantization.double", double, "double_quantization")


def _arithmetic(draft: RecipeDraft) -> None:
    off, path = "disable_gradient_checkpointing", "training.gradient_checkpointing"
    draft.put(path, not draft.read(off, boolean, False), off)
    draft.carry(path, "gradient_checkpointing")
    chosen = str(draft.get("flash_attn"))
    if chosen in ATTENTION:
        draft.put("model.attention", ATTENTION[chosen], "flash_attn")
    elif chosen == "auto":
        draft.carry("model.attention", "flash_attn")


def _generation(draft: RecipeDraft, method: str) -> None:
    """Sets sampling, and the metrics that LLaMA-Factory takes with it."""
    key = "predict_with_generate"
    if not draft.is_on(key):
        draft.ignore(key)
        return
    if method != "sft":
        draft.not_needed(key, f"has no effect with {method}")
        return
    draft.put("evaluation.metrics", ["bleu", "rouge"])
    draft.changed(
        key,
        "over evaluation.samples held-out rows, with sacreBLEU and rouge-score: LLaMA-Factory cuts texts into words "
        "with jieba, and takes BLEU over the characters of each",
    )
    draft.carry("evaluation.temperature", "do_sample")
    usual = {"temperature": 0.95, "top_p": 0.7, "max_new_tokens": 1024}
    if not draft.read("do_sample", boolean, True):
        usual = {"max_new_tokens": 1024}
        draft.put("evaluation.temperature", 0.0, "temperature")
        for name in ("top_p", "top_k", "temperature"):
            draft.drop(name, "do_sample is off", KeyResult.not_needed)
    elif draft.has("top_k"):
        draft.unsupported("top_k", DRAWN)
    else:
        draft.changed(key, "its usual top_k of 50 has no counterpart")
    for name, value in usual.items():
        draft.put(
            f"evaluation.{name}", draft.read(name, positive_int if name == "max_new_tokens" else number, value), name
        )
        if draft.get(name) is None:
            draft.assumed.append(f"evaluation.{name} {value:g}")


def _hub(draft: RecipeDraft) -> None:
    export, model, private = "export_hub_model_id", "hub_model_id", "hub_private_repo"
    pushed = export if draft.has(export) and common.push(draft, export) else None
    asked = draft.is_on("push_to_hub")
    if asked and draft.has(model):
        if pushed:
            draft.unsupported(model, f"a run pushes to one repository: {export}")
        elif common.push(draft, model):
            pushed = model
        draft.carry("export.hub", "push_to_hub")
    elif asked:
        draft.unsupported("push_to_hub", "without hub_model_id; give organisation/name in export.hub.repo")
    if pushed and draft.get(private) is None:
        draft.changed(pushed, "a new repository is private: export.hub.private")
    elif pushed:
        draft.put("export.hub.private", draft.read(private, boolean), private)


KEYS = {
    **common.TABLES["keys"],
    **TABLES["keys"],
    **dict.fromkeys(("add_tokens", "add_special_tokens", "new_special_tokens"), common.settle_tokens),
    **dict.fromkeys(("num_beams", "eval_num_beams"), _beams),
    "report_to": _tracking,
}
"""All keys but those of the methods' own settings."""


def _convert(draft: RecipeDraft) -> None:
    # In this order: later steps read the recipe that earlier ones have begun.
    method = common.begin(draft, *_choose(draft), TABLES["methods"])
    common.batch(draft, "per_device_train_batch_size", 8, None)
    common.fit_memory(draft, method)
    common.length(draft, "num_train_epochs", 3.0)
    common.warmup(draft)
    if method == "kto":
        common.fit_kto(draft, "per_device_train_batch_size")
    _weights(draft, method)
    data(draft, method)
    common.held_out(draft, "val_size")
    common.evaluations(draft, by_default=False)
    common.checkpoints(draft)
    common.early_stopping(draft, "early_stopping_steps")
    common.best(draft)
    common.order(draft, method)
    _arithmetic(draft)
    common.betas(draft)
    common.compilation(draft)
    _generation(draft, method)
    _hub(draft)
    assumed = {"training.learning_rate": RATE, "data.max_length": 2048}
    common.finish(draft, KEYS, "lr_scheduler_type", assumed)


TRAINER = OtherTrainer(tool="LLaMA-Factory", model="model_name_or_path", convert=_convert)
