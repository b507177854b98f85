"""Measures of models on held-out rows, by the method's kind of rows, and on tasks of the LM evaluation harness."""

from __future__ import annotations

import contextlib
import difflib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from baton.errors import UserError
from baton.models import chat, generate, loading, metrics, rewards, user_code
from baton.models.metrics import Array, Better, Figure, constant_figure, mean_figure, quotient, ratio_figure
from baton.models.train_rows import IGNORED
from baton.recipe import extras
from baton.recipe.evaluation import Tasks
from baton.recipe.recipe import Recipe
from baton.recipe.run import Trust

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MIN_PROMPTS = 32  # held-out prompts that a reward is averaged over, at least

NO_FILTER = "none"  # the harness's name for answers taken as they are
BETTER: dict[bool | None, Better | None] = {True: "higher", False: "lower", None: None}  # by `higher_is_better`

Progress = Callable[[int, int], None]
Likelihoods = dict[str, list[float]]


@dataclass
class Measured:
    figures: dict[str, Figure] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)  # no measures of quality, such as tokens
    likelihoods: Likelihoods = field(default_factory=dict)  # of pairs: `chosen` and `rejected` of each row, in nats
    completions: list[str] = field(default_factory=list)
    scores: dict[str, Figure] = field(default_factory=dict)  # of the completions, over the prompts


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Dataset,
    recipe: Recipe,
    progress: Progress = lambda done, of: None,
    second_model: PreTrainedModel | None = None,
) -> Measured:
    """Measures a model on held-out tokenized rows of its method; pairs give both answers' log-likelihoods too."""
    batch_size, limit = recipe.evaluation_batch_size, recipe.data.max_length
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
    """Returns DPO's implicit rewards (arXiv:2305.18290, section 4) over β, in nats, from likelihoods of pairs."""
    gains = {side: [b - a for a, b in zip(before[side], after[side], strict=True)] for side in before}
    margins = [chosen - rejected for chosen, rejected in zip(gains["chosen"], gains["rejected"], strict=True)]
    return {"reward_accuracy": mean_figure(list(map(_is_above, margins))), "reward_margin": mean_figure(margins)}


def _is_above(margin: float) -> float:
    """Returns 1 for a margin above 0, nan for nan, and else 0."""
    return margin if math.isnan(margin) else float(margin > 0)


def row_losses(
    model: PreTrainedModel, rows: Dataset, batch_size: int, progress: Progress = lambda done, of: None
) -> Array:
    """Returns each row's negative log-likelihood in nats and its number of labelled tokens, of shape (rows, 2)."""
    import torch

    losses_and_counts, order = np.zeros((len(rows), 2)), _by_length(rows["input_ids"])
    with torch.inference_mode():
        for start in range(0, len(order), batch_size):
            numbers = order[start : start + batch_size]
            batch = rows[numbers]
            ids, mask = _padded(batch["input_ids"], 0), _padded([[1] * len(x) for x in batch["input_ids"]], 0)
            labels = _padded(batch["labels"], IGNORED).to(model.device)[:, 1:]
            logits = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device)).logits[:, :-1]
            losses = torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
            ).view(labels.shape)
            losses_and_counts[numbers, 0] = losses.double().sum(1).cpu().numpy()
            losses_and_counts[numbers, 1] = (labels != IGNORED).sum(1).cpu().numpy()
            progress(start + len(numbers), len(order))
    return losses_and_counts


def held_out(sums: Array) -> Measured:

    def perplexity(drawn: Array) -> Array:
        with np.errstate(over="ignore"):
            return np.exp(quotient(drawn))

    loss = ratio_figure(sums[:, 0].tolist(), sums[:, 1].tolist(), better="lower")
    figures = {"loss": loss, "perplexity": Figure(loss.statistics, perplexity, loss.each, better="lower")}
    return Measured(figures, {"tokens": int(sums[:, 1].sum())})


def _scores(model: Any, rows: Dataset, batch_size: int) -> dict[str, Figure]:
    """Returns how a reward model tells pairs apart; `loss` is Bradley and Terry's, -log σ(margin)."""
    import torch

    def scored(sequences: Any) -> torch.Tensor:
        order = _by_length(sequences)
        scores = torch.zeros(len(order))
        with torch.inference_mode():
            for start in range(0, len(order), batch_size):
                numbers = order[start : start + batch_size]
                batch = [sequences[number] for number in numbers]
                ids = _padded(batch, model.config.get_text_config().pad_token_id or 0).to(model.device)
                mask = _padded([[1] * len(x) for x in batch], 0).to(model.device)
                scores[torch.tensor(numbers)] = model(input_ids=ids, attention_mask=mask).logits[:, 0].float().cpu()
        return scores

    margins = scored(rows["chosen_ids"]) - scored(rows["rejected_ids"])
    return {
        "loss": mean_figure((-torch.nn.functional.logsigmoid(margins)).tolist(), better="lower"),
        "accuracy": mean_figure([_is_above(margin) for margin in margins.tolist()]),
        "margin": mean_figure(margins.tolist()),
    }


def _rewards(model: Any, tokenizer: Any, rows: Dataset, recipe: Recipe, progress: Progress) -> dict[str, Figure]:
    """Returns the mean reward of greedy completions, in all and by function; one without any value does not count."""
    settings = recipe.training.generation
    assert settings
    some, _, completions = _completions(model, tokenizer, rows, recipe, progress)
    given = [{name: value for name, value in row.items() if name != "length"} for row in some]
    prompts = list(some["prompt"])
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in completions]
    functions: list[Callable[..., Any]] = rewards.build(settings.rewards)
    rewards.bind(functions, rewards.JudgedModel(model, tokenizer))
    answers: list[Any] = list(completions)
    if chat.PROMPT_TEXT in given[0]:
        prompts, given = [row[chat.PROMPT_TEXT] for row in given], [rewards.columns(row) for row in given]
    elif isinstance(prompts[0], list):
        answers = [[{"role": "assistant", "content": text}] for text in completions]
    columns = {name: [row[name] for row in given] for name in given[0] if name != "prompt"}
    arguments = {"prompts": prompts, "completions": answers, "completion_ids": ids, **columns}
    names = [function.__name__ for function in functions]
    parts = [
        metrics.function_values(f"reward {name!r}", function(**arguments), len(ids))
        for name, function in zip(names, functions, strict=True)
    ]
    weights = [spec.weight for spec in settings.rewards]
    judged = [
        [weight * value for weight, value in zip(weights, row, strict=True) if value is not None]
        for row in zip(*parts, strict=True)
    ]
    total = mean_figure([sum(row) if row else None for row in judged])
    return {"reward": total, **{f"reward_{name}": mean_figure(part) for name, part in zip(names, parts, strict=True)}}


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
    settings = recipe.training.completions
    assert settings
    some = rows.select(range(min(len(rows), max(recipe.evaluation.samples, MIN_PROMPTS))))
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


class Harness:
    def __init__(self, tasks: Tasks, scratch: str, trust: Trust = None) -> None:
        extras.require_packages(f"evaluation.tasks: {', '.join(tasks.names)}", "lm_eval")
        from lm_eval.tasks import TaskManager

        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        self._tasks = tasks
        self._folder = user_code.fetch_tasks(tasks.include_path, scratch) if tasks.include_path else None
        if self._folder:
            user_code.require_trusted(trust, user_code.TASKS_SETTING, self._folder, user_code.TASK_ENDINGS)
        self._manager: Any = TaskManager(include_path=self._folder, include_defaults=False)
        single = set(self._manager.all_tasks) - {*self._manager.all_groups, *self._manager.all_tags}
        if not single.issuperset(tasks.names):  # reading the harness's own thirteen thousand files takes ten seconds
            self._manager = TaskManager(include_path=self._folder)
        for name in tasks.names:
            if name not in self._manager.all_tasks:
                close = difflib.get_close_matches(name, self._manager.all_tasks, n=1)
                hint = f"Did you mean {close[0]!r}?" if close else "`lm-eval ls tasks` lists them."
                raise UserError(f"evaluation.tasks: {name!r} is no task of the harness. {hint}")
        with self._in_own_folder():
            try:
                self._manager.load(list(tasks.names))
            except Exception as error:  # of the task's file, its functions or the hub
                raise self._failed("loaded", error) from None

    def run(
        self, model: Any, tokenizer: Any, batch_size: int, *, chat: bool = False, system: str | None = None
    ) -> dict[str, Figure]:
        """Returns figures named `<task>.<metric>`, with the filter after them where a metric has several."""
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        judged = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        with self._in_own_folder(), _stopping_as_chat(model, tokenizer):
            try:
                evaluated: Any = simple_evaluate(
                    model=judged,
                    tasks=list(self._tasks.names),
                    num_fewshot=self._tasks.few_shot,  # a task's own 0 stays 0
                    limit=self._tasks.limit,
                    task_manager=self._manager,
                    bootstrap_iters=0,
                    apply_chat_template=chat,
                    fewshot_as_multiturn=chat,
                    system_instruction=system if chat else None,
                )
            except (ValueError, KeyError, TypeError, ImportError) as error:  # of a task, or of its own functions
                raise self._failed("run", error) from None
        figures: dict[str, Figure] = {}
        for task, results in evaluated["results"].items():
            higher = evaluated["higher_is_better"].get(task) or {}
            for name, key, value in _task_figures(task, results):
                better = BETTER[higher.get(key.partition(",")[0])]
                each = _by_document(evaluated["samples"].get(task, []), key, value)
                figures[name] = mean_figure(each, better=better) if each else constant_figure(value, better=better)
        return figures

    def _in_own_folder(self) -> contextlib.AbstractContextManager[None]:
        """Lets a task name its folder's files by relative paths."""
        return contextlib.chdir(self._folder or ".")

    def _failed(self, what: str, error: Exception) -> UserError:
        return UserError(
            f"evaluation.tasks: {', '.join(self._tasks.names)} cannot be {what}: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}",
            remedy="Check the task's file, the packages it asks for, and the network where its data is remote.",
        )


@contextlib.contextmanager
def _stopping_as_chat(model: Any, tokenizer: Any) -> Iterator[None]:
    """Ends answers at the chat template's end of turn, too."""
    settings = model.generation_config
    before = settings.eos_token_id
    settings.eos_token_id = generate.stop_ids(model, tokenizer) or None
    try:
        yield
    finally:
        settings.eos_token_id = before


def _task_figures(task: str, results: dict[str, Any]) -> list[tuple[str, str, float]]:
    keys = [key for key in results if "," in key and not key.partition(",")[0].endswith("_stderr")]
    keys = [key for key in keys if isinstance(results[key], int | float)]
    metrics = [key.partition(",")[0] for key in keys]
    measured = []
    for key, metric in zip(keys, metrics, strict=True):
        filtered = key.partition(",")[2]
        several = metrics.count(metric) > 1 and filtered != NO_FILTER
        measured.append((f"{task}.{metric}" + (f".{filtered}" if several else ""), key, float(results[key])))
    return measured


def _by_document(samples: list[dict[str, Any]], key: str, value: float) -> list[float | None] | None:
    """Returns a figure for each document, None where the value is not their mean."""
    metric, _, filtered = key.partition(",")
    rows = [row for row in samples if row.get("filter", NO_FILTER) == filtered]
    each = [row.get(metric) for row in sorted(rows, key=lambda row: row["doc_id"])]
    if not each or not all(isinstance(one, int | float) for one in each):
        return None
    numbers: list[float | None] = [float(one) for one in each if one is not None]
    return numbers if math.isclose(mean_figure(numbers).value, value, rel_tol=1e-9, abs_tol=1e-12) else None
