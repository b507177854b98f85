"""`make setup` takes torch's CPU build from the index it is told, by its digest, and names the index otherwise."""

import functools
import hashlib
import http.server
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _wheel(folder: Path, version: str) -> str:
    """Writes a package `torch` with metadata alone, lists it as an index does, and returns its digest."""
    info = f"torch-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"torch-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr("torch/__init__.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    links = (
        f'<a href="{each.name}#sha256={hashlib.sha256(each.read_bytes()).hexdigest()}">{each.name}</a>'
        for each in folder.glob("*.whl")
    )
    (folder / "index.html").write_text("".join(links), encoding="utf-8")
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """An index on loopback with both builds of torch, as a mirror has them, and locks with the digests of both."""
    for lock, version in (("requirements.lock", "2.13.0"), ("torch-cpu.lock", "2.13.0+cpu")):
        digest = _wheel(tmp_path / "index" / "torch", version)
        (tmp_path / lock).write_text(f"# a comment\ntorch=={version} \\\n    --hash=sha256:{digest}\n    # via baton\n")
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "baton-llm"\ndependencies = ["torch>=2.13"]\n'
        "[project.optional-dependencies]\ndev = []\n[dependency-groups]\ninstaller = []\n"
    )
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "index"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder


@pytest.fixture
def environment(fresh: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(fresh, tmp_path / "venv", symlinks=True)) / "bin" / "python"


def install(python: Path, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    return subprocess.run(
        [str(python), "-m", "tools.install"],
        cwd=tmp_path,
        env=clean | {"PIP_CONFIG_FILE": os.devnull, "PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
    )


def installed(python: Path) -> list[str]:
    listed = subprocess.run([str(python), "-m", "pip", "list"], capture_output=True, text=True).stdout
    return [line.split()[1] for line in listed.splitlines() if line.startswith("torch ")]


NOWHERE = "http://127.0.0.1:9/"


@pytest.mark.parametrize(
    ("torch", "address", "told"),
    [("cpu", f"{NOWHERE}whl/cpu", "is out of reach"), ("cuda", "", "expected cpu")],
)
def test_what_cannot_be_had_is_named_with_its_remedy(
    environment: Path, tmp_path: Path, index: str, torch: str, address: str, told: str
) -> None:
    ran = install(environment, tmp_path, TORCH=torch, TORCH_INDEX=address, PIP_INDEX_URL=NOWHERE)
    assert ran.returncode == 1
    assert told in ran.stderr
    assert "Traceback" not in ran.stderr
    assert address in ran.stderr


def test_cpu_build_comes_from_its_index_alone(environment: Path, tmp_path: Path, index: str) -> None:
    ran = install(environment, tmp_path, TORCH="cpu", TORCH_INDEX=index, PIP_INDEX_URL=NOWHERE)
    assert ran.returncode == 0, ran.stderr
    assert installed(environment) == ["2.13.0+cpu"]
    assert "Installing 1 packages" in ran.stdout
    assert "CUDA" not in ran.stdout


def test_cpu_build_stays_when_setup_is_repeated_without_it(environment: Path, tmp_path: Path, index: str) -> None:
    install(environment, tmp_path, TORCH="cpu", TORCH_INDEX=index, PIP_INDEX_URL=NOWHERE)
    ran = install(environment, tmp_path, PIP_INDEX_URL=NOWHERE)
    assert ran.returncode == 0, ran.stderr
    assert installed(environment) == ["2.13.0+cpu"]


@pytest.mark.parametrize("place", ["an index", "a folder"])
def test_the_cpu_build_is_taken_where_pip_finds_it_beside_the_other(
    environment: Path, tmp_path: Path, index: str, place: str
) -> None:
    own = {"PIP_INDEX_URL": index}
    if place == "a folder":  # whose links have no digests: pip would prefer the index's
        folder = tmp_path / "folder"
        folder.mkdir()
        (tmp_path / "index" / "torch" / "torch-2.13.0+cpu-py3-none-any.whl").rename(
            folder / "torch-2.13.0+cpu-py3-none-any.whl"
        )
        _wheel(tmp_path / "index" / "torch", "2.13.0")
        own["PIP_FIND_LINKS"] = str(folder)
    ran = install(environment, tmp_path, **own)
    assert ran.returncode == 0, ran.stderr
    assert installed(environment) == ["2.13.0+cpu"]


def test_without_a_cpu_build_the_other_is_taken(environment: Path, tmp_path: Path, index: str) -> None:
    (tmp_path / "index" / "torch" / "torch-2.13.0+cpu-py3-none-any.whl").unlink()
    _wheel(tmp_path / "index" / "torch", "2.13.0")
    ran = install(environment, tmp_path, PIP_INDEX_URL=index)
    assert ran.returncode == 0, ran.stderr
    assert installed(environment) == ["2.13.0"]
    assert "CUDA" in ran.stdout


@pytest.mark.parametrize(
    ("torch", "lock"),
    [("", "requirements.lock"), ("", "torch-cpu.lock"), ("cpu", "torch-cpu.lock")],
)
def test_a_file_with_another_digest_is_refused(
    environment: Path, tmp_path: Path, index: str, torch: str, lock: str
) -> None:
    if lock == "requirements.lock":
        (tmp_path / "index" / "torch" / "torch-2.13.0+cpu-py3-none-any.whl").unlink()
        digest = _wheel(tmp_path / "index" / "torch", "2.13.0")
    else:
        digest = _wheel(tmp_path / "index" / "torch", "2.13.0+cpu")
    path = tmp_path / lock
    path.write_text(path.read_text().replace(digest, digest[::-1]))
    ran = install(environment, tmp_path, TORCH=torch, TORCH_INDEX=index, PIP_INDEX_URL=index)
    assert ran.returncode != 0
    assert "DO NOT MATCH THE HASHES" in ran.stderr
    assert installed(environment) == []
