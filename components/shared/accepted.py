"""The models that were accepted under a recipe's name, one after the other.

    models/<name>/accepted/000001.json     the first: put-if-absent, as all of them
    models/<name>/accepted/000002.json     the one that took its place, and so on

The highest is the model in use. Whoever means to take its place names the one that it was judged against and writes
the number behind that: of any number of writers one succeeds, and a late one cannot undo a newer model.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from components.shared.errors import BatonError
from components.shared.store.storage import Storage

_NAME = re.compile(r"(\d{6})\.json")


@dataclass(frozen=True)
class Accepted:
    """A model that was accepted.

    Attributes:
        number: How many there have been with it; 0 where there is none yet.
        document: What was written of it: `run`, `run_uri`, `model_uri`, `digest` of its state, `data` and `recipe`
            (digests), `learnt` and `at`. Empty where there is none.
    """

    number: int = 0
    document: dict[str, Any] | None = None

    @property
    def model_uri(self) -> str | None:
        """Address of the model, None where there is none yet."""
        return str(self.document["model_uri"]) if self.document else None


def newest(storage: Storage, name: str) -> Accepted:
    """Returns the model in use.

    Args:
        storage: The store.
        name: The recipe's.
    """
    numbers = [int(match[1]) for found in storage.list(_folder(name)) if (match := _NAME.fullmatch(found))]
    return _read(storage, name, max(numbers)) if numbers else Accepted()


def add(storage: Storage, name: str, after: int, document: dict[str, Any]) -> Accepted:
    """Puts a model in the place of the one that it was judged against.

    Args:
        storage: The store.
        name: The recipe's.
        after: Number of the model that it was judged against, 0 for none.
        document: As in `Accepted`.

    Returns:
        What stands now: this model, also where an earlier attempt of the same run has written it.

    Raises:
        BatonError: another run's model was accepted meanwhile.
    """
    data = json.dumps(document, indent=1, sort_keys=True).encode()
    storage.create(f"{_folder(name)}/{after + 1:06d}.json", data)
    standing = _read(storage, name, after + 1)
    assert standing.document is not None
    if standing.document["run"] != document["run"]:
        raise BatonError(
            f"run {document['run']!r} was judged against model {after} of {name!r}, and meanwhile run "
            f"{standing.document['run']!r} was accepted; that model stays.",
            remedy="Retrain again: the model is then judged against the new one.",
        )
    return standing


def _folder(name: str) -> str:
    return f"models/{name}/accepted"


def _read(storage: Storage, name: str, number: int) -> Accepted:
    return Accepted(number, json.loads(storage.read(f"{_folder(name)}/{number:06d}.json")))
