"""The command and settings of the tracking server's pod start a server that runs report to."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import boto3
import mlflow
import pytest

from tests.manifests.building import named

pytestmark = [pytest.mark.slow, pytest.mark.s3]


def _get(url: str, host: str | None = None) -> int:
    request = urllib.request.Request(url, headers={"Host": host} if host else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.fixture
def server(s3_store: str, s3_credentials: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """The pod's process with another port, folder and bucket."""
    (container,) = named("local", "Deployment", "baton-mlflow")["spec"]["template"]["spec"]["containers"]
    settings = named("local", "ConfigMap", "baton-mlflow")["data"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [argument.replace("5000", str(port)) for argument in container["command"]]
    command[0] = str(Path(sys.executable).with_name(command[0]))
    settings = {name: value.replace("5000", str(port)) for name, value in settings.items()}
    settings["MLFLOW_BACKEND_STORE_URI"] = settings["MLFLOW_BACKEND_STORE_URI"].replace("/data", str(tmp_path))
    settings["MLFLOW_ARTIFACTS_DESTINATION"] = f"{s3_store}/mlflow"
    environment = {**os.environ, "HOME": str(tmp_path), **settings, **s3_credentials}
    process = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        url, end = f"http://localhost:{port}", time.monotonic() + 120
        while True:
            try:
                assert _get(f"{url}/health") == 200
                break
            except OSError:
                assert process.poll() is None, "the server ended"
                assert time.monotonic() < end, "the server does not answer"
                time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(30)  # what Kubernetes gives a pod before it kills it


def test_a_run_is_tracked_its_report_is_in_the_bucket_and_strangers_are_refused(
    server: str, s3_store: str, s3_credentials: dict[str, str], tmp_path: Path
) -> None:
    client = mlflow.MlflowClient(server)
    run = client.create_run(client.create_experiment("e")).info.run_id
    client.log_metric(run, "loss", 1.5, step=3)
    report = tmp_path / "report.html"
    report.write_text("done")
    mlflow.set_tracking_uri(server)
    client.log_artifact(run, str(report))
    assert client.get_run(run).data.metrics == {"loss": 1.5}
    s3 = boto3.client("s3", endpoint_url=s3_credentials["AWS_ENDPOINT_URL"], region_name="us-east-1")
    (entry,) = s3.list_objects_v2(Bucket=s3_store.removeprefix("s3://"), Prefix="mlflow/")["Contents"]
    assert entry["Key"].endswith("/artifacts/report.html")

    port = server.rsplit(":", 1)[1]
    page = f"{server}/api/2.0/mlflow/experiments/get?experiment_id=0"
    for host in ("baton-mlflow", "baton-mlflow.kubeflow.svc", "baton-mlflow.team-a.svc.cluster.local"):
        assert _get(page, f"{host}:{port}") == 200
    assert _get(page, "attacker.example.com") == 403
