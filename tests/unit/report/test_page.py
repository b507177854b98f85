from __future__ import annotations

import hashlib
import math
import re
import time
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from components.report.figures import series, thin
from components.report.page import read_proof, render, verdict

VOID = {"meta", "link", "br", "hr", "img", "input"}
CHECKED = dict.fromkeys(("weights", "optimizer", "scheduler", "rng", "position", "callbacks", "log"), "match")


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def attempt(start: int, end: int, outcome: str = "done", train: float = 20.3) -> dict[str, Any]:
    seconds = {
        "start": 4.1,
        "fetch": 0.4,
        "build": 0.9,
        "restore": 0.6 if start else 0.0,
        "train": train,
        "save": 0.5,
    }
    rate = 5100.0 + 40 * math.sin(start)
    return {
        "from_step": start,
        "to_step": end,
        "outcome": outcome,
        "seconds": seconds,
        "tokens_per_second": rate,
        "steps_per_second": rate / 1600,
    }


def proof_row(step: int, parent: int | None, **changed: Any) -> dict[str, Any]:
    return {
        "step": step,
        "digest": digest("state", step),
        "parent_step": parent,
        "parent_digest": digest("state", parent) if parent else None,
        "chain": digest("chain", step),
        "level": "bitwise",
        "verified": True,
        "checked": {**CHECKED, "scaler": "absent"} if parent else None,
        "uri": f"s3://store/runs/quickstart/checkpoints/step-{step:08d}",
        "bytes": 13_200_000 + step,
        "fingerprint": {"device": "cpu", "torch": "2.13.0", "threads": 2},
        **changed,
    }


def full_report(num_chunks: int = 4, num_steps: int = 240) -> dict[str, Any]:
    """A run whose second chunk died once and was taken up again."""
    ends = [round(num_steps * k / num_chunks) for k in range(num_chunks + 1)]
    noise = np.random.default_rng(7).normal(size=(2, num_steps))
    progress = np.arange(1, num_steps + 1) / num_steps
    loss = 3.1 + 5.2 * np.exp(-5 * progress) + 0.12 * noise[0]
    rate = 1e-3 * np.minimum(progress * 10, 0.5 + 0.5 * np.cos(np.pi * progress))
    norm = 0.6 + 1.6 * np.exp(-4 * progress) + 0.15 * np.abs(noise[1])
    chunks = [
        {"index": k, "target_step": end, "attempts": [attempt(start, end)]}
        for k, (start, end) in enumerate(pairwise(ends), 1)
    ]
    if num_chunks > 1:
        middle = (ends[1] + ends[2]) // 2
        chunks[1]["attempts"] = [
            attempt(ends[1], middle, "failed", 11.0),
            attempt(middle, ends[2], "done", 10.4),
        ]
    return {
        "run": "quickstart-20261121-020000",
        "recipe_name": "quickstart",
        "state": "succeeded",
        "created": "2026-11-21T02:00:00Z",
        "run_uri": "s3://store/runs/quickstart-20261121-020000",
        "model_uri": "s3://store/runs/quickstart-20261121-020000/model",
        "headline": {
            "eval_loss_before": 8.31,
            "eval_loss_after": 3.2,
            "perplexity_before": 4064.3,
            "perplexity_after": 24.53,
            "steps": num_steps,
            "chunks": num_chunks,
            "train_rows": 9000,
            "eval_rows": 1000,
            "trained_tokens": 1_234_567,
            "parameters": 3_400_000,
            "trainable_parameters": 3_400_000,
        },
        "history": [
            {
                "step": k + 1,
                "loss": float(loss[k]),
                "learning_rate": float(rate[k]),
                "grad_norm": float(norm[k]),
            }
            for k in range(num_steps)
        ],
        "evals": [{"step": end, "eval_loss": 3.2 + 5 * math.exp(-5 * end / num_steps)} for end in ends[1:]],
        "chunks": chunks,
        "stages": [
            {"name": "data split", "seconds": 2.1},
            {"name": "tokenize", "seconds": 5.4},
            *({"name": f"train chunk {k}", "seconds": 26.0 + k % 3} for k in range(1, num_chunks + 1)),
            *({"name": f"checkpoint {k}", "seconds": 3.0} for k in range(1, num_chunks + 1)),
            {"name": "evaluate", "seconds": 14.2},
            {"name": "export", "seconds": 4.4},
        ],
        "proof": [proof_row(end, parent or None) for parent, end in pairwise(ends)],
        "samples": [
            {
                "prompt": "Write a haiku about the sea.",
                "reference": "Grey waves fold the shore\n  a gull forgets its name\nsalt dries on the rope",
                "before": "the the the of , , and sea sea . to\tthe the of of",
                "after": "The tide comes in slow\n  and the boats lean on their ropes\nall of them asleep",
            },
            {
                "prompt": "Is 91 prime?",
                "reference": "No: 7 × 13.",
                "before": "",
                "after": "No. It is 7 times 13.",
            },
        ],
        "data": {
            "source": "hf://datasets/tiny/stories",
            "rows": 10_003,
            "train": 9000,
            "eval": 1000,
            "rejected": 3,
            "rejected_uri": "s3://store/data/ab12/rejected.jsonl",
            "truncated": 12,
            "tokens": 1_234_567,
        },
        "recipe_yaml": "name: quickstart\nmodel:\n  base: tiny\ntraining:\n  chunks: 4\n",
        "versions": {"python": "3.11.9", "torch": "2.13.0", "transformers": "5.2.0"},
        "tracking": {"mlflow": "https://mlflow.example/#/experiments/1", "run_id": "0f3a"},
    }


def empty_report() -> dict[str, Any]:
    """A run that failed before its first step."""
    report = full_report()
    report |= {key: [] for key in ("history", "evals", "chunks", "stages", "proof", "samples")}
    report |= {"state": "failed", "model_uri": None, "data": None, "recipe_yaml": "", "versions": {}}
    report["headline"] = dict.fromkeys(report["headline"])
    report["tracking"] = {"mlflow": None, "run_id": None}
    return report


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


def test_full_run() -> None:
    html = render(full_report())
    text = check(html).text
    assert (
        "Eval loss fell from 8.31 to 3.20 (perplexity 4,064 → 24.5) in 240 steps over 4 chunks; "
        "every hand-over was bit-exact." in text
    )
    assert html.count("<svg") == 10
    assert "1 attempt ended early" in text
    assert digest("state", 120) in html
    assert "\n  a gull forgets" in html
    assert "No samples" not in text


def test_run_that_failed_before_it_began() -> None:
    text = check(render(empty_report())).text
    assert "The run failed before the first step. No resume proof was recorded." in text
    assert "No loss was logged" in text
    assert "No samples were generated" in text


def test_run_that_failed_midway() -> None:
    report = full_report() | {"state": "failed", "history": full_report()["history"][:100]}
    report["proof"] = report["proof"][:1]
    report["headline"] |= {"eval_loss_after": None, "perplexity_after": None}
    text = check(render(report)).text
    assert "The run failed at step 100 of 240." in text
    assert "Eval loss was 8.31 before training; no checkpoint follows a hand-over." in text


def test_hundred_chunks_stay_small_and_quick() -> None:
    report = full_report(num_chunks=100, num_steps=100_000)
    report["samples"] = [dict.fromkeys(report["samples"][0], "word " * 40_000)] * 60
    started = time.perf_counter()
    html = render(report)
    assert time.perf_counter() - started < 30
    assert len(html.encode()) < 3_000_000
    page = check(html)
    assert "20 further samples are not shown" in page.text
    assert "train chunk × 100" in page.text


def test_hostile_text_stays_text() -> None:
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


def test_same_report_gives_the_same_bytes() -> None:
    assert render(full_report()) == render(full_report())


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
            "every hand-over was bit-exact, with 1 chunk end not yet read back from the store.",
            id="not-read-back",
        ),
        pytest.param(
            {"parent_digest": "0" * 64},
            "the resume proof does not hold (step 120: parent is not the checkpoint of step 60).",
            id="other-parent",
        ),
        pytest.param(
            {"level": "consistent", "fingerprint": {"device": "cuda", "torch": "2.13.0", "threads": 2}},
            "not every hand-over was bit-exact: 1 of 4 checkpoints only consistent (device cpu → cuda).",
            id="other-device",
        ),
        pytest.param({"checked": None}, "2 of 3 hand-overs checked, bit-exact each.", id="unchecked"),
    ],
)
def test_proof_claims_no_more_than_was_checked(row: dict[str, Any], sentence: str) -> None:
    report = full_report()
    report["proof"][1] |= row
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
def test_loss_is_told_as_it_is(before: float | None, after: float | None, words: str) -> None:
    report = full_report()
    report["headline"] |= {"eval_loss_before": before, "eval_loss_after": after}
    report["headline"] |= {"perplexity_before": None, "perplexity_after": None}
    assert verdict(report, read_proof(report))[1].startswith(f"{words} 240 steps")


def test_checkpoints_within_a_chunk_do_not_stand_in_for_a_hand_over() -> None:
    report = full_report()
    report["proof"] = [proof_row(step, step - 20 or None) for step in range(20, 121, 20)]
    report["proof"] += [proof_row(180, 120, checked=None), proof_row(240, 180)]
    assert read_proof(report).sentence == "2 of 3 hand-overs checked, bit-exact each"


def test_parts_of_the_data_may_be_unknown() -> None:
    report = full_report() | {"data": {"tokens": None}}
    report["headline"]["trainable_parameters"] = None
    assert "Nothing is known about the data" in check(render(report)).text


def test_values_that_are_not_finite_are_counted_and_left_out() -> None:
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
