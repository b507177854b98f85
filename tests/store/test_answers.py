"""What servers of S3 answer, as AWS, MinIO and Ceph write it: each is one line with its cause and its remedy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest

from baton.data import readers
from baton.errors import StoreError, UnavailableError
from baton.store import clouds, sources
from baton.store.protocol import DeniedError
from baton.store.storage import Storage

AWS = '<?xml version="1.0" encoding="UTF-8"?>\n<Error>{}<RequestId>4442587FB7D0</RequestId><HostId>x=</HostId></Error>'
MINIO = (
    '<?xml version="1.0" encoding="UTF-8"?>\n<Error>{}<Key>p/k</Key><BucketName>b</BucketName>'
    "<Resource>/b/p/k</Resource><RequestId>17A1</RequestId><HostId>dd9025</HostId></Error>"
)
CEPH = (
    '<?xml version="1.0" encoding="UTF-8"?><Error>{}<BucketName>b</BucketName><RequestId>tx00000b-0065</RequestId>'
    "<HostId>1060-default-default</HostId></Error>"
)


class Answer(NamedTuple):
    """A server's answer, and what a person reads of it."""

    status: int
    form: str
    code: str
    message: str
    more: str
    cause: str
    remedy: str
    region: str = ""
    kind: type[StoreError] = StoreError


KEYS = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN"
REGION = "the bucket is in region {}, and us-east-1 was asked"
CHECKSUM = ("the bucket wants a checksum with each request", "AWS_CHECKSUM_ALGORITHM=SHA256")
TIMES = "<RequestTime>20261125T000000Z</RequestTime><ServerTime>2026-11-25T01:00:00Z</ServerTime>"
NOT_AUTHORIZED = (
    "User: arn:aws:iam::1:user/u is not authorized to perform: {} on resource: &quot;{}&quot; because no "
    "identity-based policy allows the {} action"
)
ANSWERS = {
    "expired": Answer(
        400,
        AWS,
        "ExpiredToken",
        "The provided token has expired.",
        "<Token-0>FwoGsecret</Token-0>",
        "the credentials have expired",
        f"Get new ones and set {KEYS}",
    ),
    "a token that is none": Answer(
        400,
        AWS,
        "InvalidToken",
        "The provided token is malformed or otherwise invalid.",
        "<Token-0>FwoGsecret</Token-0>",
        "the session token is not of these keys",
        KEYS,
    ),
    "a token that is none, MinIO": Answer(
        403,
        MINIO,
        "InvalidTokenId",
        "The security token included in the request is invalid",
        "",
        "the session token is not of these keys",
        KEYS,
    ),
    "no such key": Answer(
        403,
        MINIO,
        "InvalidAccessKeyId",
        "The Access Key Id you provided does not exist in our records.",
        "",
        "access denied (InvalidAccessKeyId",
        "Check AWS_ACCESS_KEY_ID",
    ),
    "a wrong secret": Answer(
        403, CEPH, "SignatureDoesNotMatch", "", "", "access denied (SignatureDoesNotMatch)", "AWS_SECRET_ACCESS_KEY"
    ),
    "another region": Answer(
        400,
        AWS,
        "AuthorizationHeaderMalformed",
        "The authorization header is malformed; the region 'us-east-1' is wrong; expecting 'eu-central-1'",
        "<Region>eu-central-1</Region>",
        REGION.format("eu-central-1"),
        "Set AWS_REGION=eu-central-1.",
    ),
    "another region, MinIO": Answer(
        400,
        MINIO,
        "AuthorizationHeaderMalformed",
        "The authorization header is malformed; the region is wrong; expecting 'home'.",
        "<Region>home</Region>",
        REGION.format("home"),
        "Set AWS_REGION=home.",
    ),
    "a redirect without an address": Answer(
        301,
        AWS,
        "PermanentRedirect",
        "The bucket you are attempting to access must be addressed using the specified endpoint.",
        "<Endpoint>b.s3-eu-west-1.amazonaws.com</Endpoint><Bucket>b</Bucket>",
        "the bucket is in ",  # obstore drops the region
        "Set AWS_REGION",
        "eu-west-1",
    ),
    "a clock": Answer(
        403,
        AWS,
        "RequestTimeTooSkewed",
        "The difference between the request time and the current time is too large.",
        TIMES,
        "the clock of this machine is 60 minutes slow",
        "Set the clock by NTP.",
    ),
    "a clock, Ceph": Answer(
        403, CEPH, "RequestTimeTooSkewed", "", "", "the clock of this machine is more than 15 minutes off", "NTP"
    ),
    "no checksum": Answer(
        400,
        AWS,
        "InvalidRequest",
        "Content-MD5 OR x-amz-checksum- HTTP header is required for Put Object requests with Object Lock parameters",
        "",
        *CHECKSUM,
    ),
    "no checksum, MinIO": Answer(
        400, MINIO, "MissingContentMD5", "Missing required header for this request: Content-Md5.", "", *CHECKSUM
    ),
    "denied": Answer(403, AWS, "AccessDenied", "Access Denied", "", "access denied (", "Allow it: {", kind=DeniedError),
    "denied, Ceph": Answer(403, CEPH, "AccessDenied", "", "", "access denied (", "Allow it: {", kind=DeniedError),
    "a key of KMS": Answer(
        403,
        AWS,
        "AccessDenied",
        NOT_AUTHORIZED.format("kms:GenerateDataKey", "arn:aws:kms:us-east-1:1:key/2", "kms:GenerateDataKey"),
        "",
        "access denied (AccessDenied: User: arn:aws:iam::1:user/u is not authorized",
        "",
        kind=DeniedError,
    ),
    "anything else": Answer(
        400,
        AWS,
        "MethodNotAllowed",
        "The specified method is not allowed against this resource.",
        "",
        "refuses ",
        "documentation",
    ),
}


class Server(ThreadingHTTPServer):
    """Gives one answer to all."""

    answer: Answer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answer = self.server.answer  # type: ignore[attr-defined]
        message = f"<Message>{answer.message}</Message>" if answer.message else ""
        body = answer.form.format(f"<Code>{answer.code}</Code>{message}{answer.more}").encode()
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        if answer.region:
            self.send_header("x-amz-bucket-region", answer.region)
        self.end_headers()
        if self.command != "HEAD":  # whose answer has no body, and so no reason
            self.wfile.write(body)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def rows(store: Storage, file: str) -> None:
    sources.files([store.uri("rows.jsonl")])


def read_rows(store: Storage, file: str) -> None:
    list(readers.blocks(sources.SourceFile(store, "rows.jsonl")))


def upload(store: Storage, file: str) -> None:
    store.upload(file, "k")


def large(store: Storage, file: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clouds, "PART", 1)
        store.upload(file, "k")


USES: dict[str, Callable[[Storage, str], object]] = {
    "write": lambda store, file: store.write("k", b""),
    "create": lambda store, file: store.client.create("k", b""),
    "read": lambda store, file: store.read("k"),
    "exists": lambda store, file: store.exists("k"),
    "list": lambda store, file: store.list(""),
    "find": lambda store, file: store.find("a"),
    "upload": upload,
    "upload in parts": large,
    "download": lambda store, file: store.download("k", f"{file}.back", 10),
    "sha256": lambda store, file: store.sha256("k"),
    "copy": lambda store, file: store.copy("k", "l", 10),
    "rows": rows,
    "read rows": read_rows,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_is_one_line_with_cause_and_remedy(
    answer: Answer,
    use: Callable[[Storage, str], object],
    server: Server,
    aws_env: Callable[..., None],
    tmp_path: Path,
) -> None:
    server.answer = answer
    (tmp_path / "file").write_bytes(b"0123456789")
    aws_env(
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{server.server_port}",
        AWS_ACCESS_KEY_ID="key",
        AWS_SECRET_ACCESS_KEY="secret-key",
    )
    store = Storage("s3://b/p", patience=0)
    with pytest.raises(StoreError) as caught, store.translated():
        use(store, str(tmp_path / "file"))

    error = caught.value
    assert isinstance(error, answer.kind)
    assert not isinstance(error, UnavailableError)
    assert error.message.startswith(f"store '{'s3://b/p'}'")
    assert answer.cause in error.message
    assert answer.remedy in str(error.remedy)
    for unwanted in ("\n", "<", "secret-key", "FwoGsecret", "GenericError", "Debug source"):
        assert unwanted not in str(error)
    assert len(str(error)) < 700


def test_a_right_that_is_not_of_the_store_is_named(server: Server, aws_env: Callable[..., None]) -> None:
    server.answer = ANSWERS["a key of KMS"]
    aws_env(AWS_ENDPOINT_URL=f"http://127.0.0.1:{server.server_port}", AWS_ACCESS_KEY_ID="k", AWS_SECRET_ACCESS_KEY="s")
    with pytest.raises(DeniedError) as caught:
        Storage("s3://b/p", patience=0).write("k", b"")
    assert caught.value.remedy == "Allow kms:GenerateDataKey on arn:aws:kms:us-east-1:1:key/2."
