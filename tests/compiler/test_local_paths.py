"""Paths of models, and credentials in addresses: what is refused before anything runs, and what is not."""

import time
from pathlib import Path
from typing import Any

import pytest

from baton.errors import UserError
from baton.recipe import load
from baton.source import credentials, prepare
from baton.store import sources


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with models of two organisations."""
    for name in ("Qwen/Qwen3-0.6B", "mine/tiny"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").touch()
    (tmp_path / "mine" / "notes").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "base",
    ["Qwen/Qwen3-1.7B", "Qwen/Qwen3-0.6B-Base", "Qwen/Qwen3-32B", "mine/other", "mine/note", "org/model", "gpt2"],
)
def test_a_hub_id_is_one_also_beside_folders_like_it(base: str, models: Path) -> None:
    assert prepare.model_path(base, str(models)) is None


@pytest.mark.parametrize(("base", "meant"), [("mine/tinny", "mine/tiny"), ("Qwen/Qwn3-0.6B", "Qwen/Qwen3-0.6B")])
def test_a_folder_with_a_letter_wrong_is_no_hub_id(base: str, meant: str, models: Path) -> None:
    with pytest.raises(UserError, match=f"Did you mean '{meant}'"):
        prepare.model_path(base, str(models))
    assert prepare.model_path(base, str(models), revision="main") is None, "which only a hub id has"


ADDRESSES = {
    "keys of S3": ("s3://AKIA:secr/et@bucket/runs", "s3://bucket/runs", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    "a signature of Azure": ("az://runs/x?sv=1&sig=secret", "az://runs/x", "AZURE_STORAGE_ACCOUNT_NAME and"),
    "a password": ("https://me:secret@host:8080/rows.jsonl", "https://host:8080/rows.jsonl", "the environment"),
}


@pytest.mark.parametrize(("address", "without", "by"), ADDRESSES.values(), ids=ADDRESSES)
@pytest.mark.parametrize("setting", ["store.uri", "data.source"])
def test_a_credential_in_an_address_is_refused_and_not_repeated(
    setting: str, address: str, without: str, by: str, scratch_recipe: dict[str, Any]
) -> None:
    load.set_path(scratch_recipe, setting, address)

    with pytest.raises(UserError) as caught:
        credentials.require_none(load.validate(scratch_recipe, origin="r.yaml"))

    message = str(caught.value)
    assert message.startswith(setting)
    assert f"Write '{without}' and give the credential by {by}" in message
    assert "secr" not in message.replace("resources.secret", "").replace("SECRET", "")


OF_MLFLOW = {
    "server": ("https://me:secret@host:8080/x", "https://host:8080/x", "MLFLOW_TRACKING_USERNAME and"),
    "database": ("postgresql://me:secret@host/x", "postgresql://host/x", "its driver's own means, such as PGPASSWORD"),
}


@pytest.mark.parametrize(("address", "without", "by"), OF_MLFLOW.values(), ids=OF_MLFLOW)
def test_a_tracking_servers_password_is_none_of_the_recipes(
    address: str, without: str, by: str, scratch_recipe: dict[str, Any]
) -> None:
    load.set_path(scratch_recipe, "tracking.mlflow", address)
    with pytest.raises(UserError) as caught:
        credentials.require_none(load.validate(scratch_recipe, origin="r.yaml"))
    message = str(caught.value)
    assert message.startswith("tracking.mlflow: ")
    assert f"Write '{without}' and give the credential by {by}" in message
    assert message.endswith("pods get it by resources.secret_env.")
    assert "me:" not in message
    load.set_path(scratch_recipe, "tracking.mlflow", address.replace("me:secret@", "me@"))
    credentials.require_none(load.validate(scratch_recipe, origin="r.yaml"))


@pytest.mark.parametrize(
    "source",
    ["s3://bucket/a:b@c.jsonl", "hf://datasets/org/name@main?split=train", "http://host:8080/x@y.jsonl", "a:b@c.jsonl"],
)
def test_other_addresses_are_none(source: str, scratch_recipe: dict[str, Any]) -> None:
    scratch_recipe["data"]["source"] = source
    credentials.require_none(load.validate(scratch_recipe, origin="r.yaml"))
    scratch_recipe["data"]["source"] = f"http://me:secret@host/{source}"
    with pytest.raises(UserError, match=r"data\.source"):
        credentials.require_none(load.validate(scratch_recipe, origin="r.yaml"))


def test_folders_at_any_depth_in_folders_at_any_depth_are_looked_through_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "/".join("a" * 14)).mkdir(parents=True)
    began = time.process_time()
    with pytest.raises(UserError, match="matches no file"):
        sources.resolve("**/" * 14 + "x", base_dir=str(tmp_path))
    assert time.process_time() - began < 5  # each pair of folders would take hours
    (tmp_path / "a" / "a" / "x.jsonl").touch()
    found = sources.resolve("**/" * 14 + "x.jsonl", base_dir=str(tmp_path))
    assert [file.uri for file in sources.files([found])] == [f"{tmp_path}/a/a/x.jsonl"]
    assert time.process_time() - began < 10
