"""The faulty proxy in front of an S3 server: what it lets through, and what a client sees of each fault."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import boto3
import fsspec
import pytest
from botocore.config import Config
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    EndpointConnectionError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)

from tests.faults.proxy import FaultyProxy

pytestmark = pytest.mark.s3

BODY = bytes(range(256)) * 1024


@dataclass
class Bucket:
    """A test's bucket, through a client that gives up at the first failure, and soon."""

    client: Any
    name: str

    def put(self, key: str, body: bytes = BODY, **options: Any) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=body, **options)

    def get(self, key: str, **options: Any) -> bytes:
        data: bytes = self.client.get_object(Bucket=self.name, Key=key, **options)["Body"].read()
        return data

    def keys(self) -> list[str]:
        listing = self.client.list_objects_v2(Bucket=self.name)
        return [entry["Key"] for entry in listing.get("Contents", [])]


@pytest.fixture(scope="module")
def shared_proxy(s3_server: Any) -> Iterator[FaultyProxy]:
    """One for all tests here: to start one for each would take most of their time."""
    proxy = FaultyProxy(s3_server.endpoint)
    yield proxy
    proxy.stop()


@pytest.fixture
def proxy(shared_proxy: Any) -> Iterator[Any]:
    yield shared_proxy
    shared_proxy.clear()


@pytest.fixture(scope="module")
def clients(shared_proxy: Any, s3_server: Any) -> list[Any]:
    """A client through the proxy that gives up soon, and one without it that waits for a busy server."""
    session = boto3.session.Session("testing", "testing", region_name="us-east-1")
    config = Config(retries={"total_max_attempts": 1}, connect_timeout=5)
    return [
        session.client("s3", endpoint_url=endpoint, config=config.merge(Config(read_timeout=seconds)))
        for endpoint, seconds in ((shared_proxy.endpoint, 0.5), (s3_server.endpoint, 30))
    ]


@pytest.fixture
def behind(clients: list[Any]) -> Bucket:
    """The bucket, fresh and empty, without the proxy."""
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    clients[1].create_bucket(Bucket=name)
    return Bucket(clients[1], name)


@pytest.fixture
def bucket(clients: list[Any], behind: Bucket) -> Bucket:
    """The same bucket through the proxy."""
    return Bucket(clients[0], behind.name)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def error_of(call: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[int, str]:
    """Returns status and code of the error that a call ends with."""
    with pytest.raises(ClientError) as caught:
        call(*arguments, **options)
    response = caught.value.response
    return response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]


def test_a_large_object_passes_unchanged(bucket: Bucket, behind: Bucket):
    body = os.urandom(20_000_000)
    bucket.put("big", body)

    assert behind.get("big") == body
    assert bucket.get("big") == body
    assert bucket.get("big", Range="bytes=9000000-18999999") == body[9_000_000:19_000_000]
    assert bucket.client.head_object(Bucket=bucket.name, Key="big")["ContentLength"] == len(body)


def test_answers_without_body_pass(bucket: Bucket, proxy: Any):
    bucket.put("a")
    etag = bucket.client.head_object(Bucket=bucket.name, Key="a")["ETag"]

    assert error_of(bucket.get, "a", IfNoneMatch=etag) == (304, "304")
    assert bucket.client.delete_object(Bucket=bucket.name, Key="a")["ResponseMetadata"]["HTTPStatusCode"] == 204
    assert bucket.keys() == []
    ours = [line.split()[0] for line in proxy.requests() if bucket.name in line]
    assert ours == ["PUT", "HEAD", "GET", "DELETE", "GET"]


def test_the_environment_leads_through_the_proxy(faulty_s3: Any):
    fs, root = fsspec.core.url_to_fs(faulty_s3.store)
    fs.pipe_file(f"{root}/a b=c/d", BODY)

    assert fs.cat_file(f"{root}/a b=c/d", start=100, end=300) == BODY[100:300]
    assert [line.split()[0] for line in faulty_s3.proxy.requests()] == ["PUT", "GET"]
    faulty_s3.proxy.status(403, path="/a b=c/")
    with pytest.raises(PermissionError):
        fs.cat_file(f"{root}/a b=c/d")


@pytest.mark.parametrize(
    ("code", "error", "named"),
    [
        (500, "", "InternalError"),
        (502, "", "ServiceUnavailable"),
        (503, "", "SlowDown"),
        (503, "ServiceUnavailable", "ServiceUnavailable"),
        (403, "", "AccessDenied"),
        (404, "", "NoSuchKey"),
    ],
)
def test_status(bucket: Bucket, behind: Bucket, proxy: Any, code: int, error: str, named: str):
    rule = proxy.status(code, error, methods=["PUT", "GET"], times=2)

    assert error_of(bucket.put, "a") == (code, named)
    assert error_of(bucket.get, "a") == (code, named)
    assert behind.keys() == []
    bucket.put("a")
    assert (rule.seen, rule.hits, behind.keys()) == (3, 2, ["a"])


def test_status_of_a_head_has_no_body(bucket: Bucket, proxy: Any):
    bucket.put("a")
    proxy.status(503, methods="HEAD", times=1)

    assert error_of(bucket.client.head_object, Bucket=bucket.name, Key="a") == (503, "503")
    assert bucket.client.head_object(Bucket=bucket.name, Key="a")["ContentLength"] == len(BODY)


def test_reset_at_once(bucket: Bucket, behind: Bucket, proxy: Any):
    proxy.reset(methods="PUT", times=1)

    with pytest.raises(ConnectionClosedError):
        bucket.put("a")
    assert behind.keys() == []


def test_reset_in_a_request(bucket: Bucket, behind: Bucket, proxy: Any):
    rule = proxy.reset(after=1000, of="request", methods="PUT", times=1)

    with pytest.raises(ConnectionClosedError):
        bucket.put("a")
    assert (rule.hits, behind.keys()) == (1, [])


def test_reset_in_an_answer(bucket: Bucket, proxy: Any):
    bucket.put("a")
    proxy.reset(after=1000, methods="GET", times=1)

    stream = bucket.client.get_object(Bucket=bucket.name, Key="a")["Body"]
    with pytest.raises(ResponseStreamingError, match="reset"):
        stream.read()
    assert bucket.get("a") == BODY


def test_stall_without_answer(bucket: Bucket, behind: Bucket, proxy: Any):
    rule = proxy.stall(methods="PUT")

    with pytest.raises(ReadTimeoutError):
        bucket.put("a")
    assert (rule.held, behind.keys()) == (1, [])
    proxy.clear()
    bucket.put("b")
    assert behind.keys() == ["b"]


def test_stall_in_an_answer(bucket: Bucket, proxy: Any):
    bucket.put("a")
    proxy.stall(after=1000, methods="GET", path="/a", times=1)
    stream = bucket.client.get_object(Bucket=bucket.name, Key="a")["Body"]

    assert stream.read(1000) == BODY[:1000]
    with pytest.raises(ReadTimeoutError):
        stream.read(1)


@pytest.mark.parametrize("after", [1000, 10**9])
def test_short(bucket: Bucket, proxy: Any, after: int):
    bucket.put("a")
    proxy.short(after=after, methods="GET")
    stream = bucket.client.get_object(Bucket=bucket.name, Key="a")["Body"]

    with pytest.raises((IncompleteReadError, ResponseStreamingError), match=f"{min(after, len(BODY) - 1)}"):
        stream.read()


def test_lost_answer(bucket: Bucket, behind: Bucket, proxy: Any):
    proxy.lost_answer(methods="PUT", times=1)

    with pytest.raises(ConnectionClosedError):
        bucket.put("a", IfNoneMatch="*")
    assert behind.get("a") == BODY
    assert error_of(bucket.put, "a", IfNoneMatch="*") == (412, "PreconditionFailed")


def test_refuse(bucket: Bucket, proxy: Any):
    rule = proxy.refuse(0.3, methods="PUT", times=1)

    with pytest.raises(ConnectionClosedError):
        bucket.put("a")
    with pytest.raises(EndpointConnectionError):
        bucket.put("a")
    deadline = time.monotonic() + 5
    while rule.seen < 2 and time.monotonic() < deadline:
        try:
            bucket.put("a")
        except EndpointConnectionError:
            time.sleep(0.02)
    assert bucket.keys() == ["a"]


def test_outage(bucket: Bucket, proxy: Any):
    bucket.put("a")
    with proxy.outage(), pytest.raises(EndpointConnectionError):
        bucket.get("a")

    assert bucket.get("a") == BODY


def test_drop_header(bucket: Bucket, proxy: Any):
    bucket.put("a", b"1", IfNoneMatch="*")
    assert error_of(bucket.put, "a", b"2", IfNoneMatch="*") == (412, "PreconditionFailed")

    rule = proxy.drop_header("If-None-Match", header="if-none-match")
    bucket.put("a", b"3", IfNoneMatch="*")
    bucket.put("a", b"4")
    assert (rule.seen, bucket.get("a")) == (1, b"4")


def test_corrupt(bucket: Bucket, behind: Bucket, proxy: Any):
    behind.put("a")
    # The client checks what it gets, unless it is told not to or gets a part.
    proxy.corrupt(at=1000, methods="GET")
    got = bucket.get("a", Range=f"bytes=0-{len(BODY) - 2}")

    wrong = [at for at, (ours, theirs) in enumerate(zip(got, BODY, strict=False)) if ours != theirs]
    assert (len(got), wrong, got[1000] ^ BODY[1000]) == (len(BODY) - 1, [1000], 1)


def test_pause_before_the_request(bucket: Bucket, behind: Bucket, proxy: Any, pool: ThreadPoolExecutor):
    rule = proxy.pause_at(methods="PUT", times=1)
    late = pool.submit(bucket.put, "a", b"late", IfNoneMatch="*")
    rule.wait_held()
    behind.put("a", b"early")
    rule.release()

    with pytest.raises(ClientError, match="PreconditionFailed"):
        late.result(10)
    assert (rule.held, behind.get("a")) == (0, b"early")


def test_pause_before_the_answer(bucket: Bucket, behind: Bucket, proxy: Any, pool: ThreadPoolExecutor):
    rule = proxy.pause_at("answer", methods="PUT")
    put = pool.submit(bucket.put, "a")
    rule.wait_held()

    assert behind.get("a") == BODY
    assert not put.done()
    rule.release()
    put.result(10)
