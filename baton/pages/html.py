"""HTML pages of one file each: without network, with all values escaped, and no script but that of `plots.script`.

A template that has plots or copy buttons sets `scripted`. The page's policy allows that one script, by its digest.
"""

from __future__ import annotations

import math
from datetime import datetime
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from baton.pages import plots


@cache
def environment(*folders: Path) -> Environment:
    """Returns a process's loader of page templates, which may extend `page.html.j2` and import `macros.html.j2`."""
    made = Environment(
        loader=FileSystemLoader([*folders, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_encodable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"exact": "{:,}".format, "when": when, "num": number, "size": size, "duration": duration}
    made.globals |= {"script": plots.script, "script_digest": plots.script_digest, "plot_style": plots.style}
    return made


def _encodable(value: object) -> object:
    """Spells out lone surrogates, which names of files and rows may hold: UTF-8 has no bytes for them."""
    if isinstance(value, str) and not value.isascii():
        return type(value)(value.encode("utf-8", "backslashreplace").decode())
    return value


def when(timestamp: str | None) -> str:
    """Returns an ISO 8601 time in few characters, and any other text as it is."""
    if not timestamp:
        return "—"
    try:
        return datetime.fromisoformat(timestamp).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        return timestamp


def count(amount: int | None, singular: str, plural: str | None = None) -> str:
    """Returns `1 step`, `1,200 steps`."""
    return f"{amount or 0:,} {singular if amount == 1 else plural or singular + 's'}"


def number(value: float | None) -> str:
    """Returns `—`, `240`, `12,345`, `3.40 M`; fractions get three or four digits."""
    if value is None:
        return "—"
    if not math.isfinite(value):
        return "not finite"
    for unit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= unit:
            return f"{value / unit:.2f} {suffix}" if value < 1e15 else f"{value:.1e}"
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"


def size(num_bytes: float | None) -> str:
    """Returns `13.0 MB`, in powers of ten as object stores bill it."""
    if num_bytes is None:
        return "—"
    for unit, suffix in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {suffix}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float | None) -> str:
    """Returns `—`, `0.42 s`, `38.1 s`, `4 min 05 s`, `2 h 07 min`."""
    if seconds is None:
        return "—"
    if seconds < 1:
        return f"{seconds:.2g} s"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    if seconds < 3599.5:
        return f"{round(seconds) // 60} min {round(seconds) % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes < 6000 else f"{round(minutes / 60):,} h"
