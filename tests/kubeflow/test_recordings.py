"""What a real Kubeflow Pipelines 2.17 answered about runs, and what `baton status` makes of it."""

import gzip
import html
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.cli.app import app
from baton.cli.display import console
from baton.kubeflow import connection, run_status
from baton.runs.documents import Progress, RunInfo
from baton.runs.outcomes import RunFailure
from baton.runs.plan import Plan
from baton.runs.run import Run, now
from baton.store.storage import Storage

ASSETS = Path(__file__).parents[1] / "assets/kubeflow-2.17"
Recording = dict[str, Any]


@dataclass(frozen=True)
class Expected:
    """What a person is to read of a run."""

    state: str
    code: int
    counts: dict[str, int]
    """State of a stage → number of stages in it."""
    stages: dict[str, str] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)
    said: tuple[str, ...] = ()


FROZEN = "Kubeflow's record of this run has stopped, as its workflow is larger than 1 MiB"
LOST = "The machine was preempted: `baton retry` resumes from the newest checkpoint"
OWN = "Kubeflow's own pod of the pipeline"
LAUNCHER = "Kubeflow's launcher ended, not the stage, as there is no message"
VERSIONS = {
    "phases-driver-lost": "phases-record-frozen",
    "root-driver-lost": "running",
    "healed-by-retry": "running",
    "api-away": "running",
}
"""Recording of a run from a version of a pipeline → recording that has that pipeline; `succeeded` where left out."""
CACHE = "taken from Kubeflow's cache"

TABLE = {
    "succeeded": Expected("succeeded", 0, {"succeeded": 13}),
    "succeeded-cached": Expected(
        "succeeded",
        0,
        {"succeeded": 13},
        messages=dict.fromkeys(("tokenize", "train chunk 1", "train chunk 2", "train chunk 3"), CACHE),
    ),
    "by-version": Expected("succeeded", 0, {"succeeded": 13}),
    "rejected": Expected(
        "rejected", 3, {"succeeded": 10, "skipped": 1}, {"export": "skipped", "rejected": "succeeded"}
    ),
    "retrained": Expected(
        "succeeded", 0, {"succeeded": 13, "skipped": 1}, {"release": "succeeded", "look": "succeeded"}
    ),
    "running": Expected("running", 0, {"succeeded": 4, "running": 1, "waiting": 4}, {"train chunk 2": "running"}),
    "groups-of-chunks-running": Expected(
        "running",
        0,
        {"succeeded": 15, "waiting": 30},
        {
            "train chunk 1": "succeeded",
            "train chunk 7": "succeeded",
            "train chunk 9": "waiting",
            "checkpoint 9": "waiting",
        },
        {"checkpoint 2": CACHE},
    ),
    "groups-of-chunks-succeeded": Expected("succeeded", 0, {"succeeded": 45}),
    "pod-deleted-retried": Expected(
        "succeeded", 0, {"succeeded": 13}, messages={"train chunk 2": "attempt 2; before: pod deleted"}
    ),
    "pod-lost-retried": Expected(
        "succeeded", 0, {"succeeded": 13}, messages={"train chunk 2": "attempt 2; before: main: Error (exit code 143)"}
    ),
    "pod-lost-failed": Expected(
        "failed",
        1,
        {"succeeded": 4, "failed": 1, "waiting": 8},
        {"train chunk 2": "failed"},
        {"train chunk 2": "main: Error (exit code 137)"},
        (f"train chunk 2: {LOST}", "kubectl logs quick-tw568-", "a killed or evicted pod, or a shut-down node"),
    ),
    "toy-exits-not-retried": Expected(
        "failed",
        1,
        {"failed": 3},
        messages={"exit": "main: Error (exit code 1)", "sleep": "main: Error (exit code 143)"},
        said=("sleep: The machine was preempted: `baton retry` runs it again", "kubectl logs"),
    ),
    "root-driver-lost": Expected(
        "failed",
        1,
        {"failed": 1, "waiting": 9},
        {OWN: "failed", "data split": "waiting"},
        {OWN: "main: Error (exit code 137)"},
        (
            f"{OWN}: It starts the stages",
            "kubectl logs drv-ps9d7-system-dag-driver-3631836364",
            "a killed or evicted pod",
        ),
    ),
    "healed-by-retry": Expected("succeeded", 0, {"succeeded": 9}),
    "gpu-promised": Expected(
        "failed",
        1,
        {"succeeded": 2, "failed": 1, "waiting": 10},
        {"train chunk 1": "failed"},
        {
            "train chunk 1": "this pod was promised 1 GPU and sees 0: driver none, torch 2.13.0+cu130 built for CUDA "
            "13.0, image localhost/baton-cpu:97ef6027a076. Look at the node's driver and device plugin; another node "
            "may do better."
        },
        ("train chunk 1: its log",),
    ),
    "api-away": Expected(
        "failed",
        1,
        {"succeeded": 2, "failed": 1, "waiting": 6},
        {"train chunk 1": "failed"},
        {"train chunk 1": "main: Error (exit code 1)"},
        (f"train chunk 1: {LAUNCHER}", "`baton retry` resumes from the newest checkpoint"),
    ),
    "failed-user-error": Expected(
        "failed",
        1,
        {"failed": 1, "waiting": 8},
        {"data split": "failed"},
        {"data split": "main: Error (exit code 1)"},
        ("data split: its log: kubectl logs baddata-gk4rn-",),
    ),
    "waits-for-secret": Expected(
        "running",
        0,
        {"pending": 1, "waiting": 8},
        {"data split": "pending"},
        {"data split": 'CreateContainerConfigError: secret "nosuch" not found'},
        ("data split: A Secret is missing in the run's namespace",),
    ),
    "waits-for-image": Expected(
        "running",
        0,
        {"pending": 1, "waiting": 8},
        {"data split": "pending"},
        {"data split": 'ImagePullBackOff: Back-off pulling image "localhost/nosuch:1"'},
        ("data split: The image cannot be pulled",),
    ),
    "waits-for-memory": Expected(
        "running",
        0,
        {"succeeded": 2, "pending": 1, "waiting": 6},
        {"train chunk 1": "pending"},
        {"train chunk 1": "Unschedulable: 0/1 nodes are available: 1 Insufficient memory."},
        ("train chunk 1: No node fits",),
    ),
    "cancelled-waiting": Expected(
        "canceled",
        1,
        {"canceled": 1, "waiting": 8},
        {"data split": "canceled"},
        said=("no page has the reason, as its store cannot be used from here: /nowhere is not a folder here.",),
    ),
    "phases-record-frozen": Expected(
        "succeeded", 0, {"succeeded": 18}, {"second: export": "succeeded"}, said=(FROZEN,)
    ),
    "sweep-record-frozen": Expected("succeeded", 0, {"succeeded": 13}, {"winner: export": "succeeded"}, said=(FROZEN,)),
    "running-100-chunks-record-frozen": Expected(
        "running", 0, {"succeeded": 1, "unknown": 204}, {"train chunk 1": "unknown"}, said=(FROZEN,)
    ),
    "failed-workflow-too-large": Expected(
        "failed",
        1,
        {"succeeded": 1, "unknown": 204},
        said=(FROZEN, "Argo says: Request entity too large: limit is 3145728"),
    ),
}


def recorded(name: str) -> Recording:
    with gzip.open(ASSETS / f"{name}.json.gz") as file:
        recording: Recording = json.load(file)
        return recording


@pytest.fixture
def status(kfp_api: Any, kfp_api_module: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, str]]:
    """Returns how `baton status` ends, and all that it says, where a run is answered as it was recorded."""

    def ask(
        name: str, store: str = "/nowhere", changed: Recording | None = None, output: str = "json"
    ) -> tuple[Any, str]:
        recording = changed or recorded(name)
        parameters = recording["run"].setdefault("runtime_config", {}).setdefault("parameters", {})
        parameters["store"] = store
        spec = {} if name == "no version" else recorded(VERSIONS.get(name, "succeeded"))["run"]["pipeline_spec"]
        first = {"pipeline_runtime": {"workflow_manifest": json.dumps(recording["workflow"])}}

        tasks = itertools.cycle(recording.get("tasks", ()))

        def answer(method: str, path: str) -> Any:
            version = {"pipeline_version_id": path.rpartition("/")[2], "pipeline_spec": spec}
            answers = {"/apis/v2beta1/runs/": recording["run"], "/apis/v2beta1/pipelines/": version}
            if path.endswith("/tasks"):  # of an API after 2.17, page by page
                answers = {path: next(tasks)} if "tasks" in recording else {}
            if recording["workflow"] is not None:
                answers["/apis/v1beta1/runs/"] = first
            told = next((told for start, told in answers.items() if path.startswith(start)), None)
            return kfp_api_module.RawAnswer(200, json.dumps(told).encode()) if told else None

        kfp_api.interfere = answer
        seen = io.StringIO()
        monkeypatch.setattr(console, "file", seen)
        monkeypatch.setattr(console, "width", 200)
        run_id = recording["run"]["run_id"]
        done = CliRunner().invoke(app, ["status", run_id, "--endpoint", kfp_api.url, "--output", output])
        return done, seen.getvalue()

    return ask


def test_every_recording_is_in_the_table() -> None:
    assert {path.name.removesuffix(".json.gz") for path in ASSETS.iterdir()} == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_a_recorded_run_is_explained(name: str, status: Callable[..., tuple[Any, str]]) -> None:
    expected = TABLE[name]
    done, said = status(name)
    shown = json.loads(done.stdout)
    stages = {stage["name"]: stage for stage in shown["stages"]}
    assert (shown["state"], done.exit_code) == (expected.state, expected.code)
    assert Counter(stage["state"] for stage in stages.values()) == expected.counts
    assert {key: stages[key]["state"] for key in expected.stages} == expected.stages
    assert {key: stages[key]["message"] for key in expected.messages} == expected.messages
    for text in expected.said:
        assert text in said
    if not expected.said:
        assert not said


def test_ids_of_nodes_are_argos() -> None:
    for name in ("groups-of-chunks-succeeded", "retrained", "running"):
        workflow = recorded(name)["workflow"]
        told = workflow["status"]["nodes"].values()
        others = [node for node in told if node["name"] != workflow["metadata"]["name"]]
        assert [run_status.node_id(workflow["metadata"]["name"], node["name"]) for node in others] == [
            node["id"] for node in others
        ]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with the run of the recordings of 100 chunks: two chunks done, the third at step 25."""
    run = Run(Storage(str(tmp_path)), "d100")
    run.put(Plan.NAME, {"rows": 1, "steps_per_epoch": 1, "num_steps": 1000, "targets": list(range(10, 1001, 10))})
    run.put(Progress.NAME, {"step": 25, "chunk": 3, "at": "2026-11-22T08:30:00.000Z"})
    for stage, details in (("tokenize", {}), ("train-chunk-001", {"chunk": 1}), ("train-chunk-002", {"chunk": 2})):
        run.record(stage, details)  # now, which is after the run was created
    run.put("records/checkpoint-001-1735689600000-0a1b2c.json", {"stage": "checkpoint-001", "chunk": 1})  # of 2025
    return tmp_path


def test_a_record_that_has_stopped_goes_on_in_the_store(status: Callable[..., tuple[Any, str]], store: Path) -> None:
    done, said = status("running-100-chunks-record-frozen", store=str(store))
    stages = {stage["name"]: stage for stage in json.loads(done.stdout)["stages"]}
    assert FROZEN in said
    for name in ("tokenize", "train chunk 1", "train chunk 2"):
        assert stages[name]["state"] == "succeeded"
        assert stages[name]["message"].endswith("by the store")
    assert (stages["train chunk 3"]["state"], stages["train chunk 3"]["message"]) == (
        "unknown",
        "step 25 of 1000 at 2026-11-22T08:30:00.000Z",
    )
    assert stages["checkpoint 1"]["state"] == "unknown", "its record is of an earlier run of that name"
    assert stages["evaluate"]["state"] == stages["train chunk 4"]["state"] == "waiting", "they cannot have begun"


def _run_of(name: str, store: Path) -> Run:
    """Returns the training run of a recording in a store."""
    run = recorded(name)["run"]
    given = run.get("runtime_config", {}).get("parameters", {})
    return Run(
        Storage(str(store)), given.get("run_name") or f"{run['pipeline_spec']['pipelineInfo']['name']}-{run['run_id']}"
    )


@pytest.mark.parametrize(
    ("name", "stage", "message", "remedy", "shown"),
    [
        ("pod-lost-failed", "train chunk 2", "main: Error (exit code 137)", LOST, "The run failed in train chunk 2."),
        ("root-driver-lost", OWN, "main: Error (exit code 137)", "It starts the stages", f"The run failed in {OWN}."),
        ("api-away", "train chunk 1", "main: Error (exit code 1)", LAUNCHER, "The run failed in train chunk 1."),
        ("cancelled-waiting", "data split", "The run was canceled.", "`baton retry", "was canceled in data split."),
    ],
)
def test_who_looks_leaves_why_a_run_ended(
    name: str, stage: str, message: str, remedy: str, shown: str, status: Callable[..., tuple[Any, str]], tmp_path: Path
) -> None:
    """From the status alone, where there is no run yet."""
    _, said = status(name, store=str(tmp_path))
    run = _run_of(name, tmp_path)
    page = Path(run.uri, "report.html")
    assert f"why it ended: {page}\n" in said
    failure = run.need(RunFailure)
    assert (failure.stage, failure.message, failure.exit_code) == (stage, message, None)
    assert str(failure.remedy).startswith(remedy)
    assert failure.is_cancelled == (name == "cancelled-waiting")
    text = html.unescape(page.read_text())
    assert shown in text
    assert message in text
    page.write_text("as it was")
    assert f"why it ended: {page}\n" in status(name, store=str(tmp_path))[1]
    assert page.read_text() == "as it was", "it is left once"


def test_a_pod_of_no_stage_leaves_why_with_the_phase_that_did_not_begin(
    status: Callable[..., tuple[Any, str]], tmp_path: Path
) -> None:
    status("phases-driver-lost", store=str(tmp_path), changed=recorded("root-driver-lost"))
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name == "drv1-first"
    assert json.loads((run / RunFailure.NAME).read_text())["stage"] == OWN


def test_what_the_stage_has_left_itself_stays(status: Callable[..., tuple[Any, str]], tmp_path: Path) -> None:
    run = _run_of("pod-lost-failed", tmp_path)
    run.write(RunFailure(stage="train chunk 2", message="its own words", exit_code=1, at=now()))
    status("pod-lost-failed", store=str(tmp_path))
    assert run.need(RunFailure).message == "its own words"


def test_a_run_that_was_resumed_since_is_not_called_failed(
    status: Callable[..., tuple[Any, str]], tmp_path: Path
) -> None:
    run = _run_of("pod-lost-failed", tmp_path)
    run.record("data-split", {})  # now, by another run on Kubeflow
    _, said = status("pod-lost-failed", store=str(tmp_path))
    assert run.read(RunFailure) is None
    assert "why it ended" not in said


@pytest.mark.parametrize(("has_word", "message"), [(True, None), (False, None), (False, "as recorded")])
def test_a_record_that_has_stopped_is_a_loss_where_no_stage_has_left_a_word(
    has_word: bool, message: str | None, status: Callable[..., tuple[Any, str]], store: Path, kfp_api: Any
) -> None:
    """A workflow that has outgrown Kubernetes is no lost pod."""
    changed = recorded("failed-workflow-too-large")
    if message is None:
        del changed["workflow"]["status"]["message"]
    run = Run(Storage(str(store)), "d100")
    run.put(RunInfo.NAME, {"recipe": {"name": "d100"}, "created": now()})
    if has_word:
        run.write(
            RunFailure(stage="train chunk 3", message="a row is damaged.", remedy="Mend it.", exit_code=2, at=now())
        )
    done, _ = status("failed-workflow-too-large", store=str(store), changed=changed)
    stages = {stage["name"]: stage for stage in json.loads(done.stdout)["stages"]}
    assert stages["train chunk 3"]["state"] == ("failed" if has_word else "unknown")
    client = connection.connect(kfp_api.url)
    remote = client.get_run(recorded("failed-workflow-too-large")["run"]["run_id"])
    run.storage.remove(run.path(RunFailure.NAME)) if not has_word else None  # what the status above has left
    view = run_status.explained_by_store(client, remote, run_status.stages(client, remote))
    assert view.is_lost is (not has_word and message is None)


# planted: what a recording becomes where something else is lost


def _node(recording: Recording, name: str) -> Recording:
    """Returns a node of the workflow by the end of its name."""
    (found,) = [node for node in recording["workflow"]["status"]["nodes"].values() if node["name"].endswith(name)]
    return found


def _fails(recording: Recording, name: str, message: str | None, phase: str = "Failed") -> Recording:
    """Lets a run fail at a pod: in the workflow, and in the API's list at its stage or its driver."""
    recording["run"]["state"] = "FAILED" if phase != "Pending" else "RUNNING"
    node = _node(recording, f"{name}(0)")
    node |= {"phase": phase, "message": message}
    key = name.removesuffix("(0).executor")
    for detail in recording["run"]["run_details"]["task_details"]:
        if detail.get("display_name") in (key, f"{key}(0)"):
            detail["state"] = "FAILED" if phase != "Pending" else "RUNNING"
        if name.endswith("-driver") and detail.get("display_name") == key.removesuffix("-driver"):
            detail.pop("state", None)
    return recording


AGAIN = "`baton retry` runs it again, and what has ended stays."
RESUMES = "`baton retry` resumes from the newest checkpoint"


@pytest.mark.parametrize(
    ("base", "pod", "message", "stage", "hint", "is_lost"),
    [
        ("succeeded", "export-driver", "main: Error (exit code 137)", "export", "Kubeflow's own pod before it", True),
        ("succeeded", "export-driver", "main: Error (exit code 1)", "export", AGAIN, True),
        ("succeeded", "train-chunk-2-driver", "main: Error (exit code 143)", "train chunk 2", RESUMES, True),
        ("succeeded", "root-driver", "main: Error (exit code 1)", OWN, "It starts the stages", True),
        ("groups-of-chunks-succeeded", "chunks-9-16-driver", "pod deleted", OWN, "It starts the stages", True),
        (
            "succeeded",
            "root-driver",
            "ImagePullBackOff: kfp-driver:2.17.0",
            OWN,
            "ask the administrator of the installation",
            False,
        ),
        ("succeeded", "export(0).executor", "main: Error (exit code 143)", "export", AGAIN, True),
        ("succeeded", "export(0).executor", "The node was low on resource: memory.", "export", AGAIN, True),
        ("succeeded", "export(0).executor", "main: Error (exit code 1)", "export", LAUNCHER, True),
        ("succeeded", "export(0).executor", "wait: Error (exit code 64): failed to put file", "export", LAUNCHER, True),
        (
            "succeeded",
            "export(0).executor",
            "main: OOMKilled (exit code 1)",
            "export",
            "raise resources.memory.",
            False,
        ),
        (
            "succeeded",
            "train-chunk(0).executor",
            "main: OOMKilled (exit code 1)",
            "train chunk 1",
            "micro_batch",
            False,
        ),
        ("succeeded", "export(0).executor", "main: Error (exit code 1): no. (baton exit code 2)", "export", "", False),
    ],
)
def test_what_is_lost_is_told_by_the_pod_and_the_advice_by_the_stage(
    base: str, pod: str, message: str, stage: str, hint: str, is_lost: bool,
    status: Callable[..., tuple[Any, str]], kfp_api: Any,
) -> None:  # fmt: skip
    changed = _fails(recorded(base), pod, message)
    done, said = status(base, changed=changed)
    stages = {each["name"]: each for each in json.loads(done.stdout)["stages"]}
    assert stages[stage]["state"] == "failed"
    assert stages[stage]["message"] in message
    (advice,) = [line for line in said.splitlines() if line.startswith(f"{stage}: ") and "its log" not in line] or [""]
    assert hint in advice
    assert ("checkpoint" in advice) == (is_lost and stage.startswith("train"))
    client = connection.connect(kfp_api.url)
    remote = client.get_run(changed["run"]["run_id"])
    assert run_status.explained_by_store(client, remote, run_status.stages(client, remote)).is_lost is is_lost


@pytest.mark.parametrize(
    ("name", "stage", "hint"),
    [("api-away", "train-chunk", LAUNCHER), ("root-driver-lost", OWN, "It starts the stages")],
)
def test_a_loss_is_told_where_the_pipelines_version_cannot_be_had(
    name: str, stage: str, hint: str, status: Callable[..., tuple[Any, str]]
) -> None:
    done, said = status("no version", changed=recorded(name))
    stages = {each["name"]: each["state"] for each in json.loads(done.stdout)["stages"]}
    assert stages[stage] == "failed"
    assert f"{stage}: {hint}" in said


def test_a_driver_that_does_not_start_is_told_while_the_run_goes_on(status: Callable[..., tuple[Any, str]]) -> None:
    changed = _fails(recorded("root-driver-lost"), "root-driver", "Unschedulable: 0/1 nodes.", "Pending")
    done, said = status("root-driver-lost", changed=changed)
    stages = {each["name"]: each for each in json.loads(done.stdout)["stages"]}
    assert (stages[OWN]["state"], stages[OWN]["message"]) == ("pending", "Unschedulable: 0/1 nodes.")
    assert f"{OWN}: This pod is Kubeflow's own" in said


@pytest.mark.parametrize("stage", ["train chunk 1", "train chunk 2"])
@pytest.mark.parametrize("when", ["now", "before"])
def test_a_stage_that_left_its_words_in_the_store_alone_is_not_lost(
    stage: str, when: str, status: Callable[..., tuple[Any, str]], tmp_path: Path
) -> None:
    """Where the pod has no file for them; words of another stage, or of an earlier attempt, are not its own."""
    run = Run(Storage(str(tmp_path)), "drv3")
    at = now() if when == "now" else "2026-11-25T19:47:45.000Z"
    run.write(RunFailure(stage=stage, message="a row is damaged.", remedy="Mend it.", exit_code=2, at=at))
    done, said = status("api-away", store=str(tmp_path))
    (told,) = [each for each in json.loads(done.stdout)["stages"] if each["state"] == "failed"]
    is_its_own = (stage, when) == ("train chunk 1", "now")
    assert told["message"] == ("a row is damaged." if is_its_own else "main: Error (exit code 1)")
    assert (LAUNCHER in said) is not is_its_own


@pytest.mark.parametrize("name", ["healed-by-retry", "succeeded", "groups-of-chunks-succeeded"])
@pytest.mark.parametrize("behind", ["list", "list and workflow", "for a while", "no workflow"])
def test_a_record_that_lags_has_not_stopped(
    name: str, behind: str, status: Callable[..., tuple[Any, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has succeeded, its last stage is not yet listed so: a workflow that can be read has not outgrown Argo."""
    changed, seconds = recorded(name), []
    listed = changed["run"]["run_details"]["task_details"]
    last = [each for each in listed if each.get("display_name") in ("report", "report(0)")]
    for detail in last:
        detail["state"] = "RUNNING"
    if behind != "list":
        _node(changed, "report(0).executor(0)")["phase"] = "Running"
    if behind == "no workflow":
        changed["workflow"] = {}
    monkeypatch.setattr(run_status, "LAG_S", 0.0)

    def slept(_: float) -> None:
        seconds.append(1)
        if behind == "for a while":
            for detail in last:
                detail["state"] = "SUCCEEDED"

    monkeypatch.setattr(run_status.time, "sleep", slept)
    done, said = status(name, changed=changed)
    states = {each["state"] for each in json.loads(done.stdout)["stages"]}
    assert states == {"succeeded"}
    assert bool(seconds) is (behind != "list"), "a second look is for what the workflow does not tell"
    assert (FROZEN in said) is (behind == "no workflow")


def test_a_second_attempt_is_told_while_it_runs(status: Callable[..., tuple[Any, str]]) -> None:
    changed = recorded("pod-lost-retried")
    changed["run"]["state"] = "RUNNING"
    pod = _node(changed, "train-chunk-2(0).executor(1)")
    for phase, message, told in (
        ("Running", None, "attempt 2; before: main: Error (exit code 143)"),
        ("Pending", "Unschedulable: 0/1", "attempt 2; before: main: Error (exit code 143); now: Unschedulable: 0/1"),
    ):
        pod |= {"phase": phase, "message": message}
        for detail in changed["run"]["run_details"]["task_details"]:
            if detail.get("display_name") in ("train-chunk-2", "train-chunk-2(0)"):
                detail["state"] = "RUNNING"
        stages = {each["name"]: each for each in json.loads(status("x", changed=changed)[0].stdout)["stages"]}
        assert stages["train chunk 2"]["message"] == told


def test_the_table_folds_equal_neighbours_and_is_the_answer(
    status: Callable[..., tuple[Any, str]], store: Path
) -> None:
    """A line for what a hundred chunks have in common, on standard output with what helps; nothing is cut."""
    done, said = status("running-100-chunks-record-frozen", store=str(store), output="text")
    rows = [line.split("  ") for line in done.stdout.splitlines()]
    shown = {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in rows if len(row) > 1}
    assert shown["train chunk 1–2"] == ["succeeded", "done, by the store"]
    assert shown["train chunk 3"] == ["unknown", "step 25 of 1000 at 2026-11-22T08:30:00.000Z"]
    assert shown["train chunk 4–100"] == shown["checkpoint 3–100"] == shown["export"] == ["waiting"]
    assert shown["checkpoint 1–2"] == ["unknown"]
    assert len(rows) < 20
    assert FROZEN in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].startswith("http://")
    assert not said
    message = json.loads(status("gpu-promised")[0].stdout)["stages"][2]["message"]
    assert f"failed     228 s  {message}\n" in status("gpu-promised", output="text")[0].stdout


@pytest.mark.parametrize("name", TABLE)
def test_the_table_keeps_every_stage(name: str, status: Callable[..., tuple[Any, str]]) -> None:
    stages = json.loads(status(name)[0].stdout)["stages"]
    shown = status(name, output="text")[0].stdout
    for stage in stages:
        kind, _, number = stage["name"].rpartition(" ")
        ranges = re.findall(rf"^{re.escape(kind)} (\d+)–(\d+)  ", shown, re.MULTILINE)
        is_folded = number.isdecimal() and any(int(low) <= int(number) <= int(high) for low, high in ranges)
        assert is_folded or re.search(rf"^{re.escape(stage['name'])}  ", shown, re.MULTILINE), stage["name"]
