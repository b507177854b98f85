"""Metrics on their way to MLflow, by a process beside the one that has them."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict

from baton.components.shared.runs.documents.training import Tracking
from baton.components.shared.runs.mlflow.told import Model, Order
from baton.components.shared.runs.run import Run

logger = logging.getLogger("baton")

SENDER = "baton.components.shared.runs.mlflow.sender"


class Tracker:
    """Sends metrics from a separate process, so that neither import nor server holds training up.

    Args:
        run: The training run.
        trains: Whether a chunk trains: then CPU, memory, disk, network and GPU use of this machine is logged too, and
            steps that were logged before a restore are not logged again.
        model: The logged model that the first chunk makes; None where none is to be made.
        params: Parameters of the run that were found out.
    """

    def __init__(
        self, run: Run, *, trains: bool = False, model: Model | None = None, params: Mapping[str, str] | None = None
    ) -> None:
        self._process: subprocess.Popen[str] | None = None
        if tracking := run.read(Tracking):
            # In a session of its own: Ctrl-C ends training, and what was handed over is sent still; it ends with its
            # input.
            self._process = subprocess.Popen(
                [sys.executable, "-m", SENDER], stdin=subprocess.PIPE, text=True, start_new_session=True
            )
            order = Order(tracking.mlflow, tracking.run_id, trains, tracking.datasets, model, params or {})
            self._write(asdict(order))  # not as arguments: an address may hold a password

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Hands metrics of a step over; returns at once."""
        # With the time of the step: it may be sent much later.
        self._write({"metrics": dict(metrics), "step": step, "milliseconds": int(time.time() * 1000)})

    def tag_model(self, tags: Mapping[str, str]) -> None:
        """Hands tags of the logged model over; returns at once."""
        self._write({"tags": dict(tags)})

    def close(self, timeout: float = 30.0) -> None:
        """Waits until what was handed over is sent, at most `timeout` seconds."""
        if self._process is None or self._process.stdin is None:
            return
        try:
            self._process.stdin.close()
            self._process.wait(timeout)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            logger.warning("tracking did not finish in %.0f s and is abandoned", timeout)
            self._process.kill()

    def _write(self, document: Mapping[str, object]) -> None:
        if self._process and self._process.stdin:
            try:
                self._process.stdin.write(json.dumps(document) + "\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                self._process = None  # it has said why
