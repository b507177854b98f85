"""Comparison of runs on one page: losses over each other, figures, differing settings, samples side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from baton.pages import html, plots, run_page
from baton.pages.collect import RunReport, collect
from baton.pages.html import count, duration, number
from baton.pages.plots import Curve, Plot
from baton.runs.lineage import LiveSince
from baton.runs.run import Run, now

COLORS = ("blue", "orange", "green", "purple", "amber", "sky", "grey")
MAX_SAMPLES = 12


@dataclass(frozen=True)
class Setting:
    """A setting in which runs differ; a value per run, empty where it is not set."""

    path: str
    values: Sequence[str]


@dataclass(frozen=True)
class FigureRow:
    name: str
    values: Sequence[float | None]
    best: int | None  # index of the best run; None where that is not known, or two are equally good


def compare(runs: Sequence[Run], live_since: LiveSince = lambda run: None) -> str:
    """Returns the page that compares two or more runs of a store or of several."""
    return render([collect(run, as_of="" if live_since(run) is None else now()) for run in runs])


def render(reports: Sequence[RunReport]) -> str:
    environment = html.environment(Path(__file__).parent)
    environment.filters |= {"clip": run_page.clip}
    names = labels(reports)
    proofs = [run_page.read_proof(report) for report in reports]
    return environment.get_template("compare.html.j2").render(
        columns=list(zip(names, reports, (COLORS[at % len(COLORS)] for at in range(len(names))), strict=True)),
        names=names,
        sentence=sentence(names, reports),
        facts=[
            ("State", [report.state for report in reports]),
            ("Resume proof", [proof.word for proof in proofs]),
            ("Steps", [f"{report.steps:,}" for report in reports]),
            ("Chunks", [f"{len(report.targets):,}" for report in reports]),
            ("Tokens trained", [number(report.trained_tokens or None) for report in reports]),
            ("Time in chunks", [duration(run_page.chunk_seconds(report.chunk_attempts)) for report in reports]),
            ("Commit", [report.commit[:10] + report.commit[40:] or "—" for report in reports]),
            ("Device", [(report.newest and report.newest.fingerprint.device) or "—" for report in reports]),
        ],
        digests=[report.newest.digest if report.newest else "" for report in reports],
        training=_losses("Training loss by step", "training loss", names, [_training(report) for report in reports]),
        evaluation=_losses(
            "Evaluation loss by step",
            "evaluation loss",
            names,
            [run_page.evaluation_points(report) for report in reports],
            dots=True,
        ),
        figures=figure_rows(reports),
        settings=settings(reports),
        samples=samples(reports),
    )


def labels(reports: Sequence[RunReport]) -> list[str]:
    """Returns the runs' names; their addresses where two have the same."""
    names = [report.run for report in reports]
    return names if len(set(names)) == len(names) else [report.uri for report in reports]


def sentence(names: Sequence[str], reports: Sequence[RunReport]) -> str:
    digests = {report.newest.digest if report.newest else None for report in reports}
    if len(digests) == 1 and None not in digests:
        return f"Bit-identical: the newest checkpoints of {count(len(names), 'run')} have the same state digest."
    losses = [report.figures("after").get("loss") for report in reports]
    known = [(float(loss), name) for loss, name in zip(losses, names, strict=True) if loss is not None]
    num_settings = len(settings(reports))
    differing = f"{count(num_settings, 'setting')} {'differs' if num_settings == 1 else 'differ'}."
    if len(known) == len(names) and len({loss for loss, _ in known}) > 1:
        best, name = min(known)
        return f"{name} has the lowest evaluation loss, {number(best)}. {differing}"
    return f"{count(len(names), 'run')} side by side. {differing}"


def figure_rows(reports: Sequence[RunReport]) -> list[FigureRow]:
    """Returns the figures of the trained models, with the best run of each."""
    figures = [report.figures("after") for report in reports]
    better: dict[str, str | None] = {}
    for report in reports:
        better |= report.evaluation.better if report.evaluation else {}
    rows = []
    for name in dict.fromkeys(name for row in figures for name in row if name != "tokens"):
        values = [row.get(name) for row in figures]
        direction = better.get(name) or ("lower" if name in ("loss", "perplexity") else None)
        known = [value for value in values if value is not None]
        best = None
        if direction and len(known) > 1 and len(set(known)) > 1:
            value = min(known) if direction == "lower" else max(known)
            best = values.index(value) if values.count(value) == 1 else None
        rows.append(FigureRow(name, values, best))
    return rows


def settings(reports: Sequence[RunReport]) -> list[Setting]:
    """Returns the settings in which the runs' recipes differ."""
    flat = [dict(_flat(yaml.safe_load(report.recipe_yaml or "{}"))) for report in reports]
    paths = dict.fromkeys(path for settings in flat for path in settings)
    rows = [Setting(path, [settings.get(path, "") for settings in flat]) for path in paths]
    return [row for row in rows if len(set(row.values)) > 1]


def samples(reports: Sequence[RunReport]) -> list[tuple[str, list[str | None]]]:
    """Returns prompts with each run's answer; prompts that all runs have come first."""
    answers: dict[str, list[str | None]] = {}
    for at, report in enumerate(reports):
        for sample in report.evaluation.samples if report.evaluation else ():
            after = sample.get("after")
            answers.setdefault(str(sample["prompt"]), [None] * len(reports))[at] = None if after is None else str(after)
    rows = sorted(answers.items(), key=lambda row: sum(answer is None for answer in row[1]))
    return rows[:MAX_SAMPLES]


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
    elif value is not None:
        yield path, str(value)


def _training(report: RunReport) -> plots.Points:
    points = plots.series(report.losses, "loss")
    return plots.smoothed(points) or points


def _losses(
    label: str, name: str, names: Sequence[str], curves: Sequence[plots.Points], *, dots: bool = False
) -> Plot | None:
    drawn = [
        Curve(
            name=run,
            points=points,
            color=COLORS[at % len(COLORS)],
            # Later runs are dashed, so that equal curves all show.
            width=1.8 if at else 5,
            alpha=1 if at else 0.4,
            dash=(8, 5) if at else (),
            dots=dots,
        )
        for at, (run, points) in enumerate(zip(names, curves, strict=True))
    ]
    return plots.plot(label, name, drawn)
