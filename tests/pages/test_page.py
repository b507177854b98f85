"""The page is whole, self-contained HTML whatever a run left behind."""

from __future__ import annotations

import math
import os
import pickle
import re
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest

from baton.pages.plots import series, thin
from baton.pages.run_page import render, tiles
from baton.runs.documents import OwnState, Skip, SourceLocation, TrackingRun, WarningRecord
from baton.runs.outcomes import EvaluationResult, ExportedModel
from baton.runs.versions import Fingerprint
from baton.tracking.tracking_run import GpuUse
from tests.support.pages import read


def test_full_run(full_report: Any) -> None:
    report = full_report()
    html = render(report)
    page = read(html)
    assert (
        "Eval loss fell from 8.31 to 3.20 (perplexity 4,064 → 24.5) in 240 steps over 4 chunks; "
        "every resume was bit-identical: 3 from chunk to chunk, 1 after a kill." in page.text
    )
    assert "1 attempt ended early" in page.text
    assert (
        "Goodput 62% of the time since the first chunk began, 3 steps lost to interruptions, 52.8 MB sent and "
        "39.6 MB fetched, a save holds training up for 0.25 s (median)." in page.text
    )
    for phase in ("start-up", "import", "fetch", "build", "restore", "train", "save", "upload"):
        assert f" {phase} " in page.text
    assert report.proof[1].part.digest in page.copied
    assert report.proof[1].part.uri in page.copied
    assert report.export.model_uri in page.copied
    assert "\n  a gull forgets" in html
    assert "No samples" not in page.text


def test_order_is_that_of_a_readers_questions(full_report: Any) -> None:
    headings = re.findall(r"<h2>([^<]*)</h2>", render(full_report()))
    assert headings == ["Loss", "Samples", "Evaluation", "Checkpoints and export", "Time", "Verified ✓", "Run"]


def test_loss_has_evaluations_chunks_and_interruptions(full_report: Any) -> None:
    page = read(render(full_report()))
    curves = page.curves("loss")
    assert [x for x, _ in curves["training"]] == list(range(1, 241))
    assert [x for x, _ in curves["evaluation"]] == [0, 60, 120, 180, 240]
    assert curves["evaluation"][0][1] == 8.31
    marks = page.plot("loss")["marks"]
    assert [(mark["at"], mark["text"]) for mark in marks if mark["kind"] == "end"] == [
        (60, "chunk 1"),
        (120, "chunk 2"),
        (180, "chunk 3"),
        (240, "chunk 4"),
    ]
    assert [(mark["at"], mark["text"]) for mark in marks if mark["color"] == "bad"] == [(90, "✗")]
    assert "✗ killed" in page.text
    assert "Killed after step 90, resumed from step 90." in page.text
    assert "chunk 2, attempt 1 " in page.text
    assert "killed after step 90" in page.text
    assert {"learning rate", "gradient norm", "tokens per second"} <= {plot["y"] for plot in page.plots}


def test_pages_elsewhere_are_links(full_report: Any) -> None:
    report = replace(
        full_report(), mlflow_url="https://mlflow.example/#/experiments/1/runs/0f3a", has_quality_page=True
    )
    assert read(render(report)).links == ["https://mlflow.example/#/experiments/1/runs/0f3a", "data-quality.html"]
    assert read(render(full_report())).links == []


def test_the_command_and_the_commit_that_began_it_are_named(full_report: Any) -> None:
    commit = "0123456789" * 4
    report = replace(full_report(), command="baton run first.yaml --run first", commit=f"{commit}-dirty")
    page = read(render(report))
    assert {report.command, commit} <= set(page.copied)
    assert "and changed files" in page.text
    assert "and changed files" not in read(render(replace(report, commit=commit))).text
    assert "Commit" not in read(render(full_report())).text


def test_gpu_use_is_shown_where_it_was_recorded(full_report: Any) -> None:
    assert "GPU use" not in read(render(full_report())).text
    page = read(render(replace(full_report(), gpu_use=GpuUse(83.4, 61_000.0))))
    assert re.search(r"GPU use\s+83%\s+up to 61.0 GB in use", page.text)


def test_a_long_curve_has_a_smoothed_one_in_front(full_report: Any) -> None:
    curves = read(render(full_report(num_steps=2000))).curves("loss")
    raw, smooth = ([y for _, y in curves[name][-100:]] for name in ("training", "training, smoothed"))
    assert max(smooth) - min(smooth) < 0.5 * (max(raw) - min(raw))


def test_a_run_that_still_trains_has_its_page(full_report: Any) -> None:
    full = full_report()
    report = replace(
        full,
        newest=full.newest.model_copy(update={"step": 60}),
        log=full.log[:60],
        proof=full.proof[:1],
        evaluation=None,
        export=None,
        as_of="2026-11-21T03:00:00Z",
    )
    page = read(render(report))
    assert "Training: step 60 of 240, chunk 2 of 4; loss" in page.text
    assert "As of 2026-11-21 03:00 UTC" in page.text
    assert ("Steps", "60", "of 240, chunk 2 of 4") in tiles(report)
    assert ("Steps", "240", "in 4 chunks") in tiles(full)
    assert "The run failed" not in page.text
    stopped = read(render(replace(report, is_stopped=True))).text
    assert "Interrupted: step 60 of 240, chunk 2 of 4; loss" in stopped
    begun = replace(report, plan=None, newest=None, log=(), proof=(), attempts=())
    assert "Preparing the data." in read(render(begun)).text
    assert "No loss was logged yet." in read(render(begun)).text


def test_steps_of_a_killed_attempt_have_the_speed_of_their_own_chunk(full_report: Any, attempt: Any) -> None:
    report = full_report()
    report.attempts[:] = [attempt(1, 0, 60), attempt(2, 72, 120)]  # killed at 72 or later; that left no record
    curve = read(render(report)).curves("tokens per second")["tokens per second"]
    assert [x for x, _ in curve] == [0, 60, 120]
    assert curve[0][1] != curve[1][1] == curve[2][1]


def test_what_is_not_known_of_the_cost_is_left_out(full_report: Any) -> None:
    full = full_report()
    quiet = {"bytes_sent": 200, "bytes_received": 0, "save_stalls": []}
    attempts = [attempt.model_copy(update=quiet) for attempt in full.attempts]
    report = replace(full, attempts=attempts, newest=None)
    assert " in all. 1 attempt ended early. 1.0 kB sent." in read(render(report)).text


def test_spare_chunks_are_named_and_end_where_the_last_one_does(full_report: Any, attempt: Any) -> None:
    report = full_report()
    report.attempts[-1:] = [attempt(4, 180, 200, "partial"), attempt(5, 200, 240)]
    text = read(render(report)).text
    assert "every resume was bit-identical: 3 from chunk to chunk, 2 after an interruption." in text
    assert " spare 5 " in text
    assert " chunk 5 " not in text


def test_checkpoints_that_are_gone_still_stand_in_the_chain(full_report: Any) -> None:
    report = full_report()
    for index, gone in enumerate(("removed", "damaged")):
        report.proof[index] = replace(report.proof[index], gone=gone)
    text = read(render(report)).text
    assert text.count("bitwise files verified, since removed by retention") == 1
    assert text.count("bitwise files verified, since found damaged") == 1
    assert "s3://store/runs/quickstart/checkpoints/step-00000060" not in text
    assert "every resume was bit-identical: " in text


def test_run_that_failed_before_it_began(empty_report: Any) -> None:
    text = read(render(empty_report())).text
    assert "The run failed before the first step. No resume proof was recorded." in text
    assert "No loss was logged" in text
    assert "No samples were generated" in text


def test_run_that_failed_midway(full_report: Any) -> None:
    full = full_report()
    report = replace(
        full,
        newest=full.newest.model_copy(update={"step": 60}),
        log=full.log[:100],
        proof=full.proof[:1],
        evaluation=full.evaluation.model_copy(update={"after": {}}),
        verdict="failed",
    )
    text = read(render(report)).text
    assert "The run failed at step 100 of 240." in text
    assert "Eval loss was 8.31 before training; no checkpoint follows a resume." in text


@pytest.mark.slow
def test_hundred_chunks_stay_small_and_quick(full_report: Any) -> None:
    report = full_report(num_chunks=100, num_steps=100_000)
    report.evaluation.samples[:] = [dict.fromkeys(report.evaluation.samples[0], "word " * 40_000)] * 60
    started = time.process_time()
    html = render(report)
    assert time.process_time() - started < 30
    assert len(html.encode()) < 3_000_000
    page = read(html)
    assert "20 further samples are not shown" in page.text
    assert "train chunk × 100" in page.text


def test_hostile_text_stays_text(full_report: Any, proof_entry: Any) -> None:
    hostile = '</pre></style><script>alert(1)</script><img src=x onerror=alert(1)>" $\\frac{ {{ 7*7 }} \x00'
    full = full_report()
    report = replace(
        full,
        **dict.fromkeys(("run", "recipe_name", "recipe_yaml", "uri", "created"), hostile),
        export=ExportedModel(model_uri=hostile),
        evaluation=EvaluationResult(samples=[dict.fromkeys(full.evaluation.samples[0], hostile)]),
        stages={hostile: 2.1, **full.stages},
        tracking=TrackingRun(mlflow="javascript:alert(1)", run_id=hostile),
        mlflow_url="javascript:alert(1)",
        newest=full.newest.model_copy(update={"fingerprint": Fingerprint(python=hostile)}),
    )
    report.proof[1] = proof_entry(120, 60, digest=hostile, uri=hostile, checked={hostile: hostile})
    report.proof[2] = proof_entry(180, 120, fingerprint={hostile: hostile})
    page = read(render(report))
    assert "{{ 7*7 }}" in page.text
    assert hostile in page.copied
    assert page.links == []


@pytest.mark.slow
def test_same_report_gives_the_same_bytes_in_another_process(full_report: Any) -> None:
    code = "import pickle, sys\nfrom baton.pages import run_page as page\n"
    code += "print(page.render(pickle.load(sys.stdin.buffer)))"
    other = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(full_report()), capture_output=True, check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    ).stdout  # fmt: skip
    assert other.decode() == render(full_report()) + "\n"


def test_parts_of_the_data_may_be_unknown(full_report: Any) -> None:
    report = replace(full_report(), split=None, tokens=None, newest=None)
    assert "Nothing is known about the data" in read(render(report)).text


def test_values_that_are_not_finite_are_counted_and_left_out(full_report: Any) -> None:
    report = full_report()
    report.log[9]["loss"] = math.nan
    report.log[10]["grad_norm"] = math.inf
    assert "1 logged loss not finite" in read(render(report)).text


def test_thinning_keeps_ends_and_spikes() -> None:
    entries = [{"step": step, "loss": 100.0 if step == 31_337 else 1.0 / step} for step in range(1, 100_001)]
    xs, ys = zip(*thin(series(entries, "loss"), 2000), strict=True)
    assert len(xs) <= 2000
    assert max(ys) == 100.0
    assert (xs[0], xs[-1]) == (1, 100_000)
    assert sorted(xs) == list(xs)


def test_a_part_that_another_number_of_processes_kept_breaks_no_proof(full_report: Any) -> None:
    report = full_report()
    checked = {"weights": "match", "rng": "of other processes"}
    last = report.proof[-1]
    part = last.part.model_copy(update={"level": "consistent", "checked": checked})
    html = render(replace(report, proof=[*report.proof[:-1], replace(last, part=part)]))
    assert "the resume proof does not hold" not in read(html).text
    assert "not every resume was bit-identical" in read(html).text


def test_what_a_person_was_told_as_it_ran_is_in_the_report(full_report: Any) -> None:
    told = WarningRecord(text="tracking at <b> stopped: the run is deleted", at="2026-11-21T02:00:00Z")
    text = read(render(replace(full_report(), warnings=[told]))).text
    assert "tracking at <b> stopped: the run is deleted" in text
    assert "warning" not in read(render(full_report())).text


def test_state_that_is_not_carried_is_named_where_a_hand_over_is_not_exact(full_report: Any) -> None:
    report = full_report()
    lost = OwnState(lost={"reward.py:seen": "it holds more"})
    parts = [
        replace(
            entry, part=entry.part.model_copy(update={"hooks": lost, "level": "consistent" if number else "bitwise"})
        )
        for number, entry in enumerate(report.proof)
    ]
    text = read(render(replace(report, proof=parts))).text
    assert "only consistent (state of reward.py:seen is not carried)" in text
    assert "is not carried" not in render(report)


def test_steps_that_were_skipped_are_marked_and_their_rows_named(full_report: Any) -> None:
    rows = [SourceLocation(file="rows<1>.jsonl", line=17)]
    skip = Skip(step=120, chunk=2, reason="nan", message="step 120 has no loss.", rows=rows, num_rows=9)
    report = full_report()
    html = render(replace(report, skips=[skip]))
    assert "step 120 has no loss." in read(html).text
    assert "rows<1>.jsonl line 17 and 8 more" in read(html).text
    assert "step skipped" in read(html).text
    assert [mark["at"] for mark in read(html).plot("loss")["marks"] if mark["color"] == "amber"] == [120]
    assert "skipped" not in read(render(report)).text
