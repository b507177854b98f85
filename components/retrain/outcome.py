"""Outcomes of retrainings, kept in the store for the process that started them.

models/<name>/outcomes/<owner>.json     of each retraining: see `STATES`
models/<name>/rejected/<digest>.json    what a gate has rejected: the same again would be
"""

from __future__ import annotations

import json

from baton.components.shared.core import events
from baton.components.shared.core.document import Document
from baton.components.shared.runs.run import now
from baton.components.shared.store.storage import Storage


class Rejection(Document):
    """A run that a gate has rejected."""

    run: str
    at: str


STATES = ("unchanged", "busy", "promoted", "rejected", "failed")
"""Nothing to do; another one is under way and this one is dropped; accepted; refused by the gate; broken off."""


def keep(storage: Storage, name: str, owner: str, state: str, words: str, **more: object) -> None:
    """Keeps what a retraining came to, and emits it as an event.

    Args:
        storage: The store.
        name: The recipe's.
        owner: The retraining.
        state: One of `STATES`.
        words: Why, for people.
        more: Where to look: `run`, `run_uri`, `model_uri`, `report_uri`, the `summary` of the evaluation and the
            lines of the `gate`.
    """
    assert state in STATES, state
    document = {"state": state, "words": words, "at": now(), **more}
    storage.write(_path(name, owner), json.dumps(document, indent=1).encode())
    events.emit("retraining", **document)


def is_kept(storage: Storage, name: str, owner: str) -> bool:
    """Tells whether it is known what a retraining came to."""
    return storage.exists(_path(name, owner))


def reject(storage: Storage, name: str, verdict: str, run: str) -> None:
    """Remembers that a gate has rejected a run."""
    rejection = Rejection(run=run, at=now())
    storage.write(f"models/{name}/rejected/{verdict}.json", json.dumps(rejection.to_json()).encode())


def rejected(storage: Storage, name: str, verdict: str) -> Rejection | None:
    """Returns a rejection, None where there was none."""
    path = f"models/{name}/rejected/{verdict}.json"
    try:
        return Rejection.read(storage.read(path), storage.uri(path))
    except FileNotFoundError:
        return None


def _path(name: str, owner: str) -> str:
    return f"models/{name}/outcomes/{owner}.json"
