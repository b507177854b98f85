"""The small client asks a server for what MLflow's own asks it for, with the same credentials."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest

from baton.tracking import client as rest
from baton.tracking.client import Client, LibraryClient, RestClient, RestError
from baton.tracking.messages import LoggedModel

RUN = {
    "info": {"run_id": "r", "run_uuid": "r", "experiment_id": "7", "status": "FAILED", "lifecycle_stage": "active"},
    "data": {
        "metrics": [{"key": "loss", "value": 1.5, "timestamp": "1", "step": "12"}],
        "params": [{"key": "seed", "value": "7"}],
    },
    "inputs": {},
    "outputs": {"model_outputs": [{"model_id": "m-1", "step": "0"}]},
}
MODEL = {"info": {"model_id": "m-2", "experiment_id": "7", "name": "n", "creation_timestamp_ms": "1",
                  "last_updated_timestamp_ms": "1", "artifact_uri": "x", "status": 1}, "data": {}}  # fmt: skip
ANSWERS = {"runs/get": {"run": RUN}, "runs/update": {"run_info": RUN["info"]}, "logged-models": {"model": MODEL}}
HEADERS = ("authorization", "x-mlflow-workspace")


class Heard:
    """A server that notes what it is asked, and answers as MLflow's does."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, Any, dict[str, str]]] = []
        self.refuses = False
        heard = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path, _, query = self.path.partition("?")
                told = {name: self.headers[name] for name in HEADERS if self.headers[name]}
                if path.startswith("/api/2.0/mlflow/"):
                    name = path.removeprefix("/api/2.0/mlflow/")
                    document = json.loads(body) if body and body != b"null" else dict(parse_qsl(query))
                    document.pop("run_uuid", None)  # a name from before, which MLflow's own client sends besides
                    heard.requests.append((self.command, name, document, told))
                    answer = ANSWERS.get(name, {})
                else:  # what MLflow's own asks a server about itself
                    answer = {"workspaces_enabled": True}
                if heard.refuses:
                    answer = {"error_code": "PERMISSION_DENIED", "message": "not you"}
                text = json.dumps(answer).encode()
                self.send_response(403 if heard.refuses else 200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_PATCH = _answer  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.uri = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def taken(self) -> list[tuple[str, str, Any, dict[str, str]]]:
        """Returns what was asked since the last call."""
        found, self.requests = self.requests, []
        return found


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Heard]:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("USERNAME", "PASSWORD", "TOKEN", "AUTH", "AWS_SIGV4"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}", raising=False)
    monkeypatch.delenv("MLFLOW_WORKSPACE", raising=False)
    server = Heard()
    yield server
    server._server.shutdown()
    server._server.server_close()


def _ask(client: Client) -> list[object]:
    value: dict[str, str | int | float] = {"key": "loss", "value": 1.5, "timestamp": 1700000000000, "step": 3}
    of_model = {"model_id": "m-1", "dataset_name": "d", "dataset_digest": "1"}
    client.reopen("r")
    client.log("r", [value, {**value, "value": math.inf, **of_model}, {**value, "value": math.nan}])
    client.log_params("r", {"a": "1"})
    client.tag("r", {"c": "3"})
    client.tag_model("m-1", {"b": "2"})
    return [client.read("r"), client.make_model("r", "7", LoggedModel("n", "sft", {"t": "1"}), {"p": "2"})]


def _asked(heard: Heard) -> list[tuple[str, str, str, dict[str, str]]]:
    """Returns the requests in a form that does not depend on how numbers are written; 64 bits may be text."""
    found = []
    for method, name, document, headers in heard.taken():
        text = json.dumps(document, sort_keys=True)
        for number in ("1700000000000", "3", "0"):
            text = text.replace(f'"{number}"', number)
        found.append((method, name, text, headers))
    return found


CREDENTIALS: dict[str, dict[str, str]] = {
    "none": {},
    "password": {"MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": "pass: wörd"},
    "token": {"MLFLOW_TRACKING_TOKEN": "abc"},
    "workspace": {"MLFLOW_TRACKING_TOKEN": "abc", "MLFLOW_WORKSPACE": "team-a"},
}


@pytest.mark.parametrize("name", CREDENTIALS)
def test_both_ask_for_the_same(name: str, heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in CREDENTIALS[name].items():
        monkeypatch.setenv(variable, value)
    small = _ask(RestClient(heard.uri))
    by_small = _asked(heard)
    library = _ask(LibraryClient(heard.uri))
    by_library = _asked(heard)
    assert small == library
    # MLflow's own looks at run and model once more before it writes to them.
    written = [[request for request in requests if request[0] != "GET"] for requests in (by_small, by_library)]
    assert written[0] == written[1]
    assert len(written[0]) == 7
    told = {key for *_, headers in by_small for key in headers}
    assert told == {"none": set(), "workspace": set(HEADERS)}.get(name, {"authorization"})


def test_a_file_holds_the_password_and_a_netrc_takes_no_tokens_place(
    heard: Heard, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login other password other\n")
    (tmp_path / ".netrc").chmod(0o600)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "abc")
    RestClient(heard.uri).read("r")
    assert heard.taken()[0][3] == {"authorization": "Bearer abc"}
    (tmp_path / ".mlflow").mkdir()
    (tmp_path / ".mlflow" / "credentials").write_text(
        "[mlflow]\nmlflow_tracking_username = me\nmlflow_tracking_password = secret\n"
    )
    RestClient(heard.uri).read("r")
    assert heard.taken()[0][3] == {"authorization": "Basic bWU6c2VjcmV0"}


def test_a_refusal_says_what_the_server_says(heard: Heard) -> None:
    heard.refuses = True
    with pytest.raises(RestError, match="403: not you") as raised:
        RestClient(heard.uri).read("r")
    assert raised.value.code == "PERMISSION_DENIED"


@pytest.mark.parametrize(
    ("uri", "variables", "serves"),
    [
        ("http://mlflow:5000", {}, True),
        ("https://mlflow.example/path", {"MLFLOW_TRACKING_TOKEN": "abc"}, True),
        ("https://mlflow.example", {"MLFLOW_TRACKING_AUTH": "kubernetes"}, False),
        ("https://mlflow.example", {"MLFLOW_TRACKING_AWS_SIGV4": "true"}, False),
        ("sqlite:///mlflow.db", {}, False),
        ("databricks", {}, False),
        ("postgresql://host/db", {}, False),
    ],
)
def test_what_mlflow_has_plugins_for_is_left_to_it(
    uri: str, variables: dict[str, str], serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in rest.ELSEWHERE:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert rest.speaks_rest(uri) is serves
