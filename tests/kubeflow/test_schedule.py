"""`baton schedule`: a recurring run of the retraining pipeline, one for each recipe."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from baton.cli.app import app
from baton.cli.display import console
from baton.errors import UserError
from baton.kubeflow.submit import cron_line
from tests.support.kfp_schedules import ScheduleApi


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
    code, said = _baton("kfp", "schedule", str(recipe), "--cron", "0 3 * * *", "--output", "json")
    assert code == 0, said
    (run,) = api.recurring.values()
    told = json.loads(said.splitlines()[-1])
    assert told == {
        "identifier": run["recurring_run_id"], "recipe": "again", "cron": "0 3 * * *", "is_enabled": True,
        "next_run": None,
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
        assert _baton("kfp", "schedule", str(recipe), *when, *more)[0] == 0
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
        assert _baton("kfp", "schedule", str(recipe), "--cron", "0 3 * * *", *changes)[0] == 0
    assert _baton("kfp", "schedule", str(recipe), "--cron", "30 4 * * MON-FRI")[0] == 0
    code, said = _baton("kfp", "schedules", "--output", "json")
    assert code == 0
    crons = {each["recipe"]: each["cron"] for each in json.loads(said)["schedules"]}
    assert crons == {"again": "30 4 * * MON-FRI", "other": "0 3 * * *", "third": "0 3 * * *"}
    code, said = _baton("kfp", "schedule", str(recipe), "--cron", crons["again"])
    assert code == 0, "what is printed is taken"
    assert "retraining scheduled at '30 4 * * MON-FRI'" in said
    assert "times: UTC, unless" in said

    code, said = _baton("kfp", "unschedule", "again")
    assert (code, said.strip()) == (0, "again: schedule deleted")
    assert sorted(each["display_name"] for each in api.recurring.values()) == ["retrain-other", "retrain-third"]
    code, said = _baton("kfp", "unschedule", "again")
    assert code == 2
    assert "recipe 'again' has no schedule; expected one of: other, third." in said


def test_what_other_people_schedule_is_not_ours(api: ScheduleApi) -> None:
    api.recurring["x"] = {"recurring_run_id": "x", "display_name": "nightly-etl", "status": "ENABLED"}
    assert _baton("kfp", "schedules") == (0, "")


@pytest.mark.parametrize("description", [None, "", "Retrains other if data or recipe have changed.", "Ours."])
def test_a_name_alone_does_not_make_it_ours(
    api: ScheduleApi, recipe: Path, description: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = io.StringIO()
    monkeypatch.setattr(console, "file", noted)
    others = {"recurring_run_id": "x", "display_name": "retrain-again", "status": "ENABLED", "description": description}
    api.recurring["x"] = others
    code, said = _baton("kfp", "schedule", str(recipe), "--cron", "0 3 * * *")
    assert code == 0, said
    assert "recurring run retrain-again (x) is not Baton's, and stays" in " ".join(noted.getvalue().split())
    assert _baton("kfp", "schedule", str(recipe), "--cron", "0 4 * * *")[0] == 0
    assert [run.get("trigger") for run in api.recurring.values()] == [None, {"cron_schedule": {"cron": "0 0 4 * * *"}}]
    assert len(json.loads(_baton("kfp", "schedules", "--json")[1])["schedules"]) == 1
    assert _baton("kfp", "unschedule", "again")[0] == 0
    assert list(api.recurring) == ["x"]
    assert "expected one of: none" in _baton("kfp", "unschedule", "again")[1]


def test_pods_of_a_schedule_link_to_kubeflow_as_those_of_a_submission_do(
    api: ScheduleApi, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KF_PIPELINES_UI_ENDPOINT", "https://kubeflow.test/pipeline")
    assert _baton("kfp", "schedule", str(recipe), "--cron", "0 3 * * *")[0] == 0
    assert _baton("kfp", "submit", str(recipe), "--pipeline", "retrain")[0] == 0
    (version,) = api.registry.versions.values()  # both are of one content
    executors = version["pipeline_spec"]["pipeline_spec"]["deploymentSpec"]["executors"].values()
    page = {"name": "KF_PIPELINES_UI_ENDPOINT", "value": "https://kubeflow.test/pipeline"}
    assert all(page in executor["container"]["env"] for executor in executors)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("0 3 * *", "has 4 field(s), expected 5: minute, hour,"),
        ("0 0 0 3 * * *", "has 7 field(s), expected 5"),
        (
            "CRON_TZ=Asia/Tokyo 0 3 * * *",
            "names a time zone; expected a line in the time of Kubeflow's clock. Leave CRON",
        ),
    ],
)
def test_a_line_that_is_none_is_told_before_anything_is_sent(
    api: ScheduleApi, recipe: Path, line: str, said: str
) -> None:
    code, shown = _baton("kfp", "schedule", str(recipe), "--cron", line)
    assert code == 2
    assert said in " ".join(shown.split())
    assert api.requests == []


def test_what_kubeflow_does_not_take_is_one_sentence(api: ScheduleApi, recipe: Path) -> None:
    code, shown = _baton("kfp", "schedule", str(recipe), "--cron", "0 3 * * 7")
    assert code == 2
    words = "refuses the cron line (End of range (7) above maximum (6): 7); expected one that it reads. Every night"
    assert words in " ".join(shown.split())
    assert api.recurring == {}


@pytest.mark.parametrize(
    ("line", "sent"),
    [
        ("5 0-6/2 * JAN-mar SUN", "0 5 0-6/2 * JAN-mar SUN"),
        ("30 0 3 * * *", "30 0 3 * * *"),
        ("@daily", "@daily"),
    ],
)
def test_what_cron_lines_mean(line: str, sent: str) -> None:
    assert cron_line(line) == sent
    assert cron_line(cron_line(line)) == sent, "what is printed is taken back"


def test_the_endpoint_being_gone_is_one_message(recipe: Path) -> None:
    code, said = _baton("kfp", "schedule", str(recipe), "--cron", "0 3 * * *", "--endpoint", "http://127.0.0.1:9")
    assert code == 1
    assert "http://127.0.0.1:9" in said


def test_a_recipe_without_a_gate_is_not_scheduled(api: ScheduleApi, recipe: Path) -> None:
    code, said = _baton("kfp", "schedule", str(recipe), "--cron", "0 3 * * *", "--set", "evaluation={}")
    assert code == 2
    assert "has no evaluation.gate" in said
    with pytest.raises(UserError):
        cron_line("")
