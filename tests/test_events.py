"""Events: the line of each is what it has always been, and what another Baton writes stops no reader."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from baton import events
from baton.events import KINDS, Unknown
from baton.runs.documents import StagePhase

GATE: dict[str, str | bool] = {"words": "loss 2 is <= production = 2.1", "held": True}
TOKENS: dict[str, Any] = {"tokens": 900, "truncated": 1, "dropped": 0, "train": 30, "eval": 3, "test": 0, "bytes": 7200}
LENGTHS: dict[str, Any] = {"lengths": {"over": 1, "rows": 33}, "order": "uniform"}
RUN = {"run": "r", "run_uri": "s/r", "report_uri": "s/r/report.html", "summary": "loss 3 → 2"}
WRITTEN: list[tuple[events.Event, dict[str, Any]]] = [
    (events.Stage("tokenize", "started"), {"stage": "tokenize", "state": "started"}),
    (
        events.Error("export", "no room.", 2, marked=False),
        {"stage": "export", "message": "no room.", "exit_code": 2, "marked": False},
    ),
    (
        events.Error("train chunk", "no room.", exit_code=1),
        {"stage": "train chunk", "message": "no room.", "exit_code": 1},
    ),
    (events.Phase(StagePhase.IMPORT), {"phase": "import"}),
    (events.Phase(StagePhase.UPLOAD, step=4), {"phase": "upload", "step": 4}),
    (events.Phase(StagePhase.RESTORE, step=0), {"phase": "restore", "step": 0}),
    (events.Phase(StagePhase.FETCH, chunk=1, target=8), {"phase": "fetch", "chunk": 1, "target": 8}),
    (events.Phase(StagePhase.LAUNCH, processes=2), {"phase": "launch", "processes": 2}),
    (events.Phase(StagePhase.TRAIN, rows=30), {"phase": "train", "rows": 30}),
    (
        events.Source("a.csv", "text", {"text": ["a", "b"]}),
        {"uri": "a.csv", "format": "text", "columns": {"text": ["a", "b"]}},
    ),
    (events.Rejected(1, 9, "é", "s/r"), {"count": 1, "of": 9, "first": "é", "uri": "s/r"}),
    (events.Quality("ok", "All is well.", "s/p"), {"state": "ok", "sentence": "All is well.", "page": "s/p"}),
    (
        events.Split("text", 9, 6, 2, 0, 1),
        {"format": "text", "rows": 9, "train": 6, "eval": 2, "test": 0, "rejected": 1},
    ),
    (
        events.LeftOut("2 tool calls", {"tool_calls": 2}),
        {"text": "2 tool calls", "counts": {"tool_calls": 2}},
    ),
    (events.Resumed(1, 3), {"parts": 1, "of": 3}),
    (events.Tokenized("train-0", 2, 3), {"part": "train-0", "done": 2, "of": 3}),
    (
        events.Truncation("1 of 9 rows", 1, 9, 80, fixed=False),
        {"text": "1 of 9 rows", "over": 1, "rows": 9, "longest": 80, "fixed": False},
    ),
    (
        events.Tokens(False, 8, [4, 8], **TOKENS, **LENGTHS),
        {"reused": False, "steps": 8, "targets": [4, 8], **TOKENS, **LENGTHS},
    ),
    (events.TrainingResumed(2, 12, 2), {"chunk": 2, "step": 12, "repeated": 2}),
    (events.LrFound(1e-5), {"learning_rate": 1e-05}),
    (events.Verified(4, 100, "ab"), {"step": 4, "bytes": 100, "digest": "ab"}),
    (events.Evaluating("after", "writing", 2, 8), {"when": "after", "doing": "writing", "done": 2, "of": 8}),
    (events.Evaluated("after", {"loss": 2.0, "mine": 1.0}), {"when": "after", "loss": 2.0, "mine": 1.0}),
    (events.Judged(False, ["loss"]), {"passed": False, "failed": ["loss"]}),
    (events.HandedOut("gguf", 100, "same"), {"format": "gguf", "bytes": 100, "checked": "same"}),
    (events.Exported("s/m", 100), {"uri": "s/m", "bytes": 100}),
    (events.ReportWritten("s/report.html"), {"uri": "s/report.html"}),
    (events.Looked("busy", "another one", run=""), {"decision": "busy", "words": "another one", "run": ""}),
    (events.Queued("other", "2026-01-01"), {"behind": "other", "since": "2026-01-01"}),
    (
        events.Retraining("busy", "another one", "2026-01-01"),
        {"state": "busy", "words": "another one", "at": "2026-01-01"},
    ),
    (
        events.Retraining("promoted", "model 2", "2026-01-01", **RUN, gate=[GATE], model_uri="s/m"),
        {"state": "promoted", "words": "model 2", "at": "2026-01-01", **RUN, "gate": [GATE], "model_uri": "s/m"},
    ),
    (events.Prepares([{"run": "p"}]), {"preparations": [{"run": "p"}]}),
    (events.Entered(["s/t000"]), {"runs": ["s/t000"]}),
    (events.Rung(1, 3, 2, ["t000"], 3), {"rung": 1, "of": 3, "chunk": 2, "kept": ["t000"], "stopped": 3}),
    (events.Verdict(["s/t000"], "s/t000"), {"kept": ["s/t000"], "winner": "s/t000"}),
    (events.Slice(1, 4, 100), {"files": 1, "of": 4, "bytes": 100}),
    (events.MicroBatch(2, 4, "trial"), {"size": 2, "accumulation": 4, "found_by": "trial"}),
    (events.Step(3, 8, 1.5), {"step": 3, "of": 8, "loss": 1.5}),
    (events.StagedElsewhere("/tmp", "no room"), {"place": "/tmp", "reason": "no room"}),
    (events.Superseded(4), {"step": 4}),
    (events.StoreUnavailable(4, 2.5, "no route"), {"step": 4, "unsaved": 2.5, "reason": "no route"}),
    (
        events.CheckpointCommitted(4, "s/c", "ab", 100, {"upload": 0.1, "commit": 0.2}),
        {"step": 4, "uri": "s/c", "digest": "ab", "bytes": 100, "seconds": {"upload": 0.1, "commit": 0.2}},
    ),
    (events.Skipped(4, "damaged"), {"step": 4, "reason": "damaged"}),
    (events.Consistent(["torch 2 → 3"]), {"changed": ["torch 2 → 3"]}),
    (events.NotCarried(4, {"own.py:n": "why"}), {"step": 4, "lost": {"own.py:n": "why"}}),
    (events.Warned("no server"), {"text": "no server"}),
    (events.Restored(4, []), {"step": 4, "wrong": []}),
    (events.Scored("t000", 1, 4, None), {"trial": "t000", "chunk": 1, "step": 4, "value": None}),
    (events.Turn("t000", 1, "done"), {"trial": "t000", "chunk": 1, "state": "done"}),
    (events.NoEffect("warm-up is over at step 9 of 4."), {"text": "warm-up is over at step 9 of 4."}),
    (events.AlreadyDone(1, 4), {"chunk": 1, "step": 4}),
    (events.Restarted(1, 1, 2, "killed"), {"chunk": 1, "attempt": 1, "of": 2, "reason": "killed"}),
    (
        events.StepSkipped(3, 1, "step 3 has no loss.", "a.jsonl line 7"),
        {"step": 3, "chunk": 1, "message": "step 3 has no loss.", "rows": "a.jsonl line 7"},
    ),
    (events.Partial(1, 3, 4, "SIGTERM"), {"chunk": 1, "step": 3, "of": 4, "notice": "SIGTERM"}),
    (events.Finished(1, 4), {"chunk": 1, "step": 4}),
    (
        events.Finished(1, 4, "budget.limit: 6h"),
        {"chunk": 1, "step": 4, "reason": "budget.limit: 6h"},
    ),
    (
        events.EndForeseen(40, 90, "budget.limit: 6h"),
        {"step": 40, "of": 90, "reason": "budget.limit: 6h"},
    ),
    (events.EndDecided(4, 2, "budget.limit: 6h"), {"step": 4, "stable_until": 2, "reason": "budget.limit: 6h"}),
    (events.Stopped(1, 4), {"chunk": 1, "step": 4}),
]
"""Event → its fields on the wire, in their order."""


def _named(value: object) -> str | None:
    return value.kind if isinstance(value, events.Event) else ""


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Returns what an event is written as."""
    monkeypatch.setenv("BATON_EVENTS", "stdout")
    monkeypatch.setattr(events.time, "time", lambda: 7.5)

    def write(event: events.Event) -> str:
        events.emit(event)
        return capsys.readouterr().out

    return write


@pytest.mark.parametrize(("event", "fields"), WRITTEN, ids=_named)
def test_an_event_is_written_with_its_fields_and_read_again(
    event: events.Event, fields: dict[str, Any], line: Any
) -> None:
    written = line(event)
    assert written == "::baton " + json.dumps({"event": event.kind, "at": 7.5, **fields}) + "\n"
    assert events.parse(f"  {written}") == event


@pytest.mark.parametrize(("event", "fields"), WRITTEN, ids=_named)
def test_a_pods_log_has_words(
    event: events.Event, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("BATON_EVENTS", raising=False)
    with caplog.at_level(logging.INFO, "baton"):
        events.emit(event)
    assert caplog.messages == [f"{event.kind} " + " ".join(f"{name}={value}" for name, value in fields.items())]


def test_every_event_is_in_the_table() -> None:
    ours = {kind for kind, event in KINDS.items() if event.__module__.startswith("baton.")}
    assert ours == {event.kind for event, _ in WRITTEN}


def test_the_lines_themselves(line: Any) -> None:
    assert line(events.Step(3, 8, 1.5)) == '::baton {"event": "step", "at": 7.5, "step": 3, "of": 8, "loss": 1.5}\n'
    came_to = '{"event": "retraining", "at": "noon", "state": "failed", "words": "é"}'.replace("é", "\\u00e9")
    assert line(events.Retraining("failed", "é", "noon")) == f"::baton {came_to}\n"


@pytest.mark.parametrize(
    "text", ["step 3", "", '::baton {"event": "step", "at": 7.5, "st', "::bat", "::baton 12", "::baton {}"]
)
def test_other_output_is_no_event(text: str) -> None:
    assert events.parse(text) is None


def test_another_batons_events_stop_no_reader(line: Any) -> None:
    newer = '::baton {"event": "step", "at": 1.0, "step": 3, "of": 8, "loss": 1.5, "throughput": 9}'
    assert events.parse(newer) == events.Step(3, 8, 1.5)
    older = events.parse('::baton {"event": "step", "at": 1.0, "step": 3}')
    assert older == Unknown("step", {"step": 3})
    foreign = events.parse('::baton {"event": "defrosted", "at": 1.0, "degrees": 3}')
    assert foreign == Unknown("defrosted", {"degrees": 3})
    assert line(foreign) == '::baton {"event": "defrosted", "at": 7.5, "degrees": 3}\n'  # handed on as it came


def test_an_event_stays_what_it_was_told_as() -> None:
    with pytest.raises(AttributeError):
        events.Step(3, 8, 1.5).step = 4  # type: ignore[misc]
