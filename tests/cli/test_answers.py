"""Commands that ask something print their answer on standard output, where a pipe finds it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.app import app
from baton.runs.outcomes import RungEntry, SweepHead, TrialEntry
from baton.runs.run import Sweep, now
from baton.store.storage import Storage
from tests.cli import test_json
from tests.support.kfp_schedules import ScheduleApi

here = test_json.here
COMMANDS = test_json.COMMANDS
QUERIES: dict[str, tuple[list[str], str]] = {
    "validate": (["recipe.yaml"], "rows.jsonl holds rows of text"),
    "check": (["recipe.yaml", "--only", "recipe"], "rows.jsonl holds rows of text"),
    "kfp schedules": ([], "0 3 * * *"),
    "kfp summary": (["recipe.yaml", "--result", "result.json"], "succeeded"),
    "outcome": (["recipe.yaml", "--result", "result.json"], "succeeded"),
    "recipe list": ([], "quickstart"),
    "recipe schema": ([], '"title": "Recipe"'),
    "recipe show": (["quickstart"], "name: quickstart"),
    "runs graph": (["begun", "--store", "store"], "begun"),
    "runs show": (["store/runs/begun"], "begun: new"),
    "verify checkpoints": (["store/runs/begun"], ""),
    "verify run": (["store/runs/begun"], "no seals"),
    "verify keys show": (["own.key"], "public_key:"),
    "schema": ([], '"title": "Recipe"'),
    "recipes": ([], "quickstart"),
    "recipes list": ([], "quickstart"),
    "recipes show": (["quickstart"], "name: quickstart"),
    "data check": (["rows.jsonl", "--method", "pretrain"], "rows"),
    "data show": (["recipe.yaml", "--rows", "1"], "words of row"),
    "doctor": (["recipe.yaml"], "agrees with this machine"),
    "runs list": (["--store", "store"], "begun"),
    "runs tree": (["begun", "--store", "store"], "begun"),
    "checkpoints list": (["store/runs/begun"], ""),
    "checkpoints verify": (["store/runs/begun"], ""),
    "keys show": (["own.key"], "public_key:"),
    "sweep status": (["store/sweeps/there"], "t000"),
    "status": (["mine"], "data split"),
    "schedules list": ([], "0 3 * * *"),
    "ci-report": (["recipe.yaml", "--result", "result.json"], "succeeded"),
}
"""Command that asks → its arguments, and a part of its answer."""
ACTS = {
    "audit", "cancel", "checkpoints merge", "checkpoints prune", "checkpoints show", "checkpoints signature",
    "compile", "drill", "generate", "import axolotl", "import llamafactory", "init", "keys new", "prove",
    "retrain", "retry", "run", "runs fork", "schedule", "schedules delete", "submit", "sweep fork", "sweep resume",
    "sweep run", "sweep stop", "demo", "diff",
    "kfp compile", "kfp heal", "kfp schedule", "kfp submit", "kfp unschedule", "logs", "open",
    "runs merge", "runs prune", "runs remove", "stop", "verify chunks", "verify decisions",
    "verify exports", "verify keys new",
    "verify kills", "verify replay", "verify signature", "watch", "sweep watch",
}  # fmt: skip
"""Commands that do something, and `checkpoints show`, whose answer is JSON in any case."""


def test_every_command_asks_or_acts() -> None:
    assert QUERIES.keys() | ACTS == COMMANDS.keys()


@pytest.mark.parametrize(("name", "arguments", "part"), [(name, *case) for name, case in QUERIES.items()], ids=QUERIES)
def test_an_answer_goes_to_standard_output(
    name: str, arguments: list[str], part: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "result.json").write_text(
        json.dumps({"run": "mine", "run_id": "1", "url": "http://x", "state": "succeeded"})
    )
    CliRunner().invoke(app, ["keys", "new", "own.key"])
    trial, rung = TrialEntry(id="t000", run="there-t000"), RungEntry(rung=1, chunk=1, keep=1)
    head = SweepHead(name="there", created=now(), recipe={}, metric="loss", mode="min", rungs=[rung], trials=[trial])
    Sweep(Storage("store"), "there").write_new(head)
    with ScheduleApi() as api:
        monkeypatch.setenv("BATON_KFP_ENDPOINT", api.url)
        if name == "status":
            submitted = CliRunner().invoke(app, ["submit", "quickstart", "--run", "mine", "--store", "s3://baton"])
            assert submitted.exit_code == 0, submitted.output
        if name in ("schedules list", "kfp schedules"):
            words = "Retrains again if data or recipe have changed."
            recurring = {"recurring_run_id": "x", "display_name": "retrain-again", "status": "ENABLED"}
            trigger = {"cron_schedule": {"cron": "0 0 3 * * *"}}
            api.recurring["x"] = {**recurring, "description": words, "trigger": trigger}
        done = CliRunner().invoke(app, [*name.split(), *arguments])
    assert done.exit_code == 0, done.output
    assert part in done.stdout
    assert not part or part not in done.stderr
