"""Metrics on their way to MLflow, by a process beside the one that has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict

from baton.components.shared.recipe import Recipe
from baton.components.shared.runs.documents.training import Tracking
from baton.components.shared.runs.mlflow import models, unsent, usage
from baton.components.shared.runs.mlflow.told import Order
from baton.components.shared.runs.run import Run

SENDER = "baton.components.shared.runs.mlflow.sender"
STOPPED = "tracking at "
"""How the line begins by which the process tells why it has stopped."""
HELD_S = 30.0
"""Seconds for which a chunk holds back what a database of this machine is to have, see `unsent`."""


class Tracker:
    """Sends metrics from a separate process, so that neither import nor server holds training up.

    Args:
        run: The training run.
        recipe: Its recipe, where that is at hand.
        trains: Whether a chunk trains: then CPU, memory, disk, network and GPU use of this machine is logged too, and
            steps that were logged before a restore are not logged again.
        params: Parameters of the run that were found out.
    """

    def __init__(
        self,
        run: Run,
        *,
        recipe: Recipe | None = None,
        trains: bool = False,
        params: Mapping[str, str] | None = None,
    ) -> None:
        self._run = run
        self._process: subprocess.Popen[str] | None = None
        self._held: unsent.Held | None = None
        self._usage: usage.Usage | None = None
        self._began = time.monotonic()
        tracking = run.read(Tracking)
        if tracking is None:
            return
        folder = _unsent(run, tracking)
        self._order = Order(
            uri=tracking.mlflow,
            run_id=tracking.run_id,
            trains=trains,
            datasets=tracking.datasets,
            model=models.of(run, recipe or run.recipe()),
            params=params or {},
            unsent=folder,
        )
        if not (folder and trains and HELD_S and self._hold(folder)):
            self._start()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Hands metrics of a step over; returns at once."""
        # With the time of the step: it may be sent much later.
        self._hand({"metrics": dict(metrics), "step": step, "milliseconds": int(time.time() * 1000)})

    def tag_model(self, tags: Mapping[str, str]) -> None:
        """Hands tags of the logged model over; returns at once."""
        self._hand({"tags": dict(tags)})

    def close(self, timeout: float = 30.0) -> None:
        """Waits until what was handed over is sent, at most `timeout` seconds, or held back."""
        self._end_holding()
        if self._process is None or self._process.stdin is None:
            return
        try:
            self._process.stdin.close()
            self._process.wait(timeout)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._run.warn(f"tracking did not finish in {timeout:.0f} s and is abandoned")
            self._process.kill()
        self._heard()

    def _heard(self) -> None:
        """Tells why the process has stopped, where it did before its end."""
        process, self._process = self._process, None
        if process and process.stdout:
            with process.stdout as said:
                for line in said:
                    if line.startswith(STOPPED):
                        self._run.warn(line.strip())

    def _hand(self, document: Mapping[str, object]) -> None:
        if self._held is None:
            self._write(document)
            return
        self._held.write(document)
        if time.monotonic() - self._began > HELD_S:
            self._end_holding()
            self._start()  # it sends what was held back first

    def _hold(self, folder: str) -> bool:
        try:
            held = self._held = unsent.Held(folder)
        except OSError:
            return False
        held.write({"params": dict(self._order.params)})
        self._usage = usage.Usage(lambda *sample: held.write(usage.line(*sample)), imports_mlflow=False)
        return True

    def _end_holding(self) -> None:
        if self._held and self._usage:
            self._usage.end()
            self._held.close()
        self._held = None

    def _start(self) -> None:
        # In a session of its own: Ctrl-C ends training, and what was handed over is sent still; it ends with its input.
        self._process = subprocess.Popen(
            [sys.executable, "-m", SENDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._write(asdict(self._order))  # not as arguments: an address may hold a password

    def _write(self, document: Mapping[str, object]) -> None:
        if self._process and self._process.stdin:
            try:
                self._process.stdin.write(json.dumps(document) + "\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                self._heard()


def send_held(run: Run) -> None:
    """Sends what chunks have held back, where there is any, in this process.

    Raises:
        Exception: MLflow's own, where the database does not take it.
    """
    tracking = run.read(Tracking)
    folder = _unsent(run, tracking) if tracking else None
    if tracking and unsent.files(folder):
        from baton.components.shared.runs.mlflow.sender import Sender

        model = models.of(run, run.recipe())
        Sender(Order(tracking.mlflow, tracking.run_id, datasets=tracking.datasets, model=model, unsent=folder))


def _unsent(run: Run, tracking: Tracking) -> str | None:
    """Returns where lines are held back, None where they are not: for a server, and in a store that is no folder."""
    is_held = tracking.mlflow.startswith("sqlite:") and run.storage.is_local
    return os.path.abspath(run.storage.key(run.path("unsent"))) if is_held else None
