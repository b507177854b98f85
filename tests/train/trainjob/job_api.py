"""The part of Kubernetes' API that a stage with several nodes uses: jobs, their pods, their log, and what goes wrong.

A real HTTP server on a random port, asked by the real client. It keeps the jobs it is given; pods, events and logs are
what the test puts there.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kubernetes import client

NAMESPACE = "team"
JOBS = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{NAMESPACE}/trainjobs"
CORE = f"/api/v1/namespaces/{NAMESPACE}"


class JobApi:
    """The server and what is in it. Use as a context manager.

    Attributes:
        jobs: Jobs by name.
        pods: The pods of whatever job.
        events: Warnings.
        logs: Lines by pod.
        refuse: Verb of a request on jobs → status and message of the answer.
        requests: Verb and name of each request on jobs that changed something, in order.
        looks: How often a job was looked at since one was created.
        admit: Called with each job that is to be created; returns status and message where it is refused.
        on_create: Called with each job that was created.
        on_delete: Called with each job that was deleted.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.pods: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.logs: dict[str, list[str]] = {}
        self.refuse: dict[str, tuple[int, str]] = {}
        self.requests: list[tuple[str, str]] = []
        self.looks = 0
        self.admit: Callable[[dict[str, Any]], tuple[int, str] | None] = lambda job: None
        self.on_create: Callable[[dict[str, Any]], object] = lambda job: None
        self.on_delete: Callable[[dict[str, Any]], object] = lambda job: None
        api = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def _answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                given = json.loads(self.rfile.read(length)) if length else None
                status, body = api.answer(self.command, self.path, given)
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/plain" if isinstance(body, bytes) else "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_DELETE = do_PATCH = _answer  # noqa: N815

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self) -> JobApi:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def client(self) -> client.ApiClient:
        """Returns a client of this server."""
        return client.ApiClient(client.Configuration(host=f"http://127.0.0.1:{self._server.server_port}"))

    def answer(self, method: str, url: str, given: Any) -> tuple[int, Any]:
        """Returns status and body."""
        path, query = urlsplit(url).path, parse_qs(urlsplit(url).query)
        if path.startswith(JOBS):
            return self._on_jobs(method, path.removeprefix(JOBS).strip("/"), given)
        if path == f"{CORE}/pods":
            return 200, {"items": self.pods}
        if path == f"{CORE}/events":
            return 200, {"items": self.events}
        if match := re.fullmatch(f"{CORE}/pods/(.*)/log", path):
            lines = self.logs.get(match[1], [])
            stamped = [f"2026-01-01T00:00:{n:016.9f}Z {line}" if "timestamps" in query else line
                       for n, line in enumerate(lines)]  # fmt: skip
            return 200, "".join(f"{line}\n" for line in stamped).encode()
        return _status(404, "404 page not found")

    def _on_jobs(self, method: str, name: str, given: Any) -> tuple[int, Any]:
        verb = {"POST": "create", "PATCH": "patch", "DELETE": "delete", "GET": "get" if name else "list"}[method]
        if verb in self.refuse:
            return _status(*self.refuse[verb])
        if verb == "list":
            return 200, {"items": list(self.jobs.values())}
        name = name or given["metadata"]["name"]
        self.looks = self.looks + 1 if verb == "get" else 0 if verb == "create" else self.looks
        if verb != "get":
            self.requests.append((verb, name))
        if verb == "create":
            if name in self.jobs:
                return _status(409, f'trainjobs.trainer.kubeflow.org "{name}" already exists')
            if refusal := self.admit(given):
                return _status(*refusal)
            self.jobs[name] = given
            self.on_create(given)
        elif name not in self.jobs:
            return _status(404, f'trainjobs.trainer.kubeflow.org "{name}" not found')
        elif verb == "delete":
            self.pods = []
            self.on_delete(self.jobs[name])
            return 200, self.jobs.pop(name)
        elif verb == "patch":
            self.jobs[name]["metadata"] |= given["metadata"]
        return 200, self.jobs[name]

    def end(self, kind: str, message: str = "") -> None:
        """Gives every job a last condition."""
        condition = {"type": kind, "status": "True", "reason": f"Jobs{kind}", "message": message}
        for job in self.jobs.values():
            job["status"] = {"conditions": [condition]}

    def pod(self, index: int, phase: str = "Running", **status: Any) -> dict[str, Any]:
        """Adds a pod, and returns it."""
        found = {
            "metadata": {
                "name": f"job-node-0-{index}-abcde",
                "creationTimestamp": "2026-01-01T00:00:00Z",
                "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
            },
            "spec": {"nodeName": f"machine-{index}"},
            "status": {"phase": phase, **status},
        }
        self.pods.append(found)
        return found


def ended(code: int, reason: str = "Error", at: str = "2026-01-01T00:01:00Z") -> list[dict[str, Any]]:
    """Returns the statuses of a container that has ended."""
    return [{"name": "node", "state": {"terminated": {"exitCode": code, "reason": reason, "finishedAt": at}}}]


def waiting(reason: str, message: str) -> list[dict[str, Any]]:
    """Returns the statuses of a container that does not start."""
    return [{"name": "node", "image": "img:1", "state": {"waiting": {"reason": reason, "message": message}}}]


def _status(code: int, message: str) -> tuple[int, Any]:
    if message == "404 page not found":
        return code, message.encode()
    return code, {"kind": "Status", "status": "Failure", "message": message, "code": code}
