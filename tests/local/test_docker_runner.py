"""What containers get from this machine. None of this needs an engine; tests/end_to_end/images runs them."""

import os
from pathlib import Path

import pytest

from baton.compiler import pipeline_file
from baton.compiler.pipeline_file import write_package
from baton.errors import UserError
from baton.local import docker
from baton.local.docker import Needs, read_needs
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.source import prepare


@pytest.fixture
def recipe_with(scratch_recipe, tmp_path):
    def make(**sections) -> Recipe:
        rows = tmp_path / "rows" / "part-1.jsonl"
        rows.parent.mkdir(exist_ok=True)
        rows.write_text('{"text": "a"}\n')
        document = {
            **scratch_recipe,
            "data": {"source": str(rows.parent / "*.jsonl")},
            "store": str(tmp_path / "store"),
        }
        return load.validate({**document, **sections}, origin="test")

    return make


def test_what_stages_ask_for_is_read_from_the_compiled_file(recipe_with, tmp_path):
    resources = {"cpu": "1500m", "memory": "3Gi", "shm": "256Mi", "gpus": 2}
    package = str(tmp_path / "pipeline.yaml")
    write_package(recipe_with(resources=resources), package)
    found = read_needs(package)
    whole = Needs(cpu=1.5, memory=3 * 2**30, shm=256 * 2**20, gpus=2)
    assert found["train_chunk"] == found["evaluate"] == whole
    assert found["export"] == Needs(cpu=1.5, memory=3 * 2**30)
    assert found["data_split"] == found["tokenize"] == found["checkpoint"] == found["report"] == Needs()


def test_the_image_of_the_command_line_is_the_pods(recipe_with, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_with().model_dump_json(exclude_defaults=True))
    placeholder = "image 'baton-python:0.1.0' is a placeholder"
    assert any(line.startswith(placeholder) for line in pipeline_file.cluster_warnings(prepare.load(str(path)).recipe))
    named = prepare.load(str(path), image="ghcr.io/me/baton-cpu:1").recipe
    assert not any("placeholder" in line for line in pipeline_file.cluster_warnings(named))

    package = tmp_path / "pipeline.yaml"
    write_package(named, str(package))
    images = {line.split("image: ")[1] for line in package.read_text().splitlines() if " image: " in line}
    assert images == {"ghcr.io/me/baton-cpu:1"}


@pytest.mark.parametrize(
    ("store", "resources", "warned"),
    [
        ("folder", {}, None),
        ("s3://b", {}, "AWS_…"),
        ("s3://b", {"secret": "keys"}, None),
        ("s3://b", {"secret_env": {"HF_TOKEN": "hub/token"}}, "AWS_…"),
        ("az://c", {"secret": "keys"}, "AZURE_…"),
        ("az://c", {"secret_env": {"AZURE_STORAGE_ACCOUNT_KEY": "keys/key"}}, None),
        ("gs://b", {}, "GOOGLE_…"),
    ],
)
def test_a_store_whose_credentials_no_secret_holds(store, resources, warned, recipe_with):
    lines = pipeline_file.cluster_warnings(recipe_with(store={"uri": store}, resources=resources))
    assert [line for line in lines if "service account" in line] == (
        [
            f"neither resources.secret nor resources.secret_env names the store's credentials ({warned}): "
            "pods must get them from their service account"
        ]
        if warned
        else []
    )


def test_needs_as_docker_takes_them():
    assert Needs().arguments() == {}
    found = Needs(cpu=1.5, memory=1000, shm=64, gpus=2).arguments()
    (request,) = found.pop("device_requests")
    assert (request["Count"], request["Capabilities"]) == (2, [["gpu"]])
    assert found == {"nano_cpus": 1_500_000_000, "mem_limit": 1000, "memswap_limit": 1000, "shm_size": 64}


def test_environment_passes_on_what_stages_read_and_no_more(recipe_with, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("BATON_CACHE", raising=False)
    recipe = recipe_with(resources={"secret_env": {"JUDGE_KEY": "judge/key"}, "env": {"AWS_REGION": "eu-west-1"}})
    given = {
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_REGION": "us-east-1",
        "HF_TOKEN": "hf",
        "JUDGE_KEY": "key",
        "https_proxy": "http://proxy:3128",
        "BATON_KFP_TOKEN": "for Kubeflow alone",
        "GITHUB_TOKEN": "nobody's business",
        "PATH": "/usr/bin",
    }
    assert docker.environment(recipe, given) == {
        "AWS_ACCESS_KEY_ID": "id",
        "HF_TOKEN": "hf",
        "JUDGE_KEY": "key",
        "https_proxy": "http://proxy:3128",
        "BATON_CACHE": f"{tmp_path}/.cache/baton",
        "HF_HOME": f"{tmp_path}/.cache/huggingface",
        "BATON_EVENTS": "stdout",
    }  # AWS_REGION: the compiled file's own value counts, as it does for processes


def test_credentials_of_a_file_are_found_by_containers_too(recipe_with, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text("[default]\n")
    env = docker.environment(recipe_with(), {})
    assert env["AWS_SHARED_CREDENTIALS_FILE"] == f"{tmp_path}/.aws/credentials"
    assert docker.folders(recipe_with(), env)[f"{tmp_path}/.aws/credentials"] is False


def test_folders_are_those_that_the_recipe_names(recipe_with, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "elsewhere").mkdir()
    model = {"base": str(tmp_path / "model")}
    recipe = recipe_with(model=model, tracking={"mlflow": f"sqlite:///{tmp_path}/track/mlflow.db"})
    env = {"BATON_CACHE": f"{tmp_path}/cache", "HF_HOME": f"{tmp_path}/hf"}
    assert docker.folders(recipe, env) == {
        f"{tmp_path}/rows": False,
        f"{tmp_path}/model": False,
        f"{tmp_path}/store": True,
        f"{tmp_path}/track": True,
        f"{tmp_path}/cache": True,
        f"{tmp_path}/hf": True,
    }


def test_a_bucket_is_no_folder(recipe_with, tmp_path):
    env = {"BATON_CACHE": f"{tmp_path}/cache"}
    assert f"{tmp_path}/store" not in docker.folders(recipe_with(store="s3://bucket"), env)


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm", "/"])
def test_a_store_that_every_image_has_itself_is_refused(recipe_with, folder, tmp_path):
    with pytest.raises(UserError, match=f"store '{folder}' is a folder of every image"):
        docker.folders(recipe_with(store=folder), {"BATON_CACHE": f"{tmp_path}/cache"})


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, None),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9000"}, "host"),
        ({"AWS_ENDPOINT_URL": "http://localhost:9000"}, "host"),
        ({"MLFLOW_TRACKING_URI": "http://[::1]:5000"}, "host"),
        ({"AWS_ENDPOINT_URL": "https://s3.example.com"}, None),
    ],
)
def test_network_is_the_hosts_where_an_address_is_here(recipe_with, env, expected, monkeypatch):
    monkeypatch.delenv(docker.NETWORK, raising=False)
    assert docker.network(env, recipe_with()) == expected


def test_network_can_be_named(recipe_with, monkeypatch):
    monkeypatch.setenv(docker.NETWORK, "kind")
    assert docker.network({"AWS_ENDPOINT_URL": "http://127.0.0.1:9000"}, recipe_with()) == "kind"


def test_no_engine_is_one_message(recipe_with, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    expected = rf"no container engine answers at unix://{tmp_path}/no\.sock: .* Start Docker, or set DOCKER_HOST"
    with pytest.raises(UserError, match=expected), docker.runner(recipe_with(), "", os.fspath(tmp_path)):
        pass
