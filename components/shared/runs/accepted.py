"""The models that were accepted under a recipe's name, one after the other.

    models/<name>/accepted/000001.json     the first: put-if-absent, as all of them
    models/<name>/accepted/000002.json     the one that took its place, and so on

The highest is the model in use. A run that is to take its place names the one that it was judged against and writes
the number after that: of any number of writers one succeeds, and a late one cannot undo a newer model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from baton.components.shared.core.errors import BatonError
from baton.components.shared.runs.documents.outcome import AcceptedModel
from baton.components.shared.runs.folder import as_json
from baton.components.shared.store.storage import Storage

_NAME = re.compile(r"(\d{6})\.json")


@dataclass(frozen=True)
class Accepted:
    """A model that was accepted.

    Attributes:
        number: How many there have been with it; 0 where there is none yet.
        model: What was written of it, None where there is none.
    """

    number: int = 0
    model: AcceptedModel | None = None

    @property
    def model_uri(self) -> str | None:
        """Address of the model, None where there is none yet."""
        return self.model.model_uri if self.model else None


def newest(storage: Storage, name: str) -> Accepted:
    """Returns the model in use.

    Args:
        storage: The store.
        name: The recipe's.
    """
    numbers = _numbers(storage, name)
    return _read(storage, name, max(numbers)) if numbers else Accepted()


def runs(storage: Storage, name: str) -> list[str]:
    """Returns the runs whose models were accepted, one after the other."""
    models = (_read(storage, name, number).model for number in sorted(_numbers(storage, name)))
    return [model.run for model in models if model]


def add(storage: Storage, name: str, after: int, model: AcceptedModel) -> Accepted:
    """Puts a model in the place of the one that it was judged against.

    Args:
        storage: The store.
        name: The recipe's.
        after: Number of the model that it was judged against, 0 for none.
        model: The model.

    Returns:
        What stands now: this model, also where an earlier attempt of the same run has written it.

    Raises:
        BatonError: another run's model was accepted meanwhile.
    """
    data = as_json(model.to_json())
    # What it returns does not tell whose model it is: the answer to a put may be lost, and a stage that is retried has
    # written it before. So it is read back.
    storage.create(f"{_folder(name)}/{after + 1:06d}.json", data)
    committed = _read(storage, name, after + 1)
    assert committed.model is not None
    if committed.model.run != model.run:
        raise BatonError(
            f"run {model.run!r} was judged against model {after} of {name!r}, and meanwhile run "
            f"{committed.model.run!r} was accepted; that model stays.",
            remedy="Retrain again: the model is then judged against the new one.",
        )
    return committed


def _folder(name: str) -> str:
    return f"models/{name}/accepted"


def _numbers(storage: Storage, name: str) -> list[int]:
    return [int(match[1]) for entry in storage.list(_folder(name)) if (match := _NAME.fullmatch(entry))]


def _read(storage: Storage, name: str, number: int) -> Accepted:
    path = f"{_folder(name)}/{number:06d}.json"
    return Accepted(number, AcceptedModel.read(storage.read(path), storage.uri(path)))
