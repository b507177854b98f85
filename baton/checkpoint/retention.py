"""Which checkpoints stay, and taking the others away so that nobody is harmed in any order of events.

What goes is marked first (`removed-<attempt>`), then loses its manifest, then its files, then the
mark. So a reader that comes in between finds no checkpoint rather than a torn one, a removal that
died is finished by the next, and a writer that was thought gone and commits after all has a
manifest that points to a marked attempt: nobody reads it.

Only what is older than the newest whole checkpoint is ever taken, and that one is looked at again before each
removal: it may have been found damaged since the list was made, or a step may have been trained again under the same
name. A collector that slept over its list takes nothing on the strength of it.
"""

from __future__ import annotations

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

ABANDONED_AFTER = timedelta(hours=1)
"""Age of the newest file of an upload without a manifest at which its writer counts as gone."""
CLOCKS_DIFFER = timedelta(days=1)
"""By how much this machine's clock may be ahead of the store's."""
TRIES = 5
"""Times a look or a removal begins again after another process has removed what it was about to use."""
T = TypeVar("T")

_OBJECT = re.compile(
    r"step-(\d{8,})/(?:(manifest(?:-\d+)?\.json)|(?:damaged|removed)-([^/]+)|([^/]+)/(?:.+)|(\.baton-[^/]+))"
)


@dataclass
class StepObjects:
    """The objects of a step: manifests, marks, and each attempt's files with their sizes and times."""

    manifests: dict[str, datetime] = field(default_factory=dict)
    marks: list[str] = field(default_factory=list)
    attempts: dict[str, dict[str, tuple[int, datetime]]] = field(default_factory=dict)


@dataclass
class Removal:
    """Objects that are removed together: manifests, files (path → bytes), and, if `forget`, the marks of the removal.

    `beside` has all objects of the step when this was listed, `newest` the newest whole checkpoint then, and `listed`
    the objects of that one's step.
    """

    step: int
    reason: str
    attempts: list[str] = field(default_factory=list)
    manifests: dict[str, datetime] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    forget: bool = True
    beside: StepObjects = field(default_factory=StepObjects)
    newest: Checkpoint | None = None
    listed: StepObjects = field(default_factory=StepObjects)

    @property
    def bytes(self) -> int:
        """What it frees."""
        return sum(self.files.values())


def removals(store: CheckpointStore, keep: Keep, *, targets: Sequence[int] = (), in_use: int = 0) -> list[Removal]:
    """Returns what retention would take, oldest first.

    Args:
        store: The run's checkpoints.
        keep: What stays.
        targets: Steps at which the run's chunks end; theirs stay until the checkpoint stage has read them back,
            and the last one's always.
        in_use: Step that the chunk which asks went on from: its checkpoint stage may not have seen it yet.
    """
    return _beside_others(partial(_removals, store, keep, targets, in_use))


def _removals(store: CheckpointStore, keep: Keep, targets: Sequence[int], in_use: int) -> list[Removal]:
    steps, written = _inventory(store)
    whole = {step: checkpoint for step, objects in steps.items() if (checkpoint := _whole(store, step, objects))}
    # Without a whole checkpoint nothing is older than the newest one, and anything may be the last resort.
    if not whole:
        return []
    newest = max(whole)
    # By the store's own clock, as far as the newest object tells it: one of ours that is ahead would take an upload
    # from under its writer.
    now = max(written, store.storage.runtime.now() - CLOCKS_DIFFER)
    staying = _staying(store, whole, keep, targets) | {in_use}
    removals = []
    for step in sorted(steps):
        # Not whole yet: another process may be uploading it right now.
        if step > newest:
            continue
        if step not in staying:
            removals += _committed(step, steps[step], whole.get(step), store.prefix(step))
        removals += _strays(step, steps[step], whole.get(step), now)
    for removal in removals:
        removal.newest, removal.listed, removal.beside = whole[newest], steps[newest], steps[removal.step]
    return removals


def prune(store: CheckpointStore, keep: Keep, *, targets: Sequence[int] = (), in_use: int = 0) -> list[Removal]:
    """Takes away what `removals` lists, and returns it: nothing where the user has not the right to remove."""
    taken, listed = [], removals(store, keep, targets=targets, in_use=in_use)
    # Looked at before the first mark: what is marked and stays would be read by nobody.
    for removal in listed if listed and not store.storage.cannot_remove else ():
        events.emit(events.Phase(phase="prune", step=removal.step))
        if _beside_others(partial(_take, store, removal)):
            taken.append(removal)
    return taken


def tidy(store: CheckpointStore, keep: Keep, *, targets: Sequence[int] = (), in_use: int = 0) -> list[Removal]:
    """Does what `prune` does after a commit: what keeps it from that is a warning, as the checkpoint is there."""
    try:
        return prune(store, keep, targets=targets, in_use=in_use)
    except (BatonError, FileNotFoundError) as error:
        logger.warning("old checkpoints were not removed: %s", error)
        return []


def _beside_others(work: Callable[[], T]) -> T:
    """Does again what another process's removal came in the way of: a file or folder went while it was looked at."""
    for _ in range(TRIES - 1):
        with contextlib.suppress(FileNotFoundError):
            return work()
    return work()


def _take(store: CheckpointStore, removal: Removal) -> bool:
    """Takes a removal's objects away, and tells whether it did: it does not where things have changed since."""
    storage, prefix = store.storage, store.prefix(removal.step)
    if not _is_still_so(store, removal):
        return False
    marks = [f"{prefix}/{REMOVED}{attempt}" for attempt in removal.attempts]
    for mark in marks:
        storage.write(mark, b"")
    # Of several generations all but the highest are damaged or were removed, or nothing would have been committed above
    # them: none of them is used while the others go.
    for path in sorted(removal.manifests, reverse=True):
        if not storage.remove(path, partial(_is_still_so, store, removal)):
            return False
    # A crash here leaves files without a manifest under a marked attempt: `_strays` names them next time.
    storage.runtime.each(storage.remove, removal.files)
    # Last: while files are left, the mark says that nobody may read them and that they may go.
    for mark in marks if removal.forget else ():
        storage.remove(mark)
    for attempt in removal.attempts:
        storage.tidy(f"{prefix}/{attempt}")
    storage.tidy(prefix)
    return True


def _is_still_so(store: CheckpointStore, removal: Removal) -> bool:
    """Tells whether the newest whole checkpoint, the step's manifests and what goes are those that were listed."""
    if removal.newest:
        step, folder = removal.newest.step, removal.newest.manifest.folder
        fresh = _inventory(store, step)[0].get(step, StepObjects())
        marks = {mark.rsplit("/", 1)[-1] for mark in fresh.marks}
        files = fresh.attempts.get(folder, {}).items()
        if fresh.manifests != removal.listed.manifests or marks & {f"{DAMAGED}{folder}", f"{REMOVED}{folder}"}:
            return False
        if not files >= removal.listed.attempts.get(folder, {}).items():
            return False
    # A name is free again once its manifest is gone, and what has it now may be another one. A writer that was thought
    # gone may have awoken.
    fresh, beside = _inventory(store, removal.step)[0].get(removal.step, StepObjects()), removal.beside
    written = [
        fresh.attempts.get(attempt, {}).items() <= beside.attempts.get(attempt, {}).items()
        for attempt in removal.attempts
    ]
    return fresh.manifests.items() <= beside.manifests.items() and all(written)


def _inventory(store: CheckpointStore, only: int | None = None) -> tuple[dict[int, StepObjects], datetime]:
    """Returns the objects of all steps or of one, and when the newest of them was written."""
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
    """Returns a step's checkpoint if all its files are there in full size and nobody has found them damaged."""
    if not listing.manifests:
        return None
    checkpoint = None
    with contextlib.suppress(DamagedError, FileNotFoundError):
        # By the names that were listed: a second listing may know more of one thing and less of another.
        checkpoint = store.read(step, [path.rsplit("/", 1)[-1] for path in (*listing.manifests, *listing.marks)])
    if checkpoint is None:
        return None
    manifest = checkpoint.manifest
    present = listing.attempts.get(manifest.folder, {})
    for name, entry in manifest.files.items():
        path = manifest.path(store.prefix(step), name)
        # A listing may lag behind: what it lacks is asked for, before anybody calls it torn.
        if (present[path][0] if path in present else store.storage.size(path)) != entry["size"]:
            return None
    return checkpoint


def _staying(store: CheckpointStore, whole: dict[int, Checkpoint], keep: Keep, targets: Sequence[int]) -> set[int]:
    staying = set(sorted(whole)[-keep.last :])
    proven = store.run.proven_chunks()
    # The proof of a chunk is read off its last checkpoint, which must be there until the checkpoint stage has done so.
    waiting = [step for number, step in enumerate(targets, 1) if number not in proven]
    # Also the run's last, which evaluation and export read, and the newest that was read back: what is newer may yet
    # turn out damaged.
    staying |= {store.run.verified_step(), *targets[-1:], *waiting} & whole.keys()
    if keep.audit:
        # From each of them its chunk's successor can be trained again, and its own be compared.
        staying |= {*targets} & whole.keys()
    if keep.every:
        staying |= {step for step in whole if step % keep.every == 0}
    if keep.best:
        # The newest log holds the values of all steps before it.
        losses = store.evaluation_losses(whole[max(whole)])
        measured = [step for step in whole if step in losses]
        staying |= set(sorted(measured, key=lambda step: (losses[step], step))[: keep.best])
    return staying | _independent_copy(whole, staying)


def _independent_copy(whole: dict[int, Checkpoint], staying: set[int]) -> set[int]:
    """Returns the newest step whose bytes are not the newest one's as well, where those of the two newest are."""
    newest, *others = sorted(staying & whole.keys(), reverse=True)
    ours = whole[newest].manifest
    if not others or not may_share_bytes(ours, whole[others[0]].manifest):
        return set()
    return set(sorted(step for step in whole if not may_share_bytes(ours, whole[step].manifest))[-1:])


def _committed(step: int, listing: StepObjects, whole: Checkpoint | None, prefix: str) -> list[Removal]:
    """Returns what is committed under a step that goes; uploads that may still be under way are not touched."""
    if not listing.manifests:
        return []
    removal = Removal(step, "not among those to keep" if whole else "not whole", manifests=listing.manifests)
    if whole:
        # This attempt alone: another one under the same step may be under way, and is for `_strays` to judge by its
        # age.
        removal.attempts = [whole.manifest.folder]
        named = {whole.manifest.path(prefix, name): entry["size"] for name, entry in whole.manifest.files.items()}
        present = listing.attempts.get(whole.manifest.folder, {})
        removal.files = named | {path: size for path, (size, _) in present.items()}
    return [removal]


def _strays(step: int, listing: StepObjects, whole: Checkpoint | None, now: datetime) -> list[Removal]:
    """Returns a step's other attempts: lost races, killed uploads, damaged ones since replaced.

    The mark of such a removal stays: its writer may only have slept, and commit after all.
    """
    marked = {mark.rsplit("/", 1)[-1].partition("-")[2] for mark in listing.marks}
    strays = []
    for attempt, files in sorted(listing.attempts.items()):
        if (whole is None or attempt != whole.manifest.folder) and (attempt in marked or _is_abandoned(files, now)):
            sizes = {path: size for path, (size, _) in files.items()}
            strays.append(Removal(step, "never committed, or not whole", [attempt], files=sizes, forget=False))
    return strays


def _is_abandoned(files: dict[str, tuple[int, datetime]], now: datetime) -> bool:
    return now - max(time for _, time in files.values()) > ABANDONED_AFTER


def summary(taken: list[Removal]) -> list[Removed]:
    """Returns what was removed, for people and machines."""
    return [Removed(step=entry.step, reason=entry.reason, bytes=entry.bytes) for entry in taken]
