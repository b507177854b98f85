"""The report's part on evaluation: every figure beside the models it is compared with, the gate, and each example."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from baton.components.report.view import Examples
from baton.components.shared.core.document import Json
from baton.components.shared.pages.rendering import number
from baton.components.shared.runs.documents.outcome import Evaluation, GateLine
from baton.components.shared.runs.run import Run

MAX_EXAMPLES = 400
"""Examples that the page shows; the run's `examples.jsonl` has all of them."""

PAGE = 20
"""Examples on one page of the table."""

LOWER_IS_BETTER = ("loss", "perplexity", "divergence", "word_perplexity", "byte_perplexity", "bits_per_byte")
"""In evaluations that do not say which way is better, as older ones; of a task's figure its last part."""
SIGNS = {"higher": 1, "lower": -1, None: 0}
NOT_COMPARED = ("tokens",)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of the evaluation.

    Attributes:
        name: Its name.
        before: Of the model before training, None where it has none.
        production: Of the production model.
        after: Of the trained model.
        why: The reason why it was not measured of the trained model.
        low: Lower end of the confidence interval of `after`, None where there is none.
        high: Upper end.
        gain: What training changed, with its interval, in words.
        tone: `good` where the whole interval of the gain lies on the better side, `bad` on the worse, else ``.
        gate: The line of the gate on this figure, in words.
        held: Whether it held.
    """

    name: str
    before: float | None
    production: float | None
    after: float | None
    why: str
    low: float | None
    high: float | None
    gain: str
    tone: str
    gate: str
    held: bool


def examples(run: Run, evaluation: Evaluation | None) -> Examples:
    """Returns the evaluation's examples, as many as the page shows."""
    named = evaluation.examples if evaluation else None
    if not named or not named.count:
        return Examples()
    lines = run.storage.read(run.path(named.path)).splitlines()
    uri = run.storage.uri(run.path(named.path)) if lines else None
    return Examples(len(lines), uri, [json.loads(line) for line in lines[:MAX_EXAMPLES]])


def figures(evaluation: Evaluation) -> list[Figure]:
    """Returns a row for each figure, those of the gate first."""
    lines = {line.figure: line for line in (evaluation.gate.lines if evaluation.gate else ())}
    names = [name for name in evaluation.after if name not in NOT_COMPARED]
    names.sort(key=lambda name: name not in lines)  # stable: the evaluation's order otherwise
    return [_figure(name, evaluation, lines.get(name)) for name in names]


def _figure(name: str, evaluation: Evaluation, line: GateLine | None) -> Figure:
    intervals = evaluation.intervals or {}
    low, high = intervals.get("after", {}).get(name, (None, None))
    before, after = evaluation.before.get(name), evaluation.after[name]
    change = [value for value in intervals.get("gain", {}).get(name, ()) if value is not None]
    gain, tone = "", ""
    if len(change) == 2 and before is not None and after is not None:
        gain = f"{_signed(after - before)} ({_signed(change[0])} to {_signed(change[1])})"
        better = [value * _sign(name, evaluation, line) for value in change]
        tone = "good" if min(better) > 0 else "bad" if max(better) < 0 else ""
    return Figure(
        name=name,
        before=before,
        production=(evaluation.production or {}).get(name),
        after=after,
        why=evaluation.not_measured.get("after", {}).get(name, ""),
        low=low,
        high=high,
        gain=gain,
        tone=tone,
        gate=line.words if line else "",
        held=line is None or line.held,
    )


def _sign(name: str, evaluation: Evaluation, line: GateLine | None) -> int:
    """Returns 1 where more of a figure is better, -1 where less is, 0 where nobody says."""
    known = evaluation.better.get(name)
    if known is None and line and line.line:  # the gate asks for more or for less
        known = "lower" if line.line.startswith("<") else "higher"
    if known is None and name not in evaluation.better:
        known = "lower" if name.rpartition(".")[2] in LOWER_IS_BETTER else "higher"
    return SIGNS[known]


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else '−' if value < 0 else ''}{number(abs(value))}"


def example_pages(shown: Sequence[Json]) -> list[tuple[str, Sequence[Json]]]:
    """Returns the examples in pages, each with its title."""
    starts = range(0, len(shown), PAGE)
    return [(f"{start + 1}–{min(start + PAGE, len(shown))}", shown[start : start + PAGE]) for start in starts]
