"""`make lock` pins packages by the digests of files that can be installed, from one index; torch in both builds."""

import functools
import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = """\
[project]
name = "baton-llm"
dependencies = ["alpha>=1"]
[project.optional-dependencies]
dev = ["baton-llm[more]"]
more = ["gamma_ray"]
[dependency-groups]
server = ["torch>=2"]
"""
FILES = {
    "alpha-1.1-py3-none-any.whl": ["beta"],
    "alpha-1.1-cp39-cp39-manylinux_2_28_x86_64.whl": [],
    "alpha-1.1-cp311-cp311-win_amd64.whl": [],
    "alpha-1.1-cp311-cp311-musllinux_1_2_x86_64.whl": [],
    "alpha-1.1-cp311-cp311-manylinux_2_28_aarch64.whl": ["beta"],
    "alpha-1.1-cp38-abi3-manylinux_2_28_x86_64.whl": ["beta"],
    "alpha-1.1.tar.gz": [],
    "alpha-1.0-py3-none-any.whl": [],
    "alpha-1.10-py3-none-any.metadata": [],
    "beta-3-py3-none-any.whl": [],
    "gamma_ray-2-py3-none-any.whl": [],
    "torch-2.13.0-py3-none-any.whl": [],
}
"""Files of the index → what each requires."""
FITTING = (
    "alpha-1.1-py3-none-any.whl", "alpha-1.1-cp311-cp311-manylinux_2_28_aarch64.whl",
    "alpha-1.1-cp38-abi3-manylinux_2_28_x86_64.whl", "alpha-1.1.tar.gz",
)  # fmt: skip


def _wheel(path: Path, requires: list[str]) -> None:
    name, version, *_ = path.name.split("-")
    lines = "".join(f"Requires-Dist: {each}\n" for each in requires)
    with zipfile.ZipFile(path, "w") as wheel:
        info = f"{name}-{version}.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{lines}")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class _Index(http.server.SimpleHTTPRequestHandler):
    """Lists the files of a package as JSON, or as a page below `/cpu`."""

    def do_GET(self) -> None:
        name = self.path.strip("/").rpartition("/")[2]
        folder = Path(self.directory) / ("cpu" if self.path.startswith("/cpu") else "files")
        found = [path for path in sorted(folder.glob("*")) if path.name.replace("_", "-").startswith(f"{name}-")]
        if not self.path.endswith("/"):
            super().do_GET()
            return
        if folder.name == "cpu":
            kind = "text/html"
            page = "".join(
                f'<a href="/cpu/{path.name.replace("+", "%2B")}#sha256={_digest(path)}">x</a>' for path in found
            )
        else:
            kind = "application/vnd.pypi.simple.v1+json"
            files = [
                {"filename": path.name, "url": f"/files/{path.name}", "hashes": {"sha256": _digest(path)}}
                for path in found
            ]
            page = json.dumps({"meta": {"api-version": "1.0"}, "name": name, "files": files})
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(page.encode())


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    for folder in ("files", "cpu"):
        (tmp_path / folder).mkdir()
    for name, requires in FILES.items():
        _wheel(tmp_path / "files" / name, requires)
    for name in ("cp311-cp311-manylinux_2_28_x86_64", "cp312-cp312-manylinux_2_28_x86_64", "cp311-cp311-win_amd64"):
        _wheel(tmp_path / "cpu" / f"torch-2.13.0+cpu-{name}.whl", [])
        _wheel(tmp_path / "cpu" / f"torch-2.12.0+cpu-{name}.whl", [])
    handler = functools.partial(_Index, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def lock(folder: Path, index: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tools.lock", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PIP_INDEX_URL": f"{index}/simple", "TORCH_INDEX": f"{index}/cpu"}
        | environment,
        capture_output=True,
        text=True,
    )


def read(path: Path) -> dict[str, set[str]]:
    """Returns each pin with its digests."""
    blocks = re.findall(r"^([a-z]\S*==\S+)((?: \\\n    --hash=sha256:\w+)*)", path.read_text(), re.MULTILINE)
    return {pin: set(re.findall(r"sha256:(\w+)", digests)) for pin, digests in blocks}


def test_each_pin_has_the_digests_of_what_this_python_installs_on_linux(tmp_path: Path, index: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    _wheel(elsewhere / "alpha-9-py3-none-any.whl", [])
    done = lock(tmp_path, index, PIP_FIND_LINKS=str(elsewhere))
    assert done.returncode == 0, done.stderr
    files = tmp_path / "files"
    assert read(tmp_path / "requirements.lock") == {
        "alpha==1.1": {_digest(files / name) for name in FITTING},
        "beta==3": {_digest(files / "beta-3-py3-none-any.whl")},
        "gamma-ray==2": {_digest(files / "gamma_ray-2-py3-none-any.whl")},
        "torch==2.13.0": {_digest(files / "torch-2.13.0-py3-none-any.whl")},
    }
    assert read(tmp_path / "torch-cpu.lock") == {
        "torch==2.13.0+cpu": {_digest(tmp_path / "cpu" / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl")}
    }
    assert list(read(tmp_path / "constraints.lock")) == list(read(tmp_path / "requirements.lock"))
    assert not re.search(r"127\.0\.0\.1|elsewhere", "".join(path.read_text() for path in tmp_path.glob("*.lock")))


def test_what_is_selected_is_what_the_lock_says_it_is_there_for(tmp_path: Path, index: str) -> None:
    assert lock(tmp_path, index).returncode == 0
    script = "import sys; from images.requirements import *; print(select(sys.argv[1:], cpu=False))"

    def selected(*names: str) -> set[str]:
        command = [sys.executable, "-c", script, *names]
        done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
        return set(re.findall(r"^(\S+)==", done.stdout.decode(), re.MULTILINE))

    assert selected(".") == {"alpha", "beta"}
    assert selected("dev") == {"gamma-ray"}
    assert selected(".", "server") == {"alpha", "beta", "torch"}


def test_pins_stay_until_they_are_moved(tmp_path: Path, index: str) -> None:
    (tmp_path / "constraints.lock").write_text("alpha==1.0\n")
    assert lock(tmp_path, index).returncode == 0
    old = _digest(tmp_path / "files" / "alpha-1.0-py3-none-any.whl")
    assert read(tmp_path / "requirements.lock")["alpha==1.0"] == {old}
    assert lock(tmp_path, index, "--upgrade-package", "alpha").returncode == 0
    assert "alpha==1.1" in read(tmp_path / "requirements.lock")


@pytest.mark.parametrize(("version", "kept"), [("2.13.0", True), ("2.12.0", False)])
def test_without_its_index_the_cpu_build_stays_as_it_is(tmp_path: Path, index: str, version: str, kept: bool) -> None:
    before = f"torch=={version}+cpu \\\n    --hash=sha256:{'a' * 64}\n"
    (tmp_path / "torch-cpu.lock").write_text(before)
    done = lock(tmp_path, index, TORCH_INDEX="http://127.0.0.1:9")
    assert (done.returncode == 0) is kept
    assert (tmp_path / "torch-cpu.lock").read_text().endswith(before)
    if not kept:
        assert "http://127.0.0.1:9 is out of reach" in done.stderr
        assert "TORCH_INDEX" in done.stderr
        assert not (tmp_path / "requirements.lock").exists()
