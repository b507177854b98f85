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
from html.parser import HTMLParser
from typing import Any

import pytest

from baton.pages.run_page import render
from baton.pages.svg import series, thin
from baton.runs.documents import OwnState, Skip, SourceLocation, TrackingRun, WarningRecord
from baton.runs.outcomes import EvaluationResult, ExportedModel
from baton.runs.versions import Fingerprint

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Checks the nesting of tags and collects the text, the tags' names, and the ids and references."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.resources: list[str] = []
        self.pieces: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            assert not name.startswith("on"), f"{tag} has a handler: {name}"
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "action", "data", "srcset") and tag != "a":
                self.resources.append(value or "")
            self.resources += re.findall(r"url\(([^)]*)\)", value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.pieces.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.pieces))


def check(html: str) -> Page:
    page = Page(html)
    assert len(page.ids) == len(set(page.ids))
    assert all(reference.startswith("#") and reference[1:] in page.ids for reference in page.resources)
    assert not page.tags & {"script", "link", "img", "iframe", "object", "embed", "image"}
    assert not re.search(r"@import|url\(", html[html.index("<style>") : html.index("</style>")])
    return page


def test_full_run(full_report: Any) -> None:
    report = full_report()
    html = render(report)
    text = check(html).text
    assert (
        "Eval loss fell from 8.31 to 3.20 (perplexity 4,064 → 24.5) in 240 steps over 4 chunks; "
        "every hand-over was bit-exact." in text
    )
    assert html.count("<svg") == 5
    assert "1 attempt ended early" in text
    assert (
        "Goodput 62% since the run began, 3 steps lost to interruptions, 52.8 MB sent and 39.6 MB fetched, "
        "a save holds training up for 0.25 s (median)." in text
    )
    for phase in ("start-up", "import", "fetch", "build", "restore", "train", "save", "upload"):
        assert f">{phase}</text>" in html
    assert report.proof[1].part.digest in html
    assert "\n  a gull forgets" in html
    assert "No samples" not in text


def test_what_is_not_known_of_the_cost_is_left_out(full_report: Any) -> None:
    full = full_report()
    quiet = {"bytes_sent": 200, "bytes_received": 0, "save_stalls": []}
    attempts = [attempt.model_copy(update=quiet) for attempt in full.attempts]
    report = replace(full, attempts=attempts, newest=None)
    assert "% training. 1 attempt ended early. 1.0 kB sent." in check(render(report)).text


def test_spare_chunks_are_named_and_end_where_the_last_one_does(full_report: Any, attempt: Any) -> None:
    report = full_report()
    report.attempts[-1:] = [attempt(4, 180, 200, "partial"), attempt(5, 200, 240)]
    html = render(report)
    assert "in 240 steps over 4 chunks; every hand-over was bit-exact." in check(html).text
    assert ">spare 5</text>" in html
    assert ">chunk 5</text>" not in html


def test_checkpoints_that_are_gone_still_stand_in_the_chain(full_report: Any) -> None:
    report = full_report()
    for index, gone in enumerate(("removed", "damaged")):
        report.proof[index] = replace(report.proof[index], gone=gone)
    text = check(render(report)).text
    assert text.count("bitwise read back, since removed by retention") == 1
    assert text.count("bitwise read back, since found damaged") == 1
    assert "s3://store/runs/quickstart/checkpoints/step-00000060" not in text
    assert "every hand-over was bit-exact." in text


def test_run_that_failed_before_it_began(empty_report: Any) -> None:
    text = check(render(empty_report())).text
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
    )
    text = check(render(report)).text
    assert "The run failed at step 100 of 240." in text
    assert "Eval loss was 8.31 before training; no checkpoint follows a hand-over." in text


@pytest.mark.slow
def test_hundred_chunks_stay_small_and_quick(full_report: Any) -> None:
    report = full_report(num_chunks=100, num_steps=100_000)
    report.evaluation.samples[:] = [dict.fromkeys(report.evaluation.samples[0], "word " * 40_000)] * 60
    started = time.process_time()
    html = render(report)
    assert time.process_time() - started < 30
    assert len(html.encode()) < 3_000_000
    page = check(html)
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
        newest=full.newest.model_copy(update={"fingerprint": Fingerprint(python=hostile)}),
    )
    report.proof[1] = proof_entry(120, 60, digest=hostile, uri=hostile, checked={hostile: hostile})
    report.proof[2] = proof_entry(180, 120, fingerprint={hostile: hostile})
    html = render(report)
    assert "<script" not in html
    assert "{{ 7*7 }}" in check(html).text


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
    assert "Nothing is known about the data" in check(render(report)).text


def test_values_that_are_not_finite_are_counted_and_left_out(full_report: Any) -> None:
    report = full_report()
    report.log[9]["loss"] = math.nan
    report.log[10]["grad_norm"] = math.inf
    assert "1 logged loss not finite" in check(render(report)).text


def test_thinning_keeps_ends_and_spikes() -> None:
    entries = [{"step": step, "loss": 100.0 if step == 31_337 else 1.0 / step} for step in range(1, 100_001)]
    xs, ys = thin(series(entries, "loss"), 2000)
    assert len(xs) <= 2000
    assert ys.max() == 100.0
    assert (xs[0], xs[-1]) == (1, 100_000)
    assert list(xs) == sorted(xs)


def test_a_part_that_another_number_of_processes_kept_breaks_no_proof(full_report: Any) -> None:
    report = full_report()
    checked = {"weights": "match", "rng": "of other processes"}
    last = report.proof[-1]
    part = last.part.model_copy(update={"level": "consistent", "checked": checked})
    html = render(replace(report, proof=[*report.proof[:-1], replace(last, part=part)]))
    assert "the resume proof does not hold" not in check(html).text
    assert "not every hand-over was bit-exact" in check(html).text


def test_what_a_person_was_told_as_it_ran_is_in_the_report(full_report: Any) -> None:
    told = WarningRecord(text="tracking at <b> stopped: the run is deleted", at="2026-11-21T02:00:00Z")
    text = check(render(replace(full_report(), warnings=[told]))).text
    assert "tracking at <b> stopped: the run is deleted" in text
    assert "Warnings" not in render(full_report())


def test_state_that_is_not_carried_is_named_where_a_hand_over_is_not_exact(full_report: Any) -> None:
    report = full_report()
    lost = OwnState(lost={"reward.py:seen": "it holds more"})
    parts = [
        replace(
            entry, part=entry.part.model_copy(update={"hooks": lost, "level": "consistent" if number else "bitwise"})
        )
        for number, entry in enumerate(report.proof)
    ]
    text = check(render(replace(report, proof=parts))).text
    assert "only consistent (state of reward.py:seen is not carried)" in text
    assert "is not carried" not in render(report)


def test_steps_that_were_skipped_are_marked_and_their_rows_named(full_report: Any) -> None:
    rows = [SourceLocation(file="rows<1>.jsonl", line=17)]
    skip = Skip(step=120, chunk=2, reason="nan", message="step 120 has no loss.", rows=rows, num_rows=9)
    report = full_report()
    html = render(replace(report, skips=[skip]))
    assert "step 120 has no loss." in check(html).text
    assert "rows<1>.jsonl line 17 and 8 more" in check(html).text
    assert html.count(">step skipped</text>") == 1
    assert "skipped" not in render(report)
