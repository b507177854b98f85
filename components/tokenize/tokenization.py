"""Rows to tokens: the same that TRL's own preparation gives, written once."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from components.shared import bundles, events, models
from components.shared.errors import UserError
from components.shared.plan import make_plan
from components.shared.recipe import Recipe
from components.shared.runs import Run
from components.tokenize import bpe, encoding

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

SIDES = ("train", "eval")


def tokenize_run(run_uri: str) -> dict[str, Any]:
    """Tokenizes a run's split, unless the same split was tokenized the same way before.

    Returns:
        `data_uri`, and the counts `train`, `eval`, `tokens`, `truncated`, `dropped`, `steps`.

    Raises:
        UserError: the tokenizer cannot be had or does not fit, or no sequence is left.
    """
    started = time.time()
    run = Run.open(run_uri)
    recipe = run.recipe()
    base = recipe.model.base and models.local_model(recipe.model.base, recipe.model.revision)
    base_digest = models.model_identity(base) if base else None
    run.set_once("model.json", {"base_sha256": base_digest})
    split = run.require("data.json")["digest"]
    other = recipe.model.tokenizer and recipe.model.tokenizer.base
    digest = tokens_digest(
        recipe, split, base_digest, models.model_identity(models.local_model(other)) if other else None
    )
    prefix = f"data/{digest}/tokens"
    manifest = bundles.usable_manifest(run.storage, prefix)
    reused = manifest is not None
    if manifest is None:
        with tempfile.TemporaryDirectory(prefix="baton-tokens-") as folder:
            meta = _tokenize_into(run, recipe, split, base, folder)
            manifest, _ = bundles.publish(run.storage, prefix, folder, kind="tokens", meta=meta)
    plan = make_plan(recipe, manifest.meta["train"])
    run.set_once("plan.json", plan.to_json())
    run.put("tokens.json", {"prefix": prefix, "digest": digest, **manifest.meta})
    run.record("tokenize", {"seconds": time.time() - started, "reused": reused})
    events.emit("tokens", reused=reused, steps=plan.num_steps, targets=list(plan.targets), **manifest.meta)
    return {"data_uri": run.storage.uri(prefix), "steps": plan.num_steps, **manifest.meta}


def tokens_digest(recipe: Recipe, split: str, base_digest: str | None, other_digest: str | None) -> str:
    """Returns the address of a tokenized split: what it was made from, and by which libraries.

    Args:
        recipe: The recipe.
        split: Digest of the split.
        base_digest: Identity of the base model's files.
        other_digest: Identity of the files of `model.tokenizer.base`.
    """
    data = recipe.data
    made_from = {
        "split": split,
        "base": base_digest,
        "other": other_digest,
        "tokenizer": recipe.model.tokenizer.model_dump() if recipe.model.tokenizer else None,
        "settings": [
            data.max_length,
            data.packing,
            data.completion_only_loss,
            data.assistant_only_loss,
            data.separator,
        ],
        "method": recipe.training.method,
        "libraries": [version("tokenizers"), version("transformers")],
    }
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


def _tokenize_into(run: Run, recipe: Recipe, split: str, base: str | None, folder: str) -> dict[str, Any]:
    import datasets

    datasets.disable_progress_bars()
    prefix = f"data/{split}/split"
    manifest = bundles.read_manifest(run.storage, prefix)
    if manifest is None:
        raise UserError(f"{run.storage.uri(prefix)} is gone.", remedy="Start the run again from its first stage.")
    with tempfile.TemporaryDirectory(prefix="baton-split-") as scratch:
        source = bundles.fetch(run.storage, prefix, manifest, f"{scratch}/split")
        tokenizer = _tokenizer(recipe, base, f"{source}/train.jsonl")
        tokenizer.save_pretrained(f"{folder}/tokenizer")
        counts: dict[str, Any] = {"tokens": 0, "truncated": 0, "dropped": 0}
        for side in SIDES:
            tokens = _encode(_load(f"{source}/{side}.jsonl", f"{scratch}/cache"), tokenizer, recipe, counts)
            if side == "train" and recipe.data.packing == "best-fit":
                tokens = _best_fit(tokens, recipe.data.max_length)
            counts[side] = len(tokens)
            if side == "train":
                counts["tokens"] = _num_tokens(tokens)
            tokens.save_to_disk(f"{folder}/{side}")
    for side in SIDES:
        if counts[side] == 0:
            raise UserError(
                f"no {side} sequence is left after tokenizing with data.max_length {recipe.data.max_length}.",
                remedy="Raise max_length so that completions are reached, or give more text.",
            )
    return counts


def _load(path: str, cache_dir: str) -> Dataset:
    """Loads rows with the types of the first one: left to guess, the JSON reader turns dates into timestamps."""
    import datasets

    kinds = {str: datasets.Value("string"), bool: datasets.Value("bool")}
    conversation = datasets.List({"role": kinds[str], "content": kinds[str]})
    first = next(_lines(path), {})
    features = datasets.Features({name: kinds.get(type(value), conversation) for name, value in first.items()})
    return datasets.Dataset.from_generator(_lines, gen_kwargs={"path": path}, features=features, cache_dir=cache_dir)


def _lines(path: str) -> Iterator[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _tokenizer(recipe: Recipe, base: str | None, train_file: str) -> PreTrainedTokenizerBase:
    spec = recipe.model.tokenizer
    if spec and spec.train:
        return bpe.train(train_file, spec.train, recipe.data.max_length)
    folder = models.local_model(spec.base) if spec and spec.base else base
    if folder is None:
        raise UserError("model.tokenizer is missing.", remedy="Give tokenizer: {train: …} or {base: …}.")
    tokenizer = models.load_tokenizer(folder, trust_remote_code=recipe.model.trust_remote_code)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.eos_token is None:
        raise UserError(f"the tokenizer in {folder!r} has no end-of-sequence token.", remedy="Choose another one.")
    return tokenizer


def _encode(rows: Dataset, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, counts: dict[str, Any]) -> Dataset:
    encoding.require_template(tokenizer, rows[0], recipe.data)
    encode = encoding.encoder(recipe, tokenizer)

    def batch(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        names = list(columns)
        found = [
            new
            for values in zip(*columns.values(), strict=True)
            for new in encode(dict(zip(names, values, strict=True)))
        ]
        return {name: [row[name] for row in found] for name in found[0]}

    encoded = rows.map(batch, batched=True, remove_columns=rows.column_names)
    if recipe.data.packing is True:
        from trl import pack_dataset

        limit = recipe.data.max_length
        packed = pack_dataset(encoded.select_columns(["input_ids", "labels"]), limit, strategy="wrapped")
        return packed.filter(lambda row: len(row["input_ids"]) == limit or len(packed) == 1)
    return _fitted(encoded, recipe, counts)


def _best_fit(rows: Dataset, limit: int) -> Dataset:
    """Puts whole rows side by side; `seq_lengths` says where each ends."""
    from trl import pack_dataset

    return pack_dataset(rows.select_columns(["input_ids", "labels"]), limit, strategy="bfd")


def _fitted(encoded: Dataset, recipe: Recipe, counts: dict[str, Any]) -> Dataset:
    """Returns the rows from which something can be learned within `data.max_length`, and counts the others.

    Rows of text are cut here. Of pairs, the trainers cut the answers; a score needs both answers whole.
    """
    limit, method = recipe.data.max_length, recipe.training.method

    def length(row: dict[str, Any]) -> int:
        if "length" in row:
            return int(row["length"])
        ids = encoding.id_columns(row)
        head = len(row["prompt_ids"]) if "prompt_ids" in row else 0
        return head + max(len(row[name]) for name in ids if name != "prompt_ids")

    def is_usable(row: dict[str, Any]) -> bool:
        if "labels" in row:
            return any(label != encoding.IGNORED for label in row["labels"][1:])
        if method == "reward" or "length" in row:
            return length(row) <= limit
        return len(row["prompt_ids"]) < limit

    counts["truncated"] += sum(encoded.map(lambda row: {"over": length(row) > limit})["over"])
    if "labels" in encoded.column_names:
        columns = ("input_ids", "labels")
        encoded = encoded.map(lambda row: {name: row[name][:limit] for name in columns})
    kept = encoded.filter(is_usable)
    counts["dropped"] += len(encoded) - len(kept)
    return kept


def _num_tokens(rows: Dataset) -> int:
    """Returns the tokens that a side of the data has."""
    if "length" in rows.column_names:
        return sum(rows["length"])
    return sum(len(ids) for name in encoding.id_columns(rows.features) for ids in rows[name])
