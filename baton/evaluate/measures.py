"""Measures models on held-out rows, by the kind of rows a method learns from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from baton.models import chat, generate, loading, pinned, rewards
from baton.models import metrics as own_functions
from baton.models.metrics import Array, Figure, mean_figure, quotient, ratio_figure
from baton.models.train_rows import IGNORED
from baton.recipe.recipe import Recipe

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LEAST_PROMPTS = 32
"""Held-out prompts over which a reward is averaged, at least."""

Progress = Callable[[int, int], None]
Likelihoods = dict[str, list[float]]


def _silent(done: int, of: int) -> None:
    """Tells nobody."""


@dataclass
class Measured:
    """Figures of one model on held-out rows.

    Attributes:
        figures: By name.
        counts: Numbers that are no measure of quality.
        likelihoods: For pairs, of each row's `chosen` and `rejected` answer, in nats.
    """

    figures: dict[str, Figure] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    likelihoods: Likelihoods = field(default_factory=dict)


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Dataset,
    recipe: Recipe,
    progress: Progress = _silent,
    second_model: PreTrainedModel | None = None,
) -> Measured:
    """Measures a model on the rows of its method.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        rows: Held-out rows, tokenized.
        recipe: The recipe.
        progress: Told how far it is.
        second_model: The model that the method's settings name, see `second_model`, where they name one.

    Returns:
        The figures: `loss` in nats per token and `perplexity`, with the count `tokens`, where rows have something to
        predict; `loss`, `accuracy` and `margin` of scores for `reward`; `reward`, the weighted mean over greedy
        completions, for methods judged by rewards; `divergence` from a second model that the method's settings name.
        And for pairs the log-likelihoods of both answers.
    """
    batch_size = recipe.evaluation_batch_size
    limit = recipe.data.max_length
    if recipe.training.spec.scores:
        return Measured(_scores(model, rows, batch_size))
    if recipe.training.generation:
        return Measured(_rewards(model, tokenizer, rows, recipe, progress))
    if recipe.training.second_model:
        assert second_model is not None
        return Measured({"divergence": _divergence(model, second_model, tokenizer, rows, recipe, progress)})
    if "chosen_ids" in rows.column_names:
        sums = {
            side: row_losses(model, _answered(rows, f"{side}_ids", limit), batch_size, progress)
            for side in ("chosen", "rejected")
        }
        measured = held_out(sums["chosen"])
        measured.likelihoods = {side: (-losses[:, 0]).tolist() for side, losses in sums.items()}
        return measured
    if "completion_ids" in rows.column_names:
        good = [index for index, label in enumerate(rows["label"]) if label]
        if not good:
            return held_out(np.zeros((0, 2)))
        rows = _answered(rows.select(good), "completion_ids", limit)
    return held_out(row_losses(model, rows, batch_size, progress))


def preference(before: Likelihoods, after: Likelihoods) -> dict[str, Figure]:
    """Compares a model's likelihoods of pairs with those of the model it started from.

    Returns:
        `reward_accuracy`, the share of pairs in which the chosen answer gained more than the rejected one, and
        `reward_margin`, by how much on average, in nats: DPO's implicit rewards (arXiv:2305.18290, section 4) over β.
    """
    gains = {side: [b - a for a, b in zip(before[side], after[side], strict=True)] for side in before}
    margins = [chosen - rejected for chosen, rejected in zip(gains["chosen"], gains["rejected"], strict=True)]
    return {
        "reward_accuracy": mean_figure([_above(margin) for margin in margins]),
        "reward_margin": mean_figure(margins),
    }


def _above(margin: float) -> float:
    """Returns 1 for a margin above 0 and 0 for another; one that is no number stays none."""
    return margin if math.isnan(margin) else float(margin > 0)


def row_losses(model: PreTrainedModel, rows: Dataset, batch_size: int, progress: Progress = _silent) -> Array:
    """Returns each row's negative log-likelihood of its labelled tokens, in nats, and their number: of shape (rows, 2).

    Args:
        model: A causal language model.
        rows: Rows with `input_ids` and `labels`, each of the row's length.
        batch_size: Rows per forward pass; does not change the result beyond rounding.
        progress: Called after each batch with the rows that are done, and all.
    """
    losses_and_counts, done = np.zeros((len(rows), 2)), 0
    for numbers, losses, counted in _token_losses(model, rows, batch_size):
        losses_and_counts[numbers, 0] = losses.double().sum(1).cpu().numpy()
        losses_and_counts[numbers, 1] = counted.sum(1).cpu().numpy()
        done += len(numbers)
        progress(done, len(rows))
    return losses_and_counts


def held_out(sums: Array) -> Measured:
    """Returns the mean loss per labelled token, in nats, and its exponential."""

    def perplexity(drawn: Array) -> Array:
        with np.errstate(over="ignore"):
            return np.exp(quotient(drawn))

    loss = ratio_figure(sums[:, 0].tolist(), sums[:, 1].tolist(), better="lower")
    figures = {"loss": loss, "perplexity": Figure(loss.statistics, perplexity, loss.each, better="lower")}
    return Measured(figures, {"tokens": int(sums[:, 1].sum())})


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


def _scores(model: Any, rows: Dataset, batch_size: int) -> dict[str, Figure]:
    """Returns how a reward model tells pairs apart; `loss` is that of Bradley and Terry, -log σ(margin)."""
    import torch

    sides = {side: _side_scores(model, rows[f"{side}_ids"], batch_size) for side in ("chosen", "rejected")}
    margins = sides["chosen"] - sides["rejected"]
    return {
        "loss": mean_figure((-torch.nn.functional.logsigmoid(margins)).tolist(), better="lower"),
        "accuracy": mean_figure([_above(margin) for margin in margins.tolist()]),
        "margin": mean_figure(margins.tolist()),
    }


def _side_scores(model: Any, sequences: Any, batch_size: int) -> Any:
    import torch

    order = _by_length(sequences)
    scored = torch.zeros(len(order))
    with torch.inference_mode():
        for start in range(0, len(order), batch_size):
            numbers = order[start : start + batch_size]
            batch = [sequences[number] for number in numbers]
            ids = _padded(batch, model.config.get_text_config().pad_token_id or 0)
            mask = _padded([[1] * len(x) for x in batch], 0)
            scores = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device)).logits[:, 0]
            scored[torch.tensor(numbers)] = scores.float().cpu()
    return scored


def _rewards(model: Any, tokenizer: Any, rows: Dataset, recipe: Recipe, progress: Progress) -> dict[str, Figure]:
    """Returns the mean reward of greedy completions of the first held-out prompts, in all and of each function.

    A completion's reward is the weighted sum of what functions gave it; one that none has judged does not count.
    """
    settings = recipe.training.generation
    assert settings
    some, _, completions = _completions(model, tokenizer, rows, recipe, progress)
    given = [{name: value for name, value in row.items() if name != "length"} for row in some]
    prompts = list(some["prompt"])
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in completions]
    functions: list[Callable[..., Any]] = rewards.build(settings.rewards)
    rewards.bind(functions, generate.Judged(model, tokenizer))
    answers: list[Any] = list(completions)
    if chat.PROMPT_TEXT in given[0]:
        prompts, given = [row[chat.PROMPT_TEXT] for row in given], [rewards.columns(row) for row in given]
    elif isinstance(prompts[0], list):
        answers = [[{"role": "assistant", "content": text}] for text in completions]
    columns = {name: [row[name] for row in given] for name in given[0] if name != "prompt"}
    arguments = {"prompts": prompts, "completions": answers, "completion_ids": ids, **columns}
    names = [rewards.name(function) for function in functions]
    parts = [
        own_functions.function_values(f"reward {name!r}", function(**arguments), len(ids))
        for name, function in zip(names, functions, strict=True)
    ]
    weights = [spec.weight for spec in settings.rewards]
    judged = [
        [weight * value for weight, value in zip(weights, row, strict=True) if value is not None]
        for row in zip(*parts, strict=True)
    ]
    total = mean_figure([sum(row) if row else None for row in judged])
    return {"reward": total, **{f"reward_{name}": mean_figure(part) for name, part in zip(names, parts, strict=True)}}


def second_model(recipe: Recipe) -> PreTrainedModel | None:
    """Loads the model that a method's settings name, such as the teacher; None where they name none."""
    if recipe.training.second_model is None:
        return None
    role, _ = recipe.training.second_model
    return loading.second_model(recipe, pinned.fetch(recipe)[role])


def _divergence(model: Any, teacher: Any, tokenizer: Any, rows: Dataset, recipe: Recipe, progress: Progress) -> Figure:
    """Returns KL(model ‖ teacher) in nats per token, over greedy completions of the first held-out prompts."""
    import torch

    _, prompts, completions = _completions(model, tokenizer, rows, recipe, progress)
    teacher = loading.place_model(teacher)
    sums, counts = [], []
    for prompt, text in zip(prompts, completions, strict=True):
        begin = generate.prompt_ids(tokenizer, prompt, recipe.data.max_length)
        written = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([begin + written], device=model.device)
        with torch.inference_mode():
            ours, theirs = (
                torch.log_softmax(each(input_ids=ids).logits[0, len(begin) - 1 : -1].float(), dim=-1)
                for each in (model, teacher)
            )
        sums.append(float((ours.exp() * (ours - theirs)).sum()))
        counts.append(len(written))
    loading.move_to_cpu(teacher)  # beside the model for as long as both are asked
    return ratio_figure(sums, counts, better="lower")


def _completions(
    model: Any, tokenizer: Any, rows: Dataset, recipe: Recipe, progress: Progress
) -> tuple[Dataset, list[str], list[str]]:
    """Returns the first held-out rows, their prompts as text, and the model's greedy completions of them."""
    settings = recipe.training.completions
    assert settings
    some = rows.select(range(min(len(rows), max(recipe.evaluation.samples, LEAST_PROMPTS))))
    declared = some["tools"] if "tools" in some.column_names else [None] * len(some)
    pairs = zip(some["prompt"], declared, strict=True)
    prompts = [generate.rendered(prompt, tokenizer, tools) for prompt, tools in pairs]
    completions = generate.write_all(
        model,
        tokenizer,
        prompts,
        max_new_tokens=settings.max_completion_length,
        max_length=recipe.data.max_length,
        batch_size=recipe.evaluation_batch_size,
        progress=progress,
    )
    return some, prompts, completions


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
