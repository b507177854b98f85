"""The part of Kubernetes' API that lists pods and reads their logs: pods of a recorded workflow, as Argo makes them."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

PHASES = {"Error": "Failed", "Omitted": "Pending"}
"""Argo's phase of a node → Kubernetes' of its pod, where they differ."""


class KubeApi:
    """The server; use as a context manager.

    Attributes:
        pods: Pods by name.
        logs: What a pod has printed, by its name.
        others: Other answers by their path.
        status: Status of all answers.
    """

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.logs: dict[str, str] = {}
        self.others: dict[str, Any] = {}
        self.status = 200
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                body = api.answer(parts.path, parse_qs(parts.query))
                self.send_response(api.status if body is not None else 404)
                self.end_headers()
                self.wfile.write((body or "").encode())

            def log_message(self, format: str, *args: object) -> None:
                """Keep the test's output clean."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> KubeApi:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path: str, query: dict[str, list[str]]) -> str | None:
        if match := re.fullmatch(r"/api/v1/namespaces/kubeflow/pods(?:/([^/]+)/log)?", path):
            if match[1]:
                return self.logs.get(match[1]) if query["container"] == ["main"] else None
            key, _, value = query["labelSelector"][0].partition("=")
            found = [pod for pod in self.pods.values() if pod["metadata"]["labels"].get(key) == value]
            return json.dumps({"kind": "PodList", "items": found})
        return json.dumps(self.others[path]) if path in self.others else None

    def kubeconfig(self, folder: Path) -> str:
        """Write a kubeconfig that leads here, and return its path."""
        address = f"http://127.0.0.1:{self._server.server_port}"
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": address}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        path = folder / "kubeconfig"
        path.write_text(json.dumps(document))
        return str(path)

    def add(self, run_id: str, workflow: dict[str, Any]) -> None:
        """Put the pods of a recorded workflow there; those that were deleted are gone."""
        name = workflow.get("metadata", {}).get("name", "")
        for node in workflow.get("status", {}).get("nodes", {}).values():
            message = node.get("message", "")
            if node["type"] != "Pod" or "pod deleted" in message:
                continue
            pod = f"{name}-{node.get('templateName')}-{node['id'].rpartition('-')[2]}"
            annotations = {
                "workflows.argoproj.io/node-name": node["name"],
                "workflows.argoproj.io/node-id": node["id"],
            }
            labels = {"pipeline/runid": run_id, "workflows.argoproj.io/workflow": name}
            phase = PHASES.get(node["phase"], node["phase"])
            status = {"phase": phase, "startTime": node.get("startedAt"), **_status(phase, message)}
            self.pods[pod] = {
                "metadata": {"name": pod, "labels": labels, "annotations": annotations},
                "status": status,
            }


def _status(phase: str, message: str) -> dict[str, Any]:
    """Return what Kubernetes says where Argo says `message`."""
    if ended := re.fullmatch(r"(?s)([\w-]+): (\w+) \(exit code (\d+)\)(?:: (.*))?", message):
        container, reason, code, words = ended.groups()
        terminated = {"reason": reason, "exitCode": int(code), **({"message": words} if words else {})}
        beside = {"name": "wait", "state": {"terminated": {"reason": "Completed", "exitCode": 0}}}
        return {"containerStatuses": [beside, {"name": container, "state": {"terminated": terminated}}]}
    if phase == "Pending" and message:
        reason, _, words = message.partition(": ")
        if reason == "Unschedulable":
            return {"conditions": [{"type": "PodScheduled", "status": "False", "reason": reason, "message": words}]}
        return {"containerStatuses": [{"name": "main", "state": {"waiting": {"reason": reason, "message": words}}}]}
    return {"message": message} if phase == "Failed" else {}
