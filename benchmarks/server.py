"""The object store that is measured against: the one in the environment, or one that this process starts.

A row may reach it by way of a slower network.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import psutil

from benchmarks.process import FRONT

ROUND_TRIP_S, RATE = 0.03, 200e6
"""Of the slower network: seconds of a round trip, and bytes a second in each direction."""
_OWN = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_DEFAULT_REGION": "us-east-1"}


class Server:
    """A bucket of a name that was never used, on a server that is kept from filling up.

    Many a server gives the space of deleted objects back late, so deleting is not enough: when `max_bytes` have been
    written, a server of our own is started afresh, and for another one `reset` is run.

    Args:
        max_bytes: Bytes to write before there is made room.
        reset: Shell command that makes room on a server that is not our own.

    Attributes:
        generation: Counts the buckets: what was written under an earlier one is gone.
        written: Bytes announced in all.
    """

    def __init__(self, max_bytes: float, reset: str | None) -> None:
        self.max_bytes, self.reset = max_bytes, reset
        self.generation = 0
        self.written = 0
        self._since_reset = max_bytes if reset else 0  # earlier processes may have filled the server
        self._moto: Moto | None = None
        self._front: subprocess.Popen[str] | None = None
        self._is_slow = False
        self.endpoint = os.environ.pop("AWS_ENDPOINT_URL_S3", None) or os.environ.get("AWS_ENDPOINT_URL", "")
        self.is_own = not self.endpoint
        self.kind = "moto, started by the benchmark" if self.is_own else self.endpoint
        self._begin()

    @property
    def uri(self) -> str:
        """The bucket."""
        return f"s3://{self.bucket}"

    def expect(self, num_bytes: float) -> None:
        """Announces bytes that will be written, and makes room first where that is due."""
        if self._since_reset and self._since_reset + num_bytes > self.max_bytes:
            self._make_room()
        self._since_reset += int(num_bytes)
        self.written += int(num_bytes)

    def clear(self, prefix: str = "") -> None:
        """Removes objects and begun uploads."""
        for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix):
            for entry in page.get("Contents", []):
                self._client.delete_object(Bucket=self.bucket, Key=entry["Key"])
        begun = self._client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", [])
        for upload in begun:
            if upload["Key"].startswith(prefix):
                self._client.abort_multipart_upload(Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"])

    def cpu(self) -> float | None:
        """Returns the processor time that the server has had, None where it does not run on this machine."""
        times = [psutil.Process(pid).cpu_times() for pid in self.pids()]
        return sum(time.user + time.system for time in times) if times else None

    def pids(self) -> set[int]:
        """Returns the processes that listen at its address, none where it is on another machine."""
        address = urlparse(self.endpoint)
        if address.hostname not in ("localhost", "127.0.0.1", "::1"):
            return set()
        return {
            found.pid
            for found in psutil.net_connections("tcp")
            if found.status == psutil.CONN_LISTEN and found.laddr.port == address.port and found.pid
        }

    @contextmanager
    def slower(self) -> Iterator[None]:
        """Has children that are started meanwhile reach the server by way of a slower network."""
        self._is_slow = True
        self._reach()
        try:
            yield
        finally:
            self._is_slow = False
            self._reach()

    def close(self) -> None:
        """Removes the bucket, and ends a server of our own."""
        try:
            if not self.is_own:
                self.clear()
                self._client.delete_bucket(Bucket=self.bucket)
        finally:
            self._end()

    def _begin(self) -> None:
        if self.is_own:
            self._moto = Moto()
            self.endpoint = self._moto.endpoint
            os.environ.update(_OWN)
        self._reach()
        self.generation += 1
        self.bucket = f"baton-bench-{uuid.uuid4().hex[:10]}"
        self._client = _client(self.endpoint)
        _answered(lambda: self._client.create_bucket(Bucket=self.bucket))

    def _reach(self) -> None:
        """Sets the addresses of the server: this process's, and where a slower network is asked for, its children's."""
        if self._front:
            self._front.terminate()
            self._front.wait(30)
            self._front = None
        os.environ["AWS_ENDPOINT_URL"] = self.endpoint
        os.environ.pop(FRONT, None)
        if self._is_slow:
            parts = urlparse(self.endpoint)
            place = [str(parts.hostname), str(parts.port or 80), str(ROUND_TRIP_S), str(RATE)]
            command = [sys.executable, "-m", "benchmarks.shaping", *place]
            self._front = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert self._front.stdout is not None
            os.environ[FRONT] = f"http://127.0.0.1:{int(self._front.stdout.readline())}"

    def _make_room(self) -> None:
        if self.is_own:
            self._end()
        else:
            self.clear()
            self._client.delete_bucket(Bucket=self.bucket)
            if self.reset:
                subprocess.run(self.reset, shell=True, check=True)
        self._since_reset = 0
        self._begin()

    def _end(self) -> None:
        if self._moto:
            self._moto.close()


class Moto:
    """An S3 server of our own, and its log of all requests.

    Attributes:
        endpoint: Its address.
        log: The log's path.
    """

    def __init__(self) -> None:
        self._file = tempfile.NamedTemporaryFile("w", prefix="baton-bench-", suffix=".log")  # noqa: SIM115
        self.log = self._file.name
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=self._file)
        while not (found := re.search(r"Running on (http://127\.0\.0\.1:\d+)", Path(self.log).read_text("utf-8"))):
            if self._process.poll() is not None:
                raise RuntimeError("the S3 server ended before it listened")
            time.sleep(0.05)
        self.endpoint = found[1]

    def close(self) -> None:
        """Ends it."""
        self._process.terminate()
        self._process.wait(30)
        self._file.close()


def _client(endpoint: str) -> Any:
    import botocore.config
    import botocore.session

    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    settings = botocore.config.Config(retries={"max_attempts": 5}, s3={"addressing_style": "path"})
    session = botocore.session.get_session()
    return session.create_client("s3", region_name=region, config=settings, endpoint_url=endpoint)


def _answered(call: Any, patience: float = 60.0) -> None:
    """Calls until the server answers: one that was just started again may need a while."""
    from botocore.exceptions import ConnectionError as NotThere
    from botocore.exceptions import HTTPClientError

    until = time.monotonic() + patience
    while True:
        try:
            call()
            return
        except (NotThere, HTTPClientError):
            if time.monotonic() > until:
                raise
            time.sleep(1)
