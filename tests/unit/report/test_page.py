"""The page is whole, self-contained HTML whatever a run left behind."""

from __future__ import annotations

import math
import re
import time
from html.parser import HTMLParser
from typing import Any

from baton.components.report.page import render
from baton.components.shared.pages.svg import series, thin

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
    assert html.count("<svg") == 10
    assert "1 attempt ended early" in text
    assert (
        "Goodput 62% since the run began, 3 steps lost to interruptions, 52.8 MB sent and 39.6 MB fetched, "
        "a save holds training up for 0.25 s (median)." in text
    )
    for phase in ("start-up", "import", "fetch", "build", "restore", "train", "save", "upload"):
        assert f">{phase}</text>" in html
    assert report["proof"][1]["digest"] in html
    assert "\n  a gull forgets" in html
    assert "No samples" not in text


def test_what_is_not_known_of_the_cost_is_left_out(full_report: Any) -> None:
    report = full_report()
    report["cost"] = {**dict.fromkeys(report["cost"]), "bytes_sent": 1000, "bytes_received": 0}
    assert "% training. 1 attempt ended early. 1.0 kB sent." in check(render(report)).text


def test_spare_chunks_are_named_and_end_where_the_last_one_does(full_report: Any, attempt: Any) -> None:
    report = full_report()
    report["chunks"][3]["attempts"] = [attempt(180, 200, "partial")]
    report["chunks"].append({"index": 5, "target_step": 240, "spare": True, "attempts": [attempt(200, 240)]})
    html = render(report)
    assert "in 240 steps over 4 chunks; every hand-over was bit-exact." in check(html).text
    assert ">spare 5</text>" in html
    assert ">chunk 5</text>" not in html


def test_checkpoints_that_are_gone_still_stand_in_the_chain(full_report: Any) -> None:
    report = full_report()
    for row, gone in zip(report["proof"], ("removed", "damaged"), strict=False):
        row["gone"] = gone
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
    report = full_report() | {"state": "failed", "history": full_report()["history"][:100]}
    report["proof"] = report["proof"][:1]
    report["headline"] |= {"eval_loss_after": None, "perplexity_after": None}
    text = check(render(report)).text
    assert "The run failed at step 100 of 240." in text
    assert "Eval loss was 8.31 before training; no checkpoint follows a hand-over." in text


def test_hundred_chunks_stay_small_and_quick(full_report: Any) -> None:
    report = full_report(num_chunks=100, num_steps=100_000)
    report["samples"] = [dict.fromkeys(report["samples"][0], "word " * 40_000)] * 60
    started = time.perf_counter()
    html = render(report)
    assert time.perf_counter() - started < 30
    assert len(html.encode()) < 3_000_000
    page = check(html)
    assert "20 further samples are not shown" in page.text
    assert "train chunk × 100" in page.text


def test_hostile_text_stays_text(full_report: Any, proof_row: Any) -> None:
    hostile = '</pre></style><script>alert(1)</script><img src=x onerror=alert(1)>" $\\frac{ {{ 7*7 }} \x00'
    report = full_report()
    report |= dict.fromkeys(("run", "recipe_name", "recipe_yaml", "run_uri", "model_uri", "created"), hostile)
    report["samples"] = [dict.fromkeys(report["samples"][0], hostile)]
    report["stages"][0]["name"] = hostile
    report["proof"][1] = proof_row(120, 60, digest=hostile, uri=hostile, checked={hostile: hostile})
    report["proof"][2]["fingerprint"] = {hostile: hostile}
    report["versions"] = {hostile: hostile}
    report["tracking"] = {"mlflow": "javascript:alert(1)", "run_id": hostile}
    html = render(report)
    assert "<script" not in html
    assert "{{ 7*7 }}" in check(html).text


def test_same_report_gives_the_same_bytes(full_report: Any) -> None:
    assert render(full_report()) == render(full_report())


def test_parts_of_the_data_may_be_unknown(full_report: Any) -> None:
    report = full_report() | {"data": {"tokens": None}}
    report["headline"]["trainable_parameters"] = None
    assert "Nothing is known about the data" in check(render(report)).text


def test_values_that_are_not_finite_are_counted_and_left_out(full_report: Any) -> None:
    report = full_report()
    report["history"][9]["loss"] = math.nan
    report["history"][10]["grad_norm"] = math.inf
    assert "1 logged loss not finite" in check(render(report)).text


def test_thinning_keeps_ends_and_spikes() -> None:
    entries = [{"step": step, "loss": 100.0 if step == 31_337 else 1.0 / step} for step in range(1, 100_001)]
    xs, ys = thin(series(entries, "loss"), 2000)
    assert len(xs) <= 2000
    assert ys.max() == 100.0
    assert (xs[0], xs[-1]) == (1, 100_000)
    assert list(xs) == sorted(xs)
