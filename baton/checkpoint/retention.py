"""Retention: selects the checkpoints to keep, and removes the others, safe with readers and writers.

A removal marks an attempt (`removed-<attempt>`), then takes its manifest, its files, and last the mark. A reader in
between finds no checkpoint rather than a torn one. The next removal finishes one that crashed. A writer that was
thought gone and commits late points its manifest at a marked attempt, which is never read.

Only checkpoints older than the newest whole one are removed, and that one is checked again before each removal: since
the listing it may have been found damaged, or trained again under the same name.
"""

import contextlib
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TypeVar

from baton import events
from baton.checkpoint.store import Checkpoint, CheckpointStore
from baton.errors import BatonError, DamagedError
from baton.recipe.run import Keep
from baton.runs.documents import Removed
from baton.store.bundle import may_share_bytes
from baton.store.manifest import DAMAGED, REMOVED

logger = logging.getLogger("baton")

ABANDONED_AFTER = timedelta(hours=1)  # age of an uncommitted upload's newest file after which its writer counts as gone
CLOCKS_DIFFER = timedelta(days=1)  # bound on how far this machine's clock is ahead of the store's
TRIES = 5  # attempts at a listing or removal that other processes' removals disturb
T = TypeVar("T")

_OBJECT = re.compile(
    r"step-(\d{8,})/(?:(manifest(?:-\d+)?\.json)|(?:damaged|removed)-([^/]+)|([^/]+)/(?:.+)|(\.baton-[^/]+))"
)


@dataclass
class StepObjects:
    """The objects of a step: manifests, marks, and each attempt's files with size and time."""

    manifests: dict[str, datetime] = field(default_factory=dict)
    marks: list[str] = field(default_factory=list)
    attempts: dict[str, dict[str, tuple[int, datetime]]] = field(default_factory=dict)


@dataclass
class Removal:
    """Objects of a step to remove together."""

    step: int
    reason: str
    attempts: list[str] = field(default_factory=list)
    manifests: dict[str, datetime] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)  # path → bytes
    forget: bool = True  # also remove the removal's marks
    beside: StepObjects = field(default_factory=StepObjects)  # all objects of the step at the listing
    newest: Checkpoint | None = None  # the newest whole checkpoint at the listing
    listed: StepObjects = field(default_factory=StepObjects)  # its step's objects

    @property
    def bytes(self) -> int:
        return sum(self.files.values())


def removals(store: CheckpointStore, keep: Keep, *, targets: Sequence[int] = (), in_use: int = 0) -> list[Removal]:
    """Returns what retention would remove, oldest first.

    `targets` are the steps at which chunks end, kept until the checkpoint stage has read them back, the last for good;
    `in_use` is the step that the calling chunk resumed from, which its checkpoint stage may not have seen yet.
    """
    return _beside_others(partial(_removals, store, keep, targets, in_use))


def _removals(store: CheckpointStore, keep: Keep, targets: Sequence[int], in_use: int) -> list[Removal]:
    steps, written = _inventory(store)
    whole = {step: checkpoint for step, objects in steps.items() if (checkpoint := _whole(store, step, objects))}
    # Without a whole checkpoint, anything may be the last resort.
    if not whole:
        return []
    newest = max(whole)
    # By the store's clock, as the newest object shows it: with ours ahead, an upload would go from under its writer.
    now = max(written, store.storage.runtime.now() - CLOCKS_DIFFER)
    staying = _staying(store, whole, keep, targets) | {in_use}
    removals = []
    for step in sorted(steps):
        # Not whole yet: another process may be uploading it right now.
        if step > newest:
            break
        if step not in staying:
            removals += _committed(step, steps[step], whole.get(step), store.prefix(step))
        removals += _strays(step, steps[step], whole.get(step), now)
    for removal in removals:
        removal.newest, removal.listed, removal.beside = whole[newest], steps[newest], steps[removal.step]
    return removals


def prune(store: CheckpointStore, keep: Keep, *, targets: Sequence[int] = (), in_use: int = 0) -> list[Removal]:
    """Removes what `removals` lists and returns it, or removes nothing without the right to."""
    taken, listed = [], removals(store, keep, targets=targets, in_use=in_use)
    # Checked before the first mark: a checkpoint that is marked but cannot be removed would never be read.
    for removal in listed if listed and not store.storage.cannot_remove else ():
        events.emit(events.Phase(phase="prune", step=removal.step))
        if _beside_others(partial(_take, store, removal)):
            taken.append(removal)
    return taken


def tidy(store: CheckpointStore, keep: Keep, *, targets: Sequence[int] = (), in_use: int = 0) -> list[Removal]:
    """Prunes after a commit; a failure is only a warning, as the checkpoint is safe."""
    try:
        return prune(store, keep, targets=targets, in_use=in_use)
    except (BatonError, FileNotFoundError) as error:
        logger.warning("old checkpoints were not removed: %s", error)
        return []


def _beside_others(work: Callable[[], T]) -> T:
    """Repeats work during which another process's removal took a file or folder."""
    for _ in range(TRIES - 1):
        with contextlib.suppress(FileNotFoundError):
            return work()
    return work()


def _take(store: CheckpointStore, removal: Removal) -> bool:
    """Removes a removal's objects, unless something has changed since the listing, and tells whether it did."""
    storage, prefix = store.storage, store.prefix(removal.step)
    if not _is_still_so(store, removal):
        return False
    marks = [f"{prefix}/{REMOVED}{attempt}" for attempt in removal.attempts]
    # First: from here on no reader takes the attempt, whatever of it is still there, and a crash costs only disk.
    for mark in marks:
        storage.write(mark, b"")
    # All generations but the highest are damaged or removed, or nothing would have been committed above them: no reader
    # falls back to one while the others go.
    for path in sorted(removal.manifests, reverse=True):
        if not storage.remove(path, partial(_is_still_so, store, removal)):
            return False
    # Files of a crash here have no manifest, under a marked attempt: `_strays` lists them next time.
    storage.runtime.each(storage.remove, removal.files)
    # Last: while files are left, the mark forbids to read them and allows to remove them.
    for mark in marks if removal.forget else ():
        storage.remove(mark)
    for attempt in removal.attempts:
        storage.tidy(f"{prefix}/{attempt}")
    storage.tidy(prefix)
    return True


def _is_still_so(store: CheckpointStore, removal: Removal) -> bool:
    """Tells whether the newest whole checkpoint and the objects to remove are unchanged since the listing."""
    if removal.newest:
        step, folder = removal.newest.step, removal.newest.manifest.folder
        fresh = _inventory(store, step)[0].get(step, StepObjects())
        marks = {mark.rpartition("/")[2] for mark in fresh.marks}
        files = fresh.attempts.get(folder, {}).items()
        if fresh.manifests != removal.listed.manifests or marks & {f"{DAMAGED}{folder}", f"{REMOVED}{folder}"}:
            return False
        if not files >= removal.listed.attempts.get(folder, {}).items():
            return False
    # A name is free once its manifest is gone, and another attempt may have it; a writer thought gone may be back.
    fresh, beside = _inventory(store, removal.step)[0].get(removal.step, StepObjects()), removal.beside
    written = [
        fresh.attempts.get(attempt, {}).items() <= beside.attempts.get(attempt, {}).items()
        for attempt in removal.attempts
    ]
    return fresh.manifests.items() <= beside.manifests.items() and all(written)


def _inventory(store: CheckpointStore, only: int | None = None) -> tuple[dict[int, StepObjects], datetime]:
    """Returns the objects of all steps or only one, and the newest object's time."""
    base = store.run.path("checkpoints")
    below = "" if only is None else f"{store.prefix(only).rpartition('/')[2]}/"
    steps: dict[int, StepObjects] = {}
    written = datetime.min.replace(tzinfo=UTC)
    for path, entry in store.storage.find(f"{base}/{below}".rstrip("/")).items():
        name = below + path
        match = _OBJECT.fullmatch(name)
        if match is None:
            continue
        written = max(written, entry.modified)
        step = steps.setdefault(int(match[1]), StepObjects())
        if match[2]:
            step.manifests[f"{base}/{name}"] = entry.modified
        elif match[3]:
            step.marks.append(f"{base}/{name}")
        else:
            step.attempts.setdefault(match[4] or match[5], {})[f"{base}/{name}"] = entry
    return steps, written


def _whole(store: CheckpointStore, step: int, listing: StepObjects) -> Checkpoint | None:
    """Returns a step's checkpoint if all files are there in full size and none is marked as damaged."""
    if not listing.manifests:
        return None
    checkpoint = None
    with contextlib.suppress(DamagedError, FileNotFoundError):
        # By the listed names: a second listing could show some objects newer and others older than the first.
        checkpoint = store.read(step, [path.rpartition("/")[2] for path in (*listing.manifests, *listing.marks)])
    if checkpoint is None:
        return None
    manifest = checkpoint.manifest
    present = listing.attempts.get(manifest.folder, {})
    for name, entry in manifest.files.items():
        path = manifest.path(store.prefix(step), name)
        # A listing may lag behind: ask for a file that it lacks before calling the checkpoint torn.
        if (present[path][0] if path in present else store.storage.size(path)) != entry["size"]:
            return None
    return checkpoint


def _staying(store: CheckpointStore, whole: dict[int, Checkpoint], keep: Keep, targets: Sequence[int]) -> set[int]:
    staying = set(sorted(whole)[-keep.last :])
    proven = store.run.proven_chunks()
    # The checkpoint stage proves a chunk by its last checkpoint, which must stay until then.
    waiting = [step for number, step in enumerate(targets, 1) if number not in proven]
    # Also the run's last, which evaluation and export read, and the newest that was read back: newer ones may yet turn
    # out damaged.
    staying |= {store.run.verified_step(), *targets[-1:], *waiting} & whole.keys()
    if keep.audit:
        # An audit trains a chunk again from one target and compares the result with the next.
        staying |= {*targets} & whole.keys()
    if keep.every:
        staying |= {step for step in whole if step % keep.every == 0}
    if end := whole[max(whole)].meta.end:  # a larger budget continues before the decay
        staying |= {max((step for step in whole if step <= end[0]), default=0)}
    if keep.best:
        # The newest log has the values of all earlier steps.
        losses = store.evaluation_losses(whole[max(whole)])
        measured = [step for step in whole if step in losses]
        staying |= set(sorted(measured, key=lambda step: (losses[step], step))[: keep.best])
    return staying | _independent_copy(whole, staying)


def _independent_copy(whole: dict[int, Checkpoint], staying: set[int]) -> set[int]:
    """Returns the newest step that shares no bytes with the newest one, if the two newest share some."""
    newest, *others = sorted(staying & whole.keys(), reverse=True)
    ours = whole[newest].manifest
    if not others or not may_share_bytes(ours, whole[others[0]].manifest):
        return set()
    return set(sorted(step for step in whole if not may_share_bytes(ours, whole[step].manifest))[-1:])


def _committed(step: int, listing: StepObjects, whole: Checkpoint | None, prefix: str) -> list[Removal]:
    if not listing.manifests:
        return []
    removal = Removal(step, "not among those to keep" if whole else "not whole", manifests=listing.manifests)
    if whole:
        # This attempt only: another under the same step may be under way; `_strays` judges it by age.
        removal.attempts = [whole.manifest.folder]
        named = {whole.manifest.path(prefix, name): entry["size"] for name, entry in whole.manifest.files.items()}
        present = listing.attempts.get(whole.manifest.folder, {})
        removal.files = named | {path: size for path, (size, _) in present.items()}
    return [removal]


def _strays(step: int, listing: StepObjects, whole: Checkpoint | None, now: datetime) -> list[Removal]:
    """Returns a step's other attempts: lost races, killed uploads, damaged ones since replaced."""
    marked = {mark.rpartition("/")[2].partition("-")[2] for mark in listing.marks}
    strays = []
    for attempt, files in sorted(listing.attempts.items()):
        if (whole is None or attempt != whole.manifest.folder) and (attempt in marked or _is_abandoned(files, now)):
            sizes = {path: size for path, (size, _) in files.items()}
            # The mark stays: the writer may only have slept, and could commit after all.
            strays.append(Removal(step, "never committed, or not whole", [attempt], files=sizes, forget=False))
    return strays


def _is_abandoned(files: dict[str, tuple[int, datetime]], now: datetime) -> bool:
    return now - max(time for _, time in files.values()) > ABANDONED_AFTER


def summary(taken: list[Removal]) -> list[Removed]:
    """Returns removals as the proof lists them."""
    return [Removed(step=entry.step, reason=entry.reason, bytes=entry.bytes) for entry in taken]
