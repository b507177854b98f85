"""Documents of a store that are none: damage, whatever is wrong with them."""

from __future__ import annotations

import pytest

from baton.documents import NamedDocument
from baton.errors import DamagedError, FormatError
from baton.runs.run import DocumentFolder
from baton.store.storage import Storage


class Note(NamedDocument, name="note.json"):
    """A document."""

    step: int = 0


class Notes(DocumentFolder):
    """Where it lies."""

    KIND = "note"


DEEP = b"[" * 100_000 + b"]" * 100_000
DAMAGED = {
    "not JSON": (b"{", r"Expecting property name"),
    "not UTF-8": (b"\xc4", r"'utf-8' codec can't decode"),
    "digits": (b'{"step": ' + b"9" * 5000 + b"}", r"Exceeds the limit \(4300 digits\)"),
    "too deep for Python": (b'{"a": ' + DEEP + b"}", r"maximum recursion depth exceeded"),
    "deep": (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", r"nested deeper than 100 levels"),
}


@pytest.fixture
def notes(tmp_path: object) -> Notes:
    return Notes(Storage(str(tmp_path)), "n")


@pytest.mark.parametrize(("data", "reason"), DAMAGED.values(), ids=DAMAGED)
def test_what_is_no_json_is_damaged(data: bytes, reason: str, notes: Notes) -> None:
    notes.storage.write(notes.path("note.json"), data)
    with pytest.raises(DamagedError, match=rf"notes/n/note.json is not a JSON object: {reason}"):
        notes.read(Note)
    with pytest.raises(DamagedError, match=rf"notes/n/note.json is not JSON: {reason}"):
        notes.raw("note.json")
    with pytest.raises(DamagedError, match="is not JSON"):
        notes.require("note.json")


def test_half_a_character_is_damage_where_it_is_written_back() -> None:
    note = Note.read(rb'{"a": {"\ud800": 1}}', "here")
    with pytest.raises(DamagedError, match=r"Note cannot be written as it was read: .* encode character '\\ud800'"):
        note.to_json()


def test_what_is_no_object_is_damaged(notes: Notes) -> None:
    notes.storage.write(notes.path("note.json"), b"[1]")
    with pytest.raises(DamagedError, match="is not a JSON object"):
        notes.read(Note)
    with pytest.raises(DamagedError, match=r"note.json is a JSON list, expected an object"):
        notes.raw("note.json")


def test_a_newer_version_is_refused_and_what_is_no_version_is_damaged() -> None:
    with pytest.raises(FormatError, match=r"here is of version 2, and this Baton reads version 1\. Use"):
        Note.read({"version": 2}, "here")
    for version in (0, "2", None, [1]):
        with pytest.raises(DamagedError, match=r"here is of version .*, expected 1\."):
            Note.read({"version": version}, "here")
