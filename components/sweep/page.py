"""The page of a sweep: which configuration leads, why the others were stopped, and what that has saved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.components.shared.pages import rendering
from baton.components.shared.pages.rendering import count, duration, number
from baton.components.shared.runs import lineage
from baton.components.shared.sweeps import view as sweep_view
from baton.components.shared.sweeps.sweep import Sweep
from baton.components.shared.sweeps.view import STATES, Cost, Trial, View
from baton.components.sweep import figures

NAME = "page.html"
TONES = {
    "won": "good",
    "goes on": "good",
    "ended": "good",
    "failed": "bad",
    "stopped": "",
    "training": "",
    "waiting": "",
}


def write(sweep: Sweep) -> str:
    """Writes the page of a sweep from what is in the store so far.

    Returns:
        The page.
    """
    html = render(sweep_view.gather(sweep))
    sweep.storage.write(sweep.path(NAME), html.encode("utf-8", "backslashreplace"))
    return html


def render(view: View) -> str:
    """Returns the page as one HTML document, which loads nothing; the same view gives the same bytes."""
    environment = rendering.environment(Path(__file__).parent)
    environment.filters |= {"value": value_text, "long": duration, "score": score_text}
    tone, word = state(view)
    return environment.get_template("sweep.html.j2").render(
        view=view,
        tone=tone,
        word=word,
        sentence=sentence(view),
        tiles=tiles(view),
        plots=figures.draw(view),
        names=short_names(view),
        tones=TONES,
        where=where,
        family=list(lineage.walk(view.families)),
    )


def state(view: View) -> tuple[str, str]:
    """Returns the tone and the word of how the sweep stands."""
    if view.is_over:
        return "good", "over"
    return "warn", f"rung {len(view.rungs)} of {view.num_rungs}" if view.rungs else "no rung yet"


def sentence(view: View) -> str:
    """Returns the one sentence that sums the sweep up."""
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
    """Returns label, value and a remark for each key figure that is known."""
    shown, spent = [], sweep_view.cost(view)
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
    if spent.seconds and spent.seconds_all and view.rungs:
        saved = max(spent.seconds_all - spent.seconds - _to_come(view, spent), 0.0)
        remark = f"{duration(saved)} by stopping early, against training all to the end"
        shown.append(("Saved", f"{saved / spent.seconds_all:.0%}", remark))
    return shown


def _to_come(view: View, spent: Cost) -> float:
    """Returns the seconds that the trials which were not stopped still have before them."""
    if view.is_over or not spent.steps:
        return 0.0
    pace = spent.seconds / spent.steps
    length = max((trial.num_steps or 0 for trial in view.trials), default=0)
    return sum(((trial.num_steps or length) - trial.step) * pace for trial in view.trials if trial.is_alive)


def where(trial: Trial) -> str:
    """Returns how far a trial came, in words."""
    if trial.state == "won":
        return "trained to its end, and ahead of all"
    if trial.state == "failed":
        return trial.why or "failed"
    if trial.state == "stopped":
        return f"rung {trial.rung}: {trial.why}"
    if trial.state == "ended":
        place = "number {} of {}".format(*trial.beaten) if trial.beaten else trial.why
        return f"trained to its end{f'; {place}' if place else ''}"
    return f"advanced from rung {trial.rung}" if trial.state == "goes on" else STATES[trial.state]


def value_text(value: Any) -> str:
    """Returns a setting's value in few characters."""
    if value is None:
        return "—"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def score_text(value: float | None) -> str:
    """Returns a score in five digits."""
    if value is None:
        return "—"
    return f"{value:.5g}" if math.isfinite(value) else "not finite"


def short_names(view: View) -> dict[str, str]:
    """Returns the end of each parameter's path, as much of it as tells it from the others."""
    return {path: _short(path, view.parameters) for path in view.parameters}


def _short(path: str, paths: Sequence[str]) -> str:
    parts = path.split(".")
    for size in range(1, len(parts)):
        name = ".".join(parts[-size:])
        if sum(other == name or other.endswith(f".{name}") for other in paths) == 1:
            return name
    return path
