"""What `baton run` ends with: the command that tries the model as it was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.cli import local

AS_TEXT = r"--no-chat --prompt $'user\nWho?\n'"


@pytest.mark.parametrize(("asked", "options"), [("chat", "--chat"), ("prompt", AS_TEXT), (None, AS_TEXT)])
def test_a_model_of_conversations_is_tried_in_one(
    asked: str | None, options: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if asked:
        (tmp_path / "baton.json").write_text(json.dumps({"prompts": asked}), encoding="utf-8")
    result: Any = {"state": "finished", "report_uri": "report.html", "model_uri": str(tmp_path), "exports": [{}]}
    local._print_end(result, [{"prompt": "user\nWho?\n"}])
    assert capsys.readouterr().out.splitlines()[-1] == f"next:   baton generate {tmp_path} {options}"
