"""The report of a fork: where it began, what is asked of its proof, and its family."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.pages.collect import ProofEntry, RunReport
from baton.pages.run_page import read_proof, render
from baton.runs.documents import ForkNote
from baton.runs.lineage import RunNode


@pytest.fixture
def forked(full_report: Callable[..., RunReport], proof_entry: Callable[..., ProofEntry]) -> RunReport:
    """The report of four chunks of 60 steps, of which a fork at step 120 has trained the last two."""
    fork = ForkNote(parent="s3://store/runs/first", step=120, digest="0123456789abcdef", warm=True)
    first = proof_entry(120, None, forked_from={"run_uri": fork.parent, "step": 120, "digest": fork.digest})
    report = full_report()
    return replace(report, fork=fork, proof=[first, *report.proof[2:]])


def test_hand_overs_before_the_fork_are_its_parents(forked: RunReport) -> None:
    assert read_proof(forked).word == "bit-identical"
    as_if_from_scratch = replace(forked, fork=None)
    assert read_proof(as_if_from_scratch).word == "partly checked", "without the fork two resumes would be missing"


def test_the_page_says_where_the_run_began(forked: RunReport) -> None:
    html = render(forked)
    assert "it began at step 120 with the state 0123456789 of s3://store/runs/first" in html
    assert '<td class="number">fork</td>' in html
    assert "<summary>Related runs</summary>" not in html


def test_relatives_are_listed(forked: RunReport) -> None:
    first = RunNode("first", created="2026-11-20", state="succeeded", children=[forked.run, "other"])
    own = RunNode(forked.run, created="2026-11-21", parent="first", kind="fork", at=120, state="interrupted")
    other = RunNode("other", created="2026-11-22", parent="first", kind="cold fork", at=60, state="new")
    html = render(replace(forked, family={member.name: member for member in (first, own, other)}))
    assert "<summary>Related runs</summary>" in html
    listed = [re.sub(r"<[^>]+>", "", line) for line in re.findall("<li style.*", html)]
    assert listed == ["first step 0", f"{forked.run} step 0 · fork at step 120", "other step 0 · cold fork of step 60"]
    assert f"<b>{forked.run}</b>" in html


def test_of_many_relatives_the_first_are_listed(forked: RunReport) -> None:
    family = {name: RunNode(name) for name in ["<b>", *(f"run-{number:02}" for number in range(61))]}
    html = render(replace(forked, family=family))
    assert "&lt;b&gt; <span" in html
    assert html.count("<li style") == 60
    assert "and 2 more" in html
