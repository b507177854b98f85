"""A pipeline is registered: one version for each content, and runs and schedules that are started from it."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.cli.app import app
from baton.errors import BatonError, UserError
from baton.kubeflow.submit import PipelineFile

UPLOADS = ("POST", "/apis/v2beta1/pipelines/upload_version")


def changed(package: Path, folder: Path) -> Path:
    """A package of the same pipeline with another content."""
    path = folder / "changed.yaml"
    path.write_text(package.read_text(encoding="utf-8").replace("registry.test/baton:1", "registry.test/baton:2"))
    return path


def test_a_run_is_started_from_a_version_named_after_the_content(
    kfp_api: Any, two_step_package: Path, submit_to: Any
) -> None:
    submitted = submit_to(kfp_api.url, two_step_package)

    (pipeline,) = kfp_api.registry.pipelines.values()
    (version,) = kfp_api.registry.versions.values()
    digest = PipelineFile.read(str(two_step_package)).digest
    assert pipeline["name"] == pipeline["display_name"] == "two-steps"
    assert version["name"] == submitted.registered.version == f"two-steps-{digest[:12]}"
    assert submitted.registered.is_new
    run = kfp_api.runs[submitted.run_id]
    assert "pipeline_spec" not in run
    assert run["pipeline_version_reference"] == {
        "pipeline_id": pipeline["pipeline_id"], "pipeline_version_id": version["pipeline_version_id"],
    }  # fmt: skip


def test_a_run_is_given_every_parameter_in_its_type(kfp_api: Any, two_step_package: Path, submit_to: Any) -> None:
    submitted = submit_to(kfp_api.url, two_step_package, arguments={"num_rows": 3, "ratio": 0.25})

    given = kfp_api.runs[submitted.run_id]["runtime_config"]["parameters"]
    assert given == {"num_rows": 3, "label": "plain", "ratio": 0.25, "is_final": True}


def test_the_same_content_is_uploaded_once_and_another_is_a_version_of_the_same_pipeline(
    kfp_api: Any, two_step_package: Path, tmp_path: Path, submit_to: Any
) -> None:
    first, second = submit_to(kfp_api.url, two_step_package), submit_to(kfp_api.url, two_step_package)
    third = submit_to(kfp_api.url, changed(two_step_package, tmp_path))

    assert kfp_api.requests.count(UPLOADS) == 2
    assert [each.registered.is_new for each in (first, second, third)] == [True, False, True]
    assert first.registered.version_id == second.registered.version_id != third.registered.version_id
    assert len(kfp_api.registry.pipelines) == 1
    images = [json.dumps(kfp_api.spec(kfp_api.runs[each.run_id])) for each in (first, third)]
    assert ["baton:2" in image for image in images] == [False, True]


def test_two_submissions_at_once_share_one_version(kfp_api: Any, two_step_package: Path, submit_to: Any) -> None:
    together = threading.Barrier(2, timeout=20)

    def both_have_looked(method: str, path: str) -> None:
        if method == "POST" and "/pipelines" in path:
            kfp_api._lock.release()
            together.wait()
            kfp_api._lock.acquire()

    kfp_api.interfere = both_have_looked
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(submit_to, kfp_api.url, two_step_package) for _ in range(2)]
        submitted = [job.result() for job in jobs]

    assert len(kfp_api.registry.pipelines) == len(kfp_api.registry.versions) == 1
    assert kfp_api.requests.count(UPLOADS) == 2
    assert sorted(each.registered.is_new for each in submitted) == [False, True]
    assert len(kfp_api.runs) == 2


def test_an_upload_whose_answer_is_lost_is_found(
    kfp_api: Any, kfp_api_module: ModuleType, two_step_package: Path, submit_to: Any
) -> None:
    submit_to(kfp_api.url, two_step_package)
    (version,) = kfp_api.registry.versions.values()
    kfp_api.registry.versions.clear()

    def lost(method: str, path: str) -> Any:
        if (method, path) == UPLOADS:
            kfp_api.registry.versions[version["pipeline_version_id"]] = version
            return kfp_api_module.RawAnswer(504, b"upstream request timeout")
        return None

    kfp_api.interfere = lost
    assert not submit_to(kfp_api.url, two_step_package).registered.is_new


def test_an_endpoint_that_fails_is_told(
    kfp_api: Any, kfp_api_module: ModuleType, two_step_package: Path, submit_to: Any
) -> None:
    kfp_api.interfere = lambda method, path: (
        kfp_api_module.RawAnswer(503, b"down") if (method, path) == UPLOADS else None
    )
    with pytest.raises(BatonError, match=r"fails \(503: down\)"):
        submit_to(kfp_api.url, two_step_package)
    assert kfp_api.runs == {}


def test_somebody_elses_pipeline_of_the_same_name_gets_no_version(
    kfp_api: Any, two_step_package: Path, tmp_path: Path, submit_to: Any
) -> None:
    submit_to(kfp_api.url, two_step_package)
    (version,) = kfp_api.registry.versions.values()
    version["pipeline_spec"]["pipeline_spec"]["pipelineInfo"]["name"] = "nightly-etl"
    other = changed(two_step_package, tmp_path)

    with pytest.raises(UserError, match=r"'two-steps' is a different one there, compiled as 'nightly-etl'") as caught:
        submit_to(kfp_api.url, other)
    assert "--no-register" in str(caught.value)
    assert len(kfp_api.registry.versions) == 1
    assert submit_to(kfp_api.url, other, registers=False).registered is None


@pytest.mark.parametrize("verb", ["list", "create"])
def test_who_may_not_is_told_the_right_and_the_way_without(
    verb: str, kfp_api: Any, two_step_package: Path, submit_to: Any
) -> None:
    kfp_api.registry.multi_user, kfp_api.registry.forbidden = True, {verb}

    with pytest.raises(UserError, match=r"pipeline 'two-steps' cannot be registered: .*403") as caught:
        submit_to(kfp_api.url, two_step_package, namespace="team")
    assert "pipelines.kubeflow.org" in str(caught.value.remedy)
    assert "--no-register" in str(caught.value.remedy)
    assert kfp_api.runs == {}

    submitted = submit_to(kfp_api.url, two_step_package, namespace="team", registers=False)
    assert submitted.registered is None
    assert "pipeline_spec" in kfp_api.runs[submitted.run_id]


def test_a_right_that_is_missing_for_the_upload_alone_is_told_although_kubeflow_does_not(
    kfp_api: Any, two_step_package: Path, tmp_path: Path, submit_to: Any
) -> None:
    kfp_api.registry.multi_user = True
    submit_to(kfp_api.url, two_step_package, namespace="team")
    kfp_api.registry.forbidden = {"create"}

    with pytest.raises(UserError, match=r"400: Failed to create a pipeline version\); expected the right") as caught:
        submit_to(kfp_api.url, changed(two_step_package, tmp_path), namespace="team")
    assert "--no-register" in str(caught.value.remedy)
    assert not submit_to(kfp_api.url, two_step_package, namespace="team").registered.is_new


def test_each_namespace_has_its_own(kfp_api: Any, two_step_package: Path, submit_to: Any) -> None:
    kfp_api.registry.multi_user = True

    there = [submit_to(kfp_api.url, two_step_package, namespace=name).registered for name in ("a", "b", "a")]

    assert [pipeline["namespace"] for pipeline in kfp_api.registry.pipelines.values()] == ["a", "b"]
    assert [each.is_new for each in there] == [True, True, False]


def test_a_run_without_cache_carries_its_specification(kfp_api: Any, two_step_package: Path, submit_to: Any) -> None:
    submitted = submit_to(kfp_api.url, two_step_package, cache=False)

    assert submitted.registered is None
    assert "pipeline_spec" in kfp_api.runs[submitted.run_id]
    assert kfp_api.registry.pipelines == {}


# doctor


def found(api: Any, folder: Path, *arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(
        app, ["doctor", "--store", str(folder), "--endpoint", api.url, "--output", "json", *arguments]
    )
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def test_doctor_says_whether_pipelines_can_be_registered_and_posts_nothing(kfp_api: Any, tmp_path: Path) -> None:
    seen = found(kfp_api, tmp_path)
    assert "speaks v2beta1, version 2.17.0, single-user; pages at" in seen["kubeflow"]["found"]
    assert seen["pipelines"]["found"] == "can be registered; 0 are"

    kfp_api.registry.multi_user = True
    for verb, state, said in (
        ("", "ok", "can be listed, 0 are; the right to register one shows with the first submission"),
        ("create", "ok", "can be listed, 0 are; the right to register one shows with the first submission"),
        ("list", "note", "cannot be registered: "),
    ):
        kfp_api.registry.forbidden = {verb}
        check = found(kfp_api, tmp_path, "--namespace", "team")["pipelines"]
        assert check["state"] == state
        assert check["found"].startswith(said)
        assert ("--no-register" in check["remedy"]) == (state == "note")
    assert {method for method, _ in kfp_api.requests} == {"GET"}
