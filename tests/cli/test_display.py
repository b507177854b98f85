"""What a person is shown of a run's events, where standard error is a log file."""

from __future__ import annotations

import io
import re

import pytest

from baton import events
from baton.cli import display
from baton.kfp.processes import StageRepaired, TrialFailed

NOTES: list[tuple[events.Event, str]] = [
    (events.Split("text", 9, 6, 2, 0, 1), "6 rows to train on, 2 held out, 1 rejected"),
    (
        events.Tokens(True, 8, [8], tokens=1900, truncated=0, dropped=0, train=30, eval=3),
        "1,900 tokens in 30 sequences, written before; 8 steps",
    ),
    (events.Step(3, 8, 1.5), "step 3/8, loss 1.500"),
    (events.CheckpointCommitted(4, "s/c", "0123456789abcdef", 100, {}), "step 4 saved"),
    (
        events.Evaluated("after", {"perplexity": 7.4, "loss": 2.0, "mine": 1.0}),
        "loss 2, perplexity 7.4 after training",
    ),
    (
        events.Evaluated("after", {"loss": None, "reward": 0.5, "bleu": None}),
        "reward 0.5, loss not measured, bleu not measured after training",
    ),
    (events.Judged(False, ["loss is 2", "bleu is 1"]), "rejected: loss is 2; bleu is 1"),
    (events.Phase("restore", step=4), "restore"),
]
WARNINGS: list[tuple[events.Event, str]] = [
    (
        events.Source("a.jsonl", "prompt-completion", {"prompt": "question", "completion": "answer"}, ["topic"]),
        "a.jsonl holds rows of prompt-completion (prompt ← question, completion ← answer; not used: topic)",
    ),
    (events.Skipped(4, "it is damaged."), "The checkpoint of step 4 is not used: it is damaged."),
    (
        events.StepSkipped(3, 1, "step 3 has no loss.", "a.jsonl line 7"),
        "step 3 has no loss. Chunk 1 resumes before step 3 and skips it. Its rows: a.jsonl line 7.",
    ),
    (events.Rejected(1, 9, "a.csv line 3", "s/r"), "1 of 9 rows are unusable and kept in s/r; a.csv line 3"),
    (events.Quality("warn", "Look at it.", "s/p"), "Look at it. See s/p"),
    (events.Truncation("one row is long", 1, 9, 80, fixed=False), "One row is long."),
    (events.Warned("tracking at x stopped: deleted"), "Tracking at x stopped: deleted"),
    (
        events.NotCarried(4, {"own.py:it": "it is an iterator"}),
        "State of `own.py:it` is not carried: it is an iterator. Chunks that resume from step 4 are only consistent. "
        "Give its class state_dict and load_state_dict, or set `stateless = True` on it where training does not depend "
        "on it.",
    ),
    (events.StoreUnavailable(4, 2.5, "no route."), "no route. Training continues; last checkpoint 2 s ago."),
    (events.StagedElsewhere("/tmp", "there is no room"), "There is no room."),
    (events.Partial(1, 3, 4, "SIGTERM"), "SIGTERM: step 3 of 4 is saved, and the next chunk resumes from it."),
    (StageRepaired("export", "gone."), "export found damage; the run repairs it once: gone."),
]
SWEPT: list[tuple[events.Event, str]] = [
    (events.Scored("t001", 2, 6, 1.25), "t001 after chunk 2 (step 6): 1.25"),
    (events.Scored("t001", 2, 6, None), "t001 after chunk 2 (step 6): not a number"),
    (events.Rung(1, 3, 2, ["t000", "t001"], 2), "rung 1 of 3: t000, t001 stay, 2 stopped"),
    (TrialFailed("t001", 2, "no room."), "t001 chunk 2 failed: no room."),
]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What is shown."""
    screen = io.StringIO()
    monkeypatch.setattr(display.console, "file", screen)
    monkeypatch.setattr(display.console, "width", 300)
    return screen


@pytest.mark.parametrize(("event", "note"), NOTES)
def test_a_stage_ends_with_its_newest_note(event: events.Event, note: str, shown: io.StringIO) -> None:
    with display.Display(0) as screen:
        for heard in (
            events.Stage("train chunk 1", "started"),
            event,
            events.Phase("train"),
            events.ReportWritten("s"),
        ):
            screen.heard(heard)
        screen.heard(events.Stage("train chunk 1", "done"))
    assert re.sub(r"\d+\.\d s", "– s", shown.getvalue(), count=1) == f"✓ train chunk 1 (– s) {note}\n"


@pytest.mark.parametrize(("event", "words"), WARNINGS)
def test_nobody_misses_a_warning(event: events.Event, words: str, shown: io.StringIO) -> None:
    with display.Display(0) as screen:
        screen.heard(event)
        screen.heard(events.Quality("ok", "All is well.", "s/p"))
    assert shown.getvalue() == f"{words}\n"


@pytest.mark.parametrize(("event", "words"), SWEPT)
def test_scores_and_rungs_are_lines(event: events.Event, words: str, shown: io.StringIO) -> None:
    with display.Display(0) as screen:
        screen.heard(event)
        screen.heard(events.ReportWritten("s"))
    assert shown.getvalue() == f"{words}\n"


def test_a_chunk_ends_with_its_loss_and_speed(shown: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    monkeypatch.setattr(display.time, "monotonic", lambda: clock)
    with display.Display(2, batch_size=8) as screen:
        screen.heard(events.Tokens(False, 8, [4, 8], tokens=3000, truncated=0, dropped=0, train=30, eval=3))
        screen.heard(events.Stage("train chunk 1", "started"))
        screen.heard(events.Tokens(False, 8, [4, 8], tokens=3000, truncated=0, dropped=0, train=30, eval=3))
        screen.heard(events.Phase("restore", step=2))
        for step in (3, 4, 5):
            screen.heard(events.Phase("train"))
            clock += 20.0
            screen.heard(events.Step(step, 8, 1.5))
            screen.heard(events.Phase("save", step=step))
            clock += 15.0  # a save holds training, and is no part of its speed
            screen.heard(events.Phase("upload", step=step))
        screen.heard(events.CheckpointCommitted(4, "s/c", "0123456789abcdef", 100, {}))
        screen.heard(events.Stage("train chunk 1", "done"))
    *told, ended = shown.getvalue().splitlines()
    # Each half minute: this is no terminal.
    assert [line.partition(": ")[2] for line in told] == [
        "4/8 loss 1.5 38 tok/s 1:20 left",
        "5/8 loss 1.5 38 tok/s 1:00 left",
    ]
    assert ended == "✓ train chunk 1 of 2 (105.0 s) step 5/8, loss 1.500, 38 tokens/s, step 4 saved"


def test_a_spare_chunk_is_no_chunk_four_of_three(shown: io.StringIO) -> None:
    with display.Display(3) as screen:
        for name in ("train chunk 3", "checkpoint 3", "train chunk 4", "checkpoint 4", "evaluate"):
            screen.heard(events.Stage(name, "started"))
            screen.heard(events.Stage(name, "done"))
    names = [line.rpartition(" (")[0] for line in shown.getvalue().splitlines()]
    assert names == ["✓ train chunk 3 of 3", "✓ checkpoint 3 of 3", "✓ spare chunk 4", "✓ checkpoint 4", "✓ evaluate"]


def test_quiet_leaves_warnings_alone(shown: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display.Verbosity, "is_quiet", True)
    with display.Display(0) as screen:
        screen.heard(events.Stage("tokenize", "started"))
        screen.heard(events.Warned("disk is nearly full"))
        screen.heard(events.Stage("tokenize", "done"))
    assert shown.getvalue() == "Disk is nearly full\n"


def test_digests_are_for_the_verbose(shown: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display.Verbosity, "is_verbose", True)
    with display.Display(0) as screen:
        screen.heard(events.Stage("train chunk 1", "started"))
        screen.heard(events.CheckpointCommitted(4, "s/c", "0123456789abcdef", 100, {}))
        screen.heard(events.Stage("train chunk 1", "done"))
    assert "step 4 saved, digest 0123456789ab" in shown.getvalue()


RESUMED: list[tuple[tuple[int, int], str]] = [
    ((12, 0), "resumed from step 12"),
    ((12, 1), "resumed from step 12; step 13 is repeated"),
    ((12, 2), "resumed from step 12; steps 13 and 14 are repeated"),
    ((1200, 3), "resumed from step 1,200; steps 1,201 to 1,203 are repeated"),
    ((0, 3), "started again from the beginning; steps 1 to 3 are repeated"),
]


@pytest.mark.parametrize(("at", "words"), RESUMED)
def test_a_repeated_command_shows_the_step_it_resumes_from(at: tuple[int, int], words: str, shown: io.StringIO) -> None:
    with display.Display(3, resumes=True) as screen:
        screen.heard(events.TrainingResumed(2, *at))
        screen.heard(events.TrainingResumed(3, 16, 0))  # from chunk to chunk
    assert shown.getvalue() == f"{words}\n"


def test_a_process_restarted_within_a_chunk_shows_it_too(shown: io.StringIO) -> None:
    with display.Display(3) as screen:
        screen.heard(events.TrainingResumed(2, 8, 0))  # from chunk to chunk
        screen.heard(events.Restarted(2, 1, 2, "The process was lost."))
        screen.heard(events.TrainingResumed(2, 12, 2))
    assert shown.getvalue().splitlines()[1:] == ["resumed from step 12; steps 13 and 14 are repeated"]
