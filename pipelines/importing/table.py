"""The format of the tables that say what becomes of another trainer's keys, and what deals with a file by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton.components.shared.recipe import SPECS
from baton.pipelines.importing.draft import EMPTY, Draft, Fate
from baton.pipelines.importing.kinds import Kind, read

Entry = Callable[[Draft, str], None]
"""What becomes of a key: a `Carried`, or a function where it takes more than a line."""
Table = dict[str, Entry]
"""By key; one that ends in `*` stands for all that begin so and have no nearer entry."""


@dataclass(frozen=True)
class Carried:
    """A key whose value the recipe has. It has no effect where the recipe has no such section.

    Attributes:
        path: Where it has it; `{method}` stands for the training method.
        kind: Reads the value, None for one that asks for nothing; raises `ValueError` with what it expects, or
            `UnsupportedError`.
        default: What the other trainer takes where the file leaves the key out and Baton does not.
        methods: The methods with which it has an effect, where `path` does not name one.
    """

    path: str
    kind: Kind
    default: object = None
    methods: tuple[str, ...] = ()

    def __call__(self, draft: Draft, key: str) -> None:
        """Sets the recipe's value, or notes why it has none."""
        section, *names = self.path.split(".")
        method = draft.look("training.method")
        methods = self.methods or [name for name in names[:1] if name in SPECS]
        if section == "adapter" and draft.look(section) is None:
            draft.drop(key, "has no effect without adapter", Fate.needless)
        elif methods and method not in methods:
            draft.drop(key, f"has no effect with {method}", Fate.needless)
        elif (value := read(draft, key, self.kind, self.default)) is None:
            draft.rest(key)
        else:
            draft.put(self.path.format(method=method), value, key)


def noted(why: str, fate: Fate) -> Entry:
    """Returns the entry of a key that is not carried over: why, what to do instead, and whether something is lost."""
    return lambda draft, key: draft.drop(key, why, fate)


def table(
    carried: Mapping[str, Entry],
    left: Mapping[str, str] | None = None,
    needless: Mapping[str, str] | None = None,
    elsewhere: Mapping[str, str] | None = None,
) -> Table:
    """Returns a table, written down shortly.

    Args:
        carried: Entry by keys, with a space between them.
        left: Why not, and what to do instead → the keys that are not carried over.
        needless: Why → the keys that nothing is lost without.
        elsewhere: Where else it is said → the keys of names, places and logs: what is learned is the same.
    """
    entries = {key: entry for keys, entry in carried.items() for key in keys.split()}
    groups = {Fate.left: left, Fate.needless: needless, Fate.elsewhere: elsewhere}
    for fate, reasons in ((fate, reasons or {}) for fate, reasons in groups.items()):
        for why, keys in reasons.items():
            entries.update(dict.fromkeys(keys.split(), noted(why, fate)))
    return entries


def apply(draft: Draft, entries: Table) -> None:
    """Deals with every key that is left: by its name, by how it begins, or as unknown."""
    families = sorted((key[:-1] for key in entries if key.endswith("*")), key=len, reverse=True)
    for key in draft.given:
        if draft.is_handled(key):
            continue
        family = next((family for family in families if key.startswith(family)), None)
        entry = entries.get(key) or (unknown if family is None else entries[f"{family}*"])
        if draft.given[key] in EMPTY:
            draft.rest(key)
        else:
            entry(draft, key)


def unknown(draft: Draft, key: str) -> None:
    """Notes that nothing is known of a key."""
    draft.left(key, f"unknown: no setting of {draft.tool} that this command knows; see docs/recipe.md")


def switch(draft: Draft, key: str) -> None:
    """Deals with a key that has an effect only where it is on, and has been dealt with then."""
    unknown(draft, key) if draft.has(key) else draft.rest(key)


def fill(draft: Draft, entries: Table, prefix: str = "") -> None:
    """Deals with the keys of a table before all others, and with those that the file leaves out."""
    for key, entry in entries.items():
        entry(draft, f"{prefix}{key}")
