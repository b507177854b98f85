"""Rows to tokens: the same `input_ids` and `labels` that TRL's own preparation gives, written once."""

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
from components.tokenize import bpe

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""Label of a token that does not count in the loss."""

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
        "settings": [data.max_length, data.packing, data.completion_only_loss, data.separator],
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
            counts[side] = len(tokens)
            if side == "train":
                counts["tokens"] = sum(len(ids) for ids in tokens["input_ids"])
            tokens.save_to_disk(f"{folder}/{side}")
    for side in SIDES:
        if counts[side] == 0:
            raise UserError(
                f"no {side} sequence is left after tokenizing with data.max_length {recipe.data.max_length}.",
                remedy="Raise max_length so that completions are reached, or give more text.",
            )
    return counts


def _load(path: str, cache_dir: str) -> Dataset:
    """Loads rows with every value as text: left to guess, the JSON reader turns dates into timestamps."""
    import datasets

    text = datasets.Value("string")
    conversation = datasets.List({"role": text, "content": text})
    names = next(_lines(path), {})
    features = datasets.Features({name: conversation if name == "messages" else text for name in names})
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
    if "messages" in rows.column_names and tokenizer.chat_template is None:
        raise UserError("data has messages, but the tokenizer has no chat template.", remedy="Use an instruct model.")
    encoded = rows.map(
        lambda row: encode(row, tokenizer, recipe.data.separator, recipe.data.completion_only_loss),
        remove_columns=rows.column_names,
    )
    limit = recipe.data.max_length
    if recipe.data.packing:
        from trl import pack_dataset

        packed = pack_dataset(encoded, limit, strategy="wrapped")
        return packed.filter(lambda row: len(row["input_ids"]) == limit or len(packed) == 1)
    counts["truncated"] += sum(len(ids) > limit for ids in encoded["input_ids"])
    cut = encoded.map(lambda row: {name: values[:limit] for name, values in row.items()})
    kept = cut.filter(lambda row: any(label != IGNORED for label in row["labels"][1:]))
    counts["dropped"] += len(cut) - len(kept)
    return kept


def encode(
    row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, separator: str, completion_only: bool
) -> dict[str, list[int]]:
    """Turns a normalised row into token ids and labels.

    The completion starts where the tokens of the prompt alone and of prompt and completion diverge,
    as in TRL, so that a merge across the boundary counts as completion.

    Returns:
        `input_ids` and `labels`, each of the row's length; labels of the prompt are -100 where
        `completion_only`.
    """
    if "messages" in row:
        ids = list(tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=True)["input_ids"])
        return {"input_ids": ids, "labels": ids}
    if "text" in row:
        ids = tokenizer(_ended(row["text"], tokenizer))["input_ids"]
        return {"input_ids": ids, "labels": ids}
    prompt = row["prompt"] + separator
    ids = tokenizer(prompt + _ended(row["completion"], tokenizer))["input_ids"]
    if not completion_only:
        return {"input_ids": ids, "labels": ids}
    length = common_prefix_length(tokenizer(prompt)["input_ids"], ids)
    return {"input_ids": ids, "labels": [IGNORED] * length + ids[length:]}


def common_prefix_length(a: list[int], b: list[int]) -> int:
    """Returns how many elements two lists share from the start."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _ended(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    end = str(tokenizer.eos_token)
    return text if text.endswith(end) else text + end
