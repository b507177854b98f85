"""What the processes of a run do to the store, by the real code, and what befalls bytes."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import tempfile
import threading
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import cast

from baton.checkpoint import proof, retention
from baton.checkpoint.restore import Restorer, committed_at_target, usable_at_target
from baton.checkpoint.staging import PendingCheckpoint
from baton.checkpoint.store import Checkpoint, CheckpointMeta, CheckpointStore
from baton.errors import DamagedError, UnavailableError
from baton.recipe.run import Chunks, Keep
from baton.runs.plan import Plan
from baton.runs.run import Run
from baton.store.storage import Storage
from baton.train.checkpointer import Uploader
from tools.schedules.client import CONTENTS, Client
from tools.schedules.invariants import FROZEN, LOGS, WEIGHTS, Truth, frozen
from tools.schedules.machine import Flag, Machine
from tools.schedules.scheduler import Actor, Scheduler
from tools.schedules.store import Server

IDENTITY = "the same"
ONE = Keep(last=1, best=0)
TRAINING = 90.0
"""Seconds between two checkpoints: longer than a request may be on its way."""
FOLDER = Path(tempfile.mkdtemp(prefix="baton-schedules-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)  # forked processes do not come by here


@dataclass
class Recipe:
    """What the checkpoint stage reads of a recipe."""

    chunks: Chunks


class SimulatedRun(Run):
    """A run whose recipe and plan are known: reading them from JSON takes longer than a schedule."""

    targets: tuple[int, ...] = (20, 40, 60)
    keep = ONE

    def recipe(self) -> Recipe:  # type: ignore[override]
        """Returns the recipe."""
        return Recipe(Chunks(count=len(self.targets), keep=self.keep))

    def plan(self) -> Plan:
        """Returns the plan."""
        return Plan(rows=8, steps_per_epoch=4, num_steps=self.targets[-1], targets=self.targets)


@cache
def prepared(writer: str, step: int, copies: bool = False) -> str:
    """Returns a folder with the files of a checkpoint, in which writer and step can be told.

    Args:
        writer: Whose.
        step: Its step.
        copies: Whether one of them is the same in each, up to a step.
    """
    folder = FOLDER / f"{os.getpid()}-{writer}-{step}{copies or ''}"  # processes share it
    folder.mkdir(parents=True, exist_ok=True)
    body = f"step {step}|{writer}|".encode()
    log = json.dumps({"log_history": [{"step": at, "eval_loss": 1.0 / at} for at in range(10, step + 1, 10)]})
    files = {"trainer_state.json": log.encode(), "weights.bin": body + WEIGHTS}
    for name, data in (files | ({FROZEN: frozen(step)} if copies else {})).items():
        (folder / name).write_bytes(data)
        CONTENTS[str(folder / name)] = data
    LOGS.add(log.encode())
    return str(folder)


def staged(writer: str, step: int) -> str:
    """Returns such a folder that goes when its checkpoint has."""
    folder = f"{FOLDER}/{os.getpid()}-staged-{writer}-{step}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(prepared(writer, step), folder)
    CONTENTS.update({f"{folder}/{name}": CONTENTS[f"{prepared(writer, step)}/{name}"] for name in os.listdir(folder)})
    return folder


@dataclass
class House:
    """A schedule's store, scheduler and truth; its methods are what processes do."""

    server: Server
    scheduler: Scheduler
    truth: Truth
    keep: Keep = ONE
    patience: float = 120.0
    copies: bool = False
    opened: int = 0

    def open(self, actor: Actor | None, name: str = "") -> CheckpointStore:
        """Returns a process's own view of the run's checkpoints."""
        client = Client(self.server, actor)
        if not (actor or name):  # a fresh process each time: no two have a name in common
            self.opened += 1
            name = f"fresh{self.opened}"
        machine = Machine(actor, self.scheduler, name)
        storage = Storage("simulated://store", patience=self.patience, client=client, runtime=machine)
        storage.__dict__["has_conditional_put"] = self.server.conditional
        run = SimulatedRun(storage, "r")
        run.keep = self.keep
        return CheckpointStore(run)

    def commit(self, actor: Actor | None, store: CheckpointStore, step: int, by: str = "") -> bool:
        """Uploads and commits a checkpoint, and compares what it was told with what is so."""
        name = by or (actor.name if actor else "before")
        writer = store.open_writer(step)
        self.truth.alive[name] = writer.folder
        self.truth.begin_commit(writer.folder, step)
        try:
            writer.send(prepared(name, step, self.copies))
            meta = CheckpointMeta(digest=f"state {step}", identity=IDENTITY, chunk=1 if step <= 20 else 2)
            checkpoint, ours = store.commit(step, writer, meta)
        finally:
            self.truth.alive.pop(name, None)
            self.truth.end_commit(writer.folder)
        self.truth.finished_attempts.add(writer.folder)
        folder = checkpoint.manifest.folder
        if (
            folder not in self.truth.committed
            or ours != (folder == writer.folder)
            or checkpoint.digest != f"state {step}"
        ):
            self.truth.fail(7, f"{name} was told that step {step} is {folder}'s, and ours: {ours}")
        return ours

    def supersede(self, actor: Actor, *steps: int) -> None:
        """Trains on while checkpoints are on their way, each of which a newer one may take the place of."""
        store = self.open(actor)
        store.storage.patience = 5.0  # as `Committer.on_first_step`

        def committed(
            pending: PendingCheckpoint, checkpoint: Checkpoint, ours: bool, seconds: dict[str, float]
        ) -> None:
            if checkpoint.step != pending.step or checkpoint.manifest.folder not in self.truth.committed:
                self.truth.fail(7, f"{actor.name} was told that step {pending.step} is {checkpoint.manifest.folder}'s")

        uploader = Uploader(store, committed, max_unsaved=600.0)
        for step in steps:
            store.storage.runtime.sleep(TRAINING / 10)
            uploader.make_way()
            uploader.raise_failure()
            meta = partial(CheckpointMeta, digest=f"state {step}", identity=IDENTITY)
            flag = cast(threading.Event, Flag(self.scheduler))
            folder = staged(actor.name, step)
            uploader.submit(PendingCheckpoint(step, folder, superseded=flag, must_keep=step == steps[-1]), meta)
        uploader.finish()
        if self.truth.newest_valid() < steps[-1]:
            self.truth.fail(6, f"{actor.name} ended, and step {steps[-1]} is not there")

    def restore(self, actor: Actor | None, store: CheckpointStore, target: int) -> int:
        """Restores as a chunk does."""
        name = actor.name if actor else "before"
        restorer = Restorer(store, target, IDENTITY, None, lambda size: str(FOLDER / "in"))
        self.truth.begin_restore(name, target)
        restored = restorer.fetch()
        client = store.storage.client
        assert isinstance(client, Client)
        self.truth.end_restore(name, client, restored)
        return restored.step if restored else 0

    def train(self, actor: Actor | None, target: int, every: int = 10, index: int = 1) -> None:
        """Brings the run to a target: what a chunk does, without the training."""
        store = self.open(actor)
        if usable_at_target(store, target) is None:
            start = self.restore(actor, store, target)
            for step in range(start // every * every + every, target + 1, every):
                store.storage.runtime.sleep(TRAINING)
                self.commit(actor, store, step)
                if step < target:
                    with contextlib.suppress(UnavailableError):  # as `Committer._on_commit`
                        if committed_at_target(store, target):
                            break
                        retention.prune(store, self.keep, targets=SimulatedRun.targets, in_use=start)
        elif actor is not None:
            store.run.record(f"train-chunk-{index:03d}", {"outcome": "already_done", "chunk": index, "to_step": target})
            return
        if actor is not None:
            store.run.record(f"train-chunk-{index:03d}", {"outcome": "done", "chunk": index, "to_step": target})

    def stage(self, actor: Actor | None, index: int) -> None:
        """Reads a chunk's checkpoint back, as the checkpoint stage does."""
        store = self.open(actor)
        with contextlib.suppress(DamagedError):
            proof.promote(store.run, index)

    def prune(self, actor: Actor | None, keep: Keep | None = None) -> None:
        """Applies retention."""
        retention.prune(self.open(actor), keep or self.keep, targets=())

    def rot(self, actor: Actor, step: int, *, cut: bool = False, name: str = "weights.bin") -> None:
        """Changes a committed file behind everyone's back."""
        self.scheduler.point(actor)
        truth = self.truth.steps.get(step)
        newest = truth.newest() if truth else None
        if newest is None:
            return
        path = f"runs/r/checkpoints/step-{step:08d}/{newest[1]}/{name}"
        if path in self.server.objects:
            self.server.order.append(f"rot {step}")
            data = self.server.objects[path][0]
            self.server.rot(path, data[:-1] if cut else b"X" + data[1:])
