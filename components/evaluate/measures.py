"""What is measured on held-out rows, by the kind of rows a method learns from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from components.shared import generation, rewards
from components.shared.recipe import Recipe

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

IGNORED = -100
"""Label of a token that does not count in the loss."""

LEAST_PROMPTS = 32
"""Held-out prompts over which a reward is averaged, at least."""

Measures = dict[str, float]


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Dataset, recipe: Recipe
) -> tuple[Measures, dict[str, list[float]]]:
    """Measures a model on the rows of its method.

    Returns:
        The figures: `loss` in nats per token, `perplexity` and `tokens` where rows have something to predict;
        `accuracy` and `margin` of scores for `reward`; `reward`, the weighted mean over greedy completions, for `grpo`
        and `rloo`. And for pairs the log-likelihood of each row's `chosen` and `rejected` answer, in nats.
    """
    batch_size = recipe.evaluation.batch_size or recipe.training.micro
    method = recipe.training.method
    if method == "reward":
        return _scores(model, rows, batch_size), {}
    if recipe.training.generation:
        return _rewards(model, tokenizer, rows, recipe), {}
    if "chosen_ids" in rows.column_names:
        limit = recipe.data.max_length
        likelihoods = {
            side: _log_likelihoods(model, _answered(rows, f"{side}_ids", limit), batch_size)
            for side in ("chosen", "rejected")
        }
        return held_out_loss(model, _answered(rows, "chosen_ids", limit), batch_size), likelihoods
    if "completion_ids" in rows.column_names:
        good = rows.filter(lambda row: row["label"])
        if not len(good):
            return {}, {}
        return held_out_loss(model, _answered(good, "completion_ids", recipe.data.max_length), batch_size), {}
    return held_out_loss(model, rows, batch_size), {}


def preference(before: dict[str, list[float]], after: dict[str, list[float]]) -> Measures:
    """Compares a model's likelihoods of pairs with those of the model it started from.

    Returns:
        `reward_accuracy`, the share of pairs in which the chosen answer gained more than the rejected one, and
        `reward_margin`, by how much on average, in nats: DPO's implicit rewards (arXiv:2305.18290, section 4) over β.
    """
    gains = {side: [b - a for a, b in zip(before[side], after[side], strict=True)] for side in before}
    margins = [chosen - rejected for chosen, rejected in zip(gains["chosen"], gains["rejected"], strict=True)]
    return {
        "reward_accuracy": sum(margin > 0 for margin in margins) / len(margins),
        "reward_margin": math.fsum(margins) / len(margins),
    }


def held_out_loss(model: PreTrainedModel, rows: Dataset, batch_size: int) -> Measures:
    """Returns the mean negative log-likelihood per labelled token, in nats, and its exponential.

    Args:
        model: A causal language model.
        rows: Rows with `input_ids` and `labels`, each of the row's length.
        batch_size: Rows per forward pass; does not change the result beyond rounding.
    """
    total, count = 0.0, 0
    for _, losses, counted in _token_losses(model, rows, batch_size):
        total, count = total + losses.sum().item(), count + int(counted.sum())
    mean = total / max(count, 1)
    return {"loss": mean, "perplexity": math.exp(min(mean, 700.0)), "tokens": count}


def _log_likelihoods(model: PreTrainedModel, rows: Dataset, batch_size: int) -> list[float]:
    """Returns the log-likelihood of each row's labelled tokens."""
    found = [0.0] * len(rows)
    for numbers, losses, _ in _token_losses(model, rows, batch_size):
        for number, value in zip(numbers, losses.sum(1).tolist(), strict=True):
            found[number] = -value
    return found


def _token_losses(model: PreTrainedModel, rows: Dataset, batch_size: int) -> Iterator[tuple[list[int], Any, Any]]:
    """Yields row numbers, losses and which tokens counted, both of shape (rows, length - 1), for each batch."""
    import torch

    order = _by_length(rows["input_ids"])
    with torch.inference_mode():
        for start in range(0, len(order), batch_size):
            numbers = order[start : start + batch_size]
            batch = rows[numbers]
            ids, mask = _padded(batch["input_ids"], 0), _padded([[1] * len(x) for x in batch["input_ids"]], 0)
            labels = _padded(batch["labels"], IGNORED).to(model.device)[:, 1:]
            logits = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device)).logits[:, :-1]
            losses = torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
            )
            yield numbers, losses.view(labels.shape), labels != IGNORED


def _scores(model: Any, rows: Dataset, batch_size: int) -> Measures:
    """Returns how a reward model tells pairs apart; `loss` is that of Bradley and Terry, -log σ(margin)."""
    import torch

    sides = {side: _side_scores(model, rows[f"{side}_ids"], batch_size) for side in ("chosen", "rejected")}
    margins = sides["chosen"] - sides["rejected"]
    return {
        "loss": float(-torch.nn.functional.logsigmoid(margins).mean()),
        "accuracy": float((margins > 0).float().mean()),
        "margin": float(margins.mean()),
    }


def _side_scores(model: Any, sequences: Any, batch_size: int) -> Any:
    import torch

    order = _by_length(sequences)
    found = torch.zeros(len(order))
    with torch.inference_mode():
        for start in range(0, len(order), batch_size):
            numbers = order[start : start + batch_size]
            batch = [sequences[number] for number in numbers]
            ids = _padded(batch, model.config.get_text_config().pad_token_id or 0)
            mask = _padded([[1] * len(x) for x in batch], 0)
            scores = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device)).logits[:, 0]
            found[torch.tensor(numbers)] = scores.float().cpu()
    return found


def _rewards(model: Any, tokenizer: Any, rows: Dataset, recipe: Recipe) -> Measures:
    """Returns the mean reward of greedy completions of the first held-out prompts."""
    settings = recipe.training.generation
    assert settings
    some = rows.select(range(min(len(rows), max(recipe.evaluation.samples, LEAST_PROMPTS))))
    prompts = [generation.rendered(prompt, tokenizer) for prompt in some["prompt"]]
    said = [
        generation.write(
            model, tokenizer, prompt, max_new_tokens=settings.max_completion_length, max_length=recipe.data.max_length
        )
        for prompt in prompts
    ]
    columns = {name: list(some[name]) for name in some.column_names if name not in ("prompt", "length")}
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in said]
    functions: list[Callable[..., Any]] = rewards.build(settings.rewards)
    rewards.bind(functions, generation.Judged(model, tokenizer))
    found: Measures = {"reward": 0.0}
    for spec, function in zip(settings.rewards, functions, strict=True):
        given = function(prompts=list(some["prompt"]), completions=said, completion_ids=ids, **columns)
        values = [value for value in given if value is not None]
        mean = math.fsum(values) / max(len(values), 1)
        found[f"reward_{rewards.name(function)}"] = mean
        found["reward"] += spec.weight * mean
    return found


def _answered(rows: Dataset, column: str, limit: int) -> Dataset:
    """Returns rows with `input_ids` and `labels` of a prompt and the answer in a column."""

    def join(row: dict[str, Any]) -> dict[str, Any]:
        prompt, answer = row["prompt_ids"], row[column]
        ids = (prompt + answer)[:limit]
        return {"input_ids": ids, "labels": ([IGNORED] * len(prompt) + answer)[: len(ids)]}

    return rows.map(join, remove_columns=rows.column_names, load_from_cache_file=False)


def _by_length(sequences: Any) -> list[int]:
    lengths = [len(ids) for ids in sequences]
    return sorted(range(len(lengths)), key=lengths.__getitem__)


def _padded(rows: list[list[int]], filler: int) -> Any:
    import torch

    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=filler)
