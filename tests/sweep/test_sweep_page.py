"""The sweep's page: who leads, why the others were stopped, and what that has saved."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from baton.cli import sweep as sweep_display
from baton.runs.documents import PodLoss
from baton.runs.outcomes import RungVerdict, SweepHead
from baton.runs.run import Sweep, now
from baton.sweep import page
from baton.sweep import view as sweep_view
from tests.support.pages import read
from tests.sweep.swept import SEVEN, Swept

ONE = {"training.learning_rate": {"min": 1e-5, "max": 1e-2, "log": True}}


@pytest.fixture
def three_rungs(tmp_path: Path) -> Sweep:
    """8 trials, of which one failed, after two rungs of three: 4 and 2 were kept."""
    return Swept(tmp_path, 8, ONE, [(1, 4), (2, 2), (4, 1)]).go(2, failing=("t002",))


def test_the_leader_is_who_came_furthest_with_the_best_score(three_rungs: Sweep) -> None:
    view = sweep_view.gather(three_rungs)
    kept = three_rungs.rungs()[1].kept
    assert [trial.id for trial in view.trials][:2] == kept
    assert [trial.rank for trial in view.trials] == [1, 2, 3, 4, 5, 6, 7, None]
    assert [trial.chunk for trial in view.trials] == [2, 2, 2, 2, 1, 1, 1, 0]
    scores = [trial.score for trial in view.trials[:4]]
    assert scores == sorted(score for score in scores if score is not None)
    assert view.trials[-1].id == "t002"
    assert [trial.state for trial in view.trials] == ["goes on"] * 2 + ["stopped"] * 5 + ["failed"]


def test_what_was_spent_and_saved_is_counted(three_rungs: Sweep) -> None:
    view = sweep_view.gather(three_rungs)
    spent = sweep_view.cost(view)
    # 7 trials of 40 steps in 20 s, 4 of them another 40; all 8 to the end are 160 steps each, at 2 steps a second.
    assert spent.steps == 7 * 40 + 4 * 40
    assert spent.steps_all == 8 * 160
    assert spent.seconds == 11 * 20.0
    assert spent.seconds_all == pytest.approx(8 * 160 / 2)
    assert spent.gpu_hours == pytest.approx(220 / 3600)
    tiles = {label: (value, remark) for label, value, remark in page.tiles(view)}
    # of 640 s, 220 are spent and two trials have 80 steps, 40 s each, before them
    assert tiles["Saved"][0] == "53%"
    assert tiles["Saved"][1].startswith("5 min 40 s")
    assert tiles["Steps trained"] == ("440", "34% of 1,280, all to the end")
    assert tiles["Configurations"] == ("8", "2 not stopped, 1 failed")


def test_the_page_says_why_each_was_stopped(three_rungs: Sweep) -> None:
    html = page.write(three_rungs)
    assert three_rungs.storage.read(three_rungs.path("page.html")).decode() == html
    assert "rung 2 of 3" in html
    assert html.count("rung 1: ") == 3
    assert html.count("rung 2: ") == 2
    assert "chunk 1 failed: CUDA out of memory." in html
    assert re.search(r"t00\d leads with eval_loss \d\.\d{4} at step 80; 6 of 8 configurations were stopped early", html)


def test_the_page_shows_lost_pods(three_rungs: Sweep) -> None:
    assert "Pods lost" not in page.write(three_rungs)
    three_rungs.note_lost_pod(PodLoss(stage="train chunk 2", reason="exit code 137", at=now(), number=1, of=5))
    html = page.write(three_rungs)
    assert "Pods lost, and Kubeflow's run started again: 1" in html
    assert '<td class="short">train chunk 2</td>' in html


def test_the_page_loads_nothing_and_runs_nothing(three_rungs: Sweep) -> None:
    html = page.write(three_rungs)
    shown = read(html)
    curves = {curve["name"]: curve for curve in shown.plot("eval_loss")["curves"]}
    assert len(curves) == 7
    assert [bool(curve["dash"]) for name, curve in curves.items() if "(stopped)" in name] == [True] * 5
    assert page.write(three_rungs) == html, "the same sweep gives the same bytes"


def test_before_the_first_rung_there_is_a_page_too(tmp_path: Path) -> None:
    html = page.write(Swept(tmp_path, 8, SEVEN, [(1, 4), (2, 1)]).go(0))
    assert "8 configurations; none has been scored yet." in html
    assert "No rung has been decided: 2 are planned." in html
    assert "<figure" not in html
    assert html.count("has not begun") == 8


def test_names_from_a_recipe_are_text(tmp_path: Path) -> None:
    made = Swept(tmp_path, 2, {"hooks.loss": ["<img src=x onerror=alert(1)>", "b"]}, [(1, 1)])
    html = page.write(made.go(1))
    assert "<img" not in html


def test_at_its_end_the_winner_is_named_and_the_others_are_beaten(tmp_path: Path) -> None:
    view = sweep_view.gather(Swept(tmp_path, 4, ONE, [(1, 2), (2, 1)]).go(2))
    assert [trial.state for trial in view.trials] == ["won", "ended", "stopped", "stopped"]
    assert page.state(view) == ("good", "over")
    assert page.where(view.trials[1]) == "trained to its end; number 2 of 2"


FREE = "advances at each rung, whatever its place"
ACTS: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "has not begun": ({}, ["stop", "promote"], ""),
    "trains": ({"state": "training", "scores": [(1, 2.0)]}, ["stop", "promote", "clone"], ""),
    "asked to stop": ({"state": "training", "asked": "stop"}, ["promote"], "asked to stop, at its next chunk boundary"),
    "promoted": ({"state": "goes on", "asked": "go", "scores": [(1, 2.0)]}, ["stop", "clone"], FREE),
    "stopped": ({"state": "stopped", "scores": [(1, 2.0)]}, ["resume", "clone"], ""),
    "stopped as asked": ({"state": "stopped", "asked": "stop"}, ["resume"], ""),
    "to resume": ({"state": "stopped", "asked": "go"}, ["stop"], "asked to resume, at the next rung"),
    "failed": ({"state": "failed"}, ["resume"], ""),
    "won": ({"state": "won", "scores": [(1, 2.0)]}, ["clone"], ""),
    "trained to its end": ({"state": "ended", "asked": "stop", "scores": [(1, 2.0)]}, ["clone"], ""),
}


@pytest.mark.parametrize(("state", "acts", "pending"), ACTS.values(), ids=ACTS)
def test_a_trial_offers_what_a_person_may_ask(state: dict[str, Any], acts: list[str], pending: str) -> None:
    trial = sweep_view.Trial("t000", "s-t000", {}, **state)
    assert [act for act, _, _ in page.acts(trial)] == acts
    assert page.pending(trial, is_over=False) == pending


STOPPED: dict[str, tuple[dict[str, Any], bool, str, str]] = {
    "failed": (
        {"cause": "failed", "why": "asked too much of it, failed"},
        False,
        "failed",
        "asked too much of it, failed",
    ),
    "asked": ({"cause": "asked", "why": "number 1, yet slow"}, False, "stopped", "rung 1: number 1, yet slow"),
    "not finite": ({"cause": "not_finite", "why": "x, no number"}, True, "stopped", "rung 1: x, no number"),
    "beaten": (
        {"cause": "beaten", "place": 2, "of": 3, "why": "zwei von drei"},
        True,
        "stopped",
        "rung 1: zwei von drei",
    ),
    "failed, of an older Baton": ({"why": "chunk 1 failed: x"}, False, "failed", "chunk 1 failed: x"),
    "asked, of an older Baton": ({"why": "asked to stop: slow"}, False, "stopped", "rung 1: asked to stop: slow"),
    "beaten, of an older Baton": (
        {"why": "place 2 of 3, top 1 kept"},
        True,
        "stopped",
        "rung 1: place 2 of 3, top 1 kept",
    ),
}


@pytest.mark.parametrize(("entry", "scored", "state", "where"), STOPPED.values(), ids=STOPPED)
def test_the_state_of_a_trial_does_not_hang_on_words(
    entry: dict[str, Any], scored: bool, state: str, where: str, tmp_path: Path
) -> None:
    sweep = Swept(tmp_path, 2, ONE, [(1, 1), (2, 1)]).go(0)
    scores = {"t001": {"value": 1.0}} if scored else {}
    verdict = {"rung": 1, "scores": scores, "kept": ["t000"], "stopped": [{"id": "t001", **entry}]}
    sweep.write(RungVerdict.model_validate(verdict), verdict["rung"])
    trial = next(trial for trial in sweep_view.gather(sweep).trials if trial.id == "t001")
    assert (trial.state, page.where(trial)) == (state, where)


UNIONS: dict[str, tuple[dict[str, Any], int]] = {
    "nodes from and to": ({"resources": {"gpus": 2, "nodes": {"min": 1, "max": 3}}}, 6),
    "nodes": ({"resources": {"gpus": 2, "nodes": 3}}, 6),
    "no nodes": ({"resources": {"gpus": 2}}, 2),
    "no resources": ({"resources": None}, 0),
    "count auto": ({"chunks": {"count": "auto", "checkpoint_every": "auto"}}, 0),
    "micro-batch auto": ({"training": {"micro_batch_size": "auto", "compile": "auto"}}, 0),
    "several sources": ({"data": {"source": [{"uri": "a"}, {"uri": "b"}], "packing": "best_fit"}}, 0),
    "several losses": ({"training": {"dpo": {"loss": ["sigmoid", "sft"]}}}, 0),
    "processes auto": ({"parallel": {"processes": "auto"}}, 0),
    "modules": ({"adapter": {"target_modules": "all-linear", "exclude_modules": ["lm_head"]}}, 0),
    "trust": ({"trust": "all"}, 0),
    "trusted digests": ({"trust": ["a", "b"]}, 0),
}


@pytest.mark.parametrize(("sections", "gpus"), UNIONS.values(), ids=UNIONS)
def test_every_value_that_a_recipe_may_hold_is_read(sections: dict[str, Any], gpus: int, tmp_path: Path) -> None:
    made = Swept(tmp_path, 2, ONE, [(1, 1), (2, 1)])
    document = made.sweep.document().to_json()
    made.storage.remove(made.sweep.path("sweep.json"))
    recipe = {"name": "swept", "sweep": document["recipe"]["sweep"], **sections}
    made.sweep.write_new(SweepHead.model_validate({**document, "recipe": recipe}))
    view = sweep_view.gather(made.go(1))
    assert view.gpus == gpus
    assert sweep_display.gather(made.sweep).to_json()["sweep"] == "sweep"
    assert "</html>" in page.write(made.sweep)


def test_parameters_have_the_shortest_names_that_tell_them_apart(tmp_path: Path) -> None:
    choices = {**ONE, "training.dpo.beta": [0.1], "training.kto.beta": [0.1], "seed": [1]}
    html = page.write(Swept(tmp_path, 2, choices, [(1, 1)]).go(1))
    named = dict(re.findall(r'<th class="number" title="([^"]*)">([^<]*)<', html))
    assert named == {
        "training.learning_rate": "learning_rate",
        "training.dpo.beta": "dpo.beta",
        "training.kto.beta": "kto.beta",
        "seed": "seed",
    }


def test_a_forked_trial_brings_the_family(tmp_path: Path) -> None:
    made = Swept(tmp_path, 2, ONE, [(1, 1), (2, 1)])
    sweep: Any = made.go(1)
    best = sweep.rung(1).kept[0]
    assert "<h2>Family</h2>" not in page.write(sweep)
    made.fork(best, "t000-f1", 40, {"training.learning_rate": [1e-3, 5e-4]})
    html = page.write(sweep)
    assert "<h2>Family</h2>" in html
    assert "fork at step 40; learning_rate 0.0005" in html
