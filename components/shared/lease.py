"""Put-if-absent on a store that has none: a lease object with expiry lets one writer at a time look and write.

A writer writes its name into the lease, waits for others who may have looked at the same time, and
reads it back: the one whose name is in it goes on. A lease that has not changed for as long as it
is good for was left behind. Expiry is measured on the waiting writer's own clock, so that clocks
need not agree. A writer that is stopped between its look and its put can still come too late; what
it then replaces is a manifest of the same step, and either names files that are whole.
"""

from __future__ import annotations

import time
import uuid

from components.shared.store.object_store import ObjectStore

GOOD_FOR = 10.0
"""Seconds after which an unchanged lease counts as left behind."""
SETTLE = 0.5
"""Seconds in which a writer that saw no lease has written its own."""


def create(client: ObjectStore, key: str, data: bytes) -> bool:
    """Writes an object unless there is one, holding the lease `<key>.lease`.

    Returns:
        Whether this call wrote what now stands.
    """
    lease, owner = f"{key}.lease", uuid.uuid4().hex.encode()
    if not _acquire(client, key, lease, owner):
        return False
    try:
        if client.size(key) is not None:
            return False
        client.write(key, data)
        return client.read(key) == data
    finally:
        if _holder(client, lease) == owner:  # it may have expired, and be another's by now
            client.remove(lease)


def _acquire(client: ObjectStore, key: str, lease: str, owner: bytes) -> bool:
    """Waits for the lease; returns False once there is nothing left to hold it for."""
    seen, since = b"", time.monotonic()
    while client.size(key) is None:
        holder = _holder(client, lease)
        if holder != seen:
            seen, since = holder, time.monotonic()
        if not holder or time.monotonic() - since > GOOD_FOR:
            client.write(lease, owner)
            time.sleep(SETTLE)
            if _holder(client, lease) == owner:
                return True
        time.sleep(SETTLE)
    return False


def _holder(client: ObjectStore, lease: str) -> bytes:
    try:
        return client.read(lease)
    except FileNotFoundError:
        return b""
