"""Evaluation: figures on held-out rows and samples, before and after training and of the model in use.

All models are judged on the same rows, prompts and tasks. Kubeflow gets the figures as a card, to compare runs.
"""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from baton import events, machine
from baton.checkpoint.store import CheckpointStore
from baton.evaluate import measures, production
from baton.evaluate.harness import Harness
from baton.evaluate.production import Production
from baton.models import chat as today
from baton.models import generate, loading, metrics, prompts, trained, user_code
from baton.models.loading import count_parameters
from baton.models.metrics import Figure, Judge
from baton.pages.card import Card
from baton.recipe.recipe import Recipe
from baton.runs.documents import TokenizedRows
from baton.runs.outcomes import EvaluationResult, Figures
from baton.runs.run import Run
from baton.scratch import scratch_folder
from baton.tracking import tracking_run

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# --- What evaluate leaves in Kubeflow: a run's figures, one column on the page that compares runs.


DIGEST = 16
"""Characters of the digest: as many as tell runs apart and fit into a column."""


def evaluation_card(run: Run, evaluation: dict[str, Any]) -> Card:
    """Returns the figures of a run that is trained.

    Args:
        run: The run.
        evaluation: What `evaluate_run` returned.
    """
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
        "digest": chosen.digest[:DIGEST],
    }
    return Card("", figures | cost)


# --- The rows, prompts and tasks on which every model of an evaluation is judged.


TELL_EVERY = 2.0
"""Seconds between two words on how far it is."""


@dataclass
class Findings:
    """The results of one model.

    Attributes:
        figures: By name.
        counts: Numbers that are no measure of quality.
        likelihoods: Of pairs, as `measures.Measured`.
        writes: What it wrote for each prompt.
        scores: Those of the figures that judge what it wrote, over the prompts.
    """

    figures: dict[str, Figure] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    likelihoods: measures.Likelihoods = field(default_factory=dict)
    writes: list[str] = field(default_factory=list)
    scores: dict[str, Figure] = field(default_factory=dict)


class EvaluationSet:
    """Rows, prompts, metrics and tasks, loaded and checked before the first model is.

    Args:
        run: The training run.
        recipe: Its resolved recipe.
        scratch: Folder for what comes from the store.

    Raises:
        UserError: a function, encoder or task that the recipe names cannot be had, or the function fails on the first
            row's own answer.
    """

    def __init__(self, run: Run, recipe: Recipe, scratch: str) -> None:
        today.set_template_date(run.need(TokenizedRows).today)
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

    def judge(
        self, when: str, model: PreTrainedModel, own_tokenizer: PreTrainedTokenizerBase | None = None
    ) -> Findings:
        """Measures a model and lets it write.

        Args:
            when: Which model it is.
            model: The model.
            own_tokenizer: Its tokenizer, where that has another vocabulary than the run's: figures on the run's tokens
                are left out, and the prompts are rendered anew.
        """
        evaluation, tokenizer = self.recipe.evaluation, own_tokenizer or self.tokenizer
        batch_size = self.recipe.evaluation_batch_size
        findings = Findings()
        if own_tokenizer is None or self.recipe.training.generation:
            measured = measures.measure(
                model, tokenizer, self.rows, self.recipe, progress_teller(when, "measuring"), self._second_model
            )
            findings = Findings(measured.figures, measured.counts, measured.likelihoods)
        if self.harness:
            events.emit(events.Evaluating(when=when, doing="tasks", done=0, of=1))
            chat = self.asks_in_turns and bool(tokenizer.chat_template)
            system = self.recipe.data.system
            findings.figures |= self.harness.run(model, tokenizer, batch_size, chat=chat, system=system)
        pairs = self.prompts if own_tokenizer is None else self._prompts(own_tokenizer)
        findings.writes = generate.write_all(
            model,
            tokenizer,
            [prompt for prompt, _ in pairs],
            max_new_tokens=evaluation.max_new_tokens,
            max_length=self.recipe.data.max_length,
            batch_size=batch_size,
            temperature=evaluation.temperature,
            top_p=evaluation.top_p,
            seed=self.recipe.seed,
            progress=progress_teller(when, "writing"),
        )
        return findings

    def compare(self, judged: dict[str, Findings]) -> dict[str, str]:
        """Adds the figures of what the models wrote, against the rows' own answers.

        Returns:
            The metrics' signatures.
        """
        signatures: dict[str, str] = {}
        for findings in judged.values():
            scored = self.judging.judge(findings.writes)
            findings.scores |= scored.figures
            findings.figures |= scored.figures
            signatures |= scored.signatures
        return signatures

    @cached_property
    def _second_model(self) -> PreTrainedModel | None:
        """The model that the method's settings name, loaded once for all that are judged."""
        return measures.second_model(self.recipe)

    @property
    def without_reference(self) -> int:
        """Rows of the samples that have no answer to compare with."""
        return sum(not reference for _, reference in self.prompts)

    def _prompts(self, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
        return prompts.held_out_prompts(self.run, self.recipe, tokenizer, self.recipe.evaluation.samples, self.side)


def progress_teller(when: str, doing: str) -> measures.Progress:
    """Returns what tells now and then how far something is with a model."""
    told = time.monotonic()

    def progress(done: int, of: int) -> None:
        nonlocal told
        if time.monotonic() - told > TELL_EVERY:
            told = time.monotonic()
            events.emit(events.Evaluating(when=when, doing=doing, done=done, of=of))

    return progress


# --- Evaluation: figures on held-out rows and samples, of the model before and after training and of the one in use.


SHOWN = 8
"""Examples that are part of `evaluation.json`, at most; all are in `examples.jsonl`."""

Builder = Callable[[], "tuple[PreTrainedModel, PreTrainedTokenizerBase | None]"]


def evaluate_run(run_uri: str) -> dict[str, Any]:
    """Compares the trained model with what it started from and with the one in use, on rows it has not seen.

    Returns:
        `before`, `after` and `production` (None without one), each the figures of `measures.measure`, of the
        recipe's metrics and tasks, None for one that is `not_measured`, which has the reasons; `better`, which way
        each is; `production_model`, what that is or why there is none; `side`, the rows that
        were taken, in passes of `batch_size` rows; `intervals`, see `metrics.intervals`; `signatures` of
        metrics; `without_reference`, the number of samples that no metric counts; the first `samples` and where
        all `examples` are; `parameters`, and a `summary` in words.

    Raises:
        BatonError: the run has not come to its end.
        UserError: the model in use, a function, an encoder or a task that the recipe names cannot be had.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    started = time.time()
    run = Run.open(run_uri)
    recipe = run.resolved_recipe()
    machine.require_gpus(recipe.resources.image)
    last = trained.final_checkpoint(run)  # an unfinished run is told before anything is judged
    with scratch_folder("evaluate") as scratch:
        evaluation_set = EvaluationSet(run, recipe, scratch)
        rival = production.find(run, recipe, scratch)
        judged, words, parameters = _judge_all(evaluation_set, rival, scratch)
        evaluation = _document(evaluation_set, judged, evaluation_set.compare(judged))
    evaluation |= {"production_model": words, "parameters": parameters}
    for when in ("before", "after"):
        events.emit(events.Evaluated(when, evaluation[when]))
    # In the store before it is sent on: a tracking server may be out of reach.
    run.put(EvaluationResult.NAME, evaluation)
    logged = {
        f"final_{when}_{name}": value
        for when in judged
        for name, value in evaluation[when].items()
        if value is not None
    }
    tracking_run.log_metrics(run, logged, last.step)
    run.record("evaluate", {"seconds": time.time() - started})
    return evaluation


def summary(before: Figures, after: Figures, in_use: Figures | None = None) -> str:
    """Returns the figures that say most, in words, each followed by that of the model in use, if there is one."""

    def told(value: float | None) -> str:
        return "not measured" if value is None else f"{value:.4g}"

    named = {"loss": "held-out loss", "reward": "reward", "accuracy": "accuracy", "divergence": "divergence"}
    scored = ("exact_match", "numeric_match", "bleu", "chrf", "rougeL", "bertscore")
    parts = []
    for key, words in (named | {key: key.replace("_", " ") for key in scored}).items():
        if key in after and key in before:
            rival = f" (production {told(in_use[key])})" if in_use and key in in_use else ""
            parts.append(f"{words} {told(before[key])} → {told(after[key])}{rival}")
    if "reward_accuracy" in after:
        accuracy, margin = after["reward_accuracy"], after["reward_margin"]
        known = accuracy is not None and margin is not None
        told_gain = f"{accuracy:.0%}, margin {margin:.3g} nats" if known else "not measured"
        parts.append(f"preference accuracy {told_gain}")
    return ", ".join(parts)


def _judge_all(
    evaluation_set: EvaluationSet, rival: Production | None, scratch: str
) -> tuple[dict[str, Findings], str | None, int]:
    """Judges the models one after the other, so that one is in memory at a time.

    Returns:
        What was found of each, what the production model is in words, and the trained model's parameters.
    """
    import torch

    recipe, tokenizer, run = evaluation_set.recipe, evaluation_set.tokenizer, evaluation_set.run
    builders: dict[str, Builder] = {
        "before": lambda: (loading.start_model(recipe, tokenizer, trained.base_folder(recipe)), None),
        "after": lambda: (trained.trained_model(recipe, tokenizer, trained.final_folder(run, scratch)), None),
    }
    words = rival.words if rival else None
    if rival and rival.folder:
        folder = rival.folder
        builders = {"production": lambda: production.load(folder, recipe), **builders}
    judged: dict[str, Findings] = {}
    parameters = 0
    for when, build in builders.items():
        model, own = build()
        if own is not None and production.same_tokens(own, tokenizer):
            own = None
        if own is not None:
            words = f"{words}; it has another vocabulary, so that figures on tokens are left out"
        model = loading.place_model(model).eval()
        judged[when] = evaluation_set.judge(when, model, own)
        parameters = count_parameters(model.parameters())
        del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    for when in judged.keys() - {"before"}:
        if judged["before"].likelihoods and judged[when].likelihoods:
            judged[when].figures |= measures.preference(judged["before"].likelihoods, judged[when].likelihoods)
    return judged, words, parameters


def _document(evaluation_set: EvaluationSet, judged: dict[str, Findings], signatures: dict[str, str]) -> dict[str, Any]:
    """Returns what `evaluation.json` says of the models, and writes all examples beside it."""
    recipe = evaluation_set.recipe
    values: dict[str, Any] = {when: metrics.figure_values(each.figures) | each.counts for when, each in judged.items()}
    values.setdefault("production", None)
    rows = []
    for number, (prompt, reference) in enumerate(evaluation_set.prompts):
        writes = {when: findings.writes[number] for when, findings in judged.items()}
        scores = {
            when: {
                name: each
                for name, figure in findings.scores.items()
                if (each := figure.each[number]) is not None and math.isfinite(each)
            }
            for when, findings in judged.items()
        }
        rows.append({"number": number, "prompt": prompt, "reference": reference, **writes, "scores": scores})
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    evaluation_set.run.storage.write(
        evaluation_set.run.path("examples.jsonl"), text.encode("utf-8", "backslashreplace")
    )
    by_model = {when: each.figures for when, each in judged.items()}
    return values | {
        "side": evaluation_set.side,
        "batch_size": evaluation_set.recipe.evaluation_batch_size,
        "intervals": metrics.intervals(by_model, recipe.evaluation.confidence, recipe.seed),
        "not_measured": {
            when: reasons
            for when, each in by_model.items()
            if (reasons := {name: why for name, figure in each.items() if (why := figure.not_measured)})
        },
        "better": {name: figure.better for each in by_model.values() for name, figure in each.items()},
        "signatures": signatures,
        "without_reference": evaluation_set.without_reference,
        "samples": [{key: row[key] for key in ("prompt", "reference", *judged)} for row in rows[:SHOWN]],
        "examples": {"count": len(rows), "path": "examples.jsonl"},
        "summary": summary(values["before"], values["after"], values["production"]),
    }
