"""Documents of a signed sweep: none that another wrote is obeyed, and whoever has the public key finds it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.checkpoint import seals
from baton.checkpoint.chain import verify_decisions
from baton.cli.app import app
from baton.errors import BatonError, UserError
from baton.runs import objects
from baton.runs.documents import PodLoss
from baton.runs.outcomes import SweepHead, SweepTracking, TrialEntry, TrialInfo, TrialJoin, TrialScore, Winner
from baton.runs.plan import Plan
from baton.runs.run import Sweep
from baton.signing import KEY_FILE, SIGNATURE, SIGNED_BY, SignatureError, Signer, statement_of
from baton.sweep import steer
from baton.sweep.trials import rank_trials
from tests.sweep.swept import in_rungs

SIGNER, OTHER = Signer.new("ed25519"), Signer.new("p256")


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """A sweep after its first rung, whose trials are sealed."""
    (tmp_path / "key").write_bytes(SIGNER.pem())
    (tmp_path / "key.pub").write_bytes(SIGNER.public.pem)
    monkeypatch.setenv(KEY_FILE, str(tmp_path / "key"))
    monkeypatch.setenv(SIGNED_BY, SIGNER.public.line)
    sweep = in_rungs(tmp_path / "store")
    for trial, value in (("t0", 4.0), ("t1", 2.0), ("t2", 1.0), ("t3", 3.0)):
        run = sweep.run(sweep.trial(trial))
        with seals.stage(run, objects.ENTER):
            run.write(TrialInfo(sweep="s", id=trial))
            run.write(Plan(rows=1, steps_per_epoch=1, num_steps=8, targets=(2, 4, 6, 8)))
        with seals.stage(run, objects.CHUNK, 1):
            run.write(TrialScore(chunk=1, step=2, value=value, seconds=1.0), 1)
    sweep.add(TrialEntry(id="f000", run="s-t0", bracket=0))
    sweep.write_new(TrialJoin(device="d0"), 1, "f000")
    sweep.write(SweepTracking(mlflow="http://tracking"))
    sweep.write(Winner(id="t2", run="s-t2"))
    sweep.ask("t2", "go", "the best")
    rank_trials(sweep, 1)
    return sweep


# Document → a change of it, and what a stage that obeyed it would find.
PLANTED: dict[str, tuple[dict[str, Any], Callable[[Sweep], bool]]] = {
    "sweep.json": ({"metric": "planted"}, lambda sweep: sweep.document().metric == "planted"),
    "rungs/rung-001.json": ({"kept": ["t0"]}, lambda sweep: [rung.kept for rung in sweep.rungs()] == [["t0"]]),
    "winner.json": ({"id": "t0"}, lambda sweep: sweep.read(Winner) == Winner(id="t0", run="s-t2")),
    "trials/f000.json": ({"run": "planted"}, lambda sweep: sweep.trial("f000").run == "planted"),
    "control/t2.json": ({"state": "stop"}, lambda sweep: sweep.requests()["t2"].state == "stop"),
    "joins/rung-001-f000.json": (
        {"device": "planted"},
        lambda sweep: sweep.read(TrialJoin, 1, "f000") == TrialJoin(device="planted"),
    ),
    "tracking.json": (
        {"mlflow": "http://planted"},
        lambda sweep: sweep.read(SweepTracking) == SweepTracking(mlflow="http://planted"),
    ),
}


def _signed(document: dict[str, Any], place: str, signer: Signer) -> dict[str, Any]:
    digest = seals.sha256(json.dumps(document, sort_keys=True).encode())
    return {**document, SIGNATURE: signer.sign(statement_of(place, digest))}


# How → the changed document, from it without a signature, its signature and its place.
HOW: dict[str, Callable[[dict[str, Any], Any, str], dict[str, Any]]] = {
    "with the signature that was there": lambda plain, signature, place: {**plain, SIGNATURE: signature},
    "without a signature": lambda plain, signature, place: plain,
    "with an empty signature": lambda plain, signature, place: {**plain, SIGNATURE: None},
    "signed by another key": lambda plain, signature, place: _signed(plain, place, OTHER),
    "signed for another sweep": lambda plain, signature, place: _signed(plain, place.replace("/s/", "/r/"), SIGNER),
}


def _plant(sweep: Sweep, name: str, how: str) -> None:
    path = Path(sweep.storage.key(sweep.path(name)))
    document = json.loads(path.read_bytes())
    signature = document.pop(SIGNATURE)
    changed = HOW[how]({**document, **PLANTED[name][0]}, signature, sweep.path(name))
    path.write_text(json.dumps(changed, indent=1, sort_keys=True))


@pytest.mark.parametrize("has_key", [True, False])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_document_is_not_obeyed(
    name: str, how: str, has_key: bool, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a key it is: the negative control."""
    assert verify_decisions(sweep, SIGNER.public)["problems"] == []
    _plant(sweep, name, how)
    if not has_key:
        monkeypatch.delenv(SIGNED_BY)
    try:
        is_obeyed = PLANTED[name][1](sweep)
    except (SignatureError, UserError, KeyError):  # refused, or not there
        is_obeyed = False
    assert is_obeyed is not has_key
    problems = verify_decisions(sweep, SIGNER.public)["problems"]
    assert [problem.partition(": ")[0] for problem in problems] == [name]


def test_a_judge_does_not_go_by_a_planted_verdict(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    _plant(sweep, "rungs/rung-001.json", "without a signature")
    with pytest.raises(SignatureError, match=r"rung-001\.json is refused: it is not signed.*and remove it"):
        rank_trials(sweep, 1)
    monkeypatch.delenv(SIGNED_BY)
    assert rank_trials(sweep, 1).kept[0].endswith("s-t0")


def test_what_verification_finds_beside_planted_documents(sweep: Sweep, tmp_path: Path) -> None:
    def verified(*options: str) -> tuple[int, str]:
        command = ["verify", "decisions", sweep.uri, "--key", str(tmp_path / "key.pub"), *options]
        done = CliRunner().invoke(app, command)
        return done.exit_code, done.output

    wrong = {"foo": "is neither STORE/sweeps", f"{sweep.uri}x": "does not exist. Check store and name"}
    for target, told in wrong.items():
        done = CliRunner().invoke(app, ["verify", "decisions", target, "--key", str(tmp_path / "key")])
        assert (done.exit_code, told in done.output) == (2, True)
    assert sweep.storage.find(sweep.path()).keys() == PLANTED.keys()
    assert verified() == (0, f"{len(PLANTED)} documents are as signed\n")
    sweep.put("page.html", {})
    assert verified()[0] == 0
    assert "page.html" in verified()[1]
    score = sweep.run(sweep.trial("t1")).path(TrialScore.file_name(1))
    kept = sweep.storage.read(score)
    sweep.storage.write(score, kept.replace(b"2.0", b"0.1"))
    assert "CHANGED: run s-t1: scores/chunk-001.json: it differs from the run's seal" in verified()[1]
    sweep.storage.write(score, kept)
    sweep.storage.write(sweep.path("winner.json"), sweep.storage.read(sweep.path("winner.json")) + b"\n")
    assert "CHANGED: winner.json: it is not in the form in which it was written." in verified()[1]
    # A document of an older Baton, which its owner signs.
    sweep.put("winner.json", {"id": "t2", "run": "s-t2"})
    assert verified()[0] == 1
    assert verified("--sign") == (0, verified()[1])
    assert sweep.read(Winner) == Winner(id="t2", run="s-t2")


def test_who_steers_a_signed_sweep_needs_its_key(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    head = sweep.document()
    recipe: dict[str, Any] = dict(head.recipe)
    recipe["chunks"] = {**recipe["chunks"], "signing": {"public_key": SIGNER.public.line, "secret": None}}
    sweep.write(head.model_copy(update={"recipe": recipe}))
    monkeypatch.delenv(SIGNED_BY)  # in a shell
    assert "t1: stops" in steer.ask(sweep, "t1", "stop")
    monkeypatch.delenv(KEY_FILE)
    with pytest.raises(UserError, match=rf"control/t0\.json must be signed by .*{KEY_FILE} is not set"):
        steer.ask(sweep, "t0", "stop")
    monkeypatch.setenv(SIGNED_BY, SIGNER.public.line)
    assert {trial: request.state for trial, request in sweep.requests().items()} == {"t1": "stop", "t2": "go"}


def test_a_healer_without_the_key_notes_lost_pods(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as healer:
        healer.delenv(KEY_FILE)
        healer.delenv(SIGNED_BY)
        sweep.note_lost_pod(PodLoss(stage="judge rung 1", reason="evicted", at="now", number=1))
    assert [loss.reason for loss in sweep.lost_pods()] == ["evicted"]
    assert verify_decisions(sweep, SIGNER.public)["problems"] == []


def test_a_damaged_document_is_told_as_in_a_sweep_without_a_key(sweep: Sweep) -> None:
    path = Path(sweep.storage.key(sweep.path("sweep.json")))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(BatonError, match=r"sweep\.json is not a JSON object.*Put it back from a copy"):
        sweep.read(SweepHead)
