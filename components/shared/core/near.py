"""Names and paths that exist and are nearly what was asked for."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterable, Sequence


def hint(name: str, known: Iterable[str]) -> str:
    """Returns a sentence, to be put behind another, with the known name that is most like one; or nothing."""
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def near_path(path: str, folders: Sequence[str], *, cutoff: float = 0.6) -> str | None:
    """Returns the path that one which does not exist may have been meant to be, None where there is none like it.

    Args:
        path: As written, relative or absolute.
        folders: Where a relative one may begin, in the order in which they are looked through.
        cutoff: How like each part of it must be, from 0 to 1.
    """
    for folder in folders:
        with contextlib.suppress(OSError):
            if found := _near(path, folder, cutoff):
                return found
    return None


def _near(path: str, folder: str, cutoff: float) -> str | None:
    at, parts = ("/" if path.startswith("/") else os.path.expanduser(folder)), []
    for part in path.rstrip("/").split("/"):
        there = part in ("", ".", "..", "~") or os.path.exists(os.path.join(at, part))
        names = [part] if there else difflib.get_close_matches(part, sorted(os.listdir(at)), n=1, cutoff=cutoff)
        if not names:
            return None
        parts.append(names[0])
        at = os.path.expanduser(names[0]) if names[0] == "~" else os.path.join(at, names[0])
    found = "/".join(parts)
    return found if found != path.rstrip("/") else None
