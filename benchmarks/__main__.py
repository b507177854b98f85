"""`python -m benchmarks`, as `make bench` runs it: measures, prints a table, writes JSON.

Use a quiet machine, and a server in AWS_ENDPOINT_URL. Without one, moto is started, which is correct but slow: figures
of transfers then mean little.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import sys
import time
import traceback
from typing import Any

import psutil
from rich.console import Console

from baton.runs.versions import library_versions
from benchmarks import rows
from benchmarks.bench import ROUNDS, Bench, Options
from benchmarks.ours import Ours
from benchmarks.process import OtherLoad
from benchmarks.published import commit, publish, refusals
from benchmarks.server import Server
from benchmarks.sizes import SIZES
from benchmarks.table import show
from benchmarks.theirs import Theirs


def main() -> int:
    parser = _parser()
    given = parser.parse_args()
    about = _about(given)
    if given.publish and (reasons := refusals(about)):
        parser.error(f"--publish: {'; '.join(reasons)}.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what it started and wrote is removed
    large = SIZES["2m" if given.quick else given.parameters]
    small = SIZES["2m" if given.quick else "8m"]
    options = Options(rounds=given.rounds, large=large, small=small, quick=given.quick)
    console = Console(width=None if sys.stdout.isatty() else 150)
    server = Server(given.max_bytes, given.reset)
    bench = Bench(options, server)
    document: dict[str, Any] = {**about, "server": server.kind, "rows": {}, "errors": {}}
    try:
        ours = Ours(bench)
        theirs = Theirs(bench, ours)
        for name in given.only or rows.ALL:
            began = time.monotonic()
            print(f"{name}: {rows.ALL[name].title}", file=sys.stderr, flush=True)
            load = OtherLoad(given.server_process, server.pids)
            try:
                row = rows.ALL[name].measure(bench, ours, theirs)
            except Exception as error:
                traceback.print_exc()
                document["errors"][name] = f"{type(error).__name__}: {error}"
                continue
            finally:
                others = load.end()
                bench.drop_payloads()
                _write(given.json, document)
            seconds = time.monotonic() - began
            document["rows"][name] = {**row.to_json(), "seconds": seconds, "others": others}
            _write(given.json, document)
            show(name, row, console)
    finally:
        bench.close()
        with contextlib.suppress(Exception):
            server.close()
    _last_words(console, document, given.json)
    refused = publish(document) if given.publish else {}
    for name, reasons in refused.items():
        console.print(f"[red]{name} is not published: {'; '.join(reasons)}.[/red]", highlight=False)
    return 1 if document["errors"] or refused else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few rounds, to see that it works")
    parser.add_argument("--only", action="append", choices=list(rows.ALL), help="this row alone; may be repeated")
    parser.add_argument("--rounds", type=int, help="times that each side is measured, in turn (5)")
    parser.add_argument(
        "--publish",
        action="store_true",
        help="also write them into the docs; refused with local changes, under load, and below five rounds",
    )
    parser.add_argument("--json", default="build/bench.json", help="where the figures are written (%(default)s)")
    parser.add_argument("--parameters", choices=list(SIZES), default="77m", help="size of the model (%(default)s)")
    parser.add_argument(
        "--max-bytes", type=float, default=4e9, help="bytes to write before room is made on the server (%(default)g)"
    )
    parser.add_argument(
        "--reset",
        metavar="COMMAND",
        help="command that makes room on a server that is not our own, such as a restart",
    )
    parser.add_argument(
        "--server-process",
        action="append",
        default=[],
        metavar="NAME",
        help="a process that belongs to the server without listening at its address, such as ceph-osd",
    )
    return parser


def _about(given: argparse.Namespace) -> dict[str, Any]:
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "quick": given.quick,
        "rounds": given.rounds or (1 if given.quick else ROUNDS),
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory": psutil.virtual_memory().total,
            "load": os.getloadavg(),
        },
        "versions": library_versions(),
    }


def _processor() -> str:
    """Returns the processor's name, or its architecture where the system does not tell."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _write(path: str, document: dict[str, Any]) -> None:
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(document, file, indent=1, ensure_ascii=False)


def _last_words(console: Console, document: dict[str, Any], path: str) -> None:
    figures = [figure for row in document["rows"].values() for figure in row["figures"]]
    met, missed = (sum(figure["met"] is verdict for figure in figures) for verdict in (True, False))
    machine = document["machine"]
    console.print(
        f"\n{met} goals met, {missed} missed; medians of all rounds (least–greatest). "
        f"{machine['cores']} cores, {machine['memory'] / 2**30:.0f} GiB, S3: {document['server']}.",
        highlight=False,
    )
    if document["quick"]:
        console.print("[yellow]--quick: these figures only show that the benchmark works.[/yellow]")
    for name, error in document["errors"].items():
        console.print(f"[red]{name} could not be measured: {error}[/red]", highlight=False)
    console.print(f"figures: {path}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
