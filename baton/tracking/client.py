"""Clients of MLflow, and the process that sends a chunk's metrics: `python -m baton.tracking.client`.

In a process of its own, no import or server holds training up. It takes 0.35 s of a core by REST, and 2.0 s with
MLflow's own library, mostly for its import: so that is used for databases and plugins alone. Addresses, retries and
credentials are those of MLflow's own client, made to give up soon.
"""

import configparser
import contextlib
import json
import logging
import math
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from baton.tracking import messages
from baton.tracking.messages import LoggedModel, SenderConfig, TrackingState, Value

logger = logging.getLogger("baton")

TIMEOUT = "5"  # seconds for one call, which is tried twice: training matters more
CREDENTIALS = re.compile(r"//(?:[^/\s@]+|[^/:@\s'\"]+:(?!\d+(?:/|$))[^@\s'\"]+)@")  # a store's secret may hold a slash
SIGNED = re.compile(r"\?[^\s'\"]*\b(?:sig|token|X-Amz-\w+|AWSAccessKeyId|X-Goog-\w+)=[^\s'\"]*")  # query of an address


def give_up_soon(timeout: str = TIMEOUT, retries: str = "1") -> None:
    """Bounds the requests to a server from here on, unless the environment does."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", timeout)
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", retries)


def connect(uri: str, timeout: str = TIMEOUT, retries: str = "1") -> Any:
    """Returns a client of a tracking server or database that gives up soon."""
    give_up_soon(timeout, retries)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    import mlflow

    mlflow.set_tracking_uri(uri)
    return mlflow.MlflowClient(uri)


def without_credentials(text: str) -> str:
    """Returns a text without names, passwords and signatures in its addresses."""
    return SIGNED.sub("", CREDENTIALS.sub("//", text))


# Groups of entry points by which packages change how MLflow's client talks to a server.
PLUGINS = ("mlflow.request_header_provider", "mlflow.request_auth_provider", "mlflow.tracking_store")
# Variables that name a way to authenticate of MLflow's client.
ELSEWHERE = ("MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_AWS_SIGV4")
PARAMS_AT_ONCE = 100  # maximum in one request
LOG_BATCH = "runs/log-batch"
TRANSIENT = (408, 429, 500, 502, 503, 504)  # answers after which a request is tried again, as MLflow does


def speaks_rest(uri: str) -> bool:
    """Tells whether this module can speak to a server: by http, with a password, a token or nothing."""
    if not uri.startswith(("http://", "https://")) or any(os.environ.get(name) for name in ELSEWHERE):
        return False
    return not any(entry_points(group=group) for group in PLUGINS)


class RestError(Exception):
    """A server's refusal, with MLflow's error code, empty where the answer is not MLflow's."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class RestClient:
    """A tracking server by its REST API."""

    def __init__(self, uri: str) -> None:
        self._uri = uri.rstrip("/")
        self._session = _session()
        self._timeout = float(_setting("HTTP_REQUEST_TIMEOUT", "120"))
        # With each request: as the session's, a variable of `requests` would go before it.
        self._verify: str | bool = _setting("TRACKING_SERVER_CERT_PATH", "") or not _is_true(
            _setting("TRACKING_INSECURE_TLS", "")
        )
        self._redirects = _is_true(_setting("ALLOW_HTTP_REDIRECTS", "true"))

    def read(self, run_id: str) -> TrackingState:
        run = self._call("GET", "runs/get", params={"run_id": run_id})["run"]
        data = run.get("data", {})
        outputs = run.get("outputs", {}).get("model_outputs", [])
        return TrackingState(
            experiment_id=run["info"]["experiment_id"],
            status=run["info"]["status"],
            params={param["key"]: param.get("value", "") for param in data.get("params", [])},
            steps={metric["key"]: int(metric.get("step", 0)) for metric in data.get("metrics", [])},
            models=[output["model_id"] for output in outputs],
        )

    def reopen(self, run_id: str) -> None:
        self._call("POST", "runs/update", {"run_id": run_id, "status": "RUNNING"})

    def log(self, run_id: str, values: Sequence[Value]) -> None:
        metrics = [{**value, "value": _number(value["value"])} for value in values]
        self._call("POST", LOG_BATCH, {"run_id": run_id, "metrics": metrics})

    def log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        self._call("POST", LOG_BATCH, {"run_id": run_id, "params": _pairs(params)})

    def tag(self, run_id: str, tags: Mapping[str, str]) -> None:
        self._call("POST", LOG_BATCH, {"run_id": run_id, "tags": _pairs(tags)})

    def make_model(self, run_id: str, experiment_id: str, model: LoggedModel, params: Mapping[str, str]) -> str:
        """Makes a logged model of a run, and returns its id."""
        document = {
            "experiment_id": experiment_id,
            "name": model.name,
            "model_type": model.kind,
            "source_run_id": run_id,
            "params": _pairs(params)[:PARAMS_AT_ONCE],
            "tags": _pairs(model.tags),
        }
        model_id = str(self._call("POST", "logged-models", document)["model"]["info"]["model_id"])
        for first in range(PARAMS_AT_ONCE, len(params), PARAMS_AT_ONCE):
            page = {"params": _pairs(params)[first : first + PARAMS_AT_ONCE]}
            self._call("POST", f"logged-models/{model_id}/params", page)
        self._call("POST", "runs/outputs", {"run_id": run_id, "models": [{"model_id": model_id, "step": 0}]})
        return model_id

    def tag_model(self, model_id: str, tags: Mapping[str, str]) -> None:
        self._call("PATCH", f"logged-models/{model_id}/tags", {"tags": _pairs(tags)})

    def _call(self, method: str, path: str, body: object = None, *, params: Any = None) -> dict[str, Any]:
        answer = self._session.request(
            method,
            f"{self._uri}/api/2.0/mlflow/{path}",
            json=body,
            params=params,
            timeout=self._timeout,
            verify=self._verify,
            allow_redirects=self._redirects,
        )
        try:
            document = answer.json() if answer.text.strip() else {}
        except ValueError:
            document = {"message": answer.text[:300]}
        if answer.status_code != 200:
            message = document.get("message") or answer.reason
            raise RestError(f"{answer.status_code}: {message}", str(document.get("error_code", "")))
        return dict(document)


def _session() -> requests.Session:
    retry = Retry(
        total=int(_setting("HTTP_REQUEST_MAX_RETRIES", "7")),
        status_forcelist=TRANSIENT,
        allowed_methods=None,
        raise_on_status=False,
        backoff_factor=float(_setting("HTTP_REQUEST_BACKOFF_FACTOR", "2")),
        backoff_jitter=float(_setting("HTTP_REQUEST_BACKOFF_JITTER", "1.0")),
        respect_retry_after_header=_is_true(_setting("HTTP_RESPECT_RETRY_AFTER_HEADER", "true")),
    )
    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(max_retries=retry))
    session.headers["User-Agent"] = "baton"
    if workspace := _setting("WORKSPACE", "").strip():
        session.headers["X-MLFLOW-WORKSPACE"] = workspace
    user, password = _user()
    if user and password:
        session.auth = (user.encode(), password.encode())
    elif token := _setting("TRACKING_TOKEN", ""):

        def put_token(request: requests.PreparedRequest) -> requests.PreparedRequest:
            request.headers["Authorization"] = f"Bearer {token}"
            return request

        session.auth = put_token  # not as a header, whose place a `.netrc` takes
    session.cert = _setting("TRACKING_CLIENT_CERT_PATH", "") or None
    return session


def _user() -> tuple[str, str]:
    """Returns name and password: from the environment, or else from MLflow's own file."""
    names = ("tracking_username", "tracking_password")
    own = {name: _setting(name.upper(), "") for name in names}
    path = os.path.expanduser("~/.mlflow/credentials")
    if not all(own.values()) and os.path.exists(path):
        file = configparser.ConfigParser()
        file.read(path)
        own = {name: own[name] or file.get("mlflow", f"mlflow_{name}", fallback="") for name in names}
    return own["tracking_username"], own["tracking_password"]


def _setting(name: str, default: str) -> str:
    return os.environ.get(f"MLFLOW_{name}") or default


def _is_true(text: str) -> bool:
    return text.lower() in ("true", "1")


def _number(value: Any) -> float | str:
    """Returns a number as JSON of protocol buffers, which has three that plain JSON has not."""
    if math.isfinite(value):
        return float(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _pairs(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in values.items()]


class LibraryClient:
    """A tracking server or database by MLflow's own client."""

    def __init__(self, uri: str) -> None:
        self._client = connect(uri)
        from mlflow import entities

        self._entities: Any = entities

    def read(self, run_id: str) -> TrackingState:
        run = self._client.get_run(run_id)
        outputs = run.outputs.model_outputs if run.outputs else []
        return TrackingState(
            experiment_id=run.info.experiment_id,
            status=run.info.status,
            params=dict(run.data.params),
            steps={metric.key: metric.step for metric in run.data.to_proto().metrics},
            models=[output.model_id for output in outputs],
        )

    def reopen(self, run_id: str) -> None:
        self._client.update_run(run_id, "RUNNING")

    def log(self, run_id: str, values: Sequence[Value]) -> None:
        self._client.log_batch(run_id, metrics=[self._entities.Metric(**value) for value in values])

    def log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        self._client.log_batch(run_id, params=[self._entities.Param(key, value) for key, value in params.items()])

    def tag(self, run_id: str, tags: Mapping[str, str]) -> None:
        self._client.log_batch(run_id, tags=[self._entities.RunTag(key, value) for key, value in tags.items()])

    def make_model(self, run_id: str, experiment_id: str, model: LoggedModel, params: Mapping[str, str]) -> str:
        made = self._client.create_logged_model(
            experiment_id, model.name, run_id, dict(model.tags), dict(params), model.kind
        )
        self._client.log_outputs(run_id, [self._entities.LoggedModelOutput(made.model_id, step=0)])
        return str(made.model_id)

    def tag_model(self, model_id: str, tags: Mapping[str, str]) -> None:
        self._client.set_logged_model_tags(model_id, dict(tags))


Client = RestClient | LibraryClient


def open_client(uri: str) -> Client:
    """Returns a client of a server or database: REST where that will do, else MLflow's own."""
    give_up_soon()
    return RestClient(uri) if speaks_rest(uri) else LibraryClient(uri)


HELD_OUT = ("eval_", "written_", "final_")  # beginnings of figures' names for rows held out from training
# Beginnings of figures' names that are not the trained model's.
OF_OTHERS = ("system/", "final_before_", "final_production_")
# Ends of figures' names for pace and duration, in training or evaluation.
TIMED = ("_runtime", "_per_second", "num_tokens")
# Figures of the course of training, not of its model.
OF_TRAINING = ("epoch", "gpu_memory_bytes", "grad_norm", "learning_rate", "mfu")
TOGETHER_S = 1.0  # seconds of metrics in one request
METRICS_AT_ONCE = 1000  # maximum in one request


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
            os.unlink(path)  # if this process is lost before, the next one skips steps that are there

    def send(self, documents: list[dict[str, Any]], *, once: bool) -> None:
        """Sends metrics and tags; with `once` it skips steps that the run has already."""
        # After a restore, steps are trained again, to the same figures.
        values = [value for document in documents for value in self._values(document, once=once)]
        for first in range(0, len(values), METRICS_AT_ONCE):
            self._client.log(self._order.run_id, values[first : first + METRICS_AT_ONCE])
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
    """Sends lines of JSON from standard input until that ends: a `SenderConfig`, then metrics or tags of the model.

    Metrics come with their `step` and its time in `milliseconds`.
    """
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
    """Returns the first line that comes and those within a second after it; None marks the end."""
    batch = [lines.get()]
    end = time.monotonic() + TOGETHER_S
    with contextlib.suppress(queue.Empty):
        while batch[-1] is not None:
            batch.append(lines.get(timeout=max(0.0, end - time.monotonic())))
    return batch


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    serve()
