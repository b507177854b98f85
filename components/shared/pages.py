"""HTML pages of one file each: they need no network and no script, and escape what they are given."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def environment(folder: Path) -> Environment:
    """Returns what loads a page's template.

    Args:
        folder: Where the template is. It may extend `page.html.j2` and import `macros.html.j2` from here.
    """
    made = Environment(
        loader=FileSystemLoader([folder, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"exact": "{:,}".format, "when": when}
    return made


def when(timestamp: str | None) -> str:
    """Returns an ISO 8601 time in few characters, and whatever is not one as it is."""
    if not timestamp:
        return "—"
    try:
        return datetime.fromisoformat(timestamp).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        return timestamp


def count(amount: int | None, singular: str, plural: str | None = None) -> str:
    """Returns `1 step`, `1,200 steps`."""
    return f"{amount or 0:,} {singular if amount == 1 else plural or singular + 's'}"
