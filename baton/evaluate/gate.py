"""The gate: conditions on the evaluation that a model meets before its export."""

from __future__ import annotations

import math
import operator
import time

from baton import events
from baton.checkpoint import seals
from baton.errors import UserError
from baton.recipe.evaluation import GATE
from baton.runs import objects
from baton.runs.outcomes import EvaluationResult, GateVerdict, JudgedLine
from baton.runs.run import Run
from baton.tracking import tracking_run

COMPARISONS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
OPERATORS = {"*": operator.mul, "+": operator.add, "-": operator.sub}
MODELS = {"baseline": "before", "production": "production"}  # other side of a comparison → its key in the evaluation
WHOSE = {"after": "the trained model", "before": "the model before training", "production": "the production model"}


@seals.sealed(objects.GATE)
def judge_run(run_uri: str) -> GateVerdict:
    started = time.time()
    run = Run.open(run_uri)
    evaluation = run.need(EvaluationResult)
    lines = judge(run.recipe().evaluation.gate, evaluation)
    verdict = GateVerdict(passed=all(line.held for line in lines), lines=lines)
    run.write(evaluation.model_copy(update={"gate": verdict}))
    if ledger := seals.ledger_of(run):
        ledger.facts = {"gate": {"passed": verdict.passed, "lines": [line.words for line in lines]}}
    tracking_run.tag(run, {"baton.verdict": verdict.words})
    run.record("gate", {"seconds": time.time() - started})
    events.emit(events.Judged(passed=verdict.passed, failed=verdict.failed))
    return verdict


def as_markdown(verdict: GateVerdict) -> str:
    lines = [f"# {verdict.words}", "", "| figure | value | limit | |", "|---|---|---|---|"]
    for line in verdict.lines:
        value, limit = ("—" if each is None else f"{each:.4g}" for each in (line.value, line.limit))
        lines.append(f"| {line.figure} | {value} | {line.line} ({limit}) | {'held' if line.held else '**not held**'} |")
    return "\n".join(lines) + "\n"


def reject_run(run_uri: str) -> str:
    """Returns which lines of the gate failed, in words."""
    verdict = Run.open(run_uri).need(EvaluationResult).gate
    return verdict.words if verdict else ""


def judge(gate: dict[str, str], evaluation: EvaluationResult) -> list[JudgedLine]:
    return [_judge(figure, line.strip(), evaluation) for figure, line in gate.items()]


def _judge(figure: str, line: str, evaluation: EvaluationResult) -> JudgedLine:
    match = GATE.fullmatch(line)
    assert match, line  # the recipe has checked it
    value, limit, bound = _figure(figure, "after", evaluation), None, ""
    unmeasured = "after" if value is None else None
    if match["number"]:
        limit = float(match["number"])
        bound = f"{limit:.4g}"
    elif match["against"] == "production" and evaluation.production is None:
        if value is not None:
            words = f"{figure} {value:.4g}: there is no production model yet"
            return JudgedLine(figure=figure, line=line, value=value, limit=None, held=True, words=words)
    else:
        against = MODELS[match["against"]]
        limit = _figure(figure, against, evaluation)
        unmeasured = unmeasured or (against if limit is None else None)
        if limit is not None:
            limit = OPERATORS[match["operator"]](limit, float(match["by"])) if match["operator"] else limit
            bound = f"{match[0].removeprefix(match['sign']).strip()} = {limit:.4g}"
    if value is None or limit is None:
        assert unmeasured
        why = evaluation.not_measured.get(unmeasured, {}).get(figure, "no row counted")
        words = f"{figure} of {WHOSE[unmeasured]} was not measured: {why}"
        return JudgedLine(figure=figure, line=line, value=value, limit=limit, held=False, words=words)
    held = COMPARISONS[match["sign"]](value, limit)
    words = f"{figure} {value:.4g} is {'' if held else 'not '}{match['sign']} {bound}"
    if held and not (math.isfinite(value) and math.isfinite(limit)):
        held, words = False, f"{words}, but not finite"
    return JudgedLine(figure=figure, line=line, value=value, limit=limit, held=held, words=words)


def _figure(name: str, when: str, evaluation: EvaluationResult) -> float | None:
    figures = evaluation.figures(when) or {}
    if name not in figures:
        raise UserError(
            f"evaluation.gate: {WHOSE[when]} has no figure {name!r}; it has {', '.join(sorted(figures)) or 'none'}.",
            remedy="Name one of these, or add it to evaluation.metrics, functions or tasks.",
        )
    return figures[name]
