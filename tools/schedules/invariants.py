"""Invariants of docs/internals/store.md, checked on each change of a simulated object and each answer to an actor."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from tools.schedules.client import Client, sha256
from tools.schedules.store import Change, Server

BASE = "runs/r/checkpoints/"
_PATH = re.compile(
    r"runs/r/checkpoints/step-(\d{8})/(?:(manifest(?:-(\d+))?\.json)|(damaged|removed)-(\w+)|(\w+)/(.+))$"
)
HOUR = 3600.0
FROZEN = "frozen.bin"
"""A file that is the same in many checkpoints, where there is one."""
NAMES = {"weights.bin", "trainer_state.json"}
THAWS = 50
WEIGHTS = b"w" * 40
LOGS: set[bytes] = set()
"""What the second file of a checkpoint may hold."""


def frozen(step: int) -> bytes:
    """Returns the bytes of `FROZEN` in a step's checkpoint: others of the same size from a step on."""
    return (b"f" if step < THAWS else b"F") * 40


@dataclass
class Attempt:
    """What one writer has uploaded for a step."""

    files: dict[str, bytes] = field(default_factory=dict)
    by: str = ""
    written: list[float] = field(default_factory=list)


@dataclass
class Step:
    """The truth about a step, kept beside the store and without a line of its code."""

    manifests: dict[int, bytes] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    removed: set[str] = field(default_factory=set)
    attempts: dict[str, Attempt] = field(default_factory=dict)
    taken: bool = False

    def newest(self) -> tuple[int, str, dict[str, dict[str, object]]] | None:
        """Returns generation, attempt and files of the manifest that readers take; None where it is marked."""
        if not self.manifests:
            return None
        generation = max(self.manifests)
        folder, files = _parsed(self.manifests[generation])
        return None if folder in self.damaged or folder in self.removed else (generation, folder, files)

    def is_sized(self) -> bool:
        """Tells whether what readers take has all its files."""
        newest = self.newest()
        if newest is None:
            return False
        files = self.attempts.get(newest[1], Attempt()).files
        return all(name in files and len(files[name]) == entry["size"] for name, entry in newest[2].items())

    def is_valid(self) -> bool:
        """Tells whether what readers take has all its bytes."""
        newest = self.newest()
        if newest is None or not self.is_sized():
            return False
        files = self.attempts[newest[1]].files
        return all(sha256(files[name]) == entry["sha256"] for name, entry in newest[2].items())


_cache: dict[bytes, tuple[str, dict[str, dict[str, object]]]] = {}


def _parsed(data: bytes) -> tuple[str, dict[str, dict[str, object]]]:
    if data not in _cache:
        if len(_cache) > 20_000:
            _cache.clear()
        document = json.loads(data)
        _cache[data] = document["folder"], document["files"]
    return _cache[data]


class Truth:
    """Watches a server.

    Attributes:
        broken: Number of an invariant and what broke it.
        strict: Whether a manifest names whole files at every moment: nothing rots, and nothing arrives late.
        one_winner: Whether no manifest may be replaced.
        rots: Whether bytes of committed files change by themselves.
    """

    def __init__(self, server: Server, *, strict: bool, one_winner: bool, rots: bool) -> None:
        self.server = server
        self.broken: list[tuple[int, str]] = []
        self.strict, self.one_winner, self.rots = strict, one_winner, rots
        self.steps: dict[int, Step] = {}
        self.committed: set[str] = set()
        self.owners: dict[str, str] = {}
        self.verified = 0
        self.fell: dict[int, dict[str, int]] = {}
        self.lowest: dict[str, tuple[int, int]] = {}
        self.alive: dict[str, str] = {}
        self.finished_attempts: set[str] = set()
        self.writing: dict[str, tuple[int, str | None]] = {}
        self.raced = False
        for path, (data, _) in server.objects.items():
            self._enter(Change(path, None, data, "before"))
        server.watch = self.see

    def fail(self, number: int, text: str) -> None:
        """Notes that an invariant does not hold."""
        self.broken.append((number, text))

    def newest_valid(self, before: float = float("inf")) -> int:
        """Returns the newest step before one that can be restored, 0 where none can."""
        return max((number for number, step in self.steps.items() if number < before and step.is_valid()), default=0)

    def newest_usable(self, before: float) -> str | None:
        """Returns the attempt of the newest checkpoint before a step that readers take for one."""
        usable = (number for number, step in self.steps.items() if number < before and step.is_sized())
        number = max(usable, default=None)
        newest = self.steps[number].newest() if number is not None else None
        return newest[1] if newest else None

    def begin_commit(self, folder: str, step: int) -> None:
        """Notes that a writer begins, and after which checkpoint."""
        self.writing[folder] = step, self.newest_usable(step)

    def end_commit(self, folder: str) -> None:
        """Notes that it has ended."""
        self.writing.pop(folder, None)

    def shared(self, ours: str, theirs: str) -> list[str]:
        """Returns the files of two attempts that have the same bytes."""
        numbers: dict[str, dict[int, str]] = {ours: {}, theirs: {}}
        for path in self.server.objects:
            match = _PATH.match(path)
            if match and match[6] in numbers:
                numbers[match[6]][self.server.lineage[path]] = match[7]
        return [numbers[ours][number] for number in numbers[ours].keys() & numbers[theirs].keys()]

    def end_apart(self) -> None:
        """Compares the two newest checkpoints that are left, where no two writers raced for being the newest."""
        left = sorted((number for number, step in self.steps.items() if step.is_valid()), reverse=True)[:2]
        attempts = [newest[1] for number in left if (newest := self.steps[number].newest())]
        if len(attempts) == 2 and not self.raced and (names := self.shared(*attempts)):
            self.fail(9, f"steps {left} stay, which share {names}")

    def begin_restore(self, reader: str, target: int) -> None:
        """Notes that a reader looks for what to restore."""
        self.lowest[reader] = target, self.newest_valid(target)

    def end_restore(self, reader: str, client: Client, restored: object) -> None:
        """Compares what a reader got: the bytes of one writer, as that wrote them, and none that is too old."""
        _, least = self.lowest.pop(reader)
        step = getattr(restored, "step", 0)
        if restored is not None:
            manifest = restored.checkpoint.manifest  # type: ignore[attr-defined]
            got = {name: client.delivered.get(f"{restored.folder}/{name}") for name in manifest.files}  # type: ignore[attr-defined]
            body = f"step {step}|{self.owners.get(manifest.folder)}|".encode()
            unchanged, weights = got.pop(FROZEN, None), got.get("weights.bin")
            is_same = weights == body + WEIGHTS and unchanged in (None, frozen(step))
            if set(got) != NAMES or not is_same or got["trainer_state.json"] not in LOGS:
                self.fail(2, f"{reader} restored step {step} from {got}, {unchanged!r}")
        if step < least and not self.server.faults.lags:
            self.fail(6, f"{reader} restored step {step}; {least} could be restored all the while")

    def see(self, change: Change) -> None:
        """Takes a change over into the truth, and looks whether it may be."""
        match = _PATH.match(change.path)
        if match is None:
            if change.path == "runs/r/promoted.json" and change.after is not None:
                self.verified = max(self.verified, json.loads(change.after)["newest"]["step"])
            return
        number = int(match[1])
        before = self.steps.get(number)
        was_valid, newest = bool(before and before.is_valid()), self.newest_valid()
        was_sized = self.rots and bool(before and before.is_sized())
        newer_sized = any(other > number and step.is_sized() for other, step in self.steps.items())
        self._before(change, match, number, before)
        step = self._enter(change)
        assert step is not None
        if was_sized and not step.is_sized() and self.server.scheduler:
            self.fell[number] = {actor.name: actor.calls for actor in self.server.scheduler.actors}
        if was_valid and not step.is_valid() and change.by != "rot":
            self._lost(change, match, number, newest=newest, newer_sized=newer_sized)
        if self.strict and step.newest() and not step.is_sized():
            self.fail(3, f"{change.by}: a manifest without its files after {change.path}")
        if match[2] and change.after is not None and change.before is None:
            self._committed(number, _parsed(change.after)[0])
        for folder, (at, last) in self.writing.items():
            if last is not None and self.newest_usable(at) != last:
                self.writing[folder], self.raced = (at, None), True
        if self.lowest:
            for reader, (target, least) in self.lowest.items():
                self.lowest[reader] = target, min(least, self.newest_valid(target))

    def _committed(self, number: int, folder: str) -> None:
        """Looks whether a new checkpoint has bytes of its own beside the one that it came after."""
        _, last = self.writing.pop(folder, (0, None))
        if last is not None and (names := self.shared(folder, last)):
            self.fail(9, f"step {number} shares {names} with the one before it")

    def _before(self, change: Change, match: re.Match[str], number: int, step: Step | None) -> None:
        generation, attempt = int(match[3] or 1) if match[2] else 0, match[6]
        if step is None:
            return
        if generation and change.after is not None:
            if self.one_winner and change.before not in (None, change.after):
                self.fail(1, f"{change.by} replaced {change.path}")
            newest = step.newest()
            # A put retried after retention removed its object, or a name that is free again: docs/internals/store.md.
            is_again = _parsed(change.after)[0] in self.committed or (step.taken and number < self.newest_valid())
            if newest and newest[0] != generation and step.is_valid() and change.sent is None and not is_again:
                self.fail(1, f"{change.by} committed {change.path} beside a manifest that is usable")
        if (
            attempt
            and change.after is not None
            and change.by not in ("rot", step.attempts.get(attempt, Attempt(by=change.by)).by)
        ):
            self.fail(5, f"{change.by} wrote {change.path}, which is another's")
        if attempt and change.after is None and attempt in step.attempts:
            self._taken(change, match, step)

    def _taken(self, change: Change, match: re.Match[str], step: Step) -> None:
        """Looks at an upload that retention takes."""
        attempt = match[6]
        upload, newest = step.attempts[attempt], step.newest()
        if attempt in self.committed or (newest and newest[1] == attempt):
            return
        # Writes between its last look and the removal are lost; the mark records that (docs/internals/store.md).
        below = BASE, f"{BASE}step-{match[1]}/"
        looked = max(self.server.looks.get((change.by, path), 0.0) for path in below)
        idle = looked - max((at for at in upload.written if at <= looked), default=looked)
        if upload.by in self.alive and attempt not in self.finished_attempts:
            if idle < HOUR - 60:
                self.fail(5, f"{change.by} took {change.path}, whose writer had written {idle:.0f} s before it looked")
            if attempt not in step.removed:
                self.fail(5, f"{change.by} took {change.path} without a mark")

    def _lost(self, change: Change, match: re.Match[str], number: int, *, newest: int, newer_sized: bool) -> None:
        """Looks at a checkpoint that was whole before a change and is not after it."""
        if match[4] == "damaged":
            self.fail(4, f"{change.by} marked step {number} as damaged, which is whole")
        elif match[2] and change.after is not None:
            self.fail(5, f"{change.by} put {change.path} over a checkpoint that was whole")
        elif number == newest and not (self.rots and (newer_sized or self._just_fell(change, number))):
            self.fail(4, f"{change.by} took step {number}, the newest that is whole: {change.path}")
        elif number == self.verified:
            self.fail(4, f"{change.by} took step {number}, the newest that was read back: {change.path}")

    def _just_fell(self, change: Change, number: int) -> bool:
        """Tells whether an actor, as it sent a request, could not know yet that a newer one is torn: three calls."""
        actors = self.server.scheduler.actors if self.server.scheduler else []
        calls = {actor.name: actor.calls for actor in actors} | ({change.by: change.sent} if change.sent else {})
        newer = (seen for step, seen in self.fell.items() if step > number)
        return any(change.by in calls and calls[change.by] - seen.get(change.by, -9) <= 3 for seen in newer)

    def _enter(self, change: Change) -> Step | None:
        match = _PATH.match(change.path)
        if match is None:
            return None
        step = self.steps.setdefault(int(match[1]), Step())
        if match[2]:
            generation = int(match[3] or 1)
            if change.after is None:
                step.manifests.pop(generation, None)
                step.taken = True
            else:
                step.manifests[generation] = change.after
                self.committed.add(_parsed(change.after)[0])
        elif match[4]:
            marks = step.damaged if match[4] == "damaged" else step.removed
            (marks.discard if change.after is None else marks.add)(match[5])
        elif change.after is None:
            files = step.attempts[match[6]].files
            files.pop(match[7], None)
            if not files:
                del step.attempts[match[6]]
        else:
            attempt = step.attempts.setdefault(match[6], Attempt(by=change.by))
            if change.by != "rot":
                self.owners.setdefault(
                    match[6], change.after.split(b"|")[1].decode() if b"|" in change.after else change.by
                )
            # A link shows its source's age in listings: it counts where nothing else tells that its writer lives.
            if not (self.server.links and change.source and attempt.files):
                attempt.written.append(self.server.now)
            attempt.files[match[7]] = change.after
        return step
