"""The CPU image as it was built: who it runs as, what it holds, what it needs to write."""

import io
import json
import os
import shutil
import tarfile
from typing import Any

import pytest

from baton.store.manifest import read_manifest
from tests.support.sealed import SealedRun

MAX_BYTES = 1_600_000_000
SECRET_WORDS = ("SECRET", "PASSWORD", "TOKEN=", "ACCESS_KEY")


def run(engine: Any, image: str, script: str, **arguments: Any) -> str:
    return engine.containers.run(image, ["sh", "-c", script], remove=True, network_mode="none", **arguments).decode()


def read(engine: Any, image: str, path: str) -> bytes:
    """Returns a file of an image; a container's output may be cut off where it is long."""
    container = engine.containers.create(image)
    try:
        archive = io.BytesIO(b"".join(container.get_archive(path)[0]))
    finally:
        container.remove()
    with tarfile.open(fileobj=archive) as files:
        found = files.extractfile(os.path.basename(path))
        assert found
        return found.read()


def test_is_under_its_bound_and_says_what_it_is(engine, image):
    about = engine.images.get(image).attrs
    labels = about["Config"]["Labels"]
    assert about["Size"] < MAX_BYTES
    assert about["Config"]["User"] == "10001:10001"
    assert about["Config"].get("Healthcheck") is None
    assert labels["org.opencontainers.image.title"] == "baton-cpu"
    assert len(labels["org.opencontainers.image.revision"]) == 40
    assert labels["org.opencontainers.image.created"].endswith("Z")


def test_history_and_environment_hold_no_credentials(engine, image):
    found = engine.images.get(image)
    text = json.dumps([found.history(), found.attrs["Config"]]).upper()
    assert not [word for word in SECRET_WORDS if word in text]


def test_has_neither_compiler_nor_pip_nor_caches(engine, image):
    script = """
        for name in gcc cc g++ clang ld strip nvcc; do command -v "$name"; done
        ls -d /opt/baton/bin/pip* /root/.cache /tmp/* /requirements /src 2>/dev/null
        true
    """
    assert run(engine, image, script, user="0:0") == ""


@pytest.mark.parametrize("user", ["10001:10001", "54321:54321"], ids=["its-own-user", "any-user"])
def test_works_with_a_read_only_root(engine, image, user):
    script = """
        set -e
        python3 -c 'import getpass, torch, matplotlib.pyplot, baton.kfp.executor; print(getpass.getuser())'
        touch /opt/baton/x 2>/dev/null && echo writable || true
    """
    found = run(engine, image, script, user=user, read_only=True, tmpfs={"/tmp": ""}, cap_drop=["ALL"])
    assert found == "baton\n"


def test_holds_the_tracking_server_with_its_pages(engine, image):
    script = """python3 -c '
import boto3, pathlib, psycopg2, mlflow
print((pathlib.Path(mlflow.__file__).parent / "server/js/build/index.html").exists())'"""
    assert run(engine, image, script) == "True\n"


def test_bytecode_is_there_for_what_a_chunk_imports(engine, image):
    script = """python3 -c '
import os, sys
import kfp.dsl.executor, baton.kfp.executor
import baton.train.attempt, baton.evaluate.evaluate
missing = [name for name, module in sys.modules.items()
           if isinstance(found := getattr(module, "__cached__", None), str) and not os.path.exists(found)]
print(len(missing), len(sys.modules))'"""
    missing, modules = map(int, run(engine, image, script).split())
    assert modules > 2000
    assert missing < 20


def test_every_stripped_library_loads(engine, image):
    script = """python3 -c '
import ctypes, os, pathlib, torch, pyarrow.dataset, pyarrow.parquet
failed, count = [], 0
for path in pathlib.Path(torch.__file__).parent.parent.rglob("*.so*"):
    try:
        ctypes.CDLL(str(path))
        count += 1
    except OSError as error:
        failed.append(f"{path.name}: {error}")
print(count > 300, failed, flush=True)
os._exit(0)'"""  # half-made extension modules do not survive the interpreter's own end
    assert run(engine, image, script) == "True []\n"


def test_bill_of_materials_lists_python_and_debian(engine, image):
    document = json.loads(read(engine, image, "/opt/baton/share/sbom.cdx.json"))
    assert document["bomFormat"] == "CycloneDX"
    urls = [part["purl"] for part in document["components"] if "purl" in part]
    assert any(url.startswith("pkg:pypi/transformers@5.23.0") for url in urls)
    assert any(url.startswith("pkg:deb/debian/libc6@") for url in urls)
    assert not any(url.startswith(("pkg:pypi/pytest@", "pkg:pypi/mypy@")) for url in urls)


@pytest.mark.slow
def test_verifies_an_export_without_network_and_store(engine, image, tmp_path):
    sealed = SealedRun(tmp_path)
    sealed.finish()
    manifest = read_manifest(sealed.run.storage, sealed.run.path("export"))
    assert manifest
    model = shutil.copytree(sealed.run.storage.key(manifest.path(sealed.run.path("export"))), tmp_path / "model")
    key = shutil.copy(tmp_path / "run.key.pub", tmp_path / "public.pem")
    shutil.rmtree(sealed.store)
    mounts = {str(model): {"bind": "/model", "mode": "ro"}, key: {"bind": "/key", "mode": "ro"}}
    for path in (tmp_path, model, *model.rglob("*")):
        path.chmod(0o755)

    def verified() -> dict[str, Any]:
        command = "baton verify /model --key /key --output json || true"
        return json.loads(run(engine, image, command, volumes=mounts, read_only=True, tmpfs={"/tmp": ""}))

    found = verified()
    assert (found["ok"], found["is_signed"], found["problems"]) == (True, True, [])
    assert (found["origin"]["rows"]["train"], found["origin"]["plan"]) == (33, [2, 4])
    (model / "README.md").write_text("another")
    assert verified()["problems"] == ["README.md: it has changed since it was signed"]
