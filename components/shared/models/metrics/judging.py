"""All that a recipe measures of what its model writes, in training and after it."""

from __future__ import annotations

from collections.abc import Sequence

from baton.components.shared.models.metrics import functions
from baton.components.shared.models.metrics.bertscore import BertScore
from baton.components.shared.models.metrics.figures import Figure
from baton.components.shared.models.metrics.texts import METRICS, Metric, Scored
from baton.components.shared.recipe import Evaluation, extras

Pairs = Sequence[tuple[str, str]]
"""Prompts and the rows' own answers, '' where a row has none."""


class Judge:
    """The metrics and functions of a recipe, found and checked before anything is written.

    Args:
        evaluation: Says which.
        pairs: What the model is asked.
        batch_size: Texts per forward pass of an encoder.

    Raises:
        UserError: a metric's package, a function or an encoder cannot be had, or the function fails on the first
            row's own answer.
    """

    def __init__(self, evaluation: Evaluation, pairs: Pairs, batch_size: int) -> None:
        self._pairs = pairs
        extras.require_metrics(evaluation)
        self._functions = functions.load(evaluation.functions)
        for name, function in self._functions.items() if pairs else ():  # fails now, not when models are judged
            self._own(name, function, [pairs[0][1]])
        self._metrics: list[Metric] = [METRICS[name] for name in evaluation.metrics if name in METRICS]
        if "bertscore" in evaluation.metrics and pairs:
            self._metrics.append(BertScore(evaluation.bertscore_model or "", batch_size))

    def judge(self, writes: Sequence[str]) -> Scored:
        """Returns the figures of what a model wrote after the prompts, and the metrics' signatures."""
        judged = Scored()
        if not self._pairs:
            return judged
        references = [reference for _, reference in self._pairs]
        for metric in self._metrics:
            scored = metric(writes, references)
            judged.figures |= scored.figures
            judged.signatures |= scored.signatures
        for name, function in self._functions.items():
            judged.figures[name] = self._own(name, function, writes)
        return judged

    def _own(self, name: str, function: functions.Function, writes: Sequence[str]) -> Figure:
        """Returns the figure of a user's function for what was written for the first prompts."""
        asked, references = zip(*self._pairs[: len(writes)], strict=True)
        return functions.score(name, function, asked, writes, references)
