"""A small Kubeflow Pipelines API: the part of `/apis/v2beta1` that `kfp` and `kfp.Client` use.

A real HTTP server on a random port. It keeps what is posted and refuses what the backend would: a
pipeline that does not conform, a parameter the pipeline does not declare or of another type. A
run's state moves on each time it is asked for.
"""

from __future__ import annotations

import datetime
import json
import re
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support import kfp_registry, kfp_tasks
from tests.support.kfp_checks import ApiError, check_parameters, check_pipeline
from tests.support.kfp_registry import Registry

CREATED_AT = "2024-05-01T12:00:00Z"
STATES = ("PENDING", "RUNNING", "SUCCEEDED")


@dataclass
class RawAnswer:
    """An answer in place of the API's own: a proxy's page, a redirect, an outage."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class KfpApi:
    """The server and what it was given. Use as a context manager.

    Attributes:
        experiments: Experiments by id, as the API shows them.
        runs: Runs by id, as the API shows them.
        registry: Registered pipelines and their versions.
        requests: Method and path of each request, in order.
        token: Bearer token that every request must carry, or None.
        authorize: Called with method, path and `Authorization` of each request; raises `ApiError`.
        final_state: The state in which new runs end.
        stops_at: The task at which runs fail, or stay while they are running.
        verdict: The branch that a run's gate takes.
        messages: What Kubernetes says of the pods of a task.
        logs: What a task has printed.
        serves_first_version: Whether the first version of the API is there too.
        retry_strategy: What the installation merges into every template; stock 2.17's.
        retry_fails: Whether the backend cannot retry a run any more.
        taken_names: Names whose creation is refused with 409.
        interfere: Called with method and path of each request; an answer it returns is sent instead.
    """

    def __init__(self) -> None:
        self.experiments: dict[str, dict[str, Any]] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.registry = Registry()
        self.requests: list[tuple[str, str]] = []
        self.token: str | None = None
        self.authorize: Callable[[str, str, str], None] = lambda method, path, authorization: None
        self.final_state = "SUCCEEDED"
        self.stops_at: str | None = None
        self.verdict = "accepted"
        self.messages: dict[str, str] = {}
        self.logs: dict[str, str] = {}
        self.serves_first_version = True
        self.retry_strategy: dict[str, str] | None = {"limit": "2", "retryPolicy": "OnError"}
        self.retry_fails = False
        self.taken_names: set[str] = set()
        self.interfere: Callable[[str, str], RawAnswer | None] = lambda method, path: None
        self._has_recorded = False
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> KfpApi:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer("GET")

            def do_POST(self) -> None:
                self._answer("POST")

            def _answer(self, method: str) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                answer = api.answer(method, self.path, self.headers, body)
                self.send_response(answer.status)
                for name, value in {"content-type": "application/json", **answer.headers}.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(answer.body)))
                self.end_headers()
                self.wfile.write(answer.body)

            def log_message(self, format: str, *args: object) -> None:
                """Keep the test's output clean; `KfpApi.requests` has the log."""

        return Handler

    def answer(self, method: str, target: str, headers: Message, body: bytes) -> RawAnswer:
        """Answer one request, errors included."""
        path, query = urlsplit(target).path, parse_qs(urlsplit(target).query)
        with self._lock:
            self.requests.append((method, path))
            instead = self.interfere(method, path)
            if instead is not None:
                return instead
            try:
                if self.token is not None and headers.get("authorization") != f"Bearer {self.token}":
                    raise ApiError(401, "Request header error: there is no valid user identity header.")
                self.authorize(method, path, headers.get("authorization", ""))
                found = self._route(method, path, query, headers, body)
                return RawAnswer(200, (found if isinstance(found, str) else json.dumps(found)).encode())
            except ApiError as error:
                return RawAnswer(error.status, json.dumps(error.document()).encode())

    def _route(
        self, method: str, path: str, query: dict[str, list[str]], headers: Message, body: bytes
    ) -> dict[str, Any] | str:
        if older := re.fullmatch(r"/apis/v1(?:alpha1|beta1)/runs/([^/]+)(?:/nodes/([^/]+)/log)?", path):
            return self._first_version(*older.groups())
        if registered := re.fullmatch(kfp_registry.PATH, path):
            return self.registry.answer(registered, method, query, headers, body)
        match = re.fullmatch(r"/apis/v2beta1/(healthz|experiments|runs)(?:/([^/:]+)(?::(terminate|retry))?)?", path)
        if match is None:
            raise ApiError(404, f"Not Found: {path}")
        resource, identifier, verb = match.groups()
        if resource == "healthz":
            told = {"commit_sha": "0123abc", "tag_name": "2.17.0", "pipeline_store": "database"}
            return {**told, "multi_user": self.registry.multi_user}
        stored = self.experiments if resource == "experiments" else self.runs
        if identifier is not None and identifier not in stored:
            raise ApiError(404, f"{resource.capitalize()[:-1]} {identifier} not found.")
        if verb:
            return self._terminate(stored[identifier]) if verb == "terminate" else self._retry(stored[identifier])
        if method == "POST":
            created = json.loads(body)
            if not created.get("display_name"):
                raise ApiError(400, "Invalid input error: the name is empty.")
            if created["display_name"] in self.taken_names:
                raise ApiError(409, f"Already exist error: {created['display_name']} already exists.")
            return self._create_experiment(created) if resource == "experiments" else self._create_run(created)
        if identifier is None:
            if self.registry.multi_user and resource == "runs" and not query.get("namespace"):
                raise ApiError(400, "A run cannot have an empty namespace in multi-user mode")
            found = [_shown(item) for item in stored.values() if _matches(item, query)]
            if query.get("sort_by") == ["created_at desc"]:
                found.sort(key=lambda item: item["created_at"], reverse=True)
            return {resource: found, "total_size": len(found)} if found else {}
        return self._advance(identifier) if resource == "runs" else stored[identifier]

    def _create_experiment(self, experiment: dict[str, Any]) -> dict[str, Any]:
        name = experiment["display_name"]
        if any(known["display_name"] == name for known in self.experiments.values()):
            raise ApiError(409, f"Already exist error: experiment {name} already exists.")
        return self.add_experiment(name)

    def add_experiment(self, name: str) -> dict[str, Any]:
        """Put an experiment there, whether or not one of that name exists."""
        identifier = str(uuid.uuid4())
        self.experiments[identifier] = {
            "experiment_id": identifier,
            "display_name": name,
            "created_at": CREATED_AT,
            "storage_state": "AVAILABLE",
        }
        return self.experiments[identifier]

    def _create_run(self, run: dict[str, Any]) -> dict[str, Any]:
        if not run.get("experiment_id"):
            known = [each for each in self.experiments.values() if each["display_name"] == "Default"]
            run["experiment_id"] = (known[0] if known else self.add_experiment("Default"))["experiment_id"]
        if run["experiment_id"] not in self.experiments:
            raise ApiError(404, f"Experiment {run['experiment_id']} not found.")
        if reference := run.get("pipeline_version_reference"):
            version = self.registry.version(reference)
            run["pipeline_version_reference"] = {key: version[key] for key in ("pipeline_id", "pipeline_version_id")}
        posted = self.spec(run)
        wrapped = "pipeline_spec" in posted
        documents = [posted["pipeline_spec"], posted["platform_spec"]] if wrapped else [posted]
        if not any(posted == self.spec(known) for known in self.runs.values() if "_workflow" in known):
            check_pipeline(documents)  # of recorded ones only the graph was kept
            check_parameters(documents[0], run.get("runtime_config", {}).get("parameters") or {})
        identifier = str(uuid.uuid4())
        self.runs[identifier] = {
            **run,
            "run_id": identifier,
            "created_at": _now() if self._has_recorded else f"{CREATED_AT[:-3]}{len(self.runs):02d}Z",
            "storage_state": "AVAILABLE",
            "_states": [*STATES[1:-1], self.final_state],
        }
        _enter(self.runs[identifier], STATES[0])
        return _shown(self.runs[identifier])

    def add_recorded(self, run: dict[str, Any], workflow: dict[str, Any], version: dict[str, Any]) -> str:
        """Put a run there as a real backend has answered about it, until it is started again; return its id.

        Args:
            run: Answer about the run.
            workflow: Its Argo workflow.
            version: Specification of the version that it refers to, if it does.
        """
        known = {"experiment_id": run["experiment_id"], "display_name": "recorded", "created_at": CREATED_AT}
        self.experiments[run["experiment_id"]] = known
        if reference := run.get("pipeline_version_reference"):
            self.registry.pipelines[reference["pipeline_id"]] = {"pipeline_id": reference["pipeline_id"], "name": "old"}
            self.registry.versions[reference["pipeline_version_id"]] = {**reference, "pipeline_spec": version}
        self.runs[run["run_id"]] = {**run, "_states": [], "_workflow": workflow}
        self._has_recorded = True
        return str(run["run_id"])

    def spec(self, run: dict[str, Any]) -> dict[str, Any]:
        """Return the specification of a run or of a recurring one: that of its version, or its own."""
        reference = run.get("pipeline_version_reference")
        posted = self.registry.version(reference)["pipeline_spec"] if reference else run.get("pipeline_spec")
        if not isinstance(posted, dict):
            raise ApiError(400, "Invalid input error: the run has no pipeline_spec.")
        return posted

    def _advance(self, identifier: str) -> dict[str, Any]:
        """Show a run as it is now, and let it move on."""
        run = self.runs[identifier]
        if run.get("_workflow") is not None:
            return _shown(run)
        states = self.task_states(identifier)
        shown = {**_shown(run), "run_details": {"task_details": kfp_tasks.task_details(identifier, states)}}
        if run["_states"]:
            _enter(run, run["_states"].pop(0))
        return shown

    def task_states(self, run_id: str) -> dict[tuple[str, ...], str]:
        """Return the state of each task of a run as it is now."""
        run = self.runs[run_id]
        posted = self.spec(run)
        spec = posted.get("pipeline_spec", posted)
        return kfp_tasks.task_states(spec, run["state"], at=self.stops_at, verdict=self.verdict)

    def _first_version(self, run_id: str, pod: str | None) -> dict[str, Any] | str:
        if not self.serves_first_version or run_id not in self.runs:
            raise ApiError(404, "Not Found")
        if (recorded := self.runs[run_id].get("_workflow")) is not None:
            if pod:
                raise ApiError(400, "Failed to read logs from a single-user installation")
            return {"pipeline_runtime": {"workflow_manifest": json.dumps(recorded)}}
        states = self.task_states(run_id)
        if pod:
            for key, text in self.logs.items():
                if kfp_tasks.pod_name(states, key) == pod:
                    return text
            raise ApiError(500, f"Failed to read logs from pod {pod}")
        cancelled = bool(self.runs[run_id].get("_cancelled"))
        manifest = kfp_tasks.workflow(states, self.messages, cancelled=cancelled, retry_strategy=self.retry_strategy)
        return {"run": {"id": run_id}, "pipeline_runtime": {"workflow_manifest": manifest}}

    def _terminate(self, run: dict[str, Any]) -> dict[str, Any]:
        if run["state"] not in ("PENDING", "RUNNING", "PAUSED"):
            raise ApiError(400, f"Invalid input error: Failed to terminate a run {run['run_id']}. Row not found")
        run.update(_states=["FAILED"], _cancelled=True, _workflow=None)
        _enter(run, "CANCELING")
        return {}

    def _retry(self, run: dict[str, Any]) -> dict[str, Any]:
        if self.retry_fails:
            raise ApiError(500, "Internal Server Error: Cannot retry workflow with offloaded node status")
        if run["state"] != "FAILED":
            raise ApiError(400, "Workflow must be Failed/Error to retry: workflow cannot be retried")
        run.update(_states=["RUNNING", self.final_state], _cancelled=False, _workflow=None)
        _enter(run, "PENDING")
        return {}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")


def _enter(run: dict[str, Any], state: str) -> None:
    """Bring a run into a state, and keep it in its history."""
    if run.get("state") != state:
        run.setdefault("state_history", []).append({"state": state, "update_time": _now()})
    run["state"] = state


def _shown(run: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in run.items() if not key.startswith("_")}


def _matches(item: dict[str, Any], query: dict[str, list[str]]) -> bool:
    """Apply what a list is narrowed by."""
    return query.get("experiment_id", [""])[0] in ("", item["experiment_id"]) and kfp_registry.matches(item, query)
