"""Losses since a run's newest checkpoint, from where its chunk reports them: MLflow, or the lines held back for it."""

import json
import logging
import os
import threading
import time
from typing import Any

from baton.checkpoint.store import LogEntry
from baton.runs.documents import TrackingRun
from baton.runs.run import Run
from baton.tracking.client import connect, without_credentials

logger = logging.getLogger("baton")

SILENT_S = 60.0  # for which a server that did not answer is not asked again
SQLITE = "sqlite:///"
AT_CHECKPOINTS = "curves grow at each checkpoint."

Losses = dict[int, float]  # by step


class Tail:
    """Reads the losses of chunks that train, and never waits for a server: its answer counts in the next round.

    `trouble` tells in words why losses are missing; empty where none are.
    """

    def __init__(self) -> None:
        self.trouble = ""
        self._clients: dict[str, Any] = {}
        self._silent: dict[str, float] = {}  # server → when it is asked again
        self._asking: set[str] = set()  # tracking runs with a question under way
        self._answers: dict[str, Losses] = {}

    def read(self, run: Run, after: int) -> list[LogEntry]:
        """Returns the losses after step `after`, the newest checkpoint's."""
        tracking = run.read(TrackingRun)
        if tracking is None:
            self.trouble = f"Not tracked in MLflow: {AT_CHECKPOINTS}"
            return []
        losses = _held(run)
        if max(losses, default=0) <= after:  # sent already, or never held back
            losses = self._told(tracking)
        return [{"step": step, "loss": loss} for step, loss in sorted(losses.items()) if step > after]

    def _told(self, tracking: TrackingRun) -> Losses:
        uri, run_id = tracking.mlflow, tracking.run_id
        if uri.startswith(SQLITE) and not os.path.exists(uri.removeprefix(SQLITE)):  # MLflow would make an empty one
            self.trouble = f"{uri} is not on this machine: {AT_CHECKPOINTS}"
        elif run_id not in self._asking and time.monotonic() > self._silent.get(uri, 0.0):
            self._asking.add(run_id)
            threading.Thread(target=self._ask, args=(uri, run_id), name="baton-tail", daemon=True).start()
        return self._answers.get(run_id, {})

    def _ask(self, uri: str, run_id: str) -> None:
        try:
            if uri not in self._clients:
                self._clients[uri] = connect(uri)
            history = self._clients[uri].get_metric_history(run_id, "loss")
            self._answers[run_id] = {metric.step: metric.value for metric in history}
            self.trouble = ""
        except Exception as error:
            logger.info("MLflow at %s does not answer: %s", without_credentials(uri), error)
            self._silent[uri] = time.monotonic() + SILENT_S
            self.trouble = f"MLflow at {without_credentials(uri)} does not answer: {AT_CHECKPOINTS}"
        finally:
            self._asking.discard(run_id)


def _held(run: Run) -> Losses:
    """Returns the losses that are held back below the run; see `baton.tracking.messages.MetricBuffer`."""
    losses: Losses = {}
    for name in run.storage.list(run.path("unsent")):
        try:
            lines = run.storage.read(run.path(f"unsent/{name}")).decode().split("\n")[:-1]  # the last may be cut off
        except FileNotFoundError:  # sent meanwhile
            continue
        for document in map(json.loads, lines):
            if "loss" in document.get("metrics", {}):
                losses[document["step"]] = document["metrics"]["loss"]
    return losses
