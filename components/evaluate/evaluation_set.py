"""The rows, prompts and tasks on which every model of an evaluation is judged."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.components.evaluate import functions, measures
from baton.components.evaluate.bertscore import BertScore
from baton.components.evaluate.figures import Figure
from baton.components.evaluate.harness import Harness
from baton.components.evaluate.texts import METRICS, Metric
from baton.components.shared.core import events
from baton.components.shared.models import generation, loading, prompts, trained
from baton.components.shared.recipe import Recipe
from baton.components.shared.runs import code
from baton.components.shared.runs.run import Run

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TELL_EVERY = 2.0
"""Seconds between two words on how far it is."""


@dataclass
class Findings:
    """The results of one model.

    Attributes:
        figures: By name, over rows.
        plain: Further numbers, which are no sums over rows.
        likelihoods: Of pairs, as `measures.Measured`.
        writes: What it wrote for each prompt.
        scores: Those of the figures that judge what it wrote, over the prompts.
    """

    figures: dict[str, Figure] = field(default_factory=dict)
    plain: dict[str, float] = field(default_factory=dict)
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
        import datasets

        parts = {name.partition("/")[0] for name in trained.tokens_manifest(run)[1].files}
        self.side = "test" if prompts.judged_side(run) == "test" and "test" in parts else "eval"
        tokens = trained.tokens_folder(run, scratch, parts=("tokenizer", self.side))
        code.install(code.fetch(run, scratch))
        self.run, self.recipe = run, recipe
        self.tokenizer = loading.load_tokenizer(f"{tokens}/tokenizer", trust_remote_code=recipe.model.trust_remote_code)
        self.rows: Dataset = datasets.load_from_disk(f"{tokens}/{self.side}")
        self.prompts = self._prompts(self.tokenizer)
        self.functions = functions.load(recipe.evaluation.functions)
        for name, function in self.functions.items() if self.prompts else ():  # fails now, not when models are judged
            self._own(name, function, [self.prompts[0][1]])
        self.metrics = self._metrics()
        tasks = None if recipe.training.spec.scores else recipe.evaluation.tasks  # such a model writes nothing
        self.harness = Harness(tasks, scratch) if tasks else None

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
        batch_size = evaluation.batch_size or self.recipe.micro_batch_size_per_process
        findings = Findings()
        if own_tokenizer is None or self.recipe.training.generation:
            measured = measures.measure(model, tokenizer, self.rows, self.recipe, telling(when, "measuring"))
            findings = Findings(measured.figures, dict(measured.counts), measured.likelihoods)
        if self.harness:
            events.emit(events.Evaluating(when=when, doing="tasks", done=0, of=1))
            figures, plain = self.harness.run(model, tokenizer, batch_size)
            findings.figures |= figures
            findings.plain |= plain
        pairs = self.prompts if own_tokenizer is None else self._prompts(own_tokenizer)
        findings.writes = generation.write_all(
            model,
            tokenizer,
            [prompt for prompt, _ in pairs],
            max_new_tokens=evaluation.max_new_tokens,
            max_length=self.recipe.data.max_length,
            batch_size=batch_size,
            temperature=evaluation.temperature,
            top_p=evaluation.top_p,
            seed=self.recipe.seed,
            progress=telling(when, "writing"),
        )
        return findings

    def compare(self, judged: dict[str, Findings]) -> dict[str, str]:
        """Adds the figures of what the models wrote, against the rows' own answers.

        Returns:
            The metrics' signatures.
        """
        references = [reference for _, reference in self.prompts]
        signatures: dict[str, str] = {}
        for findings in judged.values() if self.prompts else ():
            for metric in self.metrics:
                scored = metric(findings.writes, references)
                findings.scores |= scored.figures
                signatures |= scored.signatures
            for name, function in self.functions.items():
                findings.scores[name] = self._own(name, function, findings.writes)
            findings.figures |= findings.scores
        return signatures

    @property
    def without_reference(self) -> int:
        """Rows of the samples that have no answer to compare with."""
        return sum(not reference for _, reference in self.prompts)

    def _metrics(self) -> list[Metric]:
        asked = self.recipe.evaluation
        metrics = [METRICS[name] for name in asked.metrics if name in METRICS]
        if "bertscore" in asked.metrics and self.prompts:
            metrics.append(
                BertScore(asked.bertscore_model or "", asked.batch_size or self.recipe.micro_batch_size_per_process)
            )
        return metrics

    def _own(self, name: str, function: functions.Function, writes: list[str]) -> Figure:
        """Returns the figure of a user's function for what was written for the first prompts."""
        asked, references = zip(*self.prompts[: len(writes)], strict=True)
        return functions.score(name, function, asked, writes, references)

    def _prompts(self, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
        return prompts.held_out_prompts(self.run, self.recipe, tokenizer, self.recipe.evaluation.samples, self.side)


def telling(when: str, doing: str) -> measures.Progress:
    """Returns what tells now and then how far something is with a model."""
    told = time.monotonic()

    def progress(done: int, of: int) -> None:
        nonlocal told
        if time.monotonic() - told > TELL_EVERY:
            told = time.monotonic()
            events.emit(events.Evaluating(when=when, doing=doing, done=done, of=of))

    return progress
