"""`python -m tools.chaos`, as `make test-chaos` runs it: a mean hour, its page, and 0 where nothing was lost."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from baton.local import forkserver
from tests.conftest import S3Server
from tests.faults.proxy import FaultyProxy
from tools.chaos import page, plan
from tools.chaos.mean import ChaosError, Mean


def main() -> int:
    given = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what it mounted and started goes
    folder = Path(tempfile.mkdtemp(prefix="baton-chaos-"))
    print(f"seed {given.seed}, {given.minutes:g} minutes and at least {given.kills} kills; {folder}", flush=True)
    failure, began = "", time.time()
    with _store() as (store, proxy):
        forkserver.start()
        mean = Mean(
            folder,
            store,
            proxy,
            seed=given.seed,
            kills=given.kills,
            seconds=60 * given.minutes,
            cells=[cell for cell in plan.CELLS if given.recipe in cell.name],
            say=lambda line: print(line, flush=True),
        )
        try:
            mean.run()
        except ChaosError as error:
            failure = str(error)
        finally:
            mean.machine.close()
    document = page.document(mean, failure, began)
    given.report.parent.mkdir(parents=True, exist_ok=True)
    given.report.write_text(page.render(document), encoding="utf-8")
    given.report.with_suffix(".json").write_text(json.dumps(asdict(document), indent=1), encoding="utf-8")
    if given.publish:
        given.publish.write_text(page.picture(document), encoding="utf-8")
    print(page.verdict(document), failure, sep="\n" if failure else "")
    print(f"report: {given.report}")
    if failure:
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return 0


@contextlib.contextmanager
def _store() -> Iterator[tuple[str, FaultyProxy]]:
    """Starts a store and a proxy before it, and has the environment lead there."""
    server = S3Server()
    proxy = FaultyProxy(server.endpoint)
    try:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            del os.environ[name]
        os.environ |= {
            "AWS_ENDPOINT_URL": proxy.endpoint,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }
        import s3fs

        bucket = f"bucket-{uuid.uuid4().hex[:12]}"
        s3fs.S3FileSystem().mkdir(bucket)
        yield f"s3://{bucket}", proxy
    finally:
        proxy.stop()
        server.stop()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.chaos")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--kills", type=int, default=500, help="how many there are to be at least")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--recipe", default="", help="part of the names of those that take turns, `grpo`; else all")
    parser.add_argument("--report", type=Path, default=Path("build/chaos.html"))
    parser.add_argument("--publish", type=Path, help="an SVG to write the curve to, such as docs/pictures/chaos.svg")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
