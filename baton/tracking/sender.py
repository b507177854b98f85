"""The process beside a chunk that sends its metrics: `python -m baton.tracking.sender`.

It reads JSON lines from standard input until that ends: a `SenderConfig`, then metrics with their `step` and its time
in `milliseconds`, or tags for the logged model. In a process of its own, no import or server holds training up; it
imports MLflow only where it has to, see `client.speaks_rest`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from baton.tracking import messages
from baton.tracking.client import open_client, without_credentials
from baton.tracking.messages import LoggedModel, SenderConfig, TrackingState, Value

logger = logging.getLogger("baton")

HELD_OUT = ("eval_", "written_", "final_")
"""Beginnings of figures' names for rows held out from training."""
OF_OTHERS = ("system/", "final_before_", "final_production_")
"""Beginnings of figures' names that are not the trained model's."""
TIMED = ("_runtime", "_per_second", "num_tokens")
"""Ends of figures' names for pace and duration, in training or evaluation."""
OF_TRAINING = ("epoch", "gpu_memory_bytes", "grad_norm", "learning_rate", "mfu")
"""Figures of the course of training, not of its model."""
TOGETHER_S = 1.0
"""Seconds of metrics in one request."""
AT_ONCE = 1000
"""Maximum of metrics in one request."""


class Sender:
    """Sends lines to a tracking run; while a chunk trains, figures of the machine are put among them."""

    def __init__(self, order: SenderConfig, lines: queue.Queue[str | None] | None = None) -> None:
        self._order = order
        self._client = open_client(order.uri)
        self._run: TrackingState = self._client.read(order.run_id)
        self._steps = dict(self._run.steps)
        self._newest: dict[str, Value] = {}
        if order.trains:
            if self._run.status != "RUNNING":
                self._client.reopen(order.run_id)  # a chunk may train again after its run was called failed or killed
            if lines is not None:
                messages.Usage(lambda line: lines.put(json.dumps(line)), imports_mlflow=True)
        held = list(messages.finished_buffers(order.unsent))
        found_out = [document.get("params", {}) for _, documents in held for document in documents]
        self._params = self._log_params([*found_out, order.params])
        self._model = self._run.models[-1] if self._run.models else None
        if self._model is None and order.model:
            try:
                self._model = self._client.make_model(order.run_id, self._run.experiment_id, order.model, self._params)
            except Exception as error:  # a server before MLflow 3 knows no models
                logger.info("tracking has no model of this run: %s", error)
        for path, documents in held:
            self.send(documents, once=True)
            os.unlink(path)  # if this process is lost before, the next one leaves out steps that are there

    def send(self, documents: list[dict[str, Any]], *, once: bool) -> None:
        """Sends metrics and tags; with `once` it leaves out steps that the run has already."""
        # After a restore, steps are trained again, to the same figures.
        values = [value for document in documents for value in self._values(document, once=once)]
        for first in range(0, len(values), AT_ONCE):
            self._client.log(self._order.run_id, values[first : first + AT_ONCE])
        for document in documents:
            if self._model and document.get("tags"):
                # The logged model gets only the newest figures: its page in MLflow has a row for every value.
                ours = [(value, self._belonging(name)) for name, value in self._newest.items()]
                if newest := [{**value, **belonging} for value, belonging in ours if belonging]:
                    self._client.log(self._order.run_id, newest)
                self._client.tag_model(self._model, document["tags"])

    def _log_params(self, found_out: Sequence[Mapping[str, str]]) -> dict[str, str]:
        """Logs parameters that are new to the run, and returns all."""
        # A parameter that has changed, such as the number of processes, keeps the first chunk's value: MLflow refuses
        # another.
        params = dict(self._run.params)
        for found in found_out:
            params = {**found, **params}
        if new := {name: value for name, value in params.items() if name not in self._run.params}:
            self._client.log_params(self._order.run_id, new)
        return params

    def _values(self, document: dict[str, Any], *, once: bool) -> Iterator[Value]:
        for name, number in document.get("metrics", {}).items():
            # Samples of a machine are numbered as they come, over all chunks.
            step = int(document["step"]) if "step" in document else self._steps.get(name, -1) + 1
            if once and step <= self._steps.get(name, -1):
                continue
            self._steps[name] = step
            time_ms = int(document["milliseconds"])
            value: Value = {"key": name, "value": float(number), "timestamp": time_ms, "step": step}
            if once:
                self._newest[name] = value
                yield value
            else:
                yield {**value, **self._belonging(name)}

    def _belonging(self, name: str) -> dict[str, str]:
        if name.startswith(OF_OTHERS) or name.endswith(TIMED) or name in OF_TRAINING:
            return {}
        found = {"model_id": self._model} if self._model else {}
        # Without a model MLflow keeps no data set with a figure.
        side = self._order.datasets.get("eval" if name.startswith(HELD_OUT) else "train") if found else None
        return found | ({"dataset_name": side[0], "dataset_digest": side[1]} if side else {})


def serve() -> None:
    """Sends the lines of standard input until that ends."""
    os.nice(10)  # training comes first
    document = json.loads(sys.stdin.readline())
    model = document.pop("model", None)
    order = SenderConfig(**document, model=LoggedModel(**model) if model else None)
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    try:
        sender = Sender(order, lines)
        while (batch := _drain(lines)) != [None]:
            sender.send([json.loads(line) for line in batch if line], once=order.trains)
            if None in batch:
                break
    except Exception as error:
        # One line, which `Tracker` passes on.
        print(f"tracking at {without_credentials(order.uri)} stopped: {' '.join(str(error).split())}", flush=True)


def _drain(lines: queue.Queue[str | None]) -> list[str | None]:
    """Returns the first line that comes and those within a second after it; None stands for the end."""
    batch = [lines.get()]
    end = time.monotonic() + TOGETHER_S
    with contextlib.suppress(queue.Empty):
        while batch[-1] is not None:
            batch.append(lines.get(timeout=max(0.0, end - time.monotonic())))
    return batch


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    serve()
