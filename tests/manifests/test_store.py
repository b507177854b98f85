"""The rights of `k8s/s3/policy.json` are enough for a run and nothing else; its credentials are nowhere after it."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from baton.store.storage import Storage
from tests.manifests.building import K8S

BUCKET = "baton"
PART_OF_A_LARGE_FILE = 16 * 1024 * 1024


@pytest.fixture
def user(s3_server: Any, s3_credentials: dict[str, str]) -> Iterator[dict[str, str]]:
    """The environment of a user with the policy, on a server that goes by it."""
    options: dict[str, Any] = {
        "endpoint_url": s3_server.endpoint,
        "region_name": "us-east-1",
        "aws_access_key_id": "testing",
        "aws_secret_access_key": "testing",
    }
    s3, iam = boto3.client("s3", **options), boto3.client("iam", **options)
    for bucket in (BUCKET, "others"):
        s3.create_bucket(Bucket=bucket)
    s3.put_object(Bucket="others", Key="theirs", Body=b"1")
    iam.create_user(UserName="stage")
    iam.put_user_policy(UserName="stage", PolicyName="baton", PolicyDocument=(K8S / "s3/policy.json").read_text())
    key = iam.create_access_key(UserName="stage")["AccessKey"]
    s3_server.require_rights(True)
    yield {
        **s3_credentials,
        "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
        "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
    }
    s3_server.require_rights(False)
    for name in (BUCKET, "others"):
        found = boto3.resource("s3", **options).Bucket(name)
        found.objects.delete()
        found.delete()
    iam.delete_access_key(UserName="stage", AccessKeyId=key["AccessKeyId"])
    iam.delete_user_policy(UserName="stage", PolicyName="baton")
    iam.delete_user(UserName="stage")


def client(user: dict[str, str]) -> Any:
    """Return boto3's client for a user."""
    return boto3.client(
        "s3",
        endpoint_url=user["AWS_ENDPOINT_URL"],
        region_name="us-east-1",
        aws_access_key_id=user["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=user["AWS_SECRET_ACCESS_KEY"],
    )


REFUSED: dict[str, Callable[[Any], Any]] = {
    "another bucket's objects": lambda s3: s3.get_object(Bucket="others", Key="theirs"),
    "another bucket's names": lambda s3: s3.list_objects_v2(Bucket="others"),
    "a write to another bucket": lambda s3: s3.put_object(Bucket="others", Key="mine", Body=b"1"),
    "all buckets": lambda s3: s3.list_buckets(),
    "a new bucket": lambda s3: s3.create_bucket(Bucket="new-one"),
    "the end of the bucket": lambda s3: s3.delete_bucket(Bucket=BUCKET),
    "who else may read": lambda s3: s3.put_bucket_policy(Bucket=BUCKET, Policy="{}"),
    "when objects expire": lambda s3: s3.put_bucket_lifecycle_configuration(
        Bucket=BUCKET, LifecycleConfiguration=json.loads((K8S / "s3/lifecycle.json").read_text())
    ),
    "an object for everybody": lambda s3: s3.put_object_acl(Bucket=BUCKET, Key="mine", ACL="public-read"),
}


@pytest.mark.s3
def test_the_policy_is_enough_for_a_store_and_for_nothing_else(
    user: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in user.items():
        monkeypatch.setenv(name, value)
    storage = Storage(f"s3://{BUCKET}/store", patience=0)
    storage.check()
    assert storage.create("manifest.json", b"1")
    assert not storage.create("manifest.json", b"2")
    large = tmp_path / "large"
    large.write_bytes(os.urandom(PART_OF_A_LARGE_FILE + 1))
    digest = storage.upload(str(large), "large")
    assert storage.download("large", str(tmp_path / "back")) == digest
    assert storage.size("absent") is None
    assert storage.list("") == ["large", "manifest.json"]
    storage.remove("large")
    assert sorted(storage.find("")) == ["manifest.json"]
    client(user).put_object(Bucket=BUCKET, Key="mine", Body=b"1")
    for what, call in REFUSED.items():
        with pytest.raises(ClientError) as refusal:
            call(client(user))
        assert refusal.value.response["Error"]["Code"] == "AccessDenied", what


def test_the_lifecycle_is_one_that_s3_takes(s3_store: str, s3_credentials: dict[str, str]) -> None:
    s3, bucket = client(s3_credentials), s3_store.removeprefix("s3://")
    rules = json.loads((K8S / "s3/lifecycle.json").read_text())
    s3.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=rules)
    (rule,) = s3.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
    assert rule["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}
    assert "Expiration" not in rule


RECIPE = """
name: planted
store: s3://baton/store
model:
  from_scratch: {architecture: llama, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2}
  tokenizer: {train: {vocab_size: 300}}
data: {source: "builtin:stdlib-docs", max_length: 32, max_samples: 40}
training: {batch_size: 8, max_steps: 4}
chunks: {count: 2}
evaluation: {samples: 2, max_new_tokens: 4}
tracking: {mlflow: "sqlite:///mlflow.db"}
resources:
  secret: baton-store
  secret_env: {HF_TOKEN: hub/token, WANDB_API_KEY: wandb/key}
"""
PLANTED = {
    "HF_TOKEN": "hf_plantedPlantedPlantedPlantedPlant",
    "WANDB_API_KEY": "0plantedplantedplantedplantedplanted0000",
    "MLFLOW_TRACKING_PASSWORD": "planted-mlflow-password",
}


def _baton(folder: Path, environment: dict[str, str], *arguments: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    done = subprocess.run(
        [str(Path(sys.executable).with_name("baton")), *arguments],
        cwd=folder,
        env=clean | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.s3
def test_planted_credentials_are_nowhere_after_a_run(user: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "planted.yaml").write_text(RECIPE)
    environment = {**user, **PLANTED, "HF_HUB_OFFLINE": "1"}
    written = {"compile": _baton(tmp_path, environment, "compile", "planted.yaml", "-o", "planted.pipeline.yaml")}
    written["run"] = _baton(tmp_path, environment, "run", "planted.yaml", "--run", "planted")
    for path in tmp_path.rglob("*"):
        if path.is_file():
            written[str(path.relative_to(tmp_path))] = path.read_bytes().decode("latin-1")
    s3 = client(user)
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
    keys = [entry["Key"] for page in pages for entry in page["Contents"]]
    for key in keys:
        written[key] = s3.get_object(Bucket=BUCKET, Key=key)["Body"].read().decode("latin-1")
    secrets = {*PLANTED.values(), user["AWS_SECRET_ACCESS_KEY"], user["AWS_ACCESS_KEY_ID"]}
    assert [(where, secret) for where, text in written.items() for secret in secrets if secret in text] == []
    # What was searched is all that a run leaves: the compiled file, output, tracking, checkpoints, report, proof.
    assert {"planted.pipeline.yaml", "mlflow.db"} <= written.keys()
    names = {"report.html", "manifest.json", "model.safetensors", "optimizer.pt", "chunk-001.json", "recipe.json"}
    assert names <= {key.rsplit("/", 1)[-1] for key in keys}
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        assert database.execute("select count(*) from metrics").fetchone()[0] > 0
    assert "secretAsEnv" in written["planted.pipeline.yaml"]
