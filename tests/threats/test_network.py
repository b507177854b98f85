"""What whoever is between Baton and its servers may do: be found out."""

from __future__ import annotations

import datetime
import ipaddress
import re
import ssl
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from s3fs import S3FileSystem

from baton.errors import BatonError
from baton.kubeflow import connection
from baton.store import clouds
from baton.store.sources import file_system
from baton.store.storage import Storage
from baton.tracking import client

ROOT = Path(__file__).parents[2]
KEYS = {"AWS_ACCESS_KEY_ID": "a-key-id", "AWS_SECRET_ACCESS_KEY": "a-secret", "AWS_DEFAULT_REGION": "us-east-1"}


class Impostor:
    """An HTTPS server with a certificate that it has signed itself.

    Attributes:
        asked: Requests that came through to it.
    """

    def __init__(self, folder: Path) -> None:
        self.asked: list[str] = []
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"{}")

            do_POST = do_PUT = do_HEAD = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(_self_signed(folder))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.address = f"https://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()


def _self_signed(folder: Path) -> str:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "pem").write_bytes(plain + certificate.public_bytes(pem))
    return str(folder / "pem")


@pytest.fixture
def impostor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Impostor]:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    server = Impostor(tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.address)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("BATON_KFP_TOKEN", "a-token")
    yield server
    server.stop()


CLIENTS: dict[str, Callable[[str], object]] = {
    "store": lambda address: Storage("s3://bucket", patience=0).read("x"),
    "store, writing": lambda address: Storage("s3://bucket", patience=0).write("x", b"y"),
    "rows": lambda address: _rows(),
    "kubeflow": lambda address: connection.connect(address),
    "mlflow": lambda address: client.RestClient(address).read("run"),
}


def _rows() -> object:
    S3FileSystem.clear_instance_cache()  # one that knows another server by the same name
    storage = Storage("s3://bucket", patience=0)
    with storage.translated():
        return file_system(storage).cat_file("bucket/rows.jsonl")


SLOW = {"rows"}
"""s3fs tries five times."""


@pytest.mark.parametrize(
    "ask",
    [pytest.param(ask, id=name, marks=pytest.mark.slow if name in SLOW else ()) for name, ask in CLIENTS.items()],
)
def test_a_server_with_a_certificate_of_its_own_is_told_nothing(
    ask: Callable[[str], object], impostor: Impostor
) -> None:
    with pytest.raises((BatonError, OSError), match=r"(?i)certificate|ssl|tls|reached|answer"):
        ask(impostor.address)
    assert impostor.asked == [], "no request, and no credential in one"


def test_whoever_does_not_look_is_answered(impostor: Impostor) -> None:
    with urllib.request.urlopen(f"{impostor.address}/x", context=ssl._create_unverified_context()) as answer:
        assert answer.read() == b"{}"
    assert impostor.asked == ["/x"]


def test_plain_http_is_spoken_where_the_address_says_so_alone() -> None:
    assert clouds.client_options("")["allow_http"] is False
    assert clouds.client_options("https://host")["allow_http"] is False
    assert clouds.client_options("http://host")["allow_http"] is True


def test_nothing_turns_off_the_look_at_certificates() -> None:
    off = re.compile(
        r"verify(_ssl)?\s*=\s*False|CERT_NONE|_create_unverified|allow_invalid_certificates|check_hostname"
    )
    files = [path for room in ("baton", "components", "pipelines", "images") for path in (ROOT / room).glob("**/*.py")]
    assert len(files) > 200
    assert off.search("requests.get(url, verify=False)")
    assert [str(path) for path in files if off.search(path.read_text(encoding="utf-8"))] == []
