"""Evaluation: held-out loss and samples, of the model before and after training."""

from __future__ import annotations

import itertools
import json
import math
import tempfile
import time
from typing import TYPE_CHECKING, Any

from components.shared import bundles, events, generation, models, tracking, trained
from components.shared.recipe import Recipe
from components.shared.runs import Run

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

IGNORED = -100
TEXT_PROMPT_SHARE = 3
"""A row of plain text is cut after this fraction (1/3) to be continued by the model."""


def evaluate_run(run_uri: str) -> dict[str, Any]:
    """Compares the trained model with what it started from, on rows it has not seen.

    Returns:
        `before` and `after`, each with `loss` (nats per token) and `perplexity`; and `samples`.
    """
    import datasets
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    started = time.time()
    run = Run.open(run_uri)
    recipe = run.recipe()
    found: dict[str, Any] = {}
    limits = {"max_new_tokens": recipe.evaluation.max_new_tokens, "max_length": recipe.data.max_length}
    with tempfile.TemporaryDirectory(prefix="baton-evaluate-") as scratch:
        tokens = trained.tokens_folder(run, scratch)
        tokenizer = models.load_tokenizer(f"{tokens}/tokenizer", trust_remote_code=recipe.model.trust_remote_code)
        held_out = datasets.load_from_disk(f"{tokens}/eval")
        prompts = _prompts(run, recipe, tokenizer)
        start = models.start_model(recipe, tokenizer, trained.base_folder(recipe))
        writes: dict[str, list[str]] = {}
        for when in ("before", "after"):
            model = (
                start
                if when == "before"
                else trained.trained_model(recipe, tokenizer, trained.final_folder(run, scratch))
            )
            model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
            found[when] = held_out_loss(model, held_out, recipe.evaluation.batch_size or recipe.training.micro)
            writes[when] = [generation.write(model, tokenizer, prompt, **limits) for prompt, _ in prompts]
            events.emit("evaluated", when=when, **found[when])
            found["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    found["samples"] = [
        {"prompt": prompt, "reference": reference, "before": before, "after": after}
        for (prompt, reference), before, after in zip(prompts, writes["before"], writes["after"], strict=True)
    ]
    run.put("evaluation.json", found)
    step = run.plan().num_steps
    tracking.log_metrics(run, {f"final_{when}_{k}": v for when in writes for k, v in found[when].items()}, step)
    run.record("evaluate", {"seconds": time.time() - started})
    return found


def held_out_loss(model: PreTrainedModel, rows: Dataset, batch_size: int) -> dict[str, float]:
    """Returns the mean negative log-likelihood per labelled token, in nats, and its exponential.

    Args:
        model: A causal language model.
        rows: Rows with `input_ids` and `labels`, each of the row's length.
        batch_size: Rows per forward pass; does not change the result beyond rounding.
    """
    import torch

    total, count = 0.0, 0
    by_length = rows.select(sorted(range(len(rows)), key=[len(ids) for ids in rows["input_ids"]].__getitem__))
    with torch.inference_mode():
        for batch in by_length.iter(batch_size):
            ids, mask = _padded(batch["input_ids"], 0), _padded([[1] * len(x) for x in batch["input_ids"]], 0)
            labels = _padded(batch["labels"], IGNORED).to(model.device)[:, 1:]
            logits = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device)).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
            )
            total, count = total + loss.item(), count + int((labels != IGNORED).sum())
    mean = total / max(count, 1)
    return {"loss": mean, "perplexity": math.exp(min(mean, 700.0)), "tokens": count}


def _padded(rows: list[list[int]], filler: int) -> Any:
    import torch

    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=filler)


def _prompts(run: Run, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    """Returns the first held-out rows as (prompt, reference)."""
    prefix = f"data/{run.require('data.json')['digest']}/split"
    manifest = bundles.read_manifest(run.storage, prefix)
    if manifest is None or recipe.evaluation.samples == 0:
        return []
    lines = run.storage.read(manifest.path(prefix, "eval.jsonl")).decode().rstrip("\n").split("\n")
    rows = (json.loads(line) for line in itertools.islice(lines, recipe.evaluation.samples))
    return [_prompt(row, recipe, tokenizer) for row in rows]


def _prompt(row: dict[str, Any], recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    if "messages" in row:
        last = max(i for i, message in enumerate(row["messages"]) if message["role"] == "assistant")
        head = tokenizer.apply_chat_template(row["messages"][:last], tokenize=False, add_generation_prompt=True)
        return str(head), str(row["messages"][last]["content"])
    if "text" in row:
        at = len(row["text"]) // TEXT_PROMPT_SHARE
        return row["text"][:at], row["text"][at:]
    return row["prompt"] + recipe.data.separator, row["completion"]
