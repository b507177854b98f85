"""The rows, prompts and tasks on which every model of an evaluation is judged."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from baton.components.evaluate import measures
from baton.components.evaluate.harness import Harness
from baton.components.shared.core import events
from baton.components.shared.models import generation, loading, prompting, prompts, today, trained
from baton.components.shared.models.metrics.figures import Figure
from baton.components.shared.models.metrics.judging import Judge
from baton.components.shared.recipe import Recipe
from baton.components.shared.runs import code
from baton.components.shared.runs.documents.data import Tokens
from baton.components.shared.runs.run import Run

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

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
        today.tell(run.need(Tokens).today)
        parts = {name.partition("/")[0] for name in trained.tokens_manifest(run)[1].files}
        self.side = "test" if prompts.judged_side(run) == "test" and "test" in parts else "eval"
        tokens = trained.tokens_folder(run, scratch, parts=("tokenizer", self.side))
        if own_code := code.fetch(run, scratch):
            trained.require_origin(run)
            code.install(own_code)
        self.run, self.recipe = run, recipe
        self.tokenizer = loading.load_tokenizer(f"{tokens}/tokenizer", trust_remote_code=recipe.model.trust_remote_code)
        self.rows = trained.open_rows(f"{tokens}/{self.side}")
        self.prompts = self._prompts(self.tokenizer)
        self.judging = Judge(recipe.evaluation, self.prompts, recipe.evaluation_batch_size)
        tasks = None if recipe.training.spec.scores else recipe.evaluation.tasks  # such a model writes nothing
        self.harness = Harness(tasks, scratch, recipe.trust) if tasks else None
        self.asks_in_turns = prompting.asks_in_turns(run, recipe, self.tokenizer)

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
                model, tokenizer, self.rows, self.recipe, telling(when, "measuring"), self._second_model
            )
            findings = Findings(measured.figures, measured.counts, measured.likelihoods)
        if self.harness:
            events.emit(events.Evaluating(when=when, doing="tasks", done=0, of=1))
            chat = self.asks_in_turns and bool(tokenizer.chat_template)
            system = self.recipe.data.system
            findings.figures |= self.harness.run(model, tokenizer, batch_size, chat=chat, system=system)
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


def telling(when: str, doing: str) -> measures.Progress:
    """Returns what tells now and then how far something is with a model."""
    told = time.monotonic()

    def progress(done: int, of: int) -> None:
        nonlocal told
        if time.monotonic() - told > TELL_EVERY:
            told = time.monotonic()
            events.emit(events.Evaluating(when=when, doing=doing, done=done, of=of))

    return progress
