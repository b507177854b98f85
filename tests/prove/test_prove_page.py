"""The page of `baton prove` shows what was compared and found, and the command writes it either way."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.cli.app import app
from baton.cli.options import page_path
from baton.errors import BatonError, UserError
from baton.prove import prove as proving
from baton.prove.prove import render
from tests.support.pages import read

SCRATCH = Path(__file__).parents[1] / "recipes/scratch.yaml"


def _sha(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _losses(num: int = 60, *, off_from: int | None = None) -> list[float]:
    """A loss that falls unevenly; from value `off_from` on, another one."""
    losses = [3.1 + 5 * math.exp(-5 * k / num) + 0.1 * math.sin(k * k) for k in range(1, num + 1)]
    return losses if off_from is None else losses[: off_from - 1] + [loss + 0.03125 for loss in losses[off_from - 1 :]]


def _variant(chunks: int, **changed: Any) -> dict[str, Any]:
    losses = changed.pop("losses", _losses())
    num, name = len(losses), f"prove-tiny-k{chunks}"
    made = {
        "chunks": chunks,
        "run": name,
        "uri": f"s3://store/runs/{name}",
        "targets": [-(-num * k // chunks) for k in range(1, chunks + 1)],
        "steps": list(range(1, num + 1)),
        "losses": losses,
        "weights_sha256": _sha("file"),
        "state_digest": _sha("state"),
        "parts": {"weights": _sha("weights"), "optimizer": _sha("optimizer")},
        "fingerprint": {"device": "cpu", "threads": 2, "torch": "2.13.0"},
    }
    return {**made, **changed}


def proved(*variants: Any, leave_out: tuple[str, ...] = (), recipe: str = "tiny") -> Any:
    """Returns what `prove` does of runs that have ended."""
    return proving.compare(variants, recipe=recipe, created="2026-11-21T10:00:00Z", leave_out=leave_out)


def _text(page: str) -> str:
    return read(page).text


def test_equal_runs_are_exact_and_lie_on_one_line() -> None:
    page = render(proved(_variant(1), _variant(2), _variant(5)))
    text = _text(page)
    assert "exact: all 3 runs are the same, byte for byte" in text
    assert "NOT exact" not in text
    assert "First difference" not in text
    assert "Left out nothing" in text
    assert "60 logged losses" in text
    (plot,) = read(page).plots
    assert [curve["name"] for curve in plot["curves"]] == ["1 chunk", "2 chunks", "5 chunks"]
    assert len({tuple(curve["ys"]) for curve in plot["curves"]}) == 1
    assert len({(curve["color"], curve["width"], *curve["dash"]) for curve in plot["curves"]}) == 3
    assert [page.split(f"<dt>{name}</dt>")[1].split("</dd>")[0].count("<i ") for name in ("1 chunk", "2 chunks")] == [
        1,
        2,
    ]
    assert plot["marks"] == []


def test_each_run_has_its_row() -> None:
    variants = [_variant(1), _variant(2, weights_sha256=_sha("other file"))]
    page = render(proved(*variants))
    text = _text(page)
    for variant in variants:
        assert variant["run"] in text
        assert {variant[key] for key in ("weights_sha256", "state_digest", "uri")} <= {*read(page).copied}
    assert text.count(f" {_losses()[-1]!r} ") == 2
    assert re.findall(r'<td class="off">.*?title="([^"]*)"', page, re.DOTALL) == [_sha("other file")]
    assert "device cpu threads 2 torch 2.13.0" in text


def test_first_difference_is_told_and_marked_where_it_was_logged() -> None:
    late, early = _losses(off_from=31), _losses(off_from=13)
    found = proved(_variant(1), _variant(2, losses=late), _variant(5, losses=early))
    page = render(found)
    text = _text(page)
    assert found["first_difference"]["chunks"] == 5
    assert "NOT exact: 2 of 3 runs differ from the run in 1 chunk" in text
    assert "in the loss, first at value 13 of 60 logged losses: step 13, in chunk 2 of 5." in text
    assert "The 12 losses before it are the same." in text
    assert f"Expected, as in 1 chunk {_losses()[12]!r} Found in 5 chunks {early[12]!r}" in text
    assert "Found less expected +0.0312" in text
    assert "✗ loss at value 31" in text
    assert "✗ loss at value 13" in text
    for name in ("loss", "difference"):
        (mark,) = read(page).plot(name)["marks"]
        assert (mark["at"], mark["text"]) == (13, "first difference, value 13")
    assert len({y for _, y in read(page).curves("difference")["1 chunk"]}) == 1


@pytest.mark.parametrize(
    ("changed", "sentence", "values"),
    [
        pytest.param(
            {"parts": {"weights": _sha("weights"), "optimizer": _sha("off")}},
            "in the last state, first in the part “optimizer”. The 60 logged losses are the same.",
            [_sha("optimizer"), _sha("off")],
            id="part",
        ),
        pytest.param(
            {"weights_sha256": _sha("off")},
            "in the weights file. The losses and every part of the last state are the same.",
            [_sha("file"), _sha("off")],
            id="file",
        ),
        pytest.param(
            {"losses": _losses()[:59]},
            "in the number of losses it logged; those that both have are the same.",
            ["60", "59"],
            id="number",
        ),
    ],
)
def test_difference_behind_equal_losses(changed: dict[str, Any], sentence: str, values: list[str]) -> None:
    page = render(proved(_variant(1), _variant(2), _variant(3, **changed)))
    text = _text(page)
    assert "NOT exact: 1 of 3 runs differs from the run in 1 chunk" in text
    assert f"The run in 3 chunks differs from the run in 1 chunk {sentence}" in text
    assert f"Expected, as in 1 chunk {values[0]} Found in 3 chunks {values[1]} " in text
    assert "Found less expected" not in text
    assert [plot["y"] for plot in read(page).plots] == ["loss"]


def test_negative_control_says_whether_it_found_anything() -> None:
    differing = proved(_variant(1), _variant(2, losses=_losses(off_from=31)), leave_out=("rng",))
    text = _text(render(differing))
    assert "NOT exact: 1 of 2 runs differs" in text
    assert "Negative control: rng was not restored, so the runs should differ." in text
    assert "They do: the comparison detects the missing part." in text
    assert "Left out rng (negative control)" in text
    same = render(proved(_variant(1), _variant(2), leave_out=("rng",)))
    assert "They do not, so this control proves nothing. Use a recipe that draws random numbers" in _text(same)
    assert 'class="verdict warn"' in same


@pytest.mark.parametrize(
    ("kills", "words"),
    [
        ([(14, 12)], "killed with SIGKILL 1 time (✗): at step 14, resumed from 12."),
        (
            [(6, 4), (14, 12)],
            "killed with SIGKILL 2 times (✗): at step 6, resumed from 4; at step 14, resumed from 12.",
        ),
    ],
)
def test_kills_are_in_words_and_on_the_curve(kills: list[tuple[int, int]], words: str) -> None:
    page = render(proved(_variant(1), _variant(3)), kills, "report.html")
    assert f"The run in 3 chunks was {words}" in _text(page)
    assert [(mark["at"], mark["text"]) for mark in read(page).plots[0]["marks"]] == [(step, "✗") for step, _ in kills]
    assert '<a href="report.html">Report of this run</a>' in page


def test_losses_that_are_not_numbers_equal_themselves() -> None:
    losses = [*_losses()[:50], *[math.nan] * 10]
    found = proved(_variant(1, losses=losses), _variant(2, losses=list(losses)))
    assert found["exact"]
    assert "20 of the logged losses are not finite and not drawn" in _text(render(found))
    lost = proved(_variant(1), _variant(2, losses=losses))
    text = _text(render(lost))
    assert lost["first_difference"]["logged_value"] == 51
    assert f"Expected, as in 1 chunk {_losses()[50]!r} Found in 2 chunks nan" in text
    assert "Found less expected" not in text


def test_no_losses_at_all() -> None:
    nothing: dict[str, Any] = {"losses": [], "targets": [4]}
    page = render(proved(_variant(1, **nothing), _variant(2, **nothing)))
    assert "No loss was logged." in _text(page)
    assert "none logged" in _text(page)
    assert read(page).plots == []


def test_hostile_text_stays_text_and_nothing_is_loaded() -> None:
    hostile = '"></td></style><script>alert(1)</script><img src=https://evil/x.png> {{ 7*7 }}'
    names = {"run": hostile, "uri": hostile, "state_digest": hostile, "parts": {hostile: "a"}}
    first = _variant(1, **names, fingerprint={hostile: hostile})
    page = render(proved(first, _variant(2, **{**names, "parts": {hostile: hostile}}), recipe=hostile))
    assert hostile in read(page).text
    assert read(page).links == []


def test_same_result_gives_the_same_bytes_in_another_process() -> None:
    found = proved(_variant(1), _variant(2, losses=_losses(off_from=31)))
    code = "import json, sys; from baton.prove.prove import render; print(render(json.load(sys.stdin)))"
    other = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(found), capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    ).stdout  # fmt: skip
    assert other == render(found) + "\n"


def test_digest_of_the_weights_file() -> None:
    others = {"optimizer.pt": {"sha256": "00"}, "model.safetensors.index.json": {"sha256": "01"}}
    assert proving.weights_sha256({"model.safetensors": {"sha256": "aa"}, **others}) == "aa"
    assert proving.weights_sha256({"adapter_model.safetensors": {"sha256": "bb"}, **others}) == "bb"
    shards = {f"model-0000{k}-of-00002.safetensors": {"sha256": f"{k}{k}"} for k in (2, 1)}
    printed = b"11  model-00001-of-00002.safetensors\n22  model-00002-of-00002.safetensors\n"
    assert proving.weights_sha256({**shards, **others}) == hashlib.sha256(printed).hexdigest()
    with pytest.raises(BatonError, match=r"no weights file, only model.safetensors.index.json, optimizer.pt"):
        proving.weights_sha256(others)


@pytest.mark.parametrize(
    ("name", "message"), [("page.pdf", "does not end in .html"), ("absent/page.html", "cannot be written")]
)
def test_page_that_could_not_be_written_is_refused_before(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        page_path(str(tmp_path / name))


@pytest.mark.parametrize("counts", ["1", "1,0", "2,2", "1,x"])
def test_counts_that_compare_nothing_are_refused(counts: str) -> None:
    with pytest.raises(UserError, match="at least two different numbers"):
        proving.parse_counts(counts)


# Parts left out, and whether the runs are equal → last lines at the terminal, and whether that is as it should be.
ENDS: dict[str, tuple[tuple[str, ...], bool, list[str], bool]] = {
    "equal": ((), True, ["exact: all 2 runs are the same, byte for byte"], True),
    "different": (
        (),
        False,
        [
            "NOT exact: 1 of 2 runs differs from the run in 1 chunk",
            "The run in 2 chunks differs from the run in 1 chunk in the loss, first at value 31 of 60 logged losses: "
            "step 31, in chunk 2 of 2. The 30 losses before it are the same.",
        ],
        False,
    ),
    "control that detects": (
        ("rng",),
        False,
        [
            "Negative control: rng was not restored, so the runs should differ. They do: the comparison detects the "
            "missing part."
        ],
        True,
    ),
    "control that proves nothing": (
        ("rng",),
        True,
        [
            "exact: all 2 runs are the same, byte for byte",
            "Negative control: rng was not restored, so the runs should differ. They do not, so this control proves "
            "nothing. Use a recipe that draws random numbers, e.g. with adapter.dropout=0.1.",
        ],
        False,
    ),
    "control of hooks that proves nothing": (
        ("hooks",),
        True,
        [
            "Negative control: hooks was not restored, so the runs should differ. They do not, so this control "
            "proves nothing. Use a recipe that carries state of your own code."
        ],
        False,
    ),
}


@pytest.mark.parametrize(("leave_out", "equal", "lines", "expected"), ENDS.values(), ids=ENDS)
def test_terminal_and_page_end_alike(
    leave_out: tuple[str, ...], equal: bool, lines: list[str], expected: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    proof = proved(_variant(1), _variant(2, losses=_losses(off_from=None if equal else 31)), leave_out=leave_out)
    proving.print_table({**proof, "report": "p.html"})
    printed, page = capsys.readouterr().out.splitlines(), _text(render(proof))
    for line in lines:
        assert line in printed
        assert line in page
    assert not any("{" in line for line in printed)
    assert proving.is_as_expected(leave_out, exact=proof["exact"]) is expected


@pytest.mark.parametrize("command", ["chunks", "kills"])
def test_a_part_that_cannot_be_left_out_is_refused_with_the_parts_that_can(command: str) -> None:
    words = ["verify", command, str(SCRATCH), "--leave-out", "optimizer"]
    done = CliRunner().invoke(app, words, prog_name="baton")
    assert done.exit_code == 2
    assert "'--leave-out': 'optimizer' is not one of 'rng', 'hooks'." in " ".join(done.output.replace("│", " ").split())


@pytest.mark.slow
def test_a_control_has_a_page_of_its_own_and_fails_where_it_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["verify", "chunks", str(SCRATCH), "--store", str(tmp_path / "store"), "--chunks", "1,2"]
    done = CliRunner().invoke(app, [*words, "--leave-out", "hooks"], prog_name="baton")
    assert done.exit_code == 1, done.output
    assert done.stdout.splitlines()[-2].endswith("Use a recipe that carries state of your own code.")
    page = tmp_path / "store/pages/prove-scratch-without-hooks.html"
    assert done.stdout.splitlines()[-1] == f"report: {page}"
    assert [path.name for path in page.parent.iterdir()] == [page.name]


@pytest.mark.parametrize("exact", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_command_writes_the_page_either_way(exact: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["prove", str(SCRATCH), "--chunks", "1,2", "--store", str(tmp_path / "store")]
    if exact:
        page = tmp_path / "store/pages/prove-scratch.html"
        done = CliRunner().invoke(app, command, prog_name="baton")
        assert done.stdout.splitlines()[-1] == f"report: {page}"
    else:
        page = tmp_path / "other.html"
        options = ["--leave-out", "rng", "--report", page.name, "--json"]
        done = CliRunner().invoke(app, [*command, *options], prog_name="baton")
        assert json.loads(done.stdout)["report"] == str(page)
    assert done.exit_code == 0, done.output  # a control is to find a difference
    assert ("NOT exact" in page.read_text()) is not exact
