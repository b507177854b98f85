"""The gate: what must hold of the evaluation before a model is handed out."""

from __future__ import annotations

import math
import time
from typing import Any

from components.shared import events, tracking
from components.shared.errors import UserError
from components.shared.recipe import GATE
from components.shared.runs import Run

SIGNS = {
    "<=": lambda value, limit: value <= limit,
    ">=": lambda value, limit: value >= limit,
    "<": lambda value, limit: value < limit,
    ">": lambda value, limit: value > limit,
}
OPERATORS = {
    "*": lambda value, by: value * by,
    "+": lambda value, by: value + by,
    "-": lambda value, by: value - by,
}
MODELS = {"baseline": "before", "production": "production"}
"""Whose figures a line compares with, by the key of the evaluation."""


def judge_run(run_uri: str) -> dict[str, Any]:
    """Judges a run and keeps the verdict with its evaluation.

    Returns:
        `passed`, and `lines` as `judge` returns them.
    """
    started = time.time()
    run = Run.open(run_uri)
    evaluation = run.require("evaluation.json")
    lines = judge(run.recipe().evaluation.gate, evaluation)
    found = {"passed": all(line["held"] for line in lines), "lines": lines}
    run.put("evaluation.json", {**evaluation, "gate": found})
    tracking.tag(run, {"baton.verdict": _verdict(found)})
    run.record("gate", {"seconds": time.time() - started})
    events.emit("judged", passed=found["passed"], failed=failed(found))
    return found


def reject_run(run_uri: str) -> str:
    """Ends a run as rejected.

    Returns:
        Which lines failed, in words.
    """
    return _verdict(Run.open(run_uri).require("evaluation.json")["gate"])


def judge(gate: dict[str, str], evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    """Compares an evaluation with the lines of a gate.

    Args:
        gate: Figure → line, as `recipe.evaluation.gate`.
        evaluation: Figures by name: `before`, `after`, and `production`, None where there is none yet.

    Returns:
        For each line `figure`, `line`, `value`, `limit` (None against a production model that is not there yet),
        `held`, and the whole in `words`.

    Raises:
        UserError: the trained model, or the one it is compared with, has no such figure.
    """
    return [_judge(figure, line.strip(), evaluation) for figure, line in gate.items()]


def failed(found: dict[str, Any]) -> list[str]:
    """Returns the lines that did not hold, in words."""
    return [line["words"] for line in found["lines"] if not line["held"]]


def _verdict(found: dict[str, Any]) -> str:
    return "accepted" if found["passed"] else f"rejected: {'; '.join(failed(found))}"


def _judge(figure: str, line: str, evaluation: dict[str, Any]) -> dict[str, Any]:
    match = GATE.fullmatch(line)
    assert match, line  # the recipe has checked it
    value = _figure(figure, "after", evaluation)
    found = {"figure": figure, "line": line, "value": value, "limit": None, "held": True}
    if match["number"]:
        limit = float(match["number"])
    elif match["against"] == "production" and evaluation.get("production") is None:
        return {**found, "words": f"{figure} {value:.4g}: there is no production model yet"}
    else:
        limit = _figure(figure, MODELS[match["against"]], evaluation)
        if match["operator"]:
            limit = OPERATORS[match["operator"]](limit, float(match["by"]))
    held = SIGNS[match["sign"]](value, limit)
    said = f"{limit:.4g}" if match["number"] else f"{match[0].removeprefix(match['sign']).strip()} = {limit:.4g}"
    words = f"{figure} {value:.4g} is {'' if held else 'not '}{match['sign']} {said}"
    if held and not math.isfinite(value):
        held, words = False, f"{words}, but not finite"
    return {**found, "limit": limit, "held": held, "words": words}


def _figure(name: str, when: str, evaluation: dict[str, Any]) -> float:
    figures = evaluation[when]
    if name not in figures:
        whose = {"after": "the trained model", "before": "the model before training"}.get(when, f"the {when} model")
        raise UserError(
            f"evaluation.gate: {whose} has no figure {name!r}; it has {', '.join(sorted(figures)) or 'none'}.",
            remedy="Name one of these, or add it to evaluation.metrics, functions or tasks.",
        )
    return float(figures[name])
