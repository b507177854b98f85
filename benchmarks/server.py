"""The object store that is measured against: the one in the environment, or one that this process starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import uuid
from typing import Any
from urllib.parse import urlparse

import psutil

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
        self._since_reset = 0
        self._processes: list[subprocess.Popen[Any]] = []
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        self.is_own = endpoint is None
        self.kind = "moto, started by the benchmark" if self.is_own else str(endpoint)
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
        address = urlparse(os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ["AWS_ENDPOINT_URL"])
        if address.hostname not in ("localhost", "127.0.0.1", "::1"):
            return None
        pids = {
            found.pid
            for found in psutil.net_connections("tcp")
            if found.status == psutil.CONN_LISTEN and found.laddr.port == address.port and found.pid
        }
        times = [psutil.Process(pid).cpu_times() for pid in pids]
        return sum(time.user + time.system for time in times) if times else None

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
            os.environ.update(_OWN, AWS_ENDPOINT_URL=self._start())
        self.generation += 1
        self.bucket = f"baton-bench-{uuid.uuid4().hex[:10]}"
        self._client = _client()
        _answered(lambda: self._client.create_bucket(Bucket=self.bucket))

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

    def _start(self) -> str:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(server)
        assert server.stderr is not None
        for line in server.stderr:
            if found := re.search(r"Running on (http://127\.0\.0\.1:\d+)", line):
                # An unread pipe that is full would stop the server.
                self._processes.append(subprocess.Popen(["cat"], stdin=server.stderr, stdout=subprocess.DEVNULL))
                return found[1]
        raise RuntimeError("the S3 server ended before it listened")

    def _end(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(30)
        self._processes.clear()


def _client() -> Any:
    import botocore.config
    import botocore.session

    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    settings = botocore.config.Config(retries={"max_attempts": 5}, s3={"addressing_style": "path"})
    return botocore.session.get_session().create_client("s3", region_name=region, config=settings)


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
