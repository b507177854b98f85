"""Outcomes of retrainings, kept in the store for the process that started them.

models/<name>/outcomes/<owner>.json     of each retraining: `Retraining`
models/<name>/rejected/<digest>.json    what a gate has rejected: the same again would be
"""

from __future__ import annotations

import json

from baton.components.shared.core import events
from baton.components.shared.core.document import Document
from baton.components.shared.core.events import Retraining
from baton.components.shared.runs.run import now
from baton.components.shared.store.storage import Storage


class Rejection(Document):
    """A run that a gate has rejected."""

    run: str
    at: str


def keep(storage: Storage, name: str, owner: str, outcome: Retraining) -> None:
    """Keeps what a retraining, by its recipe's name and its owner, came to, and emits it."""
    storage.write(_path(name, owner), json.dumps(outcome.fields(), indent=1).encode())
    events.emit(outcome)


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
