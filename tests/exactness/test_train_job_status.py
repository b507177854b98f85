"""Progress of a TrainJob, which Transformers reports to Kubeflow Trainer: it changes no bit of a chunked run."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from baton.recipe.recipe import Recipe
from baton.runs.run import Run


@pytest.fixture
def reports() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server as Trainer's controller has it: its address, and the reports that it got with the token."""
    got: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers["authorization"] == "Bearer secret":
                got.append(json.loads(body)["trainerStatus"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Keep the test's output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/status", got
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("answers", [True, False])
def test_progress_is_reported_and_bits_stay(
    answers: bool, recipes: dict[str, Recipe], undisturbed: dict[str, Run], legs: Any, tmp_path: Path,
    reports: tuple[str, list[dict[str, Any]]],
) -> None:  # fmt: skip
    url, got = reports
    (tmp_path / "token").write_text("secret")
    settings = {
        "KUBEFLOW_TRAINER_SERVER_URL": url if answers else "http://127.0.0.1:9/status",
        "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "token"),
    }
    run: Run = legs.prepare(legs.changed(recipes["lora"], chunks__count=2), f"reported-{answers}".lower())
    for index in (1, 2):
        code, printed = legs.leg(legs.reporting_chunk, run.uri, index, settings)
        assert code == 0, printed
    assert legs.losses(run) == legs.losses(undisturbed["lora"])
    assert legs.final(run).meta.state == legs.final(undisturbed["lora"]).meta.state
    assert not run.warnings()
    if answers:
        first, *_, last = got
        assert first["progressPercentage"] == 0
        assert {"name": "total_steps", "value": str(run.plan().num_steps)} in first["metrics"]
        assert last["progressPercentage"] == 100
        assert any(metric["name"] == "loss" for metric in last["metrics"])
