"""`baton schedule`: a recurring run of the retraining pipeline, one for each recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from baton.components.shared.core.errors import UserError
from baton.pipelines.cli.app import app
from baton.pipelines.kubeflow.schedule import cron_line
from tests.pipelines.kfp_schedules import ScheduleApi


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScheduleApi]:
    """A running API, with none of kfp's own settings in the way."""
    for name in ("KF_PIPELINES_ENDPOINT", "KF_PIPELINES_UI_ENDPOINT", "KF_PIPELINES_IAP_OAUTH2_CLIENT_ID"):
        monkeypatch.delenv(name, raising=False)
    with ScheduleApi() as running:
        monkeypatch.setenv("BATON_KFP_ENDPOINT", running.url)
        yield running


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    document = {
        "name": "again",
        "store": "s3://baton",
        "model": {"base": "org/model"},
        "data": {"source": "s3://rows/a.jsonl"},
        "evaluation": {"production": "accepted", "gate": {"loss": "<= production"}},
        "resources": {"secret": "s3-keys"},
        "tracking": {"mlflow": None},
    }
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def _baton(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.output


def test_a_recipe_is_scheduled_once_at_a_time_and_missed_times_are_not_made_up_for(
    api: ScheduleApi, recipe: Path
) -> None:
    code, said = _baton("schedule", str(recipe), "--cron", "0 3 * * *", "--output", "json")
    assert code == 0, said
    (run,) = api.recurring.values()
    assert json.loads(said.splitlines()[-1]) == {
        "identifier": run["recurring_run_id"], "recipe": "again", "cron": "0 0 3 * * *", "is_enabled": True,
    }  # fmt: skip
    assert run["display_name"] == "retrain-again"
    assert run["trigger"] == {"cron_schedule": {"cron": "0 0 3 * * *"}}
    assert (run["max_concurrency"], run["no_catchup"], run["mode"]) == (1, True, "ENABLE")
    posted = api.spec(run)
    assert posted.get("pipeline_spec", posted)["pipelineInfo"]["name"] == "again-retrain"
    assert [each["display_name"] for each in api.experiments.values()] == ["again"]


def test_a_schedule_is_started_from_the_registered_version_with_all_parameters(api: ScheduleApi, recipe: Path) -> None:
    when = ("--cron", "0 3 * * *")
    for more in ((), ("--no-register",)):
        assert _baton("schedule", str(recipe), *when, *more)[0] == 0
        (run,) = api.recurring.values()
        assert ("pipeline_version_reference" in run, "pipeline_spec" in run) == (not more, bool(more))
        given = {"store": "s3://baton", "source": "", "base_model": "org/model", "seed": 0, "batch_size": 8}
        assert run["runtime_config"]["parameters"] == given  # `overrides` would show as `[object Object]`
    (pipeline,) = api.registry.pipelines.values()
    assert pipeline["name"] == "again-retrain"
    assert len(api.registry.versions) == 1


def test_another_schedule_takes_the_place_of_the_first_and_leaves_other_recipes_alone(
    api: ScheduleApi, recipe: Path
) -> None:
    for changes in ([], ["--set", "name=other"], ["--set", "name=third"]):
        assert _baton("schedule", str(recipe), "--cron", "0 3 * * *", *changes)[0] == 0
    assert _baton("schedule", str(recipe), "--cron", "30 4 * * MON-FRI")[0] == 0
    code, said = _baton("schedules", "list", "--output", "json")
    assert code == 0
    crons = {each["recipe"]: each["cron"] for each in json.loads(said)["schedules"]}
    assert crons == {"again": "0 30 4 * * MON-FRI", "other": "0 0 3 * * *", "third": "0 0 3 * * *"}

    code, said = _baton("schedules", "delete", "again")
    assert (code, said.strip()) == (0, "again is not retrained by the clock any more")
    assert sorted(each["display_name"] for each in api.recurring.values()) == ["retrain-other", "retrain-third"]
    code, said = _baton("schedules", "delete", "again")
    assert code == 2
    assert "recipe 'again' has no schedule; expected one of: other, third." in said


def test_what_other_people_schedule_is_not_ours(api: ScheduleApi) -> None:
    api.recurring["x"] = {"recurring_run_id": "x", "display_name": "nightly-etl", "status": "ENABLED"}
    assert _baton("schedules", "list") == (0, "")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("0 3 * *", "has 4 field(s), expected 5"),
        ("60 3 * * *", "'60' is no minute; expected *, or numbers from 0 to 59, as in"),
        ("0 3-1 * * *", "'3-1' is no hour"),
        ("0 3 0 * *", "'0' is no day of the month"),
        ("0 3 * MAI *", "'MAI' is no month; expected *, or numbers from 1 to 12 or names such as FEB"),
        ("0 3 * * 7", "'7' is no day of the week"),
        ("*/0 * * * *", "'*/0' is no minute"),
        ("@daily", "has 1 field(s)"),
    ],
)
def test_a_line_that_is_none_is_told_before_anything_is_sent(
    api: ScheduleApi, recipe: Path, line: str, said: str
) -> None:
    code, shown = _baton("schedule", str(recipe), "--cron", line)
    assert code == 2
    assert said in " ".join(shown.split())
    assert api.requests == []


@pytest.mark.parametrize("line", ["*/15 * * * *", "0 3 1,15 * *", "5 0-6/2 * JAN-mar SUN", "0 3 ? * 1-5"])
def test_lines_that_kubeflow_takes(line: str) -> None:
    assert cron_line(line) == f"0 {line}"


def test_the_endpoint_being_gone_is_one_message(recipe: Path) -> None:
    code, said = _baton("schedule", str(recipe), "--cron", "0 3 * * *", "--endpoint", "http://127.0.0.1:9")
    assert code == 1
    assert "http://127.0.0.1:9" in said


def test_a_recipe_without_a_gate_is_not_scheduled(api: ScheduleApi, recipe: Path) -> None:
    code, said = _baton("schedule", str(recipe), "--cron", "0 3 * * *", "--set", "evaluation={}")
    assert code == 2
    assert "has no evaluation.gate" in said
    with pytest.raises(UserError):
        cron_line("")
