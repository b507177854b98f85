"""Evaluation of three models on the same held-out rows, prompts and tasks: before and after training, and in use.

Rows are measured by the method's kind of rows, tasks by the LM evaluation harness.
"""

from __future__ import annotations

import contextlib
import difflib
import gc
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from baton import events, machine
from baton.checkpoint import chain, seals
from baton.checkpoint.store import CheckpointStore
from baton.errors import UserError
from baton.models import chat, generate, loading, metrics, pinned, prompts, rewards, trained, user_code
from baton.models.metrics import Array, Better, Figure, Judge, constant_figure, mean_figure, quotient, ratio_figure
from baton.models.train_rows import IGNORED
from baton.pages.card import Card
from baton.recipe import extras
from baton.recipe.evaluation import FIGURES, REGISTERED, Tasks
from baton.recipe.recipe import Recipe
from baton.recipe.run import Trust
from baton.recipe.search import ACCEPTED
from baton.runs import lineage, objects
from baton.runs.documents import TokenizedRows
from baton.runs.outcomes import EvaluationResult, Figures
from baton.runs.run import Run
from baton.scratch import scratch_folder
from baton.signing import trusted_here
from baton.tracking import servers, tracking_run

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
    if "divergence" in recipe.training.spec.figures:
        assert second_model is not None
        return Measured({"divergence": _divergence(model, second_model, tokenizer, rows, recipe, progress)})
    if "chosen_ids" in rows.column_names:
        sums = {
            side: row_losses(model, _answered(rows, f"{side}_ids", limit), batch_size, progress)
            for side in ("chosen", "rejected")
        }
        measured = held_out(sums["chosen"])
        measured.figures["accuracy"] = preferred(**sums)
        measured.likelihoods = {side: (-losses[:, 0]).tolist() for side, losses in sums.items()}
        return measured
    if "completion_ids" in rows.column_names:
        good = [index for index, label in enumerate(rows["label"]) if label]
        if not good:
            return held_out(np.zeros((0, 2)))
        rows = _answered(rows.select(good), "completion_ids", limit)
    return held_out(row_losses(model, rows, batch_size, progress))


def preferred(chosen: Array, rejected: Array) -> Figure:
    """Returns the share of pairs whose chosen answer is likelier per token, from `row_losses` of both answers."""
    with np.errstate(divide="ignore", invalid="ignore"):
        gaps = rejected[:, 0] / rejected[:, 1] - chosen[:, 0] / chosen[:, 1]
    return mean_figure(list(map(_is_above, gaps.tolist())))


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
    loading.move_to_cpu(teacher)  # held with the model while both are asked
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
                raise UserError(f"evaluation.tasks: {name!r} is not a task of the harness. {hint}")
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


PROGRESS_INTERVAL = 2.0  # seconds between two events of one model
NUM_SAMPLES = 8  # examples in `evaluation.json`, at most; all are in `examples.jsonl`
DIGEST_LENGTH = 16  # characters on the card: enough to tell runs apart in a column

ABSENT = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # MLflow's codes for no such model or alias
# Ends of the class names of models that write, and of models that score.
WRITERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
SCORERS = ("ForSequenceClassification",)


@seals.sealed(objects.EVALUATE)
def evaluate_run(run_uri: str) -> dict[str, Any]:
    """Evaluates a run that has ended, and returns what `evaluation.json` holds; see `EvaluationResult`."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    started = time.time()
    run = Run.open(run_uri)
    recipe = run.resolved_recipe()
    machine.require_gpus(recipe.resources.image)
    last = trained.final_checkpoint(run)  # first: an unfinished run fails before anything is judged
    with scratch_folder("evaluate") as scratch:
        evaluation_set = EvaluationSet(run, recipe, scratch)
        production, words = find_production(run, recipe, scratch)
        measured, has_own_tokens, parameters = _measure_all(evaluation_set, production, scratch)
        evaluation = _document(evaluation_set, measured, evaluation_set.score(measured))
    if has_own_tokens:
        words = f"{words}; it has another vocabulary, so that figures on tokens are left out"
    evaluation |= {"production_model": words, "parameters": parameters}
    for when in ("before", "after"):
        events.emit(events.Evaluated(when, evaluation[when]))
    # In the store before it is sent on: a tracking server may be out of reach.
    run.put(EvaluationResult.NAME, evaluation)
    logged = {
        f"final_{when}_{name}": value
        for when in measured
        for name, value in evaluation[when].items()
        if value is not None
    }
    tracking_run.log_metrics(run, logged, last.step)
    run.record("evaluate", {"seconds": time.time() - started})
    return evaluation


def evaluation_card(run: Run, evaluation: dict[str, Any]) -> Card:
    """Returns a trained run's figures as one column of Kubeflow's page that compares runs."""
    chosen, last = trained.chosen_checkpoint(run), trained.final_checkpoint(run)
    work, origin = last.meta.work, last.meta.forked_from
    per_step = run.need(TokenizedRows).tokens * run.plan().passes(1)
    own_steps = last.step - (origin.step if origin else 0)
    losses = CheckpointStore(run).evaluation_losses(chosen)
    peaks = [attempt.peak_bytes for attempt in run.attempts() if attempt.peak_bytes]
    figures = {
        f"{name}_{when}": value
        for name in evaluation["after"] | evaluation["before"]
        for when in ("before", "after")
        if (value := evaluation[when].get(name)) is not None
    }
    cost = {
        "eval_loss": losses[max(losses)] if losses else None,
        "steps": chosen.step,
        "tokens": round(per_step * chosen.step),
        "tokens_per_second": round(per_step * own_steps / work.trained_seconds, 1) if work.trained_seconds else None,
        "goodput": round(work.goodput, 4),
        "peak_memory_gib": round(max(peaks) / 2**30, 3) if peaks else None,
        "digest": chosen.digest[:DIGEST_LENGTH],
    }
    return Card("", figures | cost)


def summary(before: Figures, after: Figures, in_use: Figures | None = None) -> str:
    """Returns the main figures in words, each followed by that of the model in use, if there is one."""

    def words_of(value: float | None) -> str:
        return "not measured" if value is None else f"{value:.4g}"

    named = {"loss": "held-out loss", "reward": "reward", "accuracy": "accuracy", "divergence": "divergence"}
    scored = [figures[-1] for figures in FIGURES.values()]
    parts = []
    for key, words in (named | {key: key.replace("_", " ") for key in scored}).items():
        if key in after and key in before:
            production = f" (production {words_of(in_use[key])})" if in_use and key in in_use else ""
            parts.append(f"{words} {words_of(before[key])} → {words_of(after[key])}{production}")
    if "reward_accuracy" in after:
        accuracy, margin = after["reward_accuracy"], after["reward_margin"]
        is_known = accuracy is not None and margin is not None
        gain = f"{accuracy:.0%}, margin {margin:.3g} nats" if is_known else "not measured"
        parts.append(f"reward accuracy {gain}")
    return ", ".join(parts)


class EvaluationSet:
    """Rows, prompts, metrics and tasks for every model, loaded and checked before the first model is."""

    def __init__(self, run: Run, recipe: Recipe, scratch: str) -> None:
        chat.set_template_date(run.need(TokenizedRows).today)
        parts = {name.partition("/")[0] for name in trained.tokens_manifest(run)[1].files}
        self.side = "test" if prompts.judged_side(run) == "test" and "test" in parts else "eval"
        tokens = trained.tokens_folder(run, scratch, parts=("tokenizer", self.side))
        if own_code := user_code.fetch(run, scratch):
            trained.require_origin(run)
            user_code.install(own_code)
        self.run, self.recipe = run, recipe
        self.tokenizer = loading.load_tokenizer(f"{tokens}/tokenizer", trust_remote_code=recipe.model.trust_remote_code)
        self.rows = trained.open_rows(f"{tokens}/{self.side}")
        self.prompts = self._prompts(self.tokenizer)
        self.judging = Judge(recipe.evaluation, self.prompts, recipe.evaluation_batch_size)
        tasks = None if recipe.training.spec.scores else recipe.evaluation.tasks  # such a model writes nothing
        self.harness = Harness(tasks, scratch, recipe.trust) if tasks else None
        self.asks_in_turns = prompts.asks_in_turns(run, recipe, self.tokenizer)

    def measure(
        self, when: str, model: PreTrainedModel, own_tokenizer: PreTrainedTokenizerBase | None = None
    ) -> Measured:
        """Measures a model and lets it write; `own_tokenizer` is given where its vocabulary is not the run's."""
        evaluation, tokenizer = self.recipe.evaluation, own_tokenizer or self.tokenizer
        batch_size = self.recipe.evaluation_batch_size
        measured = Measured()
        # Losses per token of another vocabulary do not compare; rewards of texts do.
        if own_tokenizer is None or self.recipe.training.generation:
            progress = _progress_events(when, "measuring")
            measured = measure(model, tokenizer, self.rows, self.recipe, progress, self._second_model)
        if self.harness:
            events.emit(events.Evaluating(when=when, doing="tasks", done=0, of=1))
            in_turns, system = self.asks_in_turns and bool(tokenizer.chat_template), self.recipe.data.system
            measured.figures |= self.harness.run(model, tokenizer, batch_size, chat=in_turns, system=system)
        pairs = self.prompts if own_tokenizer is None else self._prompts(own_tokenizer)
        measured.completions = generate.write_all(
            model,
            tokenizer,
            [prompt for prompt, _ in pairs],
            max_new_tokens=evaluation.max_new_tokens,
            max_length=self.recipe.data.max_length,
            batch_size=batch_size,
            temperature=evaluation.temperature,
            top_p=evaluation.top_p,
            seed=self.recipe.seed,
            progress=_progress_events(when, "writing"),
        )
        return measured

    def score(self, measured: dict[str, Measured]) -> dict[str, str]:
        """Adds the figures of the completions to each model's, and returns the metrics' signatures."""
        signatures: dict[str, str] = {}
        for each in measured.values():
            scored = self.judging.judge(each.completions)
            each.scores |= scored.figures
            each.figures |= scored.figures
            signatures |= scored.signatures
        return signatures

    @cached_property
    def _second_model(self) -> PreTrainedModel | None:
        """The model that the method's settings name, such as the teacher: loaded once for all that are judged."""
        if self.recipe.training.second_model is None or "divergence" not in self.recipe.training.spec.figures:
            return None
        role, _ = self.recipe.training.second_model
        return loading.second_model(self.recipe, pinned.fetch(self.recipe)[role])

    def _prompts(self, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
        return prompts.held_out_prompts(self.run, self.recipe, tokenizer, self.recipe.evaluation.samples, self.side)


def _progress_events(when: str, doing: str) -> Progress:
    emitted = time.monotonic()

    def progress(done: int, of: int) -> None:
        nonlocal emitted
        if time.monotonic() - emitted > PROGRESS_INTERVAL:
            emitted = time.monotonic()
            events.emit(events.Evaluating(when=when, doing=doing, done=done, of=of))

    return progress


def _measure_all(
    evaluation_set: EvaluationSet, production: str | None, scratch: str
) -> tuple[dict[str, Measured], bool, int]:
    """Returns each model's results, whether the production model has another vocabulary, and the parameters."""
    recipe, tokenizer, run = evaluation_set.recipe, evaluation_set.tokenizer, evaluation_set.run
    builders: dict[str, Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase | None]]] = {
        "before": lambda: (loading.start_model(recipe, tokenizer, trained.base_folder(recipe)), None),
        "after": lambda: (trained.trained_model(recipe, tokenizer, trained.final_folder(run, scratch)), None),
    }
    if production:
        builders = {"production": lambda: load_production(production, recipe), **builders}
    measured: dict[str, Measured] = {}
    has_own_tokens, parameters = False, 0
    for when, build in builders.items():
        model, own = build()  # one model in memory at a time
        if own is not None and own.get_vocab() == tokenizer.get_vocab():
            own = None
        has_own_tokens = has_own_tokens or own is not None
        model = loading.place_model(model).eval()
        measured[when] = evaluation_set.measure(when, model, own)
        parameters = loading.count_parameters(model.parameters())
        del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    for when in measured.keys() - {"before"}:
        if measured["before"].likelihoods and measured[when].likelihoods:
            measured[when].figures |= preference(measured["before"].likelihoods, measured[when].likelihoods)
    return measured, has_own_tokens, parameters


def _document(
    evaluation_set: EvaluationSet, measured: dict[str, Measured], signatures: dict[str, str]
) -> dict[str, Any]:
    """Returns the models' part of `evaluation.json`, and writes all examples to its folder."""
    recipe, run = evaluation_set.recipe, evaluation_set.run
    by_model = {when: each.figures for when, each in measured.items()}
    values: dict[str, Any] = {
        when: metrics.figure_values(each.figures) | each.counts for when, each in measured.items()
    }
    values.setdefault("production", None)
    rows = []
    for number, (prompt, reference) in enumerate(evaluation_set.prompts):
        completions = {when: each.completions[number] for when, each in measured.items()}
        scores = {
            when: {
                name: score
                for name, figure in each.scores.items()
                if (score := figure.each[number]) is not None and math.isfinite(score)
            }
            for when, each in measured.items()
        }
        rows.append({"number": number, "prompt": prompt, "reference": reference, **completions, "scores": scores})
    # Before `evaluation.json`, which names this file.
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    run.storage.write(run.path("examples.jsonl"), text.encode("utf-8", "backslashreplace"))
    return values | {
        "side": evaluation_set.side,
        "batch_size": recipe.evaluation_batch_size,
        "intervals": metrics.intervals(by_model, recipe.evaluation.confidence, recipe.seed),
        "not_measured": {
            when: reasons
            for when, each in by_model.items()
            if (reasons := {name: why for name, figure in each.items() if (why := figure.not_measured)})
        },
        "better": {name: figure.better for each in by_model.values() for name, figure in each.items()},
        "signatures": signatures,
        "without_reference": sum(not reference for _, reference in evaluation_set.prompts),
        "samples": [{key: row[key] for key in ("prompt", "reference", *measured)} for row in rows[:NUM_SAMPLES]],
        "examples": {"count": len(rows), "path": "examples.jsonl"},
        "summary": summary(values["before"], values["after"], values["production"]),
    }


def find_production(run: Run, recipe: Recipe, scratch: str) -> tuple[str | None, str | None]:
    """Returns the folder of the model in use, if there is one yet, and its name in words, if the recipe names one."""
    reference = recipe.evaluation.production
    if reference is None:
        return None, None
    if reference == ACCEPTED:
        name = recipe.name
        with contextlib.suppress(FileNotFoundError):  # it is no retraining's; a phase has its own name
            name = lineage.retraining(run).model
        in_use = lineage.newest_accepted(run.storage, name)
        if in_use.model_uri is None:
            return None, f"{ACCEPTED}: there is none yet"
        folder, words = loading.local_model(in_use.model_uri), f"{ACCEPTED}, model {in_use.number} of {name}"
        chain.require_sealed_model(run.storage, in_use.model_uri, folder, trusted_here())
    elif reference.startswith("models:"):
        registered, words = _registered(run, recipe, reference, scratch)
        if registered is None:
            return None, words
        folder = registered
    else:
        folder, words = loading.local_model(reference), reference
    _require_same_kind(folder, recipe)
    return folder, words


def _registered(run: Run, recipe: Recipe, reference: str, scratch: str) -> tuple[str | None, str]:
    match = REGISTERED.fullmatch(reference)
    if match is None:
        raise UserError(f"evaluation.production {reference!r} is not of the form models:/NAME@ALIAS.")
    uri = servers.server_address(run, recipe)
    if uri is None:
        raise UserError(
            f"evaluation.production {reference!r} is in MLflow's registry, and the run has no MLflow.",
            remedy="Set tracking.mlflow, or name a folder, s3://… or a hub id.",
        )
    import mlflow
    from mlflow.exceptions import MlflowException

    mlflow.set_tracking_uri(uri)
    name, alias, version = match["name"], match["alias"], match["version"]
    try:
        if alias:
            version = str(mlflow.MlflowClient(uri).get_model_version_by_alias(name, alias).version)
        folder = os.path.join(scratch, "production")
        os.makedirs(folder, exist_ok=True)
        folder = mlflow.artifacts.download_artifacts(
            artifact_uri=f"models:/{name}/{version}", dst_path=folder, tracking_uri=uri
        )
    except (MlflowException, ImportError, OSError) as error:
        # The alias was asked for and is not there. A version that is known and cannot be had is an error.
        if version is None and getattr(error, "error_code", None) in ABSENT:
            return None, f"{reference}: there is none yet"
        raise UserError(
            f"evaluation.production {reference!r} cannot be fetched from {uri}: {' '.join(str(error).split())[:300]}",
            remedy="Check the name and the tracking server.",
        ) from None
    return folder, f"{reference}, version {version}" if alias else reference


def _require_same_kind(folder: str, recipe: Recipe) -> None:
    reference = recipe.evaluation.production
    where = _folder_with(folder, "config.json")
    if where is None:
        if _folder_with(folder, "adapter_config.json"):
            return
        raise UserError(
            f"evaluation.production {reference!r} holds no config.json.", remedy="Name a model in Hugging Face format."
        )
    kinds = _read_json(where, "config.json").get("architectures") or []
    expected = SCORERS if recipe.training.spec.scores else WRITERS
    if kinds and not any(kind.endswith(expected) for kind in kinds):
        raise UserError(
            f"evaluation.production {reference!r} is a {', '.join(kinds)}; "
            f"expected …{expected[0]}, as the run trains one.",
            remedy="Name a model of the same kind.",
        )


def load_production(folder: str, recipe: Recipe) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads the model in use like the recipe's own; an adapter is put on its base."""
    setting = "evaluation.production"
    user_code.trusted_model(recipe, setting, folder)
    try:
        tokenizer = loading.load_tokenizer(
            _folder_with(folder, "tokenizer_config.json") or folder, trust_remote_code=recipe.model.trust_remote_code
        )
        if whole := _folder_with(folder, "config.json"):
            return loading.load_model(whole, recipe), tokenizer
        adapter = _folder_with(folder, "adapter_config.json") or folder
        named = loading.local_model(_read_json(adapter, "adapter_config.json")["base_model_name_or_path"])
        base = user_code.trusted_model(recipe, setting, named)
        return loading.adapted(loading.load_model(base, recipe), adapter, tokenizer), tokenizer
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(
            f"evaluation.production {recipe.evaluation.production!r} cannot be loaded: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}",
            remedy="Name a model in Hugging Face format, of the kind that the run trains.",
        ) from None


def _folder_with(folder: str, name: str) -> str | None:
    """Returns the topmost folder with a file: MLflow keeps model and tokenizer apart."""
    holding = [parent for parent, _, names in os.walk(folder) if name in names]
    return min(holding, key=lambda parent: (parent.count(os.sep), parent), default=None)


def _read_json(folder: str, name: str) -> dict[str, Any]:
    with open(os.path.join(folder, name), encoding="utf-8") as file:
        document: dict[str, Any] = json.load(file)
    return document
