"""Put-if-absent on a store that has none: a lease object with expiry lets one writer at a time look and write.

A writer writes its name into the lease, waits for others who may have looked at the same time, and reads it back: the
one whose name is in it proceeds. A lease that has not changed for as long as it is valid was left by a writer that
died. Expiry is measured by each writer on its own clock, so that clocks need not agree: those who wait count from when
they first saw the name, the holder from before it wrote it, and so it ends first. A writer that was stopped between
two requests finds that out and begins again. A put that is itself on its way for longer than a quarter of `GOOD_FOR`
can still come too late; what it then replaces is a manifest of the same step, and either names files that are whole.

Seconds after the lease was looked at, with `GOOD_FOR` 20: a writer whose name was in it within 0.5 reads it back 0.5
later and writes until 5. One that took up to 5 may have put its name over such a holder's: it waits out the 10 by which
the holder's last request has arrived, reads back, and writes until 15. Whoever waits for either waits 20.
"""

from __future__ import annotations

import math

from baton.components.shared.core.errors import UnavailableError
from baton.components.shared.core.patience import attempts
from baton.components.shared.core.world import REAL, World
from baton.components.shared.store.errors import DeniedError
from baton.components.shared.store.object_store import ObjectStore

GOOD_FOR = 20.0
"""Seconds after which an unchanged lease has expired."""
SETTLE = 0.5
"""Seconds in which a writer that saw no lease has written its own, where the store is quick."""


def create(client: ObjectStore, path: str, data: bytes, world: World = REAL) -> bool:
    """Writes an object unless there is one, holding the lease `<path>.lease`.

    Returns:
        Whether this call wrote what is there now.
    """
    lease, owner = f"{path}.lease", world.unique().encode()
    until = _acquire(client, path, lease, owner, world)
    if until is None:
        return False
    is_there = False
    try:
        # Again, now that no other may write: the last holder may have written between the look in `_acquire` and its
        # release. A crash from here on leaves the lease, which expires, with the object or without it.
        is_there = client.size(path) is not None
        if is_there:
            return False
        if world.monotonic() > until:
            raise UnavailableError(f"the lease {lease} was not held for long enough to write in.")
        client.write(path, data)
        is_there = True
        # Gone again: retention, which takes what it sees committed, has taken it.
        return _content(client, path) in (data, b"")
    finally:
        # Once the object is there, nobody needs a lease any more. Before, it may have expired, and be another's by the
        # time that a removal arrives.
        if _content(client, lease) == owner and (is_there or world.monotonic() < until):
            remove(client, lease)


def remove(client: ObjectStore, path: str) -> None:
    """Removes an object that harms nobody: where removing is denied, it stays."""
    try:
        client.remove(path)
    except Exception as error:
        if not isinstance(client.explain(error), DeniedError):
            raise


def _acquire(client: ObjectStore, path: str, lease: str, owner: bytes, world: World) -> float | None:
    """Waits for the lease.

    Returns:
        Until when requests may begin: they have another quarter of what the lease is good for to arrive in. None once
        the object is there, and nothing is left to hold it for.
    """
    seen, since = b"", world.monotonic()
    for _ in attempts(math.inf, pause=SETTLE, world=world):
        if client.size(path) is not None:
            break
        looked = world.monotonic()
        holder = _content(client, lease)
        # A holder's name is new with each attempt: as long as it changes, somebody is alive.
        if holder != seen:
            seen, since = holder, world.monotonic()
        if not holder or world.monotonic() - since > GOOD_FOR:
            client.write(lease, owner)
            took = world.monotonic() - looked
            if took > GOOD_FOR / 4:
                raise UnavailableError(f"{lease} took {took:.1f} s to read and write; {GOOD_FOR / 4:g} are safe.")
            # Of several that saw none, each writes; all read after the last of them has written, and find one name.
            world.sleep(SETTLE if took <= SETTLE else GOOD_FOR / 2)
            if _content(client, lease) == owner:
                return looked + (GOOD_FOR / 4 if took <= SETTLE else GOOD_FOR * 3 / 4)
    return None


def _content(client: ObjectStore, path: str) -> bytes:
    """Returns an object, empty where there is none."""
    try:
        return client.read(path)
    except FileNotFoundError:
        return b""
