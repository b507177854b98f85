"""What `baton doctor` asks of a store: each thing that a run relies on, tried out."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

from baton.components.shared.core import proxies
from baton.components.shared.core.errors import BatonError
from baton.components.shared.store.cloud import CloudStore
from baton.components.shared.store.errors import DeniedError
from baton.components.shared.store.object_store import OWN
from baton.components.shared.store.storage import Storage
from baton.pipelines.compiling.checks import Check

LARGE = 64 * 10**6
SLOW = 10e6
"""Bytes per second below which saving a checkpoint holds up small models already."""
NOTICEABLE, REFUSED = 30.0, 15 * 60.0
"""Seconds between two clocks: worth a line, and what a cloud takes for a forged request."""


def examine(uri: str) -> list[Check]:
    """Tries a store out and leaves it as it was.

    Args:
        uri: A folder or an address of any store.
    """
    try:
        storage = Storage(uri, patience=0)
    except BatonError as error:
        return [_problem("store", error)]
    made, folder = [], storage.root
    while storage.is_local and folder and not os.path.exists(folder):
        made.append(folder)
        folder = os.path.dirname(folder)
    below = f"{OWN}doctor-{uuid.uuid4().hex}"
    looks = {"listing": _listing, "commit": _commit, "large objects": _large, "clock": _clock}
    checks = [_tried("store", partial(_reach, storage)), *_proxy(storage)]
    checks += [] if storage.is_local else _rights(storage, f"{below}-right/1")
    if any(check.state == "problem" for check in checks):
        return checks
    if storage.cannot_remove:
        del looks["large objects"]  # they would stay
    try:
        checks += [_tried(f"store: {name}", partial(look, storage, below)) for name, look in looks.items()]
    finally:
        checks += _clean(storage, below, made)
    return checks


def _proxy(storage: Storage) -> list[Check]:
    found = proxies.told(storage.client.address) if isinstance(storage.client, CloudStore) else None
    return [Check("store: proxy", "ok", found)] if found else []


def _rights(storage: Storage, path: str) -> list[Check]:
    """Tries one by one what a run has to be allowed, and names each that is denied with the statement it needs."""
    rights: dict[str, tuple[Callable[[], object], str]] = {
        "write": (lambda: storage.client.write(path, b"1"), ""),
        "read": (lambda: storage.client.read(path), ""),
        "list": (lambda: storage.client.list(""), "Chunks find each other's checkpoints by listing."),
        "remove": (lambda: storage.client.remove(path), "Without it a run works, and all that it writes stays."),
    }
    denied = []
    for name, (ask, why) in rights.items():
        try:
            with storage.translated():
                ask()
        except DeniedError as error:
            remedy = f"{error.remedy} {why}".strip()
            denied.append(
                Check(f"store: right to {name}", "note" if name == "remove" else "problem", error.message, remedy)
            )
        except FileNotFoundError:  # nothing could be written, and is looked for in vain: no right is missing for that
            continue
        except (BatonError, OSError):  # nothing of rights; "store" says what
            return denied
    return denied or [Check("store: rights", "ok", "to write, read, list and remove: each was tried")]


def _tried(name: str, look: Callable[[], Check]) -> Check:
    try:
        return look()
    except (BatonError, OSError) as error:
        return _problem(name, error)


def _problem(name: str, error: Exception) -> Check:
    if isinstance(error, BatonError):
        return Check(name, "problem", error.message, error.remedy or "")
    return Check(name, "problem", f"{type(error).__name__}: {error}", "Check the store's consistency and rights.")


def _reach(storage: Storage) -> Check:
    began = time.monotonic()
    storage.check()
    return Check(
        "store", "ok", f"{storage.uri()} can be written, {1000 * (time.monotonic() - began) / 2:.0f} ms a request"
    )


def _listing(storage: Storage, below: str) -> Check:
    content = uuid.uuid4().bytes
    storage.write(f"{below}/small", content)
    if storage.read(f"{below}/small") != content:
        return Check("store: listing", "problem", "what was written comes back as something else", "Use another store.")
    if storage.list(below) != ["small"]:
        return Check(
            "store: listing",
            "problem",
            "what was just written is not listed",
            "Chunks find each other's checkpoints by listing: use a store that is consistent at once, and no cache.",
        )
    return Check("store: listing", "ok", "what was just written is read back and listed")


def _commit(storage: Storage, below: str) -> Check:
    won = [storage.create(f"{below}/once", data) for data in (b"1", b"2")]
    if won != [True, False]:
        summary = f"of two writers that commit the same, {sum(won)} are told that they won"
        return Check("store: commit", "problem", summary, "Use another store: chunks that run twice would not notice.")
    if storage.is_local:
        return Check("store: commit", "ok", "hard links: of writers that commit at once, the file system lets one win")
    if storage.has_conditional_put:
        return Check("store: commit", "ok", "conditional put: of writers that commit at once, the store lets one win")
    return Check(
        "store: commit",
        "note",
        "no conditional put; a lease object with expiry takes its place",
        "A commit takes about a second longer, and a writer that is stopped for more than ten seconds in its midst may "
        "replace another's of the same step. A store that honours If-None-Match rules that out.",
    )


def _large(storage: Storage, below: str) -> Check:
    with tempfile.TemporaryDirectory(prefix="baton-doctor-") as folder:
        sent, received = os.path.join(folder, "sent"), os.path.join(folder, "received")
        data = os.urandom(LARGE)
        with open(sent, "wb") as file:
            file.write(data)
        began = time.monotonic()
        storage.upload(sent, f"{below}/large")
        uploaded = time.monotonic()
        digest = storage.download(f"{below}/large", received)
        up, down = LARGE / (uploaded - began), LARGE / (time.monotonic() - uploaded)
    if digest != hashlib.sha256(data).hexdigest():
        return Check("store: large objects", "problem", "64 MB come back as something else", "Use another store.")
    summary = f"64 MB came back whole: {up / 1e6:.0f} MB/s up, {down / 1e6:.0f} MB/s down"
    if min(up, down) < SLOW:
        return Check("store: large objects", "note", summary, "A checkpoint of 1 GB takes minutes; save less often.")
    return Check("store: large objects", "ok", summary)


def _clock(storage: Storage, below: str) -> Check:
    before = datetime.now(UTC)
    storage.write(f"{below}/clock", b"")
    after = datetime.now(UTC)
    written = storage.find(below)["clock"][1]
    early, late = (before - written).total_seconds(), (written - after).total_seconds()
    apart = max(early, late, 0.0)
    if apart < 2:  # stores tell whole seconds
        return Check("store: clock", "ok", "agrees with this machine's to the second")
    summary = f"is {apart:.0f} s {'behind' if early > late else 'ahead of'} this machine's"
    if apart < NOTICEABLE:
        return Check("store: clock", "ok", summary)
    return Check(
        "store: clock",
        "note" if apart < REFUSED else "problem",
        summary,
        "Set the clocks by NTP: clouds refuse requests 15 minutes off, and retention goes by the age of uploads.",
    )


def _clean(storage: Storage, below: str, made: list[str]) -> list[Check]:
    """Removes all that was written."""
    try:
        for name in storage.find(below):
            storage.remove(f"{below}/{name}")
        storage.tidy(below)
        for folder in made:
            if os.path.isdir(folder):
                os.rmdir(folder)
    except (BatonError, OSError) as error:
        return [_problem("store: removal", error)]
    return []
