"""The other sides: training without Baton as processes, with the same model, tokens, batch and steps."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.store.storage import Storage
from benchmarks import OPPONENTS
from benchmarks.bench import Bench, parse_mark
from benchmarks.ours import ENVIRONMENT, Ours
from benchmarks.process import Trace, child_environment, watch
from benchmarks.sizes import Size

MOUNT = (  # as SkyPilot's MOUNT_CACHED; one transfer at a time keeps the order of the files
    *("--vfs-cache-mode", "full", "--dir-cache-time", "10s", "--transfers", "1"),
    *("--vfs-cache-poll-interval", "10s", "--vfs-write-back", "1s", "--vfs-cache-max-size", "10G"),
)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A way to train without Baton.

    Attributes:
        told: Its description on the page.
        module: The script.
        checkpoints: How it keeps checkpoints; `benchmarks.script` has the list.
        jit: Whether it saves after SIGTERM.
        package: Package in build/opponents that it needs.
        programs: Programs that it needs, and the Debian packages that have them.
    """

    told: str
    module: str = "benchmarks.script"
    checkpoints: str = "upload"
    jit: bool = False
    package: str = ""
    programs: tuple[tuple[str, str], ...] = ()

    @property
    def lacks(self) -> str:
        """The reason why it cannot run here, empty where it can."""
        if self.package and not (OPPONENTS / self.package).is_dir():
            return f"{self.package} is not in {OPPONENTS.relative_to(OPPONENTS.parents[1])}; `make bench` installs it"
        missing = [package for program, package in self.programs if not shutil.which(program)]
        if missing:
            return f"apt-get install {' '.join(missing)}"
        return "/dev/fuse is missing" if self.checkpoints == "mount" and not os.access("/dev/fuse", os.W_OK) else ""


KINDS = {
    "script": Kind(told="TRL, tokens cached, checkpoints saved to memory and uploaded by a thread"),
    "DCP": Kind(told="the same with `torch.distributed.checkpoint.async_save`", checkpoints="dcp"),
    "Lightning": Kind(
        told="PyTorch Lightning with `AsyncCheckpointIO`",
        module="benchmarks.lightning_script",
        package="pytorch_lightning",
    ),
    "rclone": Kind(
        told="TRL saving into a bucket mounted by rclone, with the flags of SkyPilot's `MOUNT_CACHED`",
        checkpoints="mount",
        programs=(("rclone", "rclone"), ("fusermount3", "fuse3")),
    ),
    "JIT": Kind(told="the script with `enable_jit_checkpoint`", jit=True),
}
BESIDE = ("script", "DCP", "Lightning", "rclone")
"""Kinds that save while they train; `JIT` saves at the end alone."""


class Theirs:
    """Their runs for one benchmark.

    Args:
        bench: The benchmark.
        ours: The side that makes the inputs.
    """

    def __init__(self, bench: Bench, ours: Ours) -> None:
        self.bench, self.ours = bench, ours
        self._uploaded: dict[str, int] = {}

    def kinds(self, names: Sequence[str] = BESIDE) -> list[str]:
        """Returns the kinds that can run here."""
        return [name for name in names if not KINDS[name].lacks]

    def notes(self, names: Sequence[str] = BESIDE) -> list[str]:
        """Returns a note on each kind: its description, or the reason why it is not measured."""
        return [
            f"{name}: not measured: {kind.lacks}" if kind.lacks else f"{name}: {kind.told}"
            for name, kind in ((name, KINDS[name]) for name in names)
        ]

    def begin(self, name: str) -> str:
        """Returns the address below which a run keeps its checkpoints; nothing is there."""
        self.bench.server.clear(f"script/{name}/")
        return f"{self.bench.server.uri}/script/{name}"

    def process(
        self,
        uri: str,
        size: Size,
        *,
        kind: str = "script",
        steps: int,
        target: int,
        every: int | None = None,
        seconds: float | None = None,
        **watching: Any,
    ) -> Trace:
        """Runs one to its target or until it is killed; what it left on this machine is removed.

        Args:
            uri: Where its checkpoints are.
            size: Its model.
            kind: Which of them.
            steps: Steps of the whole run.
            target: Step at which it saves and ends.
            every: Steps between checkpoints.
            seconds: Seconds between checkpoints.
            watching: Further arguments of `process.watch`: when to end it.
        """
        chosen, folder, scratch = KINDS[kind], self.bench.fresh_folder(kind), self.bench.fresh_folder("scratch")
        settings = {
            "uri": uri,
            "folder": folder,
            "scratch": scratch,
            "inputs": self.inputs(size),
            "checkpoints": chosen.checkpoints,
            "jit": chosen.jit,
            "steps": steps,
            "target": target,
            "every_steps": every,
            "every_seconds": seconds,
            "batch": size.batch,
            "length": size.length,
            "threads": 1,
            "seed": 1,
        }
        path = f"{self.bench.work}/script.json"
        Path(path).write_text(json.dumps(settings), encoding="utf-8")
        environment = {**ENVIRONMENT, **({"PYTHONPATH": str(OPPONENTS)} if chosen.package else {})}
        is_mount, began = chosen.checkpoints == "mount", time.time()
        try:
            with _mounted(uri, folder, f"{scratch}/cache") if is_mount else nullcontext():
                command = ["-m", chosen.module, path]
                trace = watch(
                    command, parse_mark, folder=scratch if is_mount else folder, environment=environment, **watching
                )
                if is_mount:
                    trace.spawned = began
                    if not trace.is_killed:  # a pod may go once its files are in the store
                        _wait_for_uploads(uri, folder)
                        trace.ended = time.time()
                        trace.events.append({"event": "put", "at": trace.ended, "step": target})
            return trace
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(scratch, ignore_errors=True)

    def newest(self, uri: str) -> int:
        """Returns the step of the newest complete checkpoint, 0 where there is none."""
        store = Storage(uri)
        try:
            names = [store.read("newest").decode()]
        except FileNotFoundError:
            names = [name.partition("/")[0] for name in store.find("") if name.endswith("/trainer_state.json")]
        return max((int(name.rpartition("-")[2]) for name in names), default=0)

    def inputs(self, size: Size) -> str:
        """Returns the address of tokenizer, configuration and packed tokens, made of the rows that ours trains with."""
        folder, prefix = f"{self.bench.work}/inputs-{size.name}", f"script-inputs/{size.name}"
        if not os.path.exists(folder):
            os.makedirs(folder)
            run = self.ours.run(size, steps=4, count=2)
            trace = watch(["-m", "benchmarks.export", run.uri, folder], parse_mark)
            if (parameters := trace.all("exported")[0]["parameters"]) != size.parameters:
                raise RuntimeError(f"{size.name} has {parameters} parameters, not {size.parameters}")
        uri = f"{self.bench.server.uri}/{prefix}"
        if self._uploaded.get(size.name) != self.bench.server.generation:
            self.bench.transfer("s3fs_put", folder, uri)
            self._uploaded[size.name] = self.bench.server.generation
        return uri


@contextmanager
def _mounted(uri: str, folder: str, cache: str) -> Iterator[None]:
    """Mounts an address on a folder; an end loses whatever has not been uploaded, as a pod's end does."""
    environment = child_environment()
    settings = {"TYPE": "s3", "PROVIDER": "Other", "ENV_AUTH": "true", "ENDPOINT": environment["AWS_ENDPOINT_URL"]}
    environment |= {f"RCLONE_CONFIG_BENCH_{name}": value for name, value in settings.items()}
    environment.pop("AWS_CA_BUNDLE", None)  # rclone's S3 client takes none
    remote = f"bench:{uri.removeprefix('s3://')}"
    command = ["rclone", "mount", remote, folder, "--config", "/dev/null", "--cache-dir", cache, *MOUNT]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 20
        while not os.path.ismount(folder):
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise RuntimeError(f"rclone has not mounted {uri}: {process.communicate()[1][-500:]}")
            time.sleep(0.02)
        yield
    finally:
        process.kill()
        process.wait()
        subprocess.run(["fusermount3", "-uz", folder], check=False, capture_output=True)


def _wait_for_uploads(uri: str, folder: str) -> None:
    """Waits until the store has each file of a mounted folder in its full size."""
    local = {str(path.relative_to(folder)): path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()}
    store, deadline = Storage(uri), time.monotonic() + 300
    while local.items() - {(name, entry.size) for name, entry in store.find("").items()}:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{folder} has files that rclone has not uploaded in 300 s")
        time.sleep(0.1)
