"""Each actor's client of the store."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

from baton.errors import UnavailableError
from baton.store.protocol import ObjectInfo
from tools.schedules.scheduler import Actor, Scheduler
from tools.schedules.store import Server

T = TypeVar("T")


@functools.lru_cache(maxsize=100_000)
def sha256(data: bytes) -> str:
    """Returns the SHA-256 of bytes, of which a schedule has few."""
    return hashlib.sha256(data).hexdigest()


CONTENTS: dict[str, bytes] = {}
"""Bytes of the files on the actors' machines, by their paths."""


class Client:
    """An actor's client, behind the protocol `ObjectStore`.

    Attributes:
        delivered: Bytes that came to this machine, by local path.
    """

    uri = root = "simulated://store"
    is_local = False

    def __init__(self, server: Server, actor: Actor | None) -> None:
        self.server = server
        self._own = actor
        self.create_is_certain = server.conditional
        self.delivered: dict[str, bytes] = {}

    def read(self, path: str) -> bytes:
        """Returns a whole object."""
        return self._ask("read", path, lambda: self._present(path))

    def write(self, path: str, data: bytes) -> None:
        """Writes an object."""
        self._change("write", path, lambda sent: self.server.put(path, data, self._name, sent=sent))

    def create(self, path: str, data: bytes) -> bool:
        """Writes an object unless there is one, where the server knows how to."""
        put = self.server.put
        return self._change("create", path, lambda sent: put(path, data, self._name, absent=True, sent=sent))

    def size(self, path: str) -> int | None:
        """Returns an object's bytes."""
        objects = self.server.objects
        return self._ask("size", path, lambda: len(objects[path][0]) if path in objects else None)

    def list(self, path: str) -> list[str]:
        """Returns the names directly below a path."""
        below = f"{path}/" if path else ""
        return self._ask("list", path, lambda: list({name.partition("/")[0] for name in self.server.listed(below)}))

    def find(self, path: str) -> dict[str, ObjectInfo]:
        """Returns all objects below a path."""
        below = f"{path}/" if path else ""
        listed = self._ask("find", path, lambda: self.server.look(below, self._name))
        return {name: ObjectInfo(len(data), datetime.fromtimestamp(at, UTC)) for name, (data, at) in listed.items()}

    def remove(self, path: str) -> None:
        """Removes an object."""
        self._change("remove", path, lambda sent: self.server.drop(path, self._name, sent=sent))

    def tidy(self, path: str) -> None:
        """Does nothing: there are no folders."""

    def upload(self, local_path: str, path: str, seen: Callable[[bytes], None]) -> None:
        """Sends a file."""
        data = CONTENTS[local_path]
        seen(data)
        self._change("upload", path, lambda sent: self.server.put(path, data, self._name, sent=sent))

    def copy(self, source: str, path: str, size: int) -> bool:
        """Copies an object inside the server."""
        if not self._change("copy", path, lambda sent: self.server.copy(source, path, self._name, sent=sent)):
            raise FileNotFoundError(source)
        return True

    def download(self, path: str, local_path: str, size: int) -> str:
        """Fetches an object to this machine."""
        data = self._ask("download", path, lambda: self._present(path))
        self.delivered[local_path] = data
        return sha256(data)

    def blocks(self, path: str) -> Iterator[bytes]:
        """Yields an object's bytes."""
        yield self._ask("blocks", path, lambda: self._present(path))

    def explain(self, error: Exception, path: str | None = None) -> Exception:
        """Translates what a fault raises."""
        return UnavailableError(f"simulated: {error}") if isinstance(error, TimeoutError) else error

    @property
    def actor(self) -> Actor | None:
        """The thread of its process that is running."""
        return self.server.scheduler.current if self._own and self.server.scheduler else None

    @property
    def _name(self) -> str:
        return self._own.process if self._own else "before"

    def _present(self, path: str) -> bytes:
        if path not in self.server.objects:
            raise FileNotFoundError(path)
        return self.server.objects[path][0]

    def _ask(self, kind: str, path: str, answer: Callable[[], T]) -> T:
        fault = self._turn(kind, path)
        if fault == "died":
            self._die()
        if fault:
            raise TimeoutError(f"{kind} {path}")
        try:
            return answer()
        finally:
            self._pause()

    def _change(self, kind: str, path: str, effect: Callable[[int | None], T]) -> T:
        fault = self._turn(kind, path)
        if not fault:
            done = effect(None)
            self._pause()
            return done
        assert self.server.scheduler
        if fault == "died":
            # Where no request is on its way for long, none outlives its process.
            moment = self.server.scheduler.choices.among(2 if self.server.faults.prompt else 3)
            self.server.order.append(f"moment {moment}")
            if moment == 1:
                effect(None)
            elif moment == 2:
                self.server.pending.append((self.server.now, partial(effect, self.actor.calls if self.actor else 0)))
            self._die()
        if fault == "lost":
            effect(None)
        elif fault == "late":
            self.server.pending.append((self.server.now, partial(effect, self.actor.calls if self.actor else 0)))
        self._pause()
        raise TimeoutError(f"{kind} {path}")

    def _pause(self) -> None:
        """Gives the others a turn after a request, where none of those takes long itself."""
        if self.server.faults.prompt and self.actor and self.server.scheduler:
            self._jump(self.server.scheduler)
            self.server.scheduler.point(self.actor)

    def _jump(self, scheduler: Scheduler) -> None:
        jumps = self.server.faults.jumps
        if jumps and self.actor and scheduler.choices.draw() < self.server.faults.stops:
            seconds = jumps[scheduler.choices.among(len(jumps))]
            if scheduler.choices.among(2):
                scheduler.now += seconds
            else:
                self.actor.wake = scheduler.now + seconds

    def _die(self) -> None:
        assert self.actor
        assert self.server.scheduler
        self.server.scheduler.kill(self.actor)

    def _turn(self, kind: str, path: str) -> str | None:
        """Gives the others a turn, and returns the fault that befalls this call."""
        server, scheduler = self.server, self.server.scheduler
        if self.actor is None or scheduler is None:
            return None
        faults, fault = server.faults, None
        if not faults.prompt:
            self._jump(scheduler)
            scheduler.point(self.actor)
        self.actor.calls += 1
        if server.left > 0 and scheduler.choices.draw() < faults.likely:
            server.left -= 1
            fault = faults.kinds[scheduler.choices.among(len(faults.kinds))]
        # Records have random names; there is one at the end of each process.
        server.order.append(f"{self.actor.name} {kind} {'record' if '/records/' in path else path} {fault}")
        if server.log is not None:
            server.log.append(f"{scheduler.now - 1e9:9.2f} {self.actor.name:10} {kind:8} {path} {fault or ''}")
        return fault
