"""As many trials at once as the quota of a namespace has GPUs for, asked of an API server by the real client."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.components.shared.recipe import Recipe, recipe_file
from baton.pipelines.kubeflow import capacity

RECIPE = Path(__file__).parents[3] / "pipelines" / "recipes" / "sweep.yaml"
GPU = "requests.nvidia.com/gpu"


class Quotas(ThreadingHTTPServer):
    """The part of Kubernetes' API that lists quotas: those of `specs`, by namespace."""

    def __init__(self) -> None:
        self.specs: dict[str, list[dict[str, Any]]] = {}
        quotas = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                *_, namespace, kind = self.path.partition("?")[0].split("/")
                known = kind == "resourcequotas" and namespace in quotas.specs
                items = [{"metadata": {"name": "q"}, "spec": spec} for spec in quotas.specs.get(namespace, [])]
                body = {"items": items} if known else {"kind": "Status", "message": "forbidden"}
                self.send_response(200 if known else 403, None if known else "Forbidden")
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *_: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)


@pytest.fixture
def quotas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Quotas]:
    """The server, which `KUBECONFIG` names."""
    with Quotas() as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        _write_config(tmp_path / "config", server.server_port)
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        yield server
        server.shutdown()


def _write_config(path: Path, port: int) -> None:
    context = {"cluster": "c", "user": "u", "namespace": "ours"}
    document = {
        "current-context": "x",
        "contexts": [{"name": "x", "context": context}],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {}}],
    }
    path.write_text(yaml.safe_dump(document), encoding="utf-8")


def _recipe(*overrides: str) -> Recipe:
    return recipe_file.load(str(RECIPE), ["resources.gpus=2", *overrides])


def _parallel(recipe: Recipe, namespace: str | None = None, tell: Callable[[str], None] = print) -> int | None:
    found = capacity.fitted(recipe, namespace, tell).sweep
    assert found
    return found.parallel


def _class(name: str, gpus: str) -> dict[str, Any]:
    scope = {"scopeName": "PriorityClass", "operator": "In", "values": [name]}
    return {"hard": {GPU: gpus}, "scopeSelector": {"matchExpressions": [scope]}}


@pytest.mark.parametrize(
    ("overrides", "parallel"),
    [
        pytest.param((), 4, id="the-smaller-quota"),
        pytest.param(("resources.capacity=spot",), 3, id="of-its-class"),
        pytest.param(("sweep.parallel=9",), 9, id="as-the-recipe-says"),
        pytest.param(("resources.gpus=0",), None, id="no-gpu"),
        pytest.param(("resources.accelerator=amd.com/gpu",), None, id="not-counted"),
        pytest.param(("resources.gpus=16", "training.batch_size=128"), 1, id="more-than-there-are"),
    ],
)
def test_as_many_trials_at_once_as_the_quota_has_gpus_for(
    quotas: Quotas, overrides: tuple[str, ...], parallel: int | None
) -> None:
    whole = [{"hard": {GPU: "8", "pods": "100"}}, {"hard": {GPU: "12"}}, {"hard": {GPU: "1"}, "scopes": ["BestEffort"]}]
    quotas.specs["ours"] = [*whole, _class("baton-spot", "6"), _class("baton-on-demand", "2")]
    assert _parallel(_recipe(*overrides)) == parallel


def test_the_namespace_that_is_given_counts(quotas: Quotas) -> None:
    quotas.specs = {"ours": [{"hard": {GPU: "8"}}], "team": [{"hard": {GPU: "2"}}]}
    assert _parallel(_recipe(), "team") == 1


def test_what_cannot_be_read_is_a_note(quotas: Quotas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> str:
        lines: list[str] = []
        assert _parallel(_recipe(), tell=lines.append) is None
        return "\n".join(lines)

    assert told() == "note: the quota cannot be read (Forbidden); sweep.parallel says how many at once"
    _write_config(tmp_path / "config", 9)
    assert "the quota cannot be read" in told()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert "the quota cannot be read" in told()
    monkeypatch.delenv("KUBECONFIG")
    assert told() == ""
