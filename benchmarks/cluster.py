"""Pods on the cluster of `KUBECONFIG`, whose only node is this machine, with the image `BATON_IMAGE`."""

from __future__ import annotations

import json
import os
import time
import uuid
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from baton.kfp.component import EXECUTOR
from baton.runs.run import Run
from benchmarks.bench import parse_event, parse_mark
from benchmarks.ours import ENVIRONMENT
from benchmarks.process import ChildFailed, Event, Trace

READS = "/opt/baton/share/baton/reads"
STORE = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")
LONGEST_S = 300
_STARTED = '{"mark": "container", "at": '


class Cluster:
    """A namespace of its own: a context manager.

    Raises:
        ChildFailed: there is no cluster, no image, or no right to forget files.
    """

    def __init__(self) -> None:
        if missing := [name for name in ("KUBECONFIG", "BATON_IMAGE") if not os.environ.get(name)]:
            raise ChildFailed(f"{', '.join(missing)} not set: a cluster on this machine, and the image there")
        from kubernetes import client, config

        config.load_kube_config(os.environ["KUBECONFIG"])
        self._core = client.CoreV1Api()
        self._namespace = f"baton-bench-{uuid.uuid4().hex[:6]}"

    def __enter__(self) -> Self:
        self._core.create_namespace({"metadata": {"name": self._namespace}})
        return self

    def __exit__(self, *_: object) -> None:
        self._core.delete_namespace(self._namespace)

    def chunk(self, run: Run, *, is_listed: bool) -> Trace:
        """Runs a run's first chunk to its first step.

        Args:
            run: The run.
            is_listed: Whether the pod sees the image's lists of what is read.
        """
        given = {"inputs": {"parameterValues": {"baton": run.uri, "index": 1}}, "outputs": {"outputFile": "/dev/null"}}
        stage = ["train_chunk", "bench", "--function_to_execute", "train_chunk", "--executor_input", json.dumps(given)]
        return self._run(["python3", "-m", EXECUTOR, *stage], "step", hidden=() if is_listed else (READS,))

    def read(self, threads: int) -> Event:
        """Reads all that the image's list names, and returns the `seconds` and `bytes`."""
        script = Path(__file__).with_name("disk.py").read_text(encoding="utf-8")
        return self._run(["python3", "-c", script, f"{READS}/train_chunk", str(threads)], "read").all("read")[0]

    def _run(self, command: list[str], last: str, hidden: tuple[str, ...] = ()) -> Trace:
        """Runs a pod until it tells of an event."""
        name, trace = f"pod-{uuid.uuid4().hex[:6]}", Trace(spawned=time.time())
        self._core.create_namespaced_pod(self._namespace, _manifest(name, command, hidden))
        try:
            self._listen(name, last, trace)
        finally:
            self._core.delete_namespaced_pod(name, self._namespace, grace_period_seconds=0)
        trace.ended = time.time()
        return trace

    def _listen(self, name: str, last: str, trace: Trace) -> None:
        while (phase := self._core.read_namespaced_pod(name, self._namespace).status.phase) == "Pending":
            if time.time() > trace.spawned + LONGEST_S:
                raise ChildFailed(f"pod {name} has not started in {LONGEST_S} s")
            time.sleep(0.2)
        log = self._core.read_namespaced_pod_log(name, self._namespace, follow=True, _preload_content=False)
        said = []
        for line in _lines(log):
            said.append(line)
            if event := parse_event(line) or parse_mark(line):
                trace.events.append(event)
                if event["event"] == last:
                    return
        raise ChildFailed(f"pod {name} ({phase}) has told no {last}: " + "\n".join(said[-20:]))


def forget_files() -> None:
    """Empties the kernel's cache of files.

    Raises:
        ChildFailed: this process may not.
    """
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")
    except OSError as error:
        raise ChildFailed(f"the kernel's cache of files cannot be emptied, which needs root: {error}") from None


def _manifest(name: str, command: list[str], hidden: tuple[str, ...]) -> dict[str, Any]:
    environment = {**ENVIRONMENT, **{name: os.environ[name] for name in STORE if name in os.environ}}
    is_loopback = urlsplit(os.environ["AWS_ENDPOINT_URL"]).hostname in ("127.0.0.1", "localhost", "::1")
    folders = {"/tmp": "Memory", **dict.fromkeys(hidden, "Memory")}
    begin = f"date '+{_STARTED}%s.%N}}'; exec \"$@\""
    container = {
        "name": "main",
        "image": os.environ["BATON_IMAGE"],
        "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", begin, "sh", *command],
        "env": [{"name": key, "value": value} for key, value in environment.items()],
        "securityContext": {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False},
        "volumeMounts": [{"name": f"empty-{at}", "mountPath": path} for at, path in enumerate(folders)],
    }
    return {
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "hostNetwork": is_loopback,
            "containers": [container],
            "volumes": [
                {"name": f"empty-{at}", "emptyDir": {"medium": medium}} for at, medium in enumerate(folders.values())
            ],
        },
    }


def _lines(log: Any) -> Any:
    """Yields the lines of a log that is followed."""
    rest = b""
    for piece in log.stream():
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)
