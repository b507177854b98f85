"""Google's and Azure's errors: one message with what to do, and no credential in it."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from baton.errors import AbsentError, StoreError, UnavailableError
from baton.store import clouds
from baton.store.protocol import DeniedError, StoreMessages, explain, without_signature
from baton.store.storage import Storage


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No credentials of this machine's."""
    for name in [name for name in os.environ if name.startswith(("AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)


def refused(uri: str) -> StoreError:
    with pytest.raises(StoreError) as caught:
        Storage(uri, patience=0).check()
    assert "\n" not in str(caught.value)
    return caught.value


def set_env(monkeypatch: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_lists_of_schemes_written_by_hand_are_whole():
    root = Path(__file__).parents[2]
    texts = {
        path.relative_to(root): path.read_text()
        for pattern in ("baton/recipe/*.py", "pipelines/*.py", "docs/reference/**/*.md")
        for path in root.glob(pattern)
    }
    lists = [
        (path, text[found.start() : found.end() + 40 * len(clouds.SCHEMES)])
        for path, text in texts.items()
        for found in re.finditer(r"s3://\S*\s+`?gs://", text)
    ]
    assert len(lists) > 8
    assert [(path, scheme) for path, part in lists for scheme in clouds.SCHEMES if f"{scheme}://" not in part] == []
    addresses = texts[Path("docs/reference/store.md")]
    assert [scheme for scheme in clouds.SCHEMES if f"| `{scheme}://" not in addresses] == []


CREDENTIALS: dict[str, tuple[str, dict[str, str], str]] = {
    "az without an account": ("az://c", {}, "no credentials found. Set AZURE_STORAGE_ACCOUNT_NAME and"),
    "az with a key that is none": (
        "az://c",
        {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ACCOUNT_KEY": "not base64!"},
        "the credentials cannot be used",
    ),
    "gs with a file that is not there": (
        "gs://b",
        {"GOOGLE_APPLICATION_CREDENTIALS": "/nowhere.json"},
        "the credentials cannot be used (Generic GCS error: Unable to open service account file from /nowhere.json",
    ),
    "gs with a key that is none": (
        "gs://b",
        {"GOOGLE_SERVICE_ACCOUNT_KEY": '{"private_key_id": "secret"}'},
        "the credentials cannot be used",
    ),
}


@pytest.mark.parametrize(("uri", "environment", "message"), CREDENTIALS.values(), ids=CREDENTIALS)
def test_credentials(uri: str, environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch):
    set_env(monkeypatch, environment)
    error = refused(uri)
    assert str(error).startswith(f"store {uri!r}: {message}")
    assert "resources.secret_env" in str(error.remedy)
    assert "secret" not in error.message


@pytest.mark.parametrize(
    ("uri", "variable", "credentials"),
    [
        ("az://c", "AZURE_STORAGE_ENDPOINT", {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ACCOUNT_KEY": "aaaa"}),
        ("gs://b", "GOOGLE_BASE_URL", {"GOOGLE_BEARER_TOKEN": "x"}),
    ],
    ids=["az", "gs"],
)
def test_endpoints(uri: str, variable: str, credentials: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{probe.getsockname()[1]}"
    set_env(monkeypatch, {**credentials, variable: endpoint})
    error = refused(uri)
    assert isinstance(error, UnavailableError)
    assert str(error) == f"store {uri!r}: {endpoint} cannot be reached. Check {variable} and the network."

    monkeypatch.setenv(variable, "localhost:9000")
    assert f"{variable} is not an address (Invalid endpoint: localhost:9000)" in str(refused(uri))


@pytest.mark.s3
def test_a_key_that_is_not_the_accounts_is_denied(az_store: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "AAAA" * 10)
    assert "access denied (AuthorizationFailure" in refused(az_store).message


@pytest.mark.s3
def test_a_signature_is_in_no_message(az_store: str, azurite: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setenv("AZURE_STORAGE_SAS_KEY", "sv=2021-08-06&sp=rwl&sig=secretsecret")
    for use in (lambda storage: storage.check(), lambda storage: storage.list(""), lambda storage: storage.read("a")):
        with pytest.raises(StoreError) as caught:
            use(Storage(az_store, patience=0))
        assert "secretsecret" not in f"{caught.value}{caught.value.__cause__}"


@pytest.fixture(params=[scheme for scheme in clouds.SCHEMES if scheme != "s3"])
def faulty(request: pytest.FixtureRequest, faulty_proxy: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Any]:
    """An empty store of each cloud but S3, and the proxy that can fail in front of it."""
    uri: str = request.getfixturevalue(f"{request.param}_store")
    variable = clouds.CLOUDS[request.param].words.endpoint
    address = urlsplit(os.environ[variable])
    proxy = faulty_proxy(f"{address.scheme}://{address.netloc}")
    monkeypatch.setenv(variable, f"{proxy.endpoint}{address.path}")
    return uri, proxy


FAULTS: dict[str, Callable[[Any], Any]] = {
    "503 twice": lambda proxy: proxy.status(503, times=2),
    "429 twice": lambda proxy: proxy.status(429, times=2),
    "reset before an answer": lambda proxy: proxy.reset(times=2),
    "reset in a body received": lambda proxy: proxy.reset(after=1_000_000, methods="GET", times=2),
    "short body": lambda proxy: proxy.short(after=1_000_000, methods="GET", times=2),
    "answer lost": lambda proxy: proxy.lost_answer(methods="PUT", times=1),
}


@pytest.mark.s3
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_transient_fault_passes_unnoticed(
    fault: Callable[[Any], Any], faulty: tuple[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(clouds, "PART", 5 * 1024 * 1024)
    uri, proxy = faulty
    (tmp_path / "large").write_bytes(os.urandom(6_000_000))
    storage = Storage(uri, patience=20)
    rule = fault(proxy)
    digest = storage.upload(str(tmp_path / "large"), "a/large")
    assert storage.download("a/large", str(tmp_path / "back")) == digest
    assert storage.list("a") == ["large"]
    assert rule.hits > 0


@pytest.mark.s3
def test_an_outage_has_one_message(faulty: tuple[str, Any]):
    uri, proxy = faulty
    with proxy.outage(), pytest.raises(UnavailableError, match="cannot be reached"):
        Storage(uri, patience=0).read("a")


@pytest.mark.s3
def test_without_its_condition_both_creators_would_win(
    gs_store: str, faulty_proxy: Any, monkeypatch: pytest.MonkeyPatch
):
    proxy = faulty_proxy(os.environ["GOOGLE_BASE_URL"])
    monkeypatch.setenv("GOOGLE_BASE_URL", proxy.endpoint)
    proxy.drop_header("x-goog-if-generation-match")
    assert [Storage(gs_store).create("one", data) for data in (b"1", b"2")] == [True, True]


def test_what_makes_an_address_a_credential_is_cut_out():
    text = "PUT https://x/c/o?sp=rw&sig=ab%2Fcd&se=1: 'https://y/?X-Amz-Signature=0af' X-Goog-Signature=1b"
    assert without_signature(text) == (
        "PUT https://x/c/o?sp=rw&sig=…&se=1: 'https://y/?X-Amz-Signature=…' X-Goog-Signature=…"
    )


def test_a_metadata_server_that_is_busy_is_asked_again():
    words = StoreMessages(no_credentials=("token request",))
    for status, kind in ((403, StoreError), (503, UnavailableError), (429, UnavailableError)):
        error = RuntimeError(f"token request: Server returned non-2xx status code: {status} Whatever")
        assert type(explain(error, "gs://b", words)) is kind


def test_a_duration_or_a_port_is_no_refusal():
    for text, kind in (
        ("PUT http://h:403/b/x in 403.09ms, after 3 retries: error sending request", UnavailableError),
        ("PUT http://h/b/x in 1ms: status code: 403: no", DeniedError),
    ):
        assert type(explain(RuntimeError(text), "s3://b", StoreMessages())) is kind


def test_an_upload_in_parts_that_was_cleaned_up_is_no_missing_bucket():
    for body, kind in (("<Code>NoSuchUpload</Code>", FileNotFoundError), ("Not Found", AbsentError)):
        error = FileNotFoundError(f"Object at location x not found: Error performing PUT http://h/b/x in 1ms: {body}")
        assert type(explain(error, "s3://b", StoreMessages())) is kind
