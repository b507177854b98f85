"""The judge of a rung: which trials advance by score, by wish, and when it is asked again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.checkpoint import seals
from baton.errors import BatonError, DamagedError
from baton.recipe import load
from baton.runs import objects
from baton.runs.documents import Progress
from baton.runs.outcomes import RungScore, RungVerdict, TrialEntry, TrialInfo, TrialRows, TrialScore
from baton.runs.run import Sweep
from baton.signing import KEY_FILE, SIGNED_BY, Signer
from baton.sweep import search
from baton.sweep.trials import affordable, compare, deal, decide, rank_trials
from tests.sweep.swept import in_rungs


@pytest.mark.parametrize(
    ("values", "keep", "mode", "stopped", "kept", "beaten"),
    [
        pytest.param({"a": 3.0, "b": 1.0, "c": 2.0}, 2, "min", (), ["b", "c"], ["a"], id="less-is-better"),
        pytest.param({"a": 3.0, "b": 1.0, "c": 2.0}, 2, "max", (), ["a", "c"], ["b"], id="more-is-better"),
        pytest.param({"a": 1.0, "b": 1.0, "c": 1.0}, 1, "min", (), ["a"], ["b", "c"], id="the-first-of-equals"),
        pytest.param({"a": None, "b": 5.0}, 1, "min", (), ["b"], [], id="no-number-cannot-go-on"),
        pytest.param({"a": float("nan"), "b": 5.0}, 2, "min", (), ["b"], [], id="nan-cannot-go-on"),
        pytest.param({"a": float("-inf"), "b": 5.0}, 2, "min", (), ["b"], [], id="no-infinite-score-goes-on"),
        pytest.param({"b": 5.0}, 2, "min", (), ["b"], [], id="no-score-cannot-go-on"),
        pytest.param({"a": 1.0, "b": 2.0, "c": 3.0}, 1, "min", ("a",), ["b"], ["c"], id="the-stopped-are-out"),
    ],
)
def test_decide(
    values: dict[str, float | None], keep: int, mode: str, stopped: tuple[str, ...], kept: list[str], beaten: list[str]
) -> None:
    assert decide(["a", "b", "c"], values, keep, mode, stopped) == (kept, beaten)


@pytest.mark.parametrize(
    ("keep", "per_chunk", "rest", "trials"),
    [
        pytest.param(2, 10.0, 40.0, 2, id="two-chunks-of-the-next-rung-and-two-of-the-last"),
        pytest.param(2, 10.0, 39.0, 1, id="one-too-many"),
        pytest.param(2, 10.0, -5.0, 1, id="nothing-is-left"),
        pytest.param(1, 10.0, 1e9, 1, id="no-more-than-the-rung-keeps"),
        pytest.param(2, 0.0, 0.0, 2, id="chunks-cost-nothing"),
    ],
)
def test_as_many_advance_as_a_budget_pays_for(keep: int, per_chunk: float, rest: float, trials: int) -> None:
    rung = search.PlannedRung
    later = [
        rung(number=2, bracket=1, chunk=2, keep=1, first=2),
        rung(number=3, bracket=1, chunk=4, keep=1, first=3),
    ]
    assert affordable(later, keep, per_chunk, rest) == trials


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return in_rungs(tmp_path / "store")


def _score(sweep: Sweep, chunk: int, **values: float | None) -> None:
    for trial, value in values.items():
        score = {"chunk": chunk, "step": 2 * chunk, "value": value, "metrics": {}, "seconds": 1.0, "at": "now"}
        sweep.run(sweep.trial(trial)).put(TrialScore.file_name(chunk), score)


def _judge(sweep: Sweep, number: int) -> tuple[list[str], dict[str, str]]:
    """Returns the names of those who go on, and why the others do not."""
    found = rank_trials(sweep, number)
    rung = sweep.rung(number)
    assert rung is not None
    assert found.kept == [sweep.run(sweep.trial(trial)).uri for trial in rung.kept]
    return rung.kept, {entry.id: entry.why for entry in rung.stopped}


def test_the_best_go_on_and_the_last_one_wins(sweep: Sweep) -> None:
    _score(sweep, 1, t0=4.0, t1=2.0, t2=1.0, t3=None)
    kept, why = _judge(sweep, 1)
    assert kept == ["t2", "t1"]
    rung = sweep.rung(1)
    assert rung
    assert {entry.id: (entry.cause, entry.place, entry.of) for entry in rung.stopped} == {
        "t0": ("beaten", 3, 3),
        "t3": ("not_finite", None, None),
    }
    assert why == {"t0": "place 3 of 3, top 2 kept", "t3": "eval_loss is not a number"}
    _score(sweep, 2, t1=0.5, t2=0.9)
    assert _judge(sweep, 2)[0] == ["t1"]
    _score(sweep, 4, t1=0.25)
    verdict = rank_trials(sweep, 3)
    assert verdict.winner == sweep.run(sweep.trial("t1")).uri
    assert sweep.raw("winner.json") == {**(sweep.raw("winner.json") or {}), "id": "t1", "value": 0.25}


CHANGES: dict[str, Callable[[bytes, bytes], bytes | None]] = {
    "better": lambda own, best: own.replace(b"4.0", b"0.1"),
    "emptied": lambda own, best: b"",
    "cut": lambda own, best: own[: len(own) // 2],
    "deleted": lambda own, best: None,
    "another trial's": lambda own, best: best,
}


def _sealed_scores(sweep: Sweep) -> None:
    for trial, value in (("t0", 4.0), ("t1", 2.0), ("t2", 1.0)):
        with seals.stage(sweep.run(sweep.trial(trial)), objects.CHUNK, 1):
            _score(sweep, 1, **{trial: value})


@pytest.mark.parametrize("has_seals", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_sealed_score_counts_whatever_became_of_its_document(change: str, has_seals: bool, sweep: Sweep) -> None:
    _sealed_scores(sweep)
    runs = [sweep.run(sweep.trial(trial)) for trial in ("t0", "t2")]
    own, best = (run.path(TrialScore.file_name(1)) for run in runs)
    data = CHANGES[change](sweep.storage.read(own), sweep.storage.read(best))
    sweep.storage.remove(own) if data is None else sweep.storage.write(own, data)
    if not has_seals:
        sweep.storage.remove(seals.path_of(runs[0], 1))
    with contextlib.suppress(DamagedError):
        _judge(sweep, 1)
    rung = sweep.rung(1)
    found = (rung.kept, list(rung.scores)) if rung else None
    assert (found == (["t2", "t1"], ["t0", "t1", "t2"])) == has_seals


@pytest.mark.parametrize("has_key", [True, False])
def test_a_planted_score_is_not_used(has_key: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if has_key:
        signer = Signer.new("ed25519")
        (tmp_path / "run.key").write_bytes(signer.pem())
        monkeypatch.setenv(KEY_FILE, str(tmp_path / "run.key"))
        monkeypatch.setenv(SIGNED_BY, signer.public.line)
    sweep = in_rungs(tmp_path / "store")
    _sealed_scores(sweep)
    with seals.stage(sweep.run(sweep.trial("t3")), objects.ENTER):
        sweep.run(sweep.trial("t3")).write(TrialInfo(sweep="s", id="t3", values={}, metric="eval_loss"))
    _score(sweep, 1, t3=0.1)
    kept, why = _judge(sweep, 1)
    assert kept == (["t2", "t1"] if has_key else ["t3", "t2"])
    assert ("t3" in why) == has_key


def test_a_trial_that_failed_is_stopped_with_what_it_said(sweep: Sweep) -> None:
    _score(sweep, 1, t1=2.0, t2=1.0)
    sweep.run(sweep.trial("t0")).put("failure.json", {"chunk": 1, "message": "no memory", "at": "now"})
    kept, why = _judge(sweep, 1)
    assert kept == ["t2", "t1"]
    assert why == {"t0": "chunk 1 failed: no memory", "t3": "chunk 1 was not finished"}


def test_no_score_at_all_is_an_error_that_says_why(sweep: Sweep) -> None:
    with pytest.raises(BatonError, match="no trial of sweep 's' advances from rung 1: t0: chunk 1 was not finished"):
        rank_trials(sweep, 1)
    assert sweep.rung(1) is None


def test_a_trial_that_is_asked_to_stop_makes_room_for_the_next(sweep: Sweep) -> None:
    _score(sweep, 1, t0=4.0, t1=2.0, t2=1.0, t3=3.0)
    sweep.ask("t2", "stop", "it is too dear")
    kept, why = _judge(sweep, 1)
    assert kept == ["t1", "t3"]
    assert why["t2"] == "asked to stop: it is too dear"


def test_a_stopped_trial_that_is_asked_for_goes_on_whatever_its_score(sweep: Sweep) -> None:
    _score(sweep, 1, t0=4.0, t1=2.0, t2=1.0, t3=3.0)
    rank_trials(sweep, 1)
    sweep.ask("t0", "go", "for the record")
    _score(sweep, 2, t1=0.5, t2=0.9)
    assert _judge(sweep, 2) == (["t1", "t0"], {"t2": "place 2 of 2, top 1 kept"})
    _score(sweep, 4, t1=0.25, t0=0.3)
    assert _judge(sweep, 3) == (["t1", "t0"], {})


def test_a_rung_that_was_judged_stands_but_for_what_is_asked_since(sweep: Sweep) -> None:
    _score(sweep, 1, t0=4.0, t1=2.0, t2=1.0, t3=3.0)
    rank_trials(sweep, 1)
    first = sweep.rung(1)
    _score(sweep, 1, t0=0.0)
    assert _judge(sweep, 1)[0] == ["t2", "t1"]
    assert sweep.rung(1) == first
    sweep.ask("t1", "stop", "enough")
    sweep.ask("t3", "go", "why not")
    kept, why = _judge(sweep, 1)
    assert kept == ["t2", "t3"]
    assert why == {"t0": "place 4 of 4, top 2 kept", "t1": "asked to stop: enough"}


def test_a_winner_that_is_asked_to_stop_leaves_the_place_to_the_next(sweep: Sweep) -> None:
    _score(sweep, 1, t0=4.0, t1=2.0, t2=1.0, t3=3.0)
    rank_trials(sweep, 1)
    sweep.ask("t1", "go", "both")
    _score(sweep, 2, t1=0.5, t2=0.4)
    rank_trials(sweep, 2)
    _score(sweep, 4, t1=0.3, t2=0.2)
    assert rank_trials(sweep, 3).winner.endswith("s-t2")
    sweep.ask("t2", "stop", "not that one")
    assert rank_trials(sweep, 3).winner.endswith("s-t1")


ROWS = [1.0, 2.0, 3.0, 4.0] * 20


def _rows(sweep: Sweep, chunk: int, **values: list[float]) -> None:
    for trial, own in values.items():
        data = "other" if own is ELSEWHERE else "d"
        sweep.run(sweep.trial(trial)).write(TrialRows(values=own, weights=[1.0] * len(own), data=data), chunk)
    _score(sweep, chunk, **{trial: sum(own) / len(own) for trial, own in values.items()})


def _noisy(shift: float, noise: float) -> list[float]:
    """Returns rows that are worse by a shift on average, and each by a noise of its own."""
    return [value + shift + noise * (-1) ** (at // 3) for at, value in enumerate(ROWS)]


ELSEWHERE = _noisy(0.02, 0.5)


@pytest.mark.parametrize(
    ("third", "kept"),
    [
        pytest.param(_noisy(0.02, 0.5), ["t0", "t1", "t2"], id="a difference within the noise of rows"),
        pytest.param(_noisy(0.02, 0.0), ["t0", "t1"], id="as small on every row"),
        pytest.param(_noisy(0.5, 0.5), ["t0", "t1"], id="above the noise"),
        pytest.param([*_noisy(0.02, 0.5), 9.0], ["t0", "t1"], id="more rows"),
        pytest.param(ELSEWHERE, ["t0", "t1"], id="as many rows of another split"),
    ],
)
def test_a_trial_that_cannot_be_told_from_the_last_to_advance_does_too(
    third: list[float], kept: list[str], tmp_path: Path
) -> None:
    sweep = in_rungs(tmp_path / "store", sure=0.9)
    _rows(sweep, 1, t0=_noisy(-0.5, 0), t1=ROWS, t2=third, t3=_noisy(2, 0.1))
    assert _judge(sweep, 1)[0] == kept
    verdict = sweep.rung(1)
    assert verdict
    why = {entry.id: entry.why for entry in verdict.stopped}
    assert why["t3"].startswith("place 4 of 4, top 2 kept; worse than t1 by 1.9")
    assert why["t3"].endswith("(confidence 1)")
    is_other = len(third) != len(ROWS) or third is ELSEWHERE
    assert ("t2" in why and "not compared by rows" in why["t2"]) == is_other
    assert ("t2" in verdict.differences) != is_other


def test_without_sure_any_difference_counts(sweep: Sweep) -> None:
    _rows(sweep, 1, t0=_noisy(-0.5, 0), t1=ROWS, t2=_noisy(0.02, 0.5), t3=_noisy(2, 0.1))
    assert _judge(sweep, 1)[0] == ["t0", "t1"]
    assert not sweep.rung(1).differences  # type: ignore[union-attr]


def test_the_last_rung_keeps_one_and_says_how_sure_that_is(tmp_path: Path) -> None:
    sweep = in_rungs(tmp_path / "store", sure=0.9)
    for chunk, number in ((1, 1), (2, 2), (4, 3)):
        _rows(sweep, chunk, t0=_noisy(0.02, 0.5), t1=ROWS, t2=_noisy(3, 0), t3=_noisy(4, 0))
        kept, why = _judge(sweep, number)
        assert kept == (["t1"] if chunk == 4 else ["t1", "t0"])
    assert why["t0"].startswith("place 2 of 2, top 1 kept; worse than t1 by -")


@pytest.mark.parametrize("mode", ["min", "max"])
def test_an_interval_holds_the_difference_in_rows_weighted_and_paired(mode: str) -> None:
    ours, theirs = (
        TrialRows(values=[1.0, 5.0] * 30, weights=[3.0, 1.0] * 30),
        TrialRows(values=[1.5, 5.5] * 30, weights=[3.0, 1.0] * 30),
    )
    difference = compare("a", {"a": ours, "b": theirs}, mode, 0.95, seed=1)["b"]
    sign = 1 if mode == "min" else -1
    assert difference.value == pytest.approx(sign * 0.5)
    low, high = difference.interval
    assert low <= difference.value <= high
    assert difference.confidence == (1.0 if mode == "min" else 0.0)
    # Pairs: without them the rows' own spread, two steps wide, would hide a difference of a half.
    assert high - low < 1e-9


def _trial(**more: Any) -> TrialEntry:
    entry = {"id": "t9", "run": "s-t9", "bracket": 0, "values": {}, "parent": {"run": "s-t0", "step": 2}, **more}
    return TrialEntry.model_validate(entry)


def test_a_trial_added_later_is_one_of_them_and_of_two_of_one_name_the_first_stands(sweep: Sweep) -> None:
    assert sweep.add(_trial(values={"seed": 1}))
    assert not sweep.add(_trial(values={"seed": 2}))
    assert [trial.id for trial in sweep.document().trials] == ["t0", "t1", "t2", "t3", "t9"]
    assert sweep.trial("t9").values == {"seed": 1}


def _budgeted(sweep: Sweep, limit: str, **seconds: float) -> None:
    """Gives a sweep a budget, and its trials that they have trained so long."""
    head = sweep.document()
    recipe = load.validate({**head.recipe, "budget": {"limit": limit, "price": 3600.0}}, origin="test")
    sweep.write(head.model_copy(update={"recipe": recipe.model_dump(mode="json")}))
    for trial in head.trials:
        run = sweep.run(trial)
        run.create(search.configured(recipe, trial.values, trial.id))
        run.write(Progress(step=2, device_seconds=seconds[trial.id], priced_seconds=seconds[trial.id]))


@pytest.mark.parametrize(
    ("limit", "kept", "shares"),
    [
        pytest.param("80 USD", ["t1", "t2"], ["30.000000 USD", "31.000000 USD"], id="for-both"),
        pytest.param("79 USD", ["t1"], ["49.000000 USD"], id="for-one"),
        pytest.param("5 USD", ["t1"], ["10.000000 USD"], id="for-none"),
    ],
)
def test_the_rest_of_a_budget_is_dealt_to_those_who_advance(
    limit: str, kept: list[str], shares: list[str], tmp_path: Path
) -> None:
    sweep = in_rungs(tmp_path / "store")
    _budgeted(sweep, limit, t0=9.0, t1=10.0, t2=11.0, t3=10.0)
    _score(sweep, 1, t0=4.0, t1=1.0, t2=2.0, t3=3.0)
    found, why = _judge(sweep, 1)
    assert found == kept
    given = [sweep.run(sweep.trial(trial)).recipe().budget for trial in kept]
    assert [budget and budget.limit for budget in given] == shares
    rung = sweep.rung(1)
    assert rung
    assert rung.spent == f"40.00 USD of {limit}"
    assert ("pays for 1" in why.get("t2", "")) == (len(kept) == 1)
    run = sweep.run(sweep.trial("t1"))
    run.write(Progress(step=4, device_seconds=25.0, priced_seconds=25.0))
    _judge(sweep, 1)  # asked again, later: the shares stay
    assert run.recipe().budget == given[0]


@pytest.mark.parametrize(("limit", "kept"), [("90 USD", ["t0", "t1", "t2"]), ("89 USD", ["t0", "t1"])])
def test_who_cannot_be_told_apart_advances_if_the_budget_pays_for_it(
    limit: str, kept: list[str], tmp_path: Path
) -> None:
    sweep = in_rungs(tmp_path / "store", sure=0.9)
    _budgeted(sweep, limit, t0=10.0, t1=10.0, t2=10.0, t3=10.0)
    _rows(sweep, 1, t0=_noisy(-0.5, 0), t1=ROWS, t2=_noisy(0.02, 0.5), t3=_noisy(2, 0.1))
    found, why = _judge(sweep, 1)
    assert found == kept
    assert ("pays for 2; worse than t1" in why.get("t2", "")) == (len(kept) == 2)


@pytest.mark.parametrize(
    ("seconds", "devices", "shares"),
    [
        pytest.param({}, 2, ["t0 t1", "t2 t3"], id="before-the-first-rung"),
        pytest.param({"t0": None, "t1": None}, 3, ["t0", "t1", "t2 t3"], id="no-times"),
        pytest.param({"t0": 1.0, "t1": 8.0, "t2": 3.0, "t3": 4.0}, 2, ["t1", "t0 t2 t3"], id="one-is-slow"),
        pytest.param({"t1": 8.0, "t2": 3.0, "t3": 4.0}, 2, ["t1 t2", "t0 t3"], id="one-was-resumed"),
        pytest.param({"t0": None, "t1": 8.0, "t2": 3.0, "t3": 4.0}, 2, ["t1 t2", "t0 t3"], id="one-has-no-time"),
        pytest.param({"t0": 1.0, "t1": 8.0, "t2": 3.0, "t3": 4.0}, 9, ["t1", "t3", "t2", "t0"], id="a-device-each"),
    ],
)
def test_devices_have_trials_of_about_equal_time(
    seconds: dict[str, float | None], devices: int, shares: list[str], sweep: Sweep
) -> None:
    head = sweep.document()
    recipe = load.validate(head.recipe, origin="test")
    for trial in head.trials:
        sweep.run(trial).create(search.configured(recipe, trial.values, trial.id))
    scores = {trial: RungScore(value=1.0, seconds=took) for trial, took in seconds.items()}
    if scores:
        kept = [trial.id for trial in head.trials]
        sweep.write(RungVerdict(rung=1, bracket=1, chunk=1, scores=scores, kept=kept, stopped=[], at="now"), 1)
    dealt = deal(sweep, [sweep.run(trial).uri for trial in head.trials], devices, 1 if scores else 0)
    assert [each["trials"] for each in dealt] == shares
