"""The nodes of a TrainJob as processes of this machine, which die when they are told to."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from baton.kfp import processes
from tests.train.trainjob.job_api import JobApi, ended

NO_ROOM = [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes: insufficient nvidia.com/gpu"}]


class LocalNodes:
    """Runs the nodes of each job for which there is room, until one of them fails. Use as a context manager.

    Args:
        api: Where jobs are made.
        folder: Where their output goes.
        room: For how many nodes there is room when the first job is made, and after each loss.
        kill_at: The steps after which the last node of a job is killed.

    Attributes:
        jobs: How many nodes each job had, in order.
    """

    def __init__(self, api: JobApi, folder: Path, room: list[int], kill_at: list[int]) -> None:
        self.jobs: list[int] = []
        self._api, self._folder = api, folder
        self._room, self._kill_at = list(room), list(kill_at)
        self._nodes: list[tuple[dict[str, Any], subprocess.Popen[bytes], Path]] = []
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        api.on_create, api.on_delete = self._make, self._end

    def __enter__(self) -> LocalNodes:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._end({})

    def printed(self) -> str:
        """Returns what all nodes have printed."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self._folder.glob("node-*")))

    def _make(self, job: dict[str, Any]) -> None:
        trainer = job["spec"]["trainer"]
        nodes = trainer["numNodes"]
        self.jobs.append(nodes)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with self._lock:
            for index in range(nodes):
                if nodes > self._room[0]:
                    self._api.pod(index, "Pending", conditions=NO_ROOM)["spec"] = {}
                    continue
                meeting = {"NNODES": nodes, "NPROC_PER_NODE": 1, "NODE_RANK": index, "MASTER_PORT": port}
                environment = {entry["name"]: entry["value"] for entry in trainer["env"]}
                environment |= {f"PET_{name}": str(value) for name, value in meeting.items()}
                path = self._folder / f"node-{len(self.jobs)}-{index}"
                with path.open("wb") as file:
                    process = subprocess.Popen(
                        [sys.executable, *trainer["command"][1:], *trainer["args"]],
                        env={**os.environ, **environment, "PET_MASTER_ADDR": "127.0.0.1"},
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                pod = self._api.pod(index)
                pod["metadata"]["name"] = f"job-{len(self.jobs)}-node-0-{index}"
                self._nodes.append((pod, process, path))

    def _end(self, _: dict[str, Any]) -> None:
        with self._lock:
            for _pod, process, _path in self._nodes:
                self._kill(process)
            self._nodes = []

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        processes.clear_staging(process.pid)

    def _work(self) -> None:
        while not self._stop.wait(0.1):
            with self._lock:
                for pod, process, path in self._nodes:
                    lines = path.read_text(errors="replace").splitlines()
                    self._api.logs[pod["metadata"]["name"]] = lines
                    if self._nodes[0][0] is pod and self._kill_at and _has_come_to(self._kill_at[0], lines):
                        del self._kill_at[0], self._room[0]
                        self._kill(self._nodes[-1][1])
                    if process.poll() is not None:
                        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
                        phase = "Failed" if code else "Succeeded"
                        pod["status"] = {"phase": phase, "containerStatuses": ended(code)}
                phases = {pod["status"]["phase"] for pod, _, _ in self._nodes}
                if phases == {"Succeeded"}:
                    self._api.end("Complete")
                elif "Failed" in phases:
                    self._api.end("Failed")


def _has_come_to(step: int, lines: list[str]) -> bool:
    steps = [json.loads(line.removeprefix("::baton ")) for line in lines if line.startswith('::baton {"event": "step"')]
    return any(event["step"] >= step for event in steps)
