"""Rows that come with Baton: whole, each once, and of one shape."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.cli.app import app
from baton.data import readers
from baton.errors import UserError
from baton.models import loading
from baton.source import prepare
from baton.store import sources

TEAMS = {"delivery", "returns", "billing", "account", "technical", "product"}


def rows(source: str) -> list[dict[str, Any]]:
    found = list(readers.read(source, "line"))
    assert all(isinstance(row, readers.SourceRow) for row in found)
    return [row.values for row in found if isinstance(row, readers.SourceRow)]


@pytest.mark.parametrize("source", sources.BUNDLED)
def test_each_question_is_asked_once(source: str) -> None:
    asked = Counter(row.get("prompt") or row["messages"][0]["content"] for row in rows(source))
    assert len(asked) >= 60
    assert asked.most_common(1)[0][1] == 1
    assert sources.resolve(source, base_dir="/nowhere") == source


def test_teams_have_as_many_messages_each() -> None:
    answers = [json.loads(row["completion"]) for row in rows("builtin:support")]
    assert {frozenset(answer) for answer in answers} == {frozenset({"team", "urgent"})}
    assert Counter(answer["team"] for answer in answers) == dict.fromkeys(TEAMS, 28)
    assert {type(answer["urgent"]) for answer in answers} == {bool}


def test_calls_fit_their_tools() -> None:
    for row in rows("builtin:tool-calls"):
        tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in row["tools"]}
        (call,) = row["messages"][1]["tool_calls"]
        assert list(call["function"]["arguments"]) == tools[call["function"]["name"]]["required"]


def test_replies_differ() -> None:
    assert all(row["chosen"] != row["rejected"] for row in rows("builtin:replies"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart", "sweep", "demo", "smollm2-dpo", "smollm2-tools"])
def test_no_check_finds_anything(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if base := prepare.load(name).recipe.model.base:
        try:
            loading.local_model(base)
        except UserError as error:
            pytest.skip(str(error))
    result = CliRunner().invoke(app, ["data", "check", name, "--json"])
    assert result.exit_code == 0, result.output
    assert {check["verdict"] for check in json.loads(result.stdout)["checks"]} <= {"ok", "off"}


def test_another_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is unknown\. Did you mean 'builtin:support'") as caught:
        sources.resolve("builtin:suport", base_dir=str(tmp_path))
    assert "builtin:stdlib-docs" in str(caught.value.remedy)
