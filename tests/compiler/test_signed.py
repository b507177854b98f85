"""What pods, jobs and containers of a signed run get: a public key from the pipeline, a private one from a Secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from baton import signing
from baton.compiler import pipeline_file
from baton.compiler.pipeline_file import Pipeline, write_package
from baton.errors import UserError
from baton.local import docker
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.signing import Signer
from baton.source import credentials
from baton.train.trainjob import train_job
from tests.support import conformance

SCRATCH = str(Path(__file__).parents[1] / "recipes/scratch.yaml")
SIGNER = Signer.new("ed25519")
MOUNTED = "/var/run/baton-signing"


def recipe(*settings: str, secret: str | None = "keys/run.pem") -> Recipe:
    signs = {"public_key": SIGNER.public.line, **({"secret": secret} if secret else {})}
    return load.load(SCRATCH, [f"chunks.signing={signs}", *settings])


SEARCH = "sweep={method: grid, parameters: {training.learning_rate: [0.1, 0.2]}}"
COMPILED = {
    Pipeline.finetune: (),
    Pipeline.retrain: ('evaluation.gate={loss: "<= production"}', "evaluation.production=accepted"),
    Pipeline.sweep: (SEARCH,),
}


@pytest.fixture(scope="module", params=COMPILED, ids=str)
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("compiled") / "pipeline.yaml"
    write_package(pipeline_file.for_cluster(recipe(*COMPILED[request.param])), str(path), request.param)
    return list(yaml.safe_load_all(path.read_text()))


def test_each_stage_is_told_whose_signature_to_ask_for(package: list[dict[str, Any]]) -> None:
    for label, executor in package[0]["deploymentSpec"]["executors"].items():
        env = {entry["name"]: entry["value"] for entry in executor["container"].get("env", [])}
        assert env.get(signing.SIGNED_BY) == SIGNER.public.line, label
        assert env[signing.KEY_FILE] == f"{MOUNTED}/run.pem", label
    assert conformance.check_documents(package) == []


def test_each_stage_has_the_secret_to_seal_with(package: list[dict[str, Any]]) -> None:
    executors = package[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert executors.keys() == package[0]["deploymentSpec"]["executors"].keys()
    for label, config in executors.items():
        (mount,) = config["secretAsVolume"]
        assert mount["mountPath"] == MOUNTED, label
        assert "keys" in str(mount)


def test_a_pipeline_without_a_secret_is_refused() -> None:
    with pytest.raises(UserError, match=r"names no Secret.*kubectl create secret generic"):
        pipeline_file.for_cluster(recipe(secret=None))


def test_the_nodes_of_a_job_have_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(signing.SIGNED_BY, SIGNER.public.line)
    spec: Any = train_job(recipe("resources.nodes=2"), "s3://b/runs/r", 1, None)["spec"]
    env = {entry["name"]: entry.get("value") for entry in spec["trainer"]["env"]}
    assert (env[signing.SIGNED_BY], env[signing.KEY_FILE]) == (SIGNER.public.line, f"{MOUNTED}/run.pem")
    template = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]["template"]
    pod = template["spec"]["template"]["spec"]
    assert {"name": "signing", "secret": {"secretName": "keys"}} in pod["volumes"]
    assert {"name": "signing", "mountPath": MOUNTED} in pod["containers"][0]["volumeMounts"]


def test_this_machine_must_have_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=f"{signing.KEY_FILE} is not set"):
        credentials.require_signing_key(recipe())
    (tmp_path / "key").write_bytes(SIGNER.pem())
    monkeypatch.setenv(signing.KEY_FILE, str(tmp_path / "key"))
    here = credentials.require_signing_key(recipe())
    assert here.chunks.signing
    assert here.chunks.signing.secret is None  # stages of this machine take the file that it names
    assert credentials.signing_environment(here) == {signing.SIGNED_BY: SIGNER.public.line}
    passed = docker.environment(here, {signing.KEY_FILE: str(tmp_path / "key"), signing.SIGNED_BY: "x"})
    assert passed[signing.KEY_FILE] == str(tmp_path / "key")
    assert credentials.signing_environment(load.load(SCRATCH)) == {}


def test_no_part_of_the_private_key_is_in_what_is_compiled(package: list[dict[str, Any]]) -> None:
    assert SIGNER.pem().decode().splitlines()[1] not in str(package)
