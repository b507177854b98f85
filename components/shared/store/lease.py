"""Put-if-absent on a store that has none: a lease object with expiry lets one writer at a time look and write.

A writer writes its name into the lease, waits for others who may have looked at the same time, and reads it back: the
one whose name is in it proceeds. A lease that has not changed for as long as it is valid was left by a writer that
died. Expiry is measured on the waiting writer's own clock, so that clocks need not agree. A writer that is stopped
between its look and its put can still come too late; what it then replaces is a manifest of the same step, and either
names files that are whole.
"""

from __future__ import annotations

import math
import time
import uuid

from baton.components.shared.core.patience import attempts
from baton.components.shared.store.object_store import ObjectStore

GOOD_FOR = 10.0
"""Seconds after which an unchanged lease has expired."""
SETTLE = 0.5
"""Seconds in which a writer that saw no lease has written its own."""


def create(client: ObjectStore, path: str, data: bytes) -> bool:
    """Writes an object unless there is one, holding the lease `<path>.lease`.

    Returns:
        Whether this call wrote what is there now.
    """
    lease, owner = f"{path}.lease", uuid.uuid4().hex.encode()
    if not _acquire(client, path, lease, owner):
        return False
    try:
        # Again, now that no other may write: the last holder may have written between the look in `_acquire` and its
        # release. A crash from here on leaves the lease, which expires, with the object or without it.
        if client.size(path) is not None:
            return False
        client.write(path, data)
        return client.read(path) == data
    finally:
        if _holder(client, lease) == owner:  # it may have expired, and be another's by now
            client.remove(lease)


def _acquire(client: ObjectStore, path: str, lease: str, owner: bytes) -> bool:
    """Waits for the lease; returns False once the object is there, and nothing is left to hold it for."""
    seen, since = b"", time.monotonic()
    for _ in attempts(math.inf, pause=SETTLE):
        if client.size(path) is not None:
            break
        holder = _holder(client, lease)
        # A holder's name is new with each attempt: as long as it changes, somebody is alive.
        if holder != seen:
            seen, since = holder, time.monotonic()
        if not holder or time.monotonic() - since > GOOD_FOR:
            client.write(lease, owner)
            # Of several that saw none, each writes; all read after the last of them has written, and find one name.
            time.sleep(SETTLE)
            if _holder(client, lease) == owner:
                return True
    return False


def _holder(client: ObjectStore, lease: str) -> bytes:
    try:
        return client.read(lease)
    except FileNotFoundError:
        return b""
