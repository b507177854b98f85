"""Clients of MLflow: by REST, or by MLflow's own library for databases and plugins.

A chunk's sender takes 0.35 s of a core with REST and 2.0 s with the library, mostly for its import: so REST is used
wherever it will do. Addresses, retries and credentials are those of MLflow's own client, made to give up soon.
"""

from __future__ import annotations

import configparser
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from baton.tracking.messages import LoggedModel, TrackingState, Value

TIMEOUT = "5"
"""Seconds for one call, which is tried twice: training matters more."""
CREDENTIALS = re.compile(r"//[^/\s@]+@")


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
    """Returns a text without names and passwords in its addresses."""
    return CREDENTIALS.sub("//", text)


PLUGINS = ("mlflow.request_header_provider", "mlflow.request_auth_provider", "mlflow.tracking_store")
"""Groups of entry points by which packages change how MLflow's client talks to a server."""
ELSEWHERE = ("MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_AWS_SIGV4")
"""Variables that name a way to authenticate of MLflow's client."""
AT_ONCE = 100
"""Maximum of parameters in one request."""
LOG_BATCH = "runs/log-batch"
TRANSIENT = (408, 429, 500, 502, 503, 504)
"""Answers after which a request is tried again, as MLflow does."""


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
            "params": _pairs(params)[:AT_ONCE],
            "tags": _pairs(model.tags),
        }
        model_id = str(self._call("POST", "logged-models", document)["model"]["info"]["model_id"])
        for first in range(AT_ONCE, len(params), AT_ONCE):
            page = {"params": _pairs(params)[first : first + AT_ONCE]}
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
        from mlflow.entities import Metric

        self._client.log_batch(run_id, metrics=[Metric(**value) for value in values])

    def log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        self._client.log_batch(run_id, params=[Param(key, value) for key, value in params.items()])

    def tag(self, run_id: str, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        self._client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])

    def make_model(self, run_id: str, experiment_id: str, model: LoggedModel, params: Mapping[str, str]) -> str:
        from mlflow.entities import LoggedModelOutput

        made = self._client.create_logged_model(
            experiment_id, model.name, run_id, dict(model.tags), dict(params), model.kind
        )
        self._client.log_outputs(run_id, [LoggedModelOutput(made.model_id, step=0)])
        return str(made.model_id)

    def tag_model(self, model_id: str, tags: Mapping[str, str]) -> None:
        self._client.set_logged_model_tags(model_id, dict(tags))


Client = RestClient | LibraryClient


def open_client(uri: str) -> Client:
    """Returns a client of a server or database: REST where that will do, else MLflow's own."""
    give_up_soon()
    return RestClient(uri) if speaks_rest(uri) else LibraryClient(uri)
