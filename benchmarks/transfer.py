"""One transfer in a fresh process: `python -m benchmarks.transfer OPERATION ARGUMENT…`; prints what it took.

`fetch` and `send` are ours, with their hashes. The raw ones compare nothing, and hash nothing unless told to: they show
what the server and this machine allow.
"""

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from benchmarks import OPPONENTS
from benchmarks.mark import mark

PART = 16 * 1024 * 1024
FILES = 8
"""Files in flight, as for ours."""


def fetch(run_uri: str, step: str, folder: str) -> Callable[[], None]:
    from baton.checkpoint.store import CheckpointStore
    from baton.runs.run import Run

    store = CheckpointStore(Run.open(run_uri))
    checkpoint = store.read(int(step))
    assert checkpoint
    return lambda: print(store.fetch(checkpoint, folder), file=sys.stderr)


def send(folder: str, uri: str) -> Callable[[], None]:
    from baton.store.bundle import BundleWriter
    from baton.store.storage import Storage

    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    return lambda: BundleWriter(Storage(f"s3://{bucket}"), prefix, kind="checkpoint").send(folder)


def raw_put(folder: str, uri: str) -> Callable[[], None]:
    """obstore: parts of 16 MB, four at a time for each file."""
    import obstore

    store, prefix = _store(uri)

    def put(name: str) -> None:
        size = os.path.getsize(f"{folder}/{name}")
        obstore.put(
            store,
            f"{prefix}/{name}",
            Path(folder, name),
            use_multipart=size > PART,
            chunk_size=PART,
            max_concurrency=4,
        )

    return lambda: _each(put, os.listdir(folder), FILES)


def raw_get(uri: str, folder: str, threads: str, hashed: str = "") -> Callable[[], None]:
    """obstore: ranges of 16 MB into files of full length, so many at a time over all files."""
    import hashlib

    import obstore

    store, prefix = _store(uri)
    sizes = {entry["path"]: entry["size"] for batch in obstore.list(store, f"{prefix}/") for entry in batch}

    def get() -> None:
        os.makedirs(folder, exist_ok=True)
        files = {}
        for path, size in sizes.items():
            files[path] = os.open(f"{folder}/{os.path.basename(path)}", os.O_RDWR | os.O_CREAT)
            os.ftruncate(files[path], size)
        parts = [(path, start) for path, size in sizes.items() for start in range(0, size, PART)]

        def part(which: tuple[str, int]) -> None:
            path, start = which
            data = obstore.get_range(store, path, start=start, end=min(start + PART, sizes[path]))
            os.pwrite(files[path], data, start)
            if hashed:
                hashlib.sha256(data)  # of each part: it takes as long as that of the whole

        _each(part, parts, int(threads))
        for file in files.values():
            os.close(file)

    return get


def boto3_get(uri: str, folder: str) -> Callable[[], None]:
    client, bucket, prefix, settings = _boto3(uri)
    entries = client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/")["Contents"]
    os.makedirs(folder, exist_ok=True)
    return lambda: _each(
        lambda key: client.download_file(bucket, key, f"{folder}/{os.path.basename(key)}", Config=settings),
        [entry["Key"] for entry in entries],
        FILES,
    )


def runai_get(uri: str, folder: str) -> Callable[[], None]:
    """Run:ai's model streamer, ranges of 16 MB into memory; the read bytes are written nowhere."""
    sys.path.append(str(OPPONENTS))
    os.environ["RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING"] = "0"
    from runai_model_streamer.file_streamer import file_streamer
    from runai_model_streamer.file_streamer.requests_iterator import FileChunks

    def get() -> None:
        with file_streamer.FileStreamer() as streamer:
            files = streamer.list_files(f"{uri}/")
            parts = [[min(PART, size - start) for start in range(0, size, PART)] for _, size in files]
            wanted = [
                FileChunks.contiguous(number, path, 0, part)
                for number, ((path, _), part) in enumerate(zip(files, parts, strict=True))
            ]
            streamer.stream_files(wanted)
            read = sum(chunk[-1].numel() for chunk in streamer.get_chunks())
        assert read == sum(size for _, size in files), "every byte"

    return get


def s3fs_put(folder: str, uri: str) -> Callable[[], None]:
    import s3fs

    return lambda: s3fs.S3FileSystem().put(f"{folder}/", f"{uri.removeprefix('s3://')}/", recursive=True)


def s3fs_get(uri: str, folder: str) -> Callable[[], None]:
    import s3fs

    return lambda: s3fs.S3FileSystem().get(f"{uri.removeprefix('s3://')}/", f"{folder}/", recursive=True)


def _store(uri: str) -> tuple[Any, str]:
    from obstore.store import S3Store

    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    plain: Any = {"allow_http": True}
    return S3Store(bucket, endpoint=endpoint, region=region, unsigned_payload=True, client_options=plain), prefix


def _boto3(uri: str) -> tuple[Any, str, str, Any]:
    import boto3
    from boto3.s3.transfer import TransferConfig

    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    settings = TransferConfig(multipart_threshold=PART, multipart_chunksize=PART, max_concurrency=8)
    return boto3.client("s3"), bucket, prefix, settings


def _each(work: Callable[[Any], Any], items: list[Any], threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, items))


OPERATIONS = {f.__name__: f for f in (fetch, send, raw_put, raw_get, boto3_get, runai_get, s3fs_put, s3fs_get)}

if __name__ == "__main__":
    operation = OPERATIONS[sys.argv[1]](*sys.argv[2:])
    began, cpu, before = time.perf_counter(), time.process_time(), psutil.cpu_times()
    operation()
    seconds, cores, after = time.perf_counter() - began, os.cpu_count() or 1, psutil.cpu_times()
    idle = after.idle - before.idle + after.iowait - before.iowait
    busy = 1 - idle / seconds / cores  # with the server and all others
    mark("moved", seconds=seconds, cpu=time.process_time() - cpu, busy=busy)
