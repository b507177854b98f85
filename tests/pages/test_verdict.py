"""What the page claims in words: of the resume proof, and of the loss."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from baton.pages.run_page import loss_clause, read_proof, render, tiles, verdict
from baton.runs.outcomes import EvaluationResult, RunFailure

CHECKED = dict.fromkeys(("weights", "optimizer", "scheduler", "rng", "position", "callbacks", "log"), "match")


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        pytest.param(
            {"checked": {**CHECKED, "optimizer": "mismatch"}},
            "the resume proof does not hold (step 120: optimizer differs).",
            id="part-differs",
        ),
        pytest.param(
            {"checked": {**CHECKED, "rng": "left out"}},
            "the resume proof does not hold (step 120: rng left out).",
            id="part-left-out",
        ),
        pytest.param(
            {"verified": False},
            "every resume was bit-identical: 3 from chunk to chunk, 1 after a kill; "
            "files of 1 checkpoint in the store not verified yet.",
            id="not-verified-yet",
        ),
        pytest.param(
            {"parent_digest": "0" * 64},
            "the resume proof does not hold (step 120: parent is not the checkpoint of step 60).",
            id="other-parent",
        ),
        pytest.param(
            {"level": "consistent", "fingerprint": {"device": "cuda", "torch": "2.13.0", "threads": 2}},
            "not every resume was bit-identical: 1 of 4 checkpoints only consistent (device cpu → cuda).",
            id="other-device",
        ),
        pytest.param({"checked": None}, "2 of 3 resumes checked, bit-identical each.", id="unchecked"),
    ],
)
def test_proof_claims_no_more_than_was_checked(
    row: dict[str, Any], sentence: str, full_report: Any, proof_entry: Any
) -> None:
    report = full_report()
    report.proof[1] = proof_entry(120, 60, **row)
    _, words = verdict(report, read_proof(report))
    assert words.endswith(f"; {sentence}")


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        pytest.param(3.2, 3.5, "Eval loss rose from 3.20 to 3.50 in", id="rose"),
        pytest.param(3.2, 3.201, "Eval loss stayed at 3.20 in", id="same"),
        pytest.param(3.2, math.nan, "Eval loss is no longer a finite number in", id="nan"),
        pytest.param(None, 3.2, "Eval loss was 3.20 after training in", id="only-after"),
        pytest.param(None, None, "Trained, with no eval loss measured, in", id="none"),
    ],
)
def test_loss_is_told_as_it_is(before: float | None, after: float | None, words: str, full_report: Any) -> None:
    report = replace(full_report(), evaluation=EvaluationResult(before={"loss": before}, after={"loss": after}))
    assert verdict(report, read_proof(report))[1].startswith(f"{words} 240 steps")


def test_a_chunk_end_that_was_trained_past_is_no_hand_over(full_report: Any, proof_entry: Any, attempt: Any) -> None:
    """The second chunk is preempted early, and the third resumes from there to its own end."""
    report = full_report()
    report.attempts[1:4] = [attempt(2, 60, 80, "partial"), attempt(3, 80, 180)]
    report.proof[:] = [proof_entry(60, None), proof_entry(80, 60), proof_entry(180, 80), proof_entry(240, 180)]
    told = "every resume was bit-identical: 2 from chunk to chunk, 1 after an interruption"
    assert read_proof(report).sentence == told

    report.proof[1:3] = [proof_entry(80, 60, checked=None), proof_entry(180, 80, checked=None)]
    assert read_proof(report).sentence == "1 of 2 resumes checked, bit-identical each"


def test_a_chunk_that_was_taken_away_before_its_first_step(full_report: Any, proof_entry: Any, attempt: Any) -> None:
    report = full_report()
    report.attempts[1:4] = [attempt(2, 60, 60, "partial"), attempt(3, 60, 180)]
    report.proof[:] = [proof_entry(60, None), proof_entry(180, 60), proof_entry(240, 180)]
    told = "every resume was bit-identical: 2 from chunk to chunk, 1 after an interruption"
    assert read_proof(report).sentence == told


# Outcomes of the second chunk's attempts, whether files are verified, whether the run still trains → pill and clause.
RESUMES: dict[str, tuple[list[str], bool, bool, str, str, str]] = {
    "from chunk to chunk": (
        ["done"],
        True,
        False,
        "good",
        "bit-identical",
        "every resume was bit-identical: 3 from chunk to chunk",
    ),
    "after a kill": (
        ["killed", "done"],
        True,
        False,
        "good",
        "bit-identical",
        "every resume was bit-identical: 3 from chunk to chunk, 1 after a kill",
    ),
    "after a preemption": (
        ["partial", "killed", "done"],
        True,
        False,
        "good",
        "bit-identical",
        "every resume was bit-identical: 3 from chunk to chunk, 2 after an interruption",
    ),
    "in training": (
        ["done"],
        False,
        True,
        "muted",
        "files not verified yet",
        "every resume was bit-identical: 3 from chunk to chunk; files of 4 checkpoints in the store not verified yet",
    ),
    "at the end": (
        ["done"],
        False,
        False,
        "warn",
        "files not verified yet",
        "every resume was bit-identical: 3 from chunk to chunk; files of 4 checkpoints in the store not verified yet",
    ),
}


@pytest.mark.parametrize(("outcomes", "verified", "live", "tone", "word", "clause"), RESUMES.values(), ids=RESUMES)
def test_resumes_are_counted_by_kind_and_pending_checks_are_no_warning(
    outcomes: list[str],
    verified: bool,
    live: bool,
    tone: str,
    word: str,
    clause: str,
    full_report: Any,
    attempt: Any,
    proof_entry: Any,
) -> None:
    report = full_report()
    report.attempts[1:3] = [attempt(2, 60, 120 if outcome == "done" else 90, outcome) for outcome in outcomes]
    report.proof[:] = [proof_entry(end, end - 60 or None, verified=verified) for end in (60, 120, 180, 240)]
    report = replace(report, as_of="2026-11-21T02:10:00Z" if live else "")
    proof = read_proof(report)
    assert (proof.tone, proof.word, proof.sentence) == (tone, word, clause)
    page = render(report)
    assert ("<h2>Verified ✓</h2>" in page) is verified
    assert page.count("files not verified yet</span>") == (0 if verified else 5)  # a pill, and each row


def test_the_first_resume_is_not_a_kill(full_report: Any, attempt: Any, proof_entry: Any) -> None:
    report = full_report(2)
    report.attempts[:] = [attempt(1, 0, 120), attempt(2, 120, 240)]
    report.proof[:] = [proof_entry(120, None), proof_entry(240, 120)]
    assert read_proof(report).sentence == "the resume from chunk to chunk was bit-identical"


def test_checkpoints_within_a_chunk_do_not_stand_in_for_a_hand_over(full_report: Any, proof_entry: Any) -> None:
    report = full_report()
    report.proof[:] = [proof_entry(step, step - 20 or None) for step in range(20, 121, 20)]
    report.proof.extend([proof_entry(180, 120, checked=None), proof_entry(240, 180)])
    assert read_proof(report).sentence == "2 of 3 resumes checked, bit-identical each"


JUDGED = {
    "reward rose": ({"reward": (0.1, 0.75)}, "good", "Reward rose from 0.1 to 0.75"),
    "reward fell": ({"reward": (0.75, -0.1)}, "warn", "Reward fell from 0.75 to -0.1"),
    "reward stayed": ({"reward": (0.5, 0.5)}, "warn", "Reward stayed at 0.5"),
    "accuracy beside a loss": (
        {"accuracy": (0.5, 0.875), "loss": (0.7, 0.9)},
        "good",
        "Accuracy on held-out pairs rose from 0.5 to 0.875",
    ),
    "divergence fell": (
        {"divergence": (0.5, 0.25), "loss": (None, None)},
        "good",
        "Divergence from the teacher fell from 0.5 to 0.25",
    ),
    "reward gone": ({"reward": (0.5, None)}, "warn", "Reward was not measured after training"),
    "reward not known before": ({"reward": (None, 0.5)}, "warn", "Reward was not measured before training"),
    "reward never": ({"reward": (None, None)}, "none", "Trained, with no reward measured,"),
    "loss gone": ({"loss": (3.2, None)}, "warn", "Eval loss was not measured after training"),
    "loss alone": ({"loss": (3.2, 3.0), "reward": (None, None)}, "good", "Eval loss fell from 3.20 to 3.00"),
}


@pytest.mark.parametrize(("figures", "tone", "words"), JUDGED.values(), ids=JUDGED)
def test_what_a_method_is_judged_by_comes_first(figures: dict[str, Any], tone: str, words: str) -> None:
    before, after = ({name: pair[index] for name, pair in figures.items()} for index in (0, 1))
    assert loss_clause(before, after) == (tone, words)


def test_preferences_have_a_tile(full_report: Any) -> None:
    evaluation = EvaluationResult(after={"reward_accuracy": 0.755, "reward_margin": 1.2345})
    assert ("Reward accuracy", "76%", "margin 1.23 nats") in tiles(replace(full_report(), evaluation=evaluation))
    assert "Reward accuracy" not in [label for label, _, _ in tiles(full_report())]


@pytest.mark.parametrize(
    ("cancelled", "sentence", "heading"),
    [
        (False, "The run failed in export, at step 240 of 240.", "Why it failed"),
        (True, "The run was canceled in export, at step 240 of 240.", "Where it was canceled"),
    ],
)
def test_a_run_that_ended_before_its_end(cancelled: bool, sentence: str, heading: str, full_report: Any) -> None:
    failure = RunFailure(stage="export", message="the <i>disk</i> is full.", remedy="Free it.", is_cancelled=cancelled)
    report = replace(full_report(), failure=failure)
    assert verdict(report, read_proof(report)) == ("bad", sentence)
    page = render(report)
    assert f"<h2>{heading}</h2>" in page
    assert "the &lt;i&gt;disk&lt;/i&gt; is full." in page
    assert "Free it." in page
    assert heading not in render(full_report())
    bare = replace(report, recipe_yaml="", plan=None, newest=None, proof=(), log=())
    assert verdict(bare, read_proof(bare))[1] == sentence.split(",")[0] + "."
    assert "Resume proof" not in render(bare)
