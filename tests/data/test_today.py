"""Chat templates that write today's date are told the same day in all stages of a run, however long it takes."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.checkpoint import seals
from baton.data.split import split_data
from baton.data.tokenize import tokenize_run
from baton.evaluate.evaluate import evaluate_run
from baton.models import chat, loading, trained
from baton.runs import objects
from baton.runs.documents import TokenizedRows
from baton.runs.run import Run, identity
from baton.store.storage import Storage
from tests.evaluate.finished import CHATTY, finished
from tests.support import tiny

DATED = "{{ 'Today Date: ' + strftime_now('%d %b %Y') + '\\n' }}" + tiny.CHAT
LONG_AGO = "29 Feb 2024"
QUESTION = [{"role": "user", "content": "What?"}]


@pytest.fixture
def dated(tmp_path: Path) -> Iterator[str]:
    """A model whose chat template writes the date, as Llama 3.2's does."""
    yield tiny.make_chat_base(tmp_path / "dated", DATED)
    chat.set_template_date(None)


def begun(folder: Path, base: str, name: str, day: str, **data: Any) -> Run:
    """A run that began on a day, its rows split."""
    rows = "".join(json.dumps(row) + "\n" for row in CHATTY)
    (folder / "rows.jsonl").write_text(rows, encoding="utf-8")
    source = {"source": str(folder / "rows.jsonl"), "split": {"eval": 0.2}, "max_length": 200, **data}
    given = tiny.recipe(base, data=source, store={"uri": str(folder / "store")})
    split_data(given, name)
    run = Run(Storage(given.store.uri), name)
    with seals.stage(run, objects.ADOPT):  # else the next stage writes it again from its seal
        run.put("recipe.json", run.require("recipe.json") | {"created": f"{day}T23:59:59+00:00"})
    return run


def text(run: Run, folder: Path) -> str:
    """The first sequence of a run's tokens."""
    tokens = trained.tokens_folder(run, str(folder / f"read-{run.name}"))
    tokenizer = loading.load_tokenizer(f"{tokens}/tokenizer")
    return str(tokenizer.decode(trained.open_rows(f"{tokens}/train")[0]["input_ids"]))


def rendered(base: str) -> str:
    """What a template writes in a process that was begun from here."""
    return str(loading.load_tokenizer(base).apply_chat_template(QUESTION, tokenize=False))


def test_tokens_have_the_day_on_which_the_run_began(dated: str, tmp_path: Path) -> None:
    run = begun(tmp_path, dated, "one", "2024-02-29")
    tokenize_run(run.uri)
    assert LONG_AGO in text(run, tmp_path)
    assert run.need(TokenizedRows).today == "2024-02-29"
    again = tokenize_run(run.uri)  # on another day, as it is by now
    assert again["digest"] == run.need(TokenizedRows).digest


def test_runs_of_two_days_have_tokens_of_their_own(dated: str, tmp_path: Path) -> None:
    one, other = (begun(tmp_path, dated, name, day) for name, day in (("one", "2024-02-29"), ("other", "2024-03-01")))
    assert tokenize_run(one.uri)["digest"] != tokenize_run(other.uri)["digest"]
    assert "01 Mar 2024" in text(other, tmp_path)


def test_a_day_in_the_recipe_makes_two_runs_the_same(dated: str, tmp_path: Path) -> None:
    days = (("one", "2024-02-28"), ("other", "2024-03-01"))
    one, other = (begun(tmp_path, dated, name, day, today="2024-02-29") for name, day in days)
    assert tokenize_run(one.uri)["digest"] == tokenize_run(other.uri)["digest"]
    assert LONG_AGO in text(other, tmp_path)


@pytest.mark.parametrize("render_as", ["chat", "text"])
def test_where_nobody_asks_for_the_day_tokens_are_those_of_any(render_as: str, dated: str, tmp_path: Path) -> None:
    base = tiny.make_chat_base(tmp_path / "undated") if render_as == "chat" else dated
    days = (("one", "2024-02-29"), ("other", "2024-03-01"))
    one, other = (begun(tmp_path, base, name, day, render_as=render_as) for name, day in days)
    assert tokenize_run(one.uri)["digest"] == tokenize_run(other.uri)["digest"]
    assert one.need(TokenizedRows).today is None


@pytest.mark.slow
def test_what_is_rendered_later_has_the_runs_day_too(dated: str, tmp_path: Path) -> None:
    """Prompts of methods that write, in the stage's process and those that it begins; without a run's, the clock's."""
    assert LONG_AGO not in rendered(dated)
    run = finished(tmp_path, tiny.recipe(dated, evaluation={"samples": 2, "max_new_tokens": 2}), {"eval": CHATTY})
    run.put(TokenizedRows.NAME, run.require(TokenizedRows.NAME) | {"today": "2024-02-29"})
    evaluation = evaluate_run(run.uri)
    assert LONG_AGO in evaluation["samples"][0]["prompt"]
    assert LONG_AGO in rendered(dated)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert LONG_AGO in pool.apply(rendered, (dated,))
    chat.set_template_date(None)
    assert chat.DATE_VARIABLE not in os.environ
    assert LONG_AGO not in rendered(dated)


def test_runs_from_before_are_the_same_ones() -> None:
    assert "today" not in identity(tiny.recipe("base"))["data"]  # type: ignore[operator]
