"""Page of a sweep: leader, stopped trials, saved time, and learning curves."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment

from baton.pages import html as rendering
from baton.pages import plots
from baton.pages.html import count, duration, number
from baton.pages.plots import Curve, Plot
from baton.recipe import load
from baton.runs import lineage
from baton.runs.run import Sweep
from baton.sweep import trials
from baton.sweep.view import STATES, Cost, Trial, View, cost, gather

BEST, GOOD, MIDDLE, WORST, STOPPED = "orange", "blue", "sky", "grey", "purple"
NAMED = 12  # trials whose points are drawn as dots


def draw_plots(view: View) -> dict[str, Plot | None]:
    return {
        "score": _curves(view, view.metric, lambda trial: _points(trial.scores), dots=True),
        "loss": _curves(view, "training loss", lambda trial: _course(plots.series(trial.losses, "loss")), dots=False),
    }


def color(trial: Trial, scored: int) -> str:
    """Returns a trial's colour by its rank among `scored` trials."""
    if not trial.is_alive:
        return STOPPED
    if trial.rank is None:
        return WORST
    if trial.rank == 1:
        return BEST
    share = (trial.rank - 1) / max(scored, 1)
    return GOOD if share < 0.25 else MIDDLE if share < 0.5 else WORST


def _curves(view: View, name: str, points: Callable[[Trial], plots.Points], *, dots: bool) -> Plot | None:
    scored = sum(trial.rank is not None for trial in view.trials)
    curves = [
        Curve(
            name=trial.id if trial.is_alive else f"{trial.id} ({trial.state})",
            points=points(trial),
            color=color(trial, scored),
            width=2.4 if trial.rank == 1 else 1.6 if trial.is_alive else 1.2,
            dash=() if trial.is_alive else (5, 3),
            dots=dots and len(view.trials) <= NAMED,
        )
        for trial in reversed(view.trials)  # the best on top
    ]
    values = [value for curve in curves for _, value in curve.points]
    log_y = bool(values) and min(values) > 0 and max(values) / min(values) > 50
    return plots.plot(f"{name} of each trial by step", name, curves, log_y=log_y, height=360)


def _course(points: plots.Points) -> plots.Points:
    """Returns the moving mean of a curve of many points: among many curves only the course can be seen."""
    return plots.thin(plots.smoothed(points, share=20, least=3) or points, 240)


def _points(pairs: Sequence[tuple[int, float]]) -> plots.Points:
    return [(step, value) for step, value in pairs if math.isfinite(value)]


LEGEND = [
    (BEST, "", "best"),
    (GOOD, "", "first quarter"),
    (MIDDLE, "", "to the middle"),
    (WORST, "", "others"),
    (STOPPED, "line dashed", "stopped or failed"),
]
NAME = "page.html"
TONES = {**dict.fromkeys(STATES, ""), **dict.fromkeys(("won", "goes on", "ended"), "good"), "failed": "bad"}


def write(sweep: Sweep) -> str:
    """Writes the page from the store's present content, and returns it."""
    page = render(gather(sweep))
    sweep.storage.write(sweep.path(NAME), page.encode("utf-8", "backslashreplace"))
    return page


def publish(sweep: Sweep, number: int) -> str:
    """Writes the page after a rung, logs both to the tracking server, and returns the page."""
    document, rung = sweep.document(), sweep.rung(number)
    assert rung is not None
    recipe = load.stored(document.recipe, origin=sweep.uri)
    page = write(sweep)
    is_last = number == len(document.rungs)
    trials.log_rung(sweep, recipe, rung, page, is_last=is_last)
    trials.end_trials(sweep, document, rung, is_last=is_last)
    return page


def environment(*folders: Path) -> Environment:
    """Returns a loader of this page's template, and of templates in other folders that extend it."""
    made = rendering.environment(*folders, Path(__file__).parent)
    made.filters |= {"value": value_text, "long": duration, "score": score_text}
    return made


def render(view: View, *, live: bool = False, note: str = "") -> str:
    """Returns one HTML document that loads nothing; the same view gives the same bytes.

    `live` is the form that `baton watch` serves, with buttons; `note` is a remark above the figures.
    """
    tone, word = state(view)
    template = environment().get_template("sweep.html.j2")
    return template.render(
        view=view,
        tone=tone,
        word=word,
        sentence=sentence(view),
        tiles=tiles(view),
        plots=draw_plots(view),
        legend=LEGEND,
        names={path: _short(path, view.parameters) for path in view.parameters},
        tones=TONES,
        where=where,
        pending=pending,
        acts=acts,
        as_set=as_set,
        origins={trial.run: trial.id for trial in view.trials},
        live=live,
        note=note,
        family=list(lineage.walk(view.families)),
    )


def state(view: View) -> tuple[str, str]:
    """Returns tone and word of the sweep's state."""
    if view.is_over:
        return "good", "over"
    return "warn", f"rung {len(view.rungs)} of {view.num_rungs}" if view.rungs else "no rung yet"


def sentence(view: View) -> str:
    best, total = view.best, len(view.trials)
    if best is None:
        failed = sum(trial.state == "failed" for trial in view.trials)
        told = f", {failed} of them failed" if failed else ""
        return f"{count(total, 'configuration')}{told}; none has been scored yet."
    leads = "is the best" if view.is_over else "leads"
    stopped = sum(not trial.is_alive for trial in view.trials)
    told = f"{best.id} {leads} with {view.metric} {score_text(best.score)} at step {best.step:,}"
    return f"{told}; {stopped} of {count(total, 'configuration')} {'was' if stopped == 1 else 'were'} stopped early."


def tiles(view: View) -> list[tuple[str, str, str]]:
    """Returns label, value and remark of each known key figure."""
    shown, spent = [], cost(view)
    states = [trial.state for trial in view.trials]
    if view.best:
        shown.append((f"Best {view.metric}", score_text(view.best.score), f"{view.best.id}, of all that came as far"))
    alive = sum(trial.is_alive for trial in view.trials)
    failed = f", {states.count('failed')} failed" if "failed" in states else ""
    shown.append(("Configurations", f"{len(states)}", f"{alive} not stopped{failed}"))
    for label, words, value, total in (
        ("Steps trained", number, spent.steps, spent.steps_all),
        ("Time of all chunks", duration, spent.seconds, spent.seconds_all),
        ("GPU-hours", number, spent.gpu_hours, spent.gpu_hours_all),
    ):
        if value:
            told = f"{value / total:.0%} of {words(total)}, all to the end" if total else "so far"
            shown.append((label, words(value), told))
    if view.rungs and view.rungs[-1].spent:
        paid, _, limit = view.rungs[-1].spent.partition(" of ")
        shown.append(("Spent", paid, f"of {limit}, by rung {view.rungs[-1].rung}"))
    if spent.seconds and spent.seconds_all and view.rungs:
        saved = max(spent.seconds_all - spent.seconds - _to_come(view, spent), 0.0)
        remark = f"{duration(saved)} by stopping early, against training all to the end"
        shown.append(("Saved", f"{saved / spent.seconds_all:.0%}", remark))
    return shown


def _to_come(view: View, spent: Cost) -> float:
    """Returns the remaining seconds of the trials that were not stopped."""
    if view.is_over or not spent.steps:
        return 0.0
    pace = spent.seconds / spent.steps
    length = max((trial.num_steps or 0 for trial in view.trials), default=0)
    return sum(((trial.num_steps or length) - trial.step) * pace for trial in view.trials if trial.is_alive)


def where(trial: Trial) -> str:
    if trial.state == "won":
        return "trained to its end: winner"
    if trial.state == "failed":
        return trial.why or "failed"
    if trial.state == "stopped":
        return f"rung {trial.rung}: {trial.why}"
    if trial.state == "ended":
        place = "number {} of {}".format(*trial.beaten) if trial.beaten else trial.why
        return f"trained to its end{f'; {place}' if place else ''}"
    told = f"advanced from rung {trial.rung}" if trial.state == "goes on" else STATES[trial.state]
    return f"{told}, trains now" if trial.trains and trial.state == "goes on" else told


def pending(trial: Trial, *, is_over: bool) -> str:
    """Returns the request that no rung of a sweep has taken up yet, in words."""
    if trial.asked == "stop" and trial.is_alive and trial.state not in ("won", "ended"):
        return "asked to stop, at its next chunk boundary"
    if trial.asked == "go" and not trial.is_alive:
        return f"asked to resume, {'once the sweep is started again' if is_over else 'at the next rung'}"
    if trial.asked == "go" and trial.state not in ("won", "ended"):
        return "advances at each rung, whatever its place"
    return ""


def acts(trial: Trial) -> list[tuple[str, str, str]]:
    """Returns the requests that a person may give for a trial now: name, word and effect of each."""
    given = []
    if trial.is_alive and trial.state not in ("won", "ended"):
        if trial.asked != "stop":
            given.append(("stop", "Stop", "Stop at the next chunk boundary"))
        if trial.asked != "go":
            given.append(("promote", "Promote", "Advance at each rung, whatever its place, and train to the end"))
    elif trial.state in ("stopped", "failed"):
        if trial.asked == "go":
            given.append(("stop", "Stop", "Stay stopped"))
        else:
            given.append(("resume", "Resume", "Come back at the next rung, and train to the end"))
    if trial.scores:  # and so a checkpoint
        given.append(("clone", "Clone", "Add a trial that starts at its newest checkpoint, with changes"))
    return given


def as_set(values: Mapping[str, Any]) -> str:
    """Returns values as lines for `--set`."""
    return "\n".join(f"{path}={json.dumps(value)}" for path, value in values.items())


def value_text(value: Any) -> str:
    if value is None:
        return "—"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def score_text(value: float | None) -> str:
    if value is None:
        return "—"
    return f"{value:.5g}" if math.isfinite(value) else "not finite"


def _short(path: str, paths: Sequence[str]) -> str:
    """Returns the shortest end of a parameter's path that no other has."""
    parts = path.split(".")
    for size in range(1, len(parts)):
        name = ".".join(parts[-size:])
        if sum(other == name or other.endswith(f".{name}") for other in paths) == 1:
            return name
    return path
