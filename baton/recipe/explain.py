"""Problems that pydantic finds in a recipe, in one line: path, value and remedy."""

import copy
import datetime
import difflib
import functools
import json
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from baton.recipe.base import written_name
from baton.recipe.recipe import Recipe
from baton.recipe.yaml_text import brief, lookalikes, plain

# Key of other trainers, or a misplaced one → dotted path in the recipe.
ELSEWHERE = {
    name: path
    for path, names in {
        "model.base": "base_model model_id model_name model_name_or_path",
        "model.tokenizer.base": "tokenizer_name",
        "model.dtype": "torch_dtype",
        "model.attention": "attn_implementation",
        "model.quantization.bits": "load_in_4bit load_in_8bit",
        "data.source": "dataset dataset_name dataset_path datasets path train_file",
        "data.columns": "column_mapping",
        "data.max_length": "cutoff_len max_seq_len max_seq_length sequence_len",
        "data.split.eval": "eval_ratio test_size val_set_size val_size",
        "data.packing": "sample_packing",
        "adapter": "lora peft",
        "adapter.alpha": "lora_alpha",
        "adapter.dropout": "lora_dropout",
        "adapter.r": "lora_r lora_rank rank",
        "adapter.target_modules": "lora_target_modules targets",
        "adapter.dora": "use_dora",
        "adapter.rslora": "use_rslora",
        "training.precision": "bf16 fp16",
        "training.batch_size": "effective_batch_size global_batch_size",
        "training.micro_batch_size": "gradient_accumulation_steps per_device_train_batch_size",
        "training.lr_scheduler": "learning_rate_scheduler lr_scheduler_type scheduler",
        "training.learning_rate": "lr",
        "training.epochs": "num_epochs num_train_epochs",
        "training.max_steps": "num_steps steps",
        "training.optimizer": "optim",
        "training.method": "stage",
        "training.warmup_steps": "warmup_ratio",
        "training.log_every": "logging_steps",
        "evaluation.max_new_tokens": "max_new_tokens",
        "chunks.checkpoint_every": "save_steps",
        "chunks.count": "num_chunks",
        "chunks.keep.last": "save_total_limit",
        "evaluation.every": "eval_steps",
        "store.uri": "output_dir",
        "tracking": "report_to",
        "resources.gpus": "gpu num_gpus",
    }.items()
    for name in names.split()
}

# Last part of the path of a field without a default → an example.
EXAMPLES = {
    "name": "my-model",
    "model": "{base: Qwen/Qwen3-0.6B}",
    "data": "{source: rows.jsonl}",
    "source": "rows.jsonl",
    "base": "Qwen/Qwen3-0.6B",
    "teacher": "Qwen/Qwen3-8B",
    "rewards": "[numeric]",
}

# Section → fields that a plain value in its place likely means, the likeliest first.
SHORT = {
    "adapter": ("type", "r"),
    "chunks": ("count",),
    "data": ("source",),
    "hooks": ("source",),
    "model": ("base",),
    "model.quantization": ("bits", "type"),
    "resources": ("gpus", "profile"),
    "tracking": ("mlflow",),
    "training": ("method",),
}


LIKE = 0.8  # likeness from which a key counts as misspelt, before other sections are searched for it
NUMBER = re.compile(r"\s*([-+]?[\d.,_]*\d(?:[eE][-+]?\d+)?)\s*(%|[A-Za-z][A-Za-z ]*)?")
WORD = re.compile(r"[A-Za-z0-9_./-]+")
MEANT = "did you mean"


def explain(problem: Mapping[str, Any], document: Mapping[str, Any], source: Callable[[], str | None]) -> str:
    """Returns a problem in words.

    Args:
        problem: An entry of `ValidationError.errors()` of a recipe.
        document: The recipe, on which remedies are tried out.
        source: Returns the value's text in the file; None where that is not known.
    """
    location = place_of(problem)
    path = as_written(".".join(str(part) for part in location))
    if problem["type"] == "extra_forbidden":
        return f"{path}: unknown key; {_instead_of(location)}"
    if problem["type"] == "missing":
        example = EXAMPLES.get(str(location[-1]))
        return f"{path}: missing, and it has no default" + (f"; write {location[-1]}: {example}" if example else "")
    message = problem["msg"].removeprefix("Value error, ")
    value = problem.get("input")
    if problem["type"] == "value_error" or not isinstance(value, str | int | float | datetime.date | None):
        return f"{path}: {message}" if path else message
    # YAML 1.1 reads `no`, `0755`, `1e3` and dates as other values, whose own text is unknown.
    text = _as_yaml(value) if isinstance(value, str) else source() or _as_yaml(value)
    shown = repr(value) if isinstance(value, str) else text
    hints = (words for words, meant in _hints(problem, path, text) if _is_accepted(document, location, meant))
    hint = next((f"; {words}" for words in hints), "")
    return f"{path}: {message} (got {brief(shown)}){hint}"


def place_of(problem: Mapping[str, Any]) -> tuple[str | int, ...]:
    """Returns a problem's place in the recipe, without the tried member of a union."""
    location: tuple[str | int, ...] = problem["loc"]
    is_tried = location and re.match(r"constrained|list\[|literal\[|str$", str(location[-1]))
    return location[:-1] if is_tried else location


def _as_yaml(value: str | float | datetime.date | None) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value).strip()


def _is_accepted(document: Mapping[str, Any], location: tuple[str | int, ...], value: Any) -> bool:
    """Tells whether a recipe has no problem at a place with this value there."""
    changed: Any = copy.deepcopy(dict(document))
    node = changed
    try:
        for part in location[:-1]:
            node = node[part]
        node[location[-1]] = value
    except (LookupError, TypeError):  # a place in a text that the schema takes apart
        return False
    try:
        Recipe.model_validate(changed)
    except ValidationError as error:
        return all(tuple(each["loc"][: len(location)]) != location for each in error.errors())
    return True


def _instead_of(location: tuple[Any, ...]) -> str:
    """Returns a remedy for an unknown key."""
    key, keys = str(location[-1]), _keys_at(location[:-1])
    if odd := lookalikes(key):
        return f"it has {odd}; {MEANT} {plain(key).strip()!r}?"
    here = ".".join(str(part) for part in location[:-1] if isinstance(part, str))
    if close := difflib.get_close_matches(key, keys, n=1, cutoff=LIKE):
        return f"{MEANT} {close[0]!r}?"
    known = ELSEWHERE.get(key)
    if known and known.rpartition(".")[0] == here:
        return f"{MEANT} {known.rpartition('.')[2]!r}?"
    others = [known] if known else [path for path in _all_paths() if path.rpartition(".")[2] == key]
    if others and "." not in others[0]:
        return f"{others[0]} belongs to the top level of the recipe: write it there, not below {here}"
    if others:
        depth = others[0].count(".")
        return f"it is {' or '.join(path for path in others if path.count('.') == depth)} here"
    if close := difflib.get_close_matches(key, keys, n=1, cutoff=0.6):
        return f"{MEANT} {close[0]!r}?"
    return f"known here: {', '.join(keys)}"


def _hints(problem: Mapping[str, Any], path: str, text: str) -> Iterator[tuple[str, Any]]:
    """Yields replacements of a value of the wrong kind, in words and as a value."""
    kind = str(problem["type"])
    if kind == "literal_error":
        expected = re.findall(r"'([^']+)'", problem["msg"])
        for each in difflib.get_close_matches(text.lower(), expected, n=1):
            yield f"{MEANT} {each!r}?", each
    elif kind == "list_type":
        yield f"write [{text}]", [problem["input"]]
    elif kind in ("model_type", "model_attributes_type", "dict_type") and path in SHORT:
        bits = re.fullmatch(r"(?i)int(\d)|(\d)[-_ ]?bits?", text)
        meant = int(bits[1] or bits[2]) if bits else problem["input"]
        for key in SHORT[path] if bits or WORD.fullmatch(text) else ():
            yield f"write {path.rpartition('.')[2]}: {{{key}: {meant if bits else text}}}", {key: meant}
    elif kind == "string_type":
        written = "" if problem["input"] is None else text
        yield f"write it in quotes: {written!r}", written
    elif kind in ("float_parsing", "int_parsing") and (match := NUMBER.fullmatch(text)):
        digits = match[1].replace(",", "").replace("_", "")
        number = f"{float(digits) / 100:g}" if match[2] == "%" else digits
        yield f"write {number}", number
    elif kind == "string_pattern_mismatch":
        slug = re.sub(r"[^a-z0-9]+", "-", text.lower())[:63].strip("-")
        quantity = re.sub(r"(?i)^([\d.]+) *([kmgtpe])(i?)b?$", lambda m: f"{m[1]}{m[2].upper()}{m[3].lower()}", text)
        for each in (quantity, slug):
            yield f"{MEANT} {each!r}?", each


@functools.cache
def renamed() -> dict[str, str]:
    """Returns people's path → field's path, where these differ; see `WrittenAs`."""

    def below(section: type[BaseModel], fields: str, written: str) -> Iterator[tuple[str, str]]:
        for name, field in section.model_fields.items():
            theirs = f"{written}{written_name(name, field)}"
            if theirs != fields + name:
                yield theirs, fields + name
            if inner := _section_of(field.annotation):
                yield from below(inner, f"{fields}{name}.", f"{theirs}.")

    return dict(below(Recipe, "", ""))


def as_written(path: str) -> str:
    """Returns people's path of a field."""
    return next((theirs for theirs, ours in renamed().items() if ours == path), path)


def _keys_at(location: tuple[Any, ...]) -> list[str]:
    """Returns the keys of the section at a location of the schema."""
    model: type[BaseModel] | None = Recipe
    for part in location:
        field = model.model_fields.get(str(part)) if model else None
        if field is not None:
            model = _section_of(field.annotation)
    return [written_name(name, field) for name, field in model.model_fields.items()] if model else []


@functools.cache
def _all_paths() -> tuple[str, ...]:
    return tuple(_paths())


def _paths(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[str]:
    """Yields the paths of all fields outside lists, the shallow ones first."""
    inner: list[tuple[type[BaseModel], str]] = []
    for name, field in model.model_fields.items():
        yield prefix + written_name(name, field)
        section = _section_of(field.annotation)
        if section and "list[" not in str(field.annotation) and name != "sweep":
            inner.append((section, f"{prefix}{name}."))
    for section, path in inner:
        yield from _paths(section, path)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, list, typing.Annotated):
        for argument in typing.get_args(annotation):
            if section := _section_of(argument):
                return section
    return None
