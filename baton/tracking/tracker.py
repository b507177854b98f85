"""A run's parameters, logged model and metrics in MLflow; another process sends the metrics.

A parameter's name is its dotted path in the recipe, so that pages of runs compare. The logged model is pending while
chunks train, and ready once it can be used.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, Self

from baton.recipe.recipe import Recipe
from baton.runs.documents import TokenizedRows, TrackingRun
from baton.runs.outcomes import EvaluationResult, ExportedModel
from baton.runs.plan import Plan
from baton.runs.run import Run
from baton.tracking import messages
from baton.tracking.messages import LoggedModel, SenderConfig

# Sections without influence on training; the recipe among the artifacts has them.
ELSEWHERE = frozenset({"name", "phases", "resources", "retrain", "store", "sweep", "tracking"})
KIND = ("profile", "gpus", "nodes")  # settings of `resources` with influence
ALWAYS = ("seed", "training.method", "training.batch_size", "training.learning_rate")
LONGEST = 500
FORBIDDEN = re.compile(r"[^\w\-. /:]")  # characters that MLflow refuses in a name

Parameters = dict[str, str]


def recipe_params(recipe: Recipe) -> Parameters:
    """Returns a recipe's settings, with its `--set` and its profile's choices, but for those that a chunk finds out."""
    written: dict[str, Any] = recipe.model_dump(mode="json", exclude_defaults=True)
    resources = written.get("resources", {})
    document = {name: value for name, value in written.items() if name not in ELSEWHERE}
    document["resources"] = {name: resources[name] for name in KIND if name in resources}
    whole = dict(_flat(recipe.model_dump(mode="json", include={"seed", "training"})))
    values = dict(_flat(document)) | {name: whole[name] for name in ALWAYS}
    # These are found by the first chunk, and a parameter cannot be changed.
    if recipe.training.lr_find:
        del values["training.learning_rate"]
    if recipe.training.micro_batch_size == "auto":
        del values["training.micro_batch_size"]
    return _texts(values)


def resolved_params(
    recipe: Recipe, plan: Plan, tokens: TokenizedRows, *, world_size: int, parameters: int, trainable: int
) -> Parameters:
    """Returns the parameters that a chunk has found out; its recipe is resolved."""
    return _texts(
        {
            "training.learning_rate": recipe.training.learning_rate,
            "training.micro_batch_size": recipe.micro_batch_size_per_process,
            "training.gradient_accumulation_steps": recipe.gradient_accumulation_steps,
            "parallel.world_size": world_size,
            "plan.steps": plan.num_steps,
            "plan.steps_per_epoch": plan.steps_per_epoch,
            "plan.targets": ", ".join(map(str, plan.targets)),
            "plan.rows": plan.rows,
            "data.tokens": tokens.tokens,
            "model.parameters": parameters,
            "model.trainable_parameters": trainable,
        }
    )


def section_params(name: str, document: Mapping[str, Any]) -> Parameters:
    """Returns the parameters of a section."""
    return _texts(dict(_flat(dict(document), name)))


def _texts(values: Mapping[str, Any]) -> Parameters:
    # None is no value, and an empty section sets nothing.
    found = {}
    for name, value in values.items():
        if value is not None and value != {}:
            is_plain = isinstance(value, list) and not any(isinstance(entry, list | dict) for entry in value)
            found[FORBIDDEN.sub("_", name)] = (", ".join(map(str, value)) if is_plain else str(value))[:LONGEST]
    return found


def _flat(document: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        name = f"{path}.{key}".lstrip(".")
        if isinstance(value, dict) and value:
            yield from _flat(value, name)
        else:
            yield name, value


EXTERNAL = "mlflow.model.isExternal"  # MLflow's tag of a model whose files are elsewhere


def model_of(run: Run, recipe: Recipe) -> LoggedModel:
    """Returns the model that a run's first chunk makes."""
    tags = {"baton.run": run.name, "baton.run_uri": run.uri}
    if recipe.model.base:
        tags["baton.base"] = recipe.model.base
    return LoggedModel(run.name, recipe.training.method, tags)


def newest_model(client: Any, run_id: str) -> Any:
    """Returns the newest logged model of a run, if any."""
    outputs = client.get_run(run_id).outputs
    found = outputs.model_outputs if outputs else []
    return client.get_logged_model(found[-1].model_id) if found else None


def has_no_files(model: Any) -> bool:
    """Tells whether a logged model can take files: it is not ready, or was made ready without any."""
    return bool(model.status != "READY" or EXTERNAL in model.tags)


def end_model(client: Any, run: Run, run_id: str, status: str) -> None:
    """Ends the model of a run that has ended, unless an export with its files has made it ready."""
    if status != "FINISHED":
        fail_model(client, run_id)
        return
    model = newest_model(client, run_id)
    if model is None or model.status == "READY":
        return
    tags = {EXTERNAL: "true"}
    if exported := run.read(ExportedModel):
        tags["baton.model_uri"] = exported.model_uri
    evaluation = run.read(EvaluationResult)
    if evaluation and evaluation.gate:
        tags["baton.verdict"] = evaluation.gate.words
    client.set_logged_model_tags(model.model_id, tags)
    client.finalize_logged_model(model.model_id, "READY")


def fail_model(client: Any, run_id: str) -> None:
    """Sets the model of a run failed, unless it is ready."""
    model = newest_model(client, run_id)
    if model is not None and model.status != "READY":
        client.finalize_logged_model(model.model_id, "FAILED")


def resume_model(client: Any, run_id: str) -> None:
    """Sets a failed model of a run that resumes pending again."""
    model = newest_model(client, run_id)
    if model is not None and model.status == "FAILED":
        client.finalize_logged_model(model.model_id, "PENDING")


SENDER = "baton.tracking.client"
STOPPED = "tracking at "  # beginning of the line with which the process tells why it has stopped
HELD_S = 30.0  # seconds that a chunk holds back metrics for a database of this machine, see `messages.MetricBuffer`


class Tracker:
    """Sends metrics from a separate process, so that no import or server holds training up; see `SenderConfig`."""

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
        self._held: messages.MetricBuffer | None = None
        self._usage: messages.Usage | None = None
        self._began = time.monotonic()
        tracking = run.read(TrackingRun)
        if tracking is None:
            return
        folder = _unsent(run, tracking)
        self._order = SenderConfig(
            uri=tracking.mlflow,
            run_id=tracking.run_id,
            trains=trains,
            datasets=tracking.datasets,
            model=model_of(run, recipe or run.recipe()),
            params=params or {},
            unsent=folder,
        )
        if folder and trains and HELD_S:
            with contextlib.suppress(OSError):
                held = self._held = messages.MetricBuffer(folder)
                held.write({"params": dict(self._order.params)})
                self._usage = messages.Usage(held.write, imports_mlflow=False)
        if self._held is None:
            self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        # With the time of the step: it may be sent much later.
        self._send({"metrics": dict(metrics), "step": step, "milliseconds": int(time.time() * 1000)})

    def tag_model(self, tags: Mapping[str, str]) -> None:
        self._send({"tags": dict(tags)})

    def close(self, timeout: float = 30.0) -> None:
        """Waits until everything is sent, at most `timeout` seconds, or held back."""
        self._end_holding()
        if self._process is None or self._process.stdin is None:
            return
        try:
            self._process.stdin.close()
            self._process.wait(timeout)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._run.warn(f"tracking did not finish in {timeout:.0f} s and is abandoned")
            self._process.kill()
        self._pass_on_warnings()

    def _pass_on_warnings(self) -> None:
        process, self._process = self._process, None
        if process and process.stdout:
            with process.stdout as said:
                for line in said:
                    if line.startswith(STOPPED):
                        self._run.warn(line.strip())

    def _send(self, document: Mapping[str, object]) -> None:
        if self._held is None:
            self._write(document)
            return
        self._held.write(document)
        if time.monotonic() - self._began > HELD_S:
            self._end_holding()
            self._start()  # it sends held metrics first

    def _end_holding(self) -> None:
        if self._held and self._usage:
            self._usage.end()
            self._held.close()
        self._held = None

    def _start(self) -> None:
        # In a session of its own: Ctrl-C ends training, and the lines handed over are still sent; it ends with its
        # input.
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
                self._pass_on_warnings()


def send_held(run: Run) -> None:
    """Sends the lines that chunks have held back, in this process; raises MLflow's own errors."""
    tracking = run.read(TrackingRun)
    folder = _unsent(run, tracking) if tracking else None
    if tracking and messages.buffered_files(folder):
        from baton.tracking.client import Sender

        model = model_of(run, run.recipe())
        Sender(SenderConfig(tracking.mlflow, tracking.run_id, datasets=tracking.datasets, model=model, unsent=folder))


def _unsent(run: Run, tracking: TrackingRun) -> str | None:
    """Returns the folder of lines held back; None for a server, and in a store that is no folder."""
    is_held = tracking.mlflow.startswith("sqlite:") and run.storage.is_local
    return os.path.abspath(run.storage.key(run.path("unsent"))) if is_held else None
