"""Identity of an attached run: its dataset's digest, and facts that decide the bits, compared by value."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import datasets
import pyarrow as pa
import torch
import xxhash
from torch import nn
from transformers import Trainer, TrainerCallback

from baton.checkpoint.digest import tree_digest
from baton.documents import Json
from baton.errors import UserError
from baton.runs.documents import Script

AT_ONCE = 1000
"""Rows that are hashed at a time: a whole number of bytes also where a value takes one bit."""


def dataset_identity(rows: Any) -> Json:
    """Returns the number of rows and the digest of their content; for rows that are no table, facts known unread."""
    if isinstance(rows, Mapping):
        return {str(name): dataset_identity(part) for name, part in rows.items()}
    if isinstance(rows, datasets.Dataset):
        return {"rows": len(rows), "columns": sorted(rows.column_names), "digest": dataset_digest(rows)}
    kind = f"{type(rows).__module__}.{type(rows).__qualname__}"
    if isinstance(rows, datasets.IterableDataset):
        return {"kind": kind, "columns": sorted(rows.column_names or [])}
    return {"kind": kind, "rows": len(rows) if hasattr(rows, "__len__") else None}


def dataset_digest(rows: datasets.Dataset) -> str:
    """Returns a digest of the rows in order, which depends on their content and not on files or earlier steps."""
    plain = rows.with_format("arrow")
    names = sorted(rows.column_names)
    whole = xxhash.xxh3_128()
    for start in range(0, len(rows), AT_ONCE):
        table = plain[start : start + AT_ONCE].select(names).replace_schema_metadata(None).combine_chunks()
        sink = pa.BufferOutputStream()
        # Arrow's stream format drops the buffers' bytes before and after a slice, so the rows' files do not count.
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        whole.update(sink.getvalue())
    return whole.hexdigest()


NOT_COUNTED = frozenset(
    {
        "output_dir", "overwrite_output_dir", "logging_dir", "run_name", "project", "report_to", "trackio_space_id",
        "trackio_bucket_id", "trackio_static_space_id", "disable_tqdm", "log_level", "log_level_replica",
        "log_on_each_node", "do_train", "do_eval", "do_predict", "resume_from_checkpoint",
        "restore_callback_states_from_checkpoint", "enable_jit_checkpoint", "save_strategy", "save_steps",
        "save_total_limit", "save_only_model", "save_safetensors", "save_on_each_node", "load_best_model_at_end",
        "push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo", "hub_always_push",
        "hub_revision", "skip_memory_metrics", "debug", "dataset_num_proc", "dataloader_num_workers",
        "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor",
        "dataloader_multiprocessing_context", "torch_empty_cache_steps", "log_completions", "num_completions_to_print",
        "teacher_model_name_or_path",  # its weights count, wherever they lie
    }
)  # fmt: skip
"""Arguments that change no bit: destinations, how often checkpoints are written, who fetches rows."""
MODELS = ("ref_model", "teacher_model", "reward_model")
"""Attributes of trainers that hold a second model, which no checkpoint has."""

_begun: WeakKeyDictionary[Trainer, dict[str, dict[str, Any]]] = WeakKeyDictionary()
"""Trainer → run → model and optimizer at its start: a chunk in this process leaves the trainer with other weights."""


def run_identity(trainer: Trainer, run_uri: str, identity: Mapping[str, Any] | None) -> Json:
    """Returns the facts that must be the same for a run to be resumed by a trainer as its script has built it."""
    args = trainer.args
    found: dict[str, Any] = {
        "trainer": _name(type(trainer)),
        "arguments": {name: value for name, value in args.to_dict().items() if name not in NOT_COUNTED},
        **_begun.setdefault(trainer, {}).setdefault(
            run_uri, {"model": _model(trainer), "optimizer": _optimizer(trainer)}
        ),
        "rows": dataset_identity(trainer.train_dataset),
        "tokenizer": _tokenizer(trainer.processing_class),
        "collator": _name(trainer.data_collator),
        "rewards": [
            _weights(reward, trained=None) if isinstance(reward, nn.Module) else _name(reward)
            for reward in getattr(trainer, "reward_funcs", [])
        ],
        "callbacks": [_name(each) for each in trainer.callback_handler.callbacks if _counts(each)],
    }
    if args.eval_strategy != "no" and trainer.eval_dataset is not None:
        found["held_out"] = dataset_identity(trainer.eval_dataset)
    if identity:
        try:
            found["identity"] = json.loads(json.dumps(dict(identity), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise UserError(f"identity is {identity!r}; expected names and JSON values ({error}).") from None
    document: Json = json.loads(json.dumps(found, default=_as_text, sort_keys=True))
    return document


def running_script() -> Script:
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if not path or not Path(path).is_file():
        return Script()
    return Script(path=str(path), sha256=hashlib.sha256(Path(path).read_bytes()).hexdigest())


def _model(trainer: Trainer) -> dict[str, Any]:
    model = trainer.model
    config = getattr(model, "config", None)
    facts: dict[str, Any] = {
        "class": _name(type(model)),
        "config": _hash({**config.to_dict(), "_name_or_path": None, "transformers_version": None}) if config else None,
        "trained": sum(weight.numel() for weight in model.parameters() if weight.requires_grad),
        "begins_with": _weights(model, trained=True),
        "frozen": _weights(model, trained=False),
        "adapter": {
            name: {**value.to_dict(), "base_model_name_or_path": None}
            for name, value in getattr(model, "peft_config", {}).items()
        },
    }
    for name in MODELS:
        other = getattr(trainer, name, None)
        # A reference that moves is in the checkpoint.
        if isinstance(other, nn.Module) and not (
            name == "ref_model" and getattr(trainer.args, "sync_ref_model", False)
        ):
            facts[name] = _weights(other, trained=None)
    return facts


def _weights(model: nn.Module, *, trained: bool | None) -> str:
    chosen: dict[str, torch.Tensor] = {
        name: weight.detach()
        for name, weight in model.named_parameters()
        if trained is None or weight.requires_grad is trained
    }
    return tree_digest(chosen)


def _tokenizer(processing: Any) -> str | None:
    """Returns the digest of a tokenizer, whatever it was last asked to cut or fill up."""
    tokenizer = getattr(processing, "tokenizer", processing)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return _name(type(tokenizer)) if tokenizer is not None else None
    document = json.loads(backend.to_str())
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return _hash(
        [{**document, "truncation": None, "padding": None}, special, getattr(processing, "chat_template", None)]
    )


def _optimizer(trainer: Trainer) -> dict[str, Any] | None:
    """Returns the optimizer that the script has built itself; None where the arguments name it."""
    own, chosen = trainer.optimizer, getattr(trainer, "optimizer_cls_and_kwargs", None)
    if chosen:
        return {"class": _name(chosen[0]), "settings": chosen[1]}
    if own is None:
        return None
    bare = getattr(own, "optimizer", own)
    return {"class": _name(type(bare)), "scheduler": _name(type(trainer.lr_scheduler))}


def _counts(callback: TrainerCallback) -> bool:
    """Tells a callback of the script's or TRL's from those by which Transformers shows and reports."""
    module = type(callback).__module__
    return not module.startswith(("transformers.integrations", "transformers.utils.notebook", "baton.")) and type(
        callback
    ).__name__ not in ("PrinterCallback", "ProgressCallback", "RichProgressCallback", "NotebookProgressCallback")


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=_as_text, sort_keys=True).encode()).hexdigest()


def _name(value: Any) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _as_text(value: Any) -> Any:
    """Returns values that JSON does not know in a form that is the same in every process."""
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if hasattr(value, "__qualname__") or type(value).__repr__ is object.__repr__:
        return _name(value)
    return str(value)
