"""`make setup` takes torch's CPU build from the index it is told, and names that index where it fails."""

import functools
import hashlib
import http.server
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _wheel(folder: Path, version: str) -> None:
    """Writes a package `torch` with metadata alone, and lists it as an index does."""
    info = f"torch-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
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


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """An index on loopback with both builds of torch, as PyPI and torch's own index have them."""
    for version in ("2.13.0", "2.13.0+cpu"):
        _wheel(tmp_path / "index" / "torch", version)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "index"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("install") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder / "bin" / "python"


def install(python: Path, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "requirements.lock").write_text("# a comment\ntorch==2.13.0\n    # via baton\n", encoding="utf-8")
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    return subprocess.run(
        [str(python), str(ROOT / "tools" / "install.py"), "requirements.lock"],
        cwd=tmp_path,
        env=clean | {"PIP_CONFIG_FILE": os.devnull} | environment,
        capture_output=True,
        text=True,
    )


# First, as an environment that has the build needs no index.
@pytest.mark.parametrize(
    ("torch", "address", "told"),
    [("cpu", "http://127.0.0.1:9/whl/cpu", "is out of reach"), ("cuda", "", "expected cpu")],
)
def test_what_cannot_be_had_is_named_with_its_remedy(
    environment: Path, tmp_path: Path, torch: str, address: str, told: str
) -> None:
    ran = install(environment, tmp_path, TORCH=torch, TORCH_INDEX=address)
    assert ran.returncode == 1
    assert told in ran.stderr
    assert "Traceback" not in ran.stderr
    assert address in ran.stderr


def test_cpu_build_comes_from_its_index_alone(environment: Path, tmp_path: Path, index: str) -> None:
    ran = install(environment, tmp_path, TORCH="cpu", TORCH_INDEX=index, PIP_INDEX_URL="http://127.0.0.1:9/")
    assert ran.returncode == 0, ran.stderr
    listed = subprocess.run([str(environment), "-m", "pip", "list"], capture_output=True, text=True).stdout
    assert "2.13.0+cpu" in listed
    assert "Installing 1 packages" in ran.stdout
    assert "CUDA" not in ran.stdout
