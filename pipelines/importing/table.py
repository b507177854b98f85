"""The format of the tables that say what becomes of another trainer's keys, and what deals with a file by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton.pipelines.importing.draft import EMPTY, Draft, Fate
from baton.pipelines.importing.kinds import Kind, read


@dataclass(frozen=True)
class Carried:
    """A key whose value the recipe has.

    Attributes:
        path: Where it has it; `{method}` stands for the training method.
        kind: Reads the value, None for one that asks for nothing; raises `ValueError` with what it expects, or
            `UnsupportedError`.
        within: Section of the recipe without which the key has no effect, or the methods that have it.
        default: What the other trainer takes where the file leaves the key out and Baton does not.
    """

    path: str
    kind: Kind
    within: str | tuple[str, ...] = ()
    default: object = None


@dataclass(frozen=True)
class Noted:
    """A key that is not carried over.

    Attributes:
        fate: Whether something is lost.
        why: Why, and what to do instead.
    """

    fate: Fate
    why: str


Entry = Carried | Noted | Callable[[Draft, str], None]
"""What becomes of a key; a function where it takes more than a line."""
Table = dict[str, Entry]
"""By key; one that ends in `*` stands for all that begin so and have no nearer entry."""


def table(
    carried: Mapping[str, Entry], left: Mapping[str, str] | None = None, needless: Mapping[str, str] | None = None
) -> Table:
    """Returns a table, written down shortly.

    Args:
        carried: Entry by keys, with a space between them.
        left: Why not, and what to do instead → the keys that are not carried over.
        needless: Why → the keys that nothing is lost without.
    """
    entries = {key: entry for keys, entry in carried.items() for key in keys.split()}
    for fate, reasons in ((Fate.left, left or {}), (Fate.needless, needless or {})):
        for why, keys in reasons.items():
            entries.update(dict.fromkeys(keys.split(), Noted(fate, why)))
    return entries


def apply(draft: Draft, entries: Table) -> None:
    """Deals with every key that is left: by its name, by how it begins, or as unknown."""
    families = [(key[:-1], entry) for key, entry in entries.items() if key.endswith("*")]
    for key in draft.given:
        if draft.is_handled(key):
            continue
        entry = entries.get(key)
        if entry is None:
            fitting = [family for family in families if key.startswith(family[0])]
            entry = max(fitting, key=lambda family: len(family[0]))[1] if fitting else None
        if draft.given[key] in EMPTY:
            draft.rest(key)
        elif entry is None:
            unknown(draft, key)
        else:
            handle(draft, key, entry)


def unknown(draft: Draft, key: str) -> None:
    """Notes that nothing is known of a key."""
    draft.left(key, f"unknown: no setting of {draft.tool} that this command knows; see docs/recipe.md")


def switch(draft: Draft, key: str) -> None:
    """Deals with a key that has an effect only where it is on, and has been dealt with then."""
    unknown(draft, key) if draft.has(key) else draft.rest(key)


def fill(draft: Draft, entries: Table) -> None:
    """Deals with the keys of a table before all others, and with those that the file leaves out."""
    for key, entry in entries.items():
        handle(draft, key, entry)


def handle(draft: Draft, key: str, entry: Entry) -> None:
    """Does with a key what its entry says."""
    if isinstance(entry, Noted):
        draft.note(entry.fate, key, entry.why) if draft.has(key) else draft.rest(key)
    elif isinstance(entry, Carried):
        _carry(draft, key, entry)
    else:
        entry(draft, key)


def _carry(draft: Draft, key: str, entry: Carried) -> None:
    method = draft.look("training.method")
    if isinstance(entry.within, str):
        missing = f"without {entry.within}" if draft.look(entry.within) is None else None
    else:
        missing = f"with {method}" if entry.within and method not in entry.within else None
    if missing:
        draft.needless(key, f"has no effect {missing}") if draft.has(key) else draft.rest(key)
        return
    value = read(draft, key, entry.kind, entry.default)
    if value is not None:
        draft.put(entry.path.format(method=method), value, key)
    draft.rest(key)
